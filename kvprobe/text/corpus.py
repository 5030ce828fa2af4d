"""What does a small model train on, and what is held out? One text as ids, cut into windows at stride 1.

The published split (Dive into Deep Learning's time machine): a window of ``length + 1`` ids starts at every id; the
first ``n_train`` windows are for training and the next ``n_valid`` for validation. Windows overlap, so the first
``length`` validation windows begin inside the last training windows, and their targets up to there were trained on.
"""

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvprobe.errors import KvprobeError, Wording
from kvprobe.text.passages import Tokenizer
from kvprobe.text.texts import Cut, Text
from kvprobe.text.tokenizer_panics import guarded, name_of

UNKNOWN = "<unknown>"
LETTERS = (UNKNOWN, " ", *"abcdefghijklmnopqrstuvwxyz")
"""The published character vocabulary: 28 symbols, including the unknown one."""

# a text may have a few letters of other alphabets, which become spaces, but not be made of them
MOST_FOREIGN = 0.01
BYTES_A_CHARACTER = 64
"""More than any text has, even one that mostly becomes spaces."""


@dataclass(frozen=True, eq=False)
class Corpus:
    """Ids of one text and their split. ``ids`` is int64 ``[n]``; a window is ``length`` ids and the next one.

    ``kind`` is how the text became ids, ``vocab`` the number of possible ids; ``name``, ``sha256`` and ``cut`` are the
    text's. Raises KvprobeError for a text with fewer windows than ``n_train + n_valid`` or an id outside the
    vocabulary, ValueError for sizes below 1.
    """

    name: str
    sha256: str
    kind: str
    vocab: int
    ids: Tensor
    length: int = 128
    n_train: int = 100_000
    n_valid: int = 3_000
    cut: Cut | None = None

    def __post_init__(self) -> None:
        for name in ("length", "n_train", "n_valid"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        needed = self.n_train + self.n_valid + self.length
        if len(self.ids) < needed:
            cut = "" if self.cut is None else f" ({self.cut})"
            raise KvprobeError(
                Wording(
                    "{0} is too small: {train_windows} {1:,} and {valid_windows} {2:,}, of {3} + 1, need {4:,} {5}, "
                    "but it has {6:,}{7}; give a longer text, or ask for fewer windows",
                    *(self.name, self.n_train, self.n_valid, self.length, needed, self.kind, len(self.ids), cut),
                )
            )
        if (highest := int(self.ids.max())) >= self.vocab:
            raise KvprobeError(f"{self.name} has the id {highest:,}, but the vocabulary only {self.vocab:,} ids")

    def windows(self, starts: Tensor) -> Tensor:
        """The windows that begin at ``starts`` ``[n]``: int64 ``[n, length + 1]``, the last column only a target."""
        return self.ids[starts[:, None] + torch.arange(self.length + 1)]

    def train_batch(self, step: int, *, batch: int, seed: int) -> Tensor:
        """The windows of one training step, int64 ``[batch, length + 1]``: a function only of ``seed`` and ``step``.

        Every epoch is shuffled anew and read without its last, incomplete batch. Two models trained with the same seed
        read the same batches in the same order, even after a resume.
        """
        a_epoch = self.n_train // batch
        if not a_epoch:
            raise ValueError(f"a batch of {batch} is larger than the {self.n_train:,} training windows")
        epoch, place = divmod(step, a_epoch)
        generator = torch.Generator().manual_seed(((seed << 20) + epoch) % 2**63)
        order = torch.randperm(self.n_train, generator=generator)
        return self.windows(order[place * batch : (place + 1) * batch])

    def valid_windows(self) -> Tensor:
        """All validation windows, int64 ``[n_valid, length + 1]``."""
        return self.windows(torch.arange(self.n_train, self.n_train + self.n_valid))

    def record(self) -> Mapping[str, Any]:
        """The corpus in a run record: name, fingerprint and split, never a path; ``text_cut`` if that applies."""
        cut = {} if self.cut is None else self.cut.record()
        return cut | {
            "corpus": self.name,
            "corpus_sha256": self.sha256,
            "corpus_kind": self.kind,
            "vocab": self.vocab,
            "length": self.length,
            "n_train": self.n_train,
            "n_valid": self.n_valid,
        }


def enough(n_windows: int, length: int) -> int:
    """Bytes that are enough for ``n_windows`` windows of ``length`` characters and the next one."""
    return BYTES_A_CHARACTER * (n_windows + length)


def characters(text: Text, **split: int) -> Corpus:
    """The published character corpus: every run of anything but letters A to Z becomes one space, the rest lower case.

    ``split`` gives ``length``, ``n_train`` and ``n_valid``. Raises as :class:`Corpus` does, and KvprobeError for a text
    without letters or in another alphabet, most of which would become spaces.
    """
    # a letter's accent may be a separate character
    letters = [character for character in text.text if character.isalpha() or unicodedata.combining(character)]
    if not letters:
        raise KvprobeError(f"{text.name} has no letters, and this corpus is made of letters only: give an English text")
    foreign = [character for character in letters if not character.isascii()]
    if len(foreign) > MOST_FOREIGN * len(letters):
        named = ", ".join(repr(character) for character in sorted(set(foreign))[:5])
        raise KvprobeError(
            f"the vocabulary of {len(LETTERS)} symbols misses {len(foreign) / len(letters):.0%} of the letters of "
            f"{text.name} (such as {named}), which would all become spaces; give an English or a transliterated text"
        )
    return spelled(text, re.sub("[^A-Za-z]+", " ", text.text).lower(), vocabulary=LETTERS, **split)


def spelled(text: Text, characters: str, *, vocabulary: tuple[str, ...], **split: int) -> Corpus:
    """A corpus of ``characters`` made from ``text``; a character's id is its place in ``vocabulary``.

    Raises KvprobeError naming characters that the vocabulary misses: none silently becomes the unknown one.
    """
    place = {symbol: i for i, symbol in enumerate(vocabulary)}
    if missing := sorted(set(characters) - place.keys()):
        named = ", ".join(repr(character) for character in missing[:5])
        raise KvprobeError(
            f"the vocabulary of {len(vocabulary)} symbols misses {len(missing)} characters of {text.name}: {named}"
            f"{', …' if len(missing) > 5 else ''}"
        )
    ids = torch.tensor([place[character] for character in characters], dtype=torch.long)
    return Corpus(text.name, text.sha256, "characters", len(vocabulary), ids, cut=text.cut, **split)


def tokens(text: Text, tokenizer: Tokenizer, **split: int) -> Corpus:
    """A corpus of a tokenizer's ids over its full vocabulary, with no mark added in front."""
    with guarded(name_of(tokenizer)):
        given = {"add_special_tokens": False, "truncation": False, "padding": False, "verbose": False}
        ids = tokenizer(text.text, **given)["input_ids"]
    return Corpus(
        text.name, text.sha256, "tokens", len(tokenizer), torch.tensor(ids, dtype=torch.long), cut=text.cut, **split
    )
