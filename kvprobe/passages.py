"""Which token ids does an analysis read, from which text, and what stands in front of them?"""

import hashlib
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from kvprobe.errors import KvprobeError
from kvprobe.texts import Text, read_text
from kvprobe.tokenizing import guarded, name_of

__all__ = [
    "Bos", "Passage", "Text", "Tokenizer",
    "control", "cut_before", "encode", "front_ids", "heldout", "random_ids", "read_text", "repeat_ids", "run_record",
]  # fmt: skip

Bos = Literal["auto", "add", "drop"]

MARGIN = 16
"""Ids at the end of an encoded prefix that are never used (see ``encode``)."""


class Tokenizer(Protocol):
    """What is used of a tokenizer, as transformers names it."""

    bos_token_id: Any
    all_special_ids: Any

    def __call__(self, text: str, **options: Any) -> Any:
        """Return a mapping whose ``input_ids`` are the ids of ``text``."""
        ...

    def __len__(self) -> int:
        """Return the size of the vocabulary with added tokens."""
        ...


@dataclass(frozen=True)
class Passage:
    """Token ids cut from a text.

    ``ids`` is int64 ``[n_tokens]``; its first ``n_front`` ids are not of the text (0 or, with a BOS, 1; a few
    tokenizers put more there). ``bos`` is the policy asked for, ``bos_token_id`` the id that stands first where the
    text does not begin at once, else None. ``offset`` counts the text's tokens skipped before the passage. ``name`` and
    ``sha256`` are the text's.
    """

    name: str
    sha256: str
    ids: Tensor
    bos: Bos
    bos_token_id: int | None
    n_front: int
    offset: int = 0

    @property
    def n_tokens(self) -> int:
        """Ids in the passage, those in front of the text counted."""
        return len(self.ids)

    @property
    def has_bos(self) -> bool:
        """Whether the text's first token stands behind an id that is not of the text."""
        return self.n_front > 0

    @property
    def first_content_id(self) -> int:
        """The first id that is of the text: an ordinary token, for ``repeat_ids``."""
        return int(self.ids[self.n_front])


def run_record(passage: Passage) -> dict[str, Any]:
    """What a run says of its passage: names and fingerprints, never a path."""
    return {
        "passage": passage.name,
        "passage_sha256": passage.sha256,
        "passage_offset": passage.offset,
        # what the model really read: the same text has other ids under another tokenizer, and random ids have no text
        "ids_sha256": hashlib.sha256(passage.ids.numpy().tobytes()).hexdigest(),
        "n_tokens": passage.n_tokens,
        "bos": passage.bos,
        "has_bos": passage.has_bos,
    }


def encode(tokenizer: Tokenizer, text: Text, *, n_tokens: int, bos: Bos = "auto", offset: int = 0) -> Passage:
    """Cut exactly ``n_tokens`` ids from a text, BOS counted, after skipping ``offset`` of the text's own tokens.

    ``bos``: ``auto`` puts in front what the tokenizer does by itself, ``add`` makes sure that its BOS stands there,
    ``drop`` leaves only the text. What a tokenizer appends (EOS) is never kept: a cut passage has not ended. Raises
    KvprobeError where the text is too short or ``add`` meets a tokenizer without BOS; ValueError for an ``n_tokens``
    that leaves no room for text.
    """
    front = front_ids(tokenizer, bos)
    if n_tokens <= len(front):
        raise ValueError(f"a passage needs at least {len(front) + 1} tokens here (BOS counts), got {n_tokens}")
    if offset < 0:
        raise ValueError(f"offset must be at least 0, got {offset}")
    end = offset + n_tokens - len(front)
    # Tokenising all of a long text to use its beginning can take minutes. The ids of a prefix that ends at
    # `cut_before` are the first ids of the whole; the margin is for a vocabulary that breaks what is argued there.
    limit = 8 * (end + MARGIN)
    while True:
        cut = cut_before(text.text, limit)
        content = _ids(tokenizer, text.text[:cut])
        if cut == len(text.text) or len(content) >= end + MARGIN:
            break
        limit *= 2
    if len(content) < end:
        where = f" from token {offset} on" if offset else ""
        raise KvprobeError(
            f"{text.name} is too short: {n_tokens} tokens{where} need {end + len(front)} of this tokenizer's tokens "
            f"and it holds {len(content) + len(front)}; ask for fewer, or give a longer text"
        )
    return Passage(
        name=text.name,
        sha256=text.sha256,
        ids=torch.tensor(front + content[offset:end], dtype=torch.long),
        bos=bos,
        bos_token_id=front[0] if front else None,
        n_front=len(front),
        offset=offset,
    )


def heldout(tokenizer: Tokenizer, text: Text, *, n_tokens: int, bos: Bos = "auto") -> Passage:
    """Tokens T…2T of the text whose first T = ``n_tokens`` are the passage of ``encode``; the two share no token of it.

    The policy applies again: with a BOS each of the two has its own, and each holds T − 1 tokens of the text.
    Raises as ``encode`` does.
    """
    return encode(tokenizer, text, n_tokens=n_tokens, bos=bos, offset=max(0, n_tokens - len(front_ids(tokenizer, bos))))


def random_ids(
    vocab_size: int, n: int, seed: int, *, tokenizer: Tokenizer | None = None, bos_token_id: int | None = None
) -> Tensor:
    """Control: ids drawn uniformly (with replacement) from the vocabulary, int64 ``[n]``, BOS counted where given.

    With a tokenizer, its special ids and the padding rows of an embedding larger than its vocabulary are never drawn.
    Give ``passage.bos_token_id`` to have in front what the passage has.
    """
    front = [] if bos_token_id is None else [bos_token_id]
    if n <= len(front):
        raise ValueError(f"random ids need at least {len(front) + 1} tokens (BOS counts), got {n}")
    ordinary = torch.ones(vocab_size, dtype=torch.bool)
    if tokenizer is not None:
        ordinary[len(tokenizer) :] = False
        ordinary[[i for i in tokenizer.all_special_ids if i < vocab_size]] = False
    pool = ordinary.nonzero().squeeze(1)
    draw = torch.randint(len(pool), (n - len(front),), generator=torch.Generator().manual_seed(seed))
    return torch.cat([torch.tensor(front, dtype=torch.long), pool[draw]])


def repeat_ids(token_id: int, n: int) -> Tensor:
    """Control: one id repeated, int64 ``[n]``, never with a BOS in front, which would be unlike the rest and a sink.

    ``passage.first_content_id`` is the id that kvprobe's own analyses repeat. Source: Gu et al., When attention sink
    emerges in language models: repetition removes the sink under RoPE, not under learned positions.
    """
    if n < 1:
        raise ValueError(f"a repeated id needs at least 1 token, got {n}")
    return torch.full((n,), token_id, dtype=torch.long)


def control(passage: Passage, kind: str, tokenizer: Tokenizer, *, seed: int) -> Passage:
    """The passage itself (``none``), or as many ids that mean nothing: ``random`` ones, or one id ``repeat``-ed.

    ``random`` keeps the passage's BOS; ``repeat`` has none and repeats the passage's first token of text. What is not
    of a text has no fingerprint: ``sha256`` is then empty and the name says what it is.
    """
    n = passage.n_tokens
    if kind == "none":
        return passage
    if kind == "random":
        ids = random_ids(len(tokenizer), n, seed, tokenizer=tokenizer, bos_token_id=passage.bos_token_id)
        return replace(passage, name="random ids", sha256="", ids=ids, n_front=min(1, passage.n_front), offset=0)
    if kind == "repeat":
        ids = repeat_ids(passage.first_content_id, n)
        return replace(passage, name="one id repeated", sha256="", ids=ids, bos_token_id=None, n_front=0, offset=0)
    raise ValueError(f"control must be none, random or repeat, got {kind!r}")


def cut_before(text: str, limit: int) -> int:
    """Where to cut so that the prefix's ids are the first ids of the whole text: at most ``limit`` characters, or all.

    The cut is the last one before a space that follows a non-space. Every pre-tokenizer in use (GPT-2's pattern and its
    successors, SentencePiece's ▁) begins a new piece there, and none looks past a non-space for what ends at it: runs
    of whitespace, which do look ahead, and punctuation that takes newlines along lie whole on one side. Byte-pair
    merges stay inside a piece or, without pieces, would need a vocabulary entry that holds the end of one word and the
    space before the next. Where there is no such place the answer is 0, until ``limit`` reaches the text's length.
    """
    if limit >= len(text):
        return len(text)
    cut = text.rfind(" ", 0, limit + 1)
    while cut > 0 and text[cut - 1].isspace():
        cut = text.rfind(" ", 0, cut)
    return max(cut, 0)


def _ids(tokenizer: Tokenizer, text: str, *, special: bool = False) -> list[int]:
    # verbose=False: a text longer than the model's positions is no fault here; the analysis decides what it can read.
    with guarded(name_of(tokenizer)):
        given = {"add_special_tokens": special, "truncation": False, "padding": False, "verbose": False}
        return list(tokenizer(text, **given)["input_ids"])


def front_ids(tokenizer: Tokenizer, bos: Bos) -> list[int]:
    """Ids to put before the text, found by watching the tokenizer: every family keeps that setting elsewhere."""
    if bos not in ("auto", "add", "drop"):
        raise ValueError(f"bos must be auto, add or drop, got {bos!r}")
    if bos == "drop":
        return []
    plain, dressed = _ids(tokenizer, "a"), _ids(tokenizer, "a", special=True)
    starts = [i for i in range(len(dressed)) if dressed[i : i + len(plain)] == plain]
    if not starts:
        raise KvprobeError(f"{type(tokenizer).__name__} changes the text when it adds its marks; use --bos drop")
    front = dressed[: starts[0]]
    if bos == "auto" or front:
        return front
    if tokenizer.bos_token_id is None:
        raise KvprobeError(f"--bos add: {type(tokenizer).__name__} has no BOS token; use --bos auto or --bos drop")
    return [int(tokenizer.bos_token_id)]
