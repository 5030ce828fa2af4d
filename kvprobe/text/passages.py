"""Which token ids does an analysis read, from which text, and what is put in front of them?"""

import hashlib
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from kvprobe.errors import KvprobeError, Wording
from kvprobe.text.texts import Cut, Text
from kvprobe.text.tokenizer_panics import guarded, name_of

Bos = Literal["auto", "add", "drop"]

MARGIN = 16
"""Ids at the end of an encoded prefix that are not used (see ``encode``)."""
BYTES_A_TOKEN = 1024
"""More than the longest token of any vocabulary in use (256 spaces, or 256 letters of up to 4 bytes)."""


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is used."""

    bos_token_id: Any
    all_special_ids: Any

    def __call__(self, text: str, **options: Any) -> Any:
        """Return a mapping whose ``input_ids`` are the ids of ``text``."""

    def __len__(self) -> int:
        """Return the size of the vocabulary, added tokens included."""


@dataclass(frozen=True, repr=False)
class Passage:
    """Token ids cut from a text.

    ``ids`` is int64 ``[n_tokens]``. ``marks`` are the ids that begin a sequence: the tokenizer's BOS, and what it adds
    before a text by itself (a few add two). The first ``n_added`` ids were added before the text; ``bos`` is the policy
    asked for. What comes first, whoever added it, is read from the ids. ``offset`` counts the text's tokens skipped
    before the passage. ``name``, ``sha256`` and ``cut`` are the text's.
    """

    name: str
    sha256: str
    ids: Tensor
    bos: Bos
    marks: frozenset[int]
    n_added: int
    offset: int = 0
    cut: Cut | None = None

    def __repr__(self) -> str:
        """As in ``Passage(bundled, 1,024 tokens)``."""
        return f"Passage({self.name}, {self.n_tokens:,} tokens)"

    @property
    def n_tokens(self) -> int:
        """Ids in the passage, including those in front of the text."""
        return len(self.ids)

    @property
    def next_offset(self) -> int:
        """The first of the text's tokens after the passage."""
        return self.offset + self.n_tokens - self.n_added

    @property
    def n_front(self) -> int:
        """How many marks the ids begin with: 0, or 1 with a BOS (a few tokenizers have more)."""
        return next((i for i in range(self.n_tokens) if int(self.ids[i]) not in self.marks), self.n_tokens)

    @property
    def has_bos(self) -> bool:
        """Whether the first id is a mark, either the tokenizer's or the text's."""
        return self.n_front > 0

    @property
    def bos_in_text(self) -> bool:
        """Whether a mark at the beginning is part of the text, as in one made with a chat template."""
        return self.n_front > self.n_added

    @property
    def first_content_id(self) -> int:
        """The first id that is not a mark: an ordinary token, for ``repeat_ids``."""
        if self.n_front == self.n_tokens:
            raise KvprobeError(f"the passage of {self.name} holds only begin-of-sequence marks: ask for more tokens")
        return int(self.ids[self.n_front])

    def record(self) -> dict[str, Any]:
        """The passage in a run record: names and fingerprints, never a path.

        ``bos_in_text`` and ``text_cut`` are present only if they apply.
        """
        record: dict[str, Any] = {
            "passage": self.name,
            "passage_sha256": self.sha256,
            "passage_offset": self.offset,
            # what the model actually read: another tokenizer gives other ids, and random ids have no text
            "ids_sha256": hashlib.sha256(self.ids.numpy().tobytes()).hexdigest(),
            "n_tokens": self.n_tokens,
            "bos": self.bos,
            "has_bos": self.has_bos,
        }
        if self.bos_in_text:
            record["bos_in_text"] = True
        return record if self.cut is None else record | self.cut.record()


def notices(passage: Passage) -> list[str]:
    """What a user should know about a passage and may not expect, one sentence each."""
    said = []
    if passage.bos_in_text:
        said.append(own_marks(passage.name, passage.n_front - passage.n_added))
    later = [i for i in range(passage.n_front, passage.n_tokens) if int(passage.ids[i]) in passage.marks]
    if later:
        first = "after the one at token 0" if passage.has_bos else "and token 0 is not one"
        said.append(f"{passage.name} holds a begin-of-sequence mark at token {later[0]:,}, {first}")
    if passage.cut is not None and not passage.cut.hashed_whole:
        said.append(f"{passage.name} is {passage.cut}; the SHA-256 is of those that were read")
    return said


def own_marks(name: str, number: int) -> str:
    """The notice on a text that begins with ``number`` marks of its own."""
    own, them = ("a begin-of-sequence mark", "it") if number == 1 else (f"{number} begin-of-sequence marks", "them")
    return f"{name} begins with {own} of its own: none is added, and --bos drop keeps {them}"


def enough(n_tokens: int) -> int:
    """Bytes that are enough for a passage of ``n_tokens`` and as many tokens after it (:func:`heldout`)."""
    return BYTES_A_TOKEN * (2 * n_tokens + 4 * MARGIN)


def encode(tokenizer: Tokenizer, text: Text, *, n_tokens: int, bos: Bos = "auto", offset: int = 0) -> Passage:
    """Cut exactly ``n_tokens`` ids from a text, including a BOS, after skipping ``offset`` of the text's own tokens.

    ``bos``: ``auto`` adds in front what the tokenizer adds by itself, ``add`` makes sure that its BOS is there, and
    ``drop`` adds nothing. A BOS at the beginning of the text stays, and no second one is added (:func:`front_of`). What
    a tokenizer appends (EOS) is never kept: a cut passage has not ended. Raises KvprobeError if the text is too short
    or, with ``add``, the tokenizer has no BOS; ValueError for an ``n_tokens`` that leaves no room for text.
    """
    front = bos_ids(tokenizer, bos)
    if n_tokens <= len(front):
        raise ValueError(f"a passage needs at least {len(front) + 1} tokens here (including BOS), got {n_tokens}")
    if offset < 0:
        raise ValueError(f"offset must be at least 0, got {offset}")
    known = marks(tokenizer)
    # Tokenising all of a long text to use its beginning can take minutes. The ids of a prefix that ends at `cut_before`
    # are the first ids of the full text; the margin is for a vocabulary that breaks the argument there.
    limit = 8 * (offset + n_tokens + MARGIN)
    while True:
        cut = cut_before(text.text, limit)
        content = _ids(tokenizer, text.text[:cut])
        if cut == len(text.text) or len(content) >= offset + n_tokens + MARGIN:
            break
        limit *= 2
    if text.cut is not None:
        # a text may be cut inside a word
        content = content[: max(0, len(content) - MARGIN)]
    added = front_of(content[offset : offset + len(front) + 1], front, known)
    end = offset + n_tokens - len(added)
    if len(content) < end:
        where = f" from token {offset} on" if offset else ""
        raise KvprobeError(
            f"{text.name} is too short: {n_tokens} tokens{where} need {end + len(added)} of this tokenizer's tokens, "
            f"but it has {len(content) + len(added)}{f' ({text.cut})' if text.cut else ''}; ask for fewer, or give a "
            "longer text"
        )
    return _passage(text, added, content[offset:end], bos=bos, marks=known, offset=offset)


def whole(tokenizer: Tokenizer, text: Text, *, bos: Bos = "auto") -> Passage:
    """All of a text, and in front of it what ``encode`` adds."""
    known = marks(tokenizer)
    # in one piece: a tokenizer that puts a space before the text would put one before every piece
    content = _ids(tokenizer, text.text)
    return _passage(text, front_of(content, bos_ids(tokenizer, bos), known), content, bos=bos, marks=known)


def of_ids(tokenizer: Tokenizer | None, ids: Any) -> Passage:
    """Given ids as a passage, int ``[n_tokens]``. Raises ValueError for fewer than two, and for negative ones.

    The tokenizer says which of them are marks; without a tokenizer none are.
    """
    given = torch.as_tensor(ids)
    if given.ndim != 1 or len(given) < 2 or given.is_floating_point() or given.dtype == torch.bool or given.min() < 0:
        raise ValueError(
            f"ids must be a list of at least 2 whole numbers from 0 on, got {[*given.shape]} {given.dtype}"
        )
    known = frozenset() if tokenizer is None else marks(tokenizer)
    kept = given.to("cpu", torch.long, copy=True)
    return Passage(name="ids", sha256="", ids=kept, bos="auto", marks=known, n_added=0)


def _passage(text: Text, added: list[int], content: list[int], **about: Any) -> Passage:
    ids = torch.tensor(added + content, dtype=torch.long)
    return Passage(name=text.name, sha256=text.sha256, ids=ids, n_added=len(added), cut=text.cut, **about)


def heldout(tokenizer: Tokenizer, text: Text, *, n_tokens: int, bos: Bos = "auto") -> Passage:
    """Tokens T…2T of the text whose first T = ``n_tokens`` are the passage of ``encode``; the two share no token.

    ``bos`` applies again: with a BOS, each of the two has its own and holds T − 1 tokens of the text.
    Raises as ``encode`` does.
    """
    first = encode(tokenizer, text, n_tokens=n_tokens, bos=bos)
    return encode(tokenizer, text, n_tokens=n_tokens, bos=bos, offset=first.next_offset)


def random_ids(vocab_size: int, n: int, seed: int, *, tokenizer: Tokenizer | None = None) -> Tensor:
    """Control: ids drawn uniformly (with replacement) from the vocabulary, int64 ``[n]``.

    With a tokenizer, its special ids and the padding rows of an embedding larger than the vocabulary are never drawn.
    """
    if n < 1:
        raise ValueError(f"random ids need at least 1 token, got {n}")
    ordinary = torch.ones(vocab_size, dtype=torch.bool)
    if tokenizer is not None:
        ordinary[len(tokenizer) :] = False
        ordinary[[i for i in tokenizer.all_special_ids if i < vocab_size]] = False
    pool = ordinary.nonzero().squeeze(1)
    return pool[torch.randint(len(pool), (n,), generator=torch.Generator().manual_seed(seed))]


def repeat_ids(token_id: int, n: int) -> Tensor:
    """Control: one id repeated, int64 ``[n]``, never with a BOS in front, which would differ and become a sink.

    kvprobe's own analyses repeat ``passage.first_content_id``. Source: Gu et al., When attention sink emerges in
    language models: repetition removes the sink under RoPE, but not under learned positions.
    """
    if n < 1:
        raise ValueError(f"a repeated id needs at least 1 token, got {n}")
    return torch.full((n,), token_id, dtype=torch.long)


def control(passage: Passage, kind: str, tokenizer: Tokenizer, *, seed: int) -> Passage:
    """The passage itself (``none``), or as many meaningless ids: ``random`` ones, or one id ``repeat``-ed.

    ``random`` keeps the marks that the passage begins with; ``repeat`` has none, and repeats the passage's first id
    that is not a mark. Ids without a text have no fingerprint: ``sha256`` is empty and the name says what they are.
    """
    n = passage.n_tokens
    if kind == "none":
        return passage
    if kind == "random":
        front = passage.ids[: passage.n_front]
        drawn = random_ids(len(tokenizer), n - len(front), seed, tokenizer=tokenizer)
        name, ids = "random ids", torch.cat([front, drawn])
        return replace(passage, name=name, sha256="", ids=ids, n_added=len(front), offset=0, cut=None)
    if kind == "repeat":
        name, ids = "one id repeated", repeat_ids(passage.first_content_id, n)
        return replace(passage, name=name, sha256="", ids=ids, n_added=0, offset=0, cut=None)
    raise ValueError(f"control must be none, random or repeat, got {kind!r}")


def cut_before(text: str, limit: int) -> int:
    """Where to cut so that the prefix's ids are the first ids of the full text: at most ``limit`` characters, or all.

    The cut is before the last space that follows a non-space. Every pre-tokenizer in use (GPT-2's pattern and its
    successors, SentencePiece's ▁) begins a new piece there, and none looks past a non-space to end a piece: runs of
    whitespace, which do look ahead, and punctuation that takes newlines along lie entirely on one side. Byte-pair
    merges stay inside a piece or, without pieces, would need a vocabulary entry that holds the end of one word and the
    space before the next. If there is no such place the result is 0, until ``limit`` reaches the text's length.
    """
    if limit >= len(text):
        return len(text)
    cut = text.rfind(" ", 0, limit + 1)
    while cut > 0 and text[cut - 1].isspace():
        cut = text.rfind(" ", 0, cut)
    return max(cut, 0)


def _ids(tokenizer: Tokenizer, text: str, *, special: bool = False) -> list[int]:
    # verbose=False: a text longer than the model's positions is not an error here; the analysis decides what to read
    with guarded(name_of(tokenizer)):
        given = {"add_special_tokens": special, "truncation": False, "padding": False, "verbose": False}
        return list(tokenizer(text, **given)["input_ids"])


def bos_ids(tokenizer: Tokenizer, bos: Bos) -> list[int]:
    """Ids to add before the text, found from the tokenizer's outputs: every family keeps the setting elsewhere."""
    if bos not in ("auto", "add", "drop"):
        raise ValueError(f"bos must be auto, add or drop, got {bos!r}")
    if bos == "drop":
        return []
    plain, dressed = _ids(tokenizer, "a"), _ids(tokenizer, "a", special=True)
    starts = [i for i in range(len(dressed)) if dressed[i : i + len(plain)] == plain]
    if not starts:
        said = "{0} changes the text when it adds its marks; use {bos} drop"
        raise KvprobeError(Wording(said, type(tokenizer).__name__))
    front = dressed[: starts[0]]
    if bos == "auto" or front:
        return front
    if tokenizer.bos_token_id is None:
        said = "{bos} add: {0} has no BOS token; use {bos} auto or {bos} drop"
        raise KvprobeError(Wording(said, type(tokenizer).__name__))
    return [int(tokenizer.bos_token_id)]


def front_of(content: Sequence[int], front: list[int], marks: Container[int]) -> list[int]:
    """The part of ``front`` to add before ``content``, which may begin with it already.

    All of it before an ordinary id; nothing before a mark, except that if ``content`` begins with the end of ``front``
    (the second of two marks), the missing beginning is added.
    """
    for n in range(len(front), 0, -1):
        if list(content[:n]) == front[-n:]:
            return front[:-n]
    return [] if content and content[0] in marks else front


def marks(tokenizer: Tokenizer) -> frozenset[int]:
    """The ids that begin a sequence: what the tokenizer adds before a text by itself, and its BOS."""
    try:
        front = bos_ids(tokenizer, "auto")
    except KvprobeError:
        # what it adds cannot be told from the text
        front = []
    own = tokenizer.bos_token_id
    return frozenset(front if own is None else [*front, int(own)])
