"""Which text does a name mean, and what exactly was read?"""

import codecs
import hashlib
import io
import os
import stat
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, BinaryIO

from kvprobe.errors import KvprobeError, Wording, did_you_mean

TEXTS = {
    "bundled": ("passage.txt", "72555202e7c2c0f1c15bda2728a389669f762087f929391c6705c60c3800d3a2"),
    "time-machine": ("time-machine.txt", "4149e15a170aa94068969282e8b2cee7aaab0d889bf1c0d684378177040267dd"),
    "manual": ("manual.txt", "e802e404a97a2e1e657589e04ef2f6f309ae35e26220a03ff06a988b938352f9"),
}
"""Texts that need no path: file and SHA-256. ``bundled`` is a story, ``manual`` instructions for an instrument."""
BLOCK = 1 << 16
MOST_HASHED = 1 << 30
"""The largest file, in bytes, that is hashed completely even if little of its text is needed: some seconds."""


@dataclass(frozen=True)
class Cut:
    """How much of a longer text was read: ``n_read`` of its ``n_bytes`` bytes (None: its end was not reached).

    ``hashed_whole``: the fingerprint is of the whole text nevertheless, and not of the bytes read.
    """

    n_read: int
    n_bytes: int | None
    hashed_whole: bool

    def __str__(self) -> str:
        """As in ``cut: 2,162,688 bytes of 10,737,418,240``."""
        total = "a longer stream" if self.n_bytes is None else f"{self.n_bytes:,}"
        return f"cut: {self.n_read:,} bytes of {total}"

    def record(self) -> dict[str, Any]:
        """The cut in a run record: empty if the fingerprint is of the whole text."""
        return {} if self.hashed_whole else {"text_cut": {"n_read": self.n_read, "n_bytes": self.n_bytes}}


@dataclass(frozen=True, repr=False)
class Text:
    """A text and its fingerprint: ``sha256`` is of the raw bytes, ``name`` never holds a path.

    ``cut`` says how much of it this is, if not all; its last word may then be cut too.
    """

    name: str
    sha256: str
    text: str
    cut: Cut | None = None

    def __repr__(self) -> str:
        """As in ``Text(bundled, 31,246 characters)``."""
        return f"Text({self.name}, {len(self.text):,} characters)"


def read_text(name: str = "bundled", *, n_bytes: int | None = None) -> Text:
    """Read a named text, a UTF-8 file, or standard input (``-``).

    With ``n_bytes``, a file, pipe or device is read and checked only to about there (:class:`Cut`); the fingerprint
    still covers a file of at most ``MOST_HASHED`` bytes completely.
    A named text wins over a file of that name (``./bundled`` is the file). A byte-order mark is dropped and line ends
    become one newline character, as Python reads any text; nothing else is normalised. ``time-machine`` is H. G. Wells,
    The Time Machine (1895, public domain), the edition that small models are trained on (:mod:`kvprobe.text.corpus`).
    Raises KvprobeError for a text that is missing, unreadable, binary, not UTF-8 (with the byte offset) or empty.
    """
    if not name:
        raise KvprobeError(f"the name of the text is empty; a file, or one of {', '.join(TEXTS)}")
    if name in TEXTS:
        file, pinned = TEXTS[name]
        sha256, text, _ = _read(io.BytesIO(files("kvprobe").joinpath("data", file).read_bytes()), name)
        if sha256 != pinned:
            raise KvprobeError(f"the bundled {file} was changed: SHA-256 {sha256}, not {pinned}; reinstall kvprobe")
        return Text(name, sha256, text)
    if name == "-":
        if sys.stdin is None:
            raise KvprobeError("standard input is closed: pipe a text in, or name a file")
        return Text("stdin", *_read(sys.stdin.buffer, "standard input", n_bytes))
    try:
        with Path(name).open("rb") as source:
            # a name that is not UTF-8 could not be written into a record
            return Text(Path(name).name.encode(errors="backslashreplace").decode(), *_read(source, name, n_bytes))
    except OSError as error:
        raise _unread(name, error) from None


def read_exact(name: str, *, most: int, shown: str) -> str:
    """All of a UTF-8 file, or of standard input (``-``), to the byte: line ends and byte-order marks stay as they are.

    Errors call it ``shown``. Raises KvprobeError if it cannot be read, is not UTF-8 (with the byte offset), or has more
    than ``most`` bytes.
    """
    if name == "-" and sys.stdin is None:
        raise KvprobeError("standard input is closed: pipe a text in, or name a file")
    try:
        with nullcontext(sys.stdin.buffer) if name == "-" else Path(name).open("rb") as source:
            data = source.read(most + 1)
    except OSError as error:
        raise KvprobeError(f"cannot read {shown} ({error.strerror}): check the path") from None
    if len(data) > most:
        raise KvprobeError(f"{shown} has more than {most:,} bytes: give a shorter text")
    decoder = codecs.getincrementaldecoder("utf-8")()
    return _decoded(decoder, data, len(data), shown) + _decoded(decoder, b"", len(data), shown)


def check_utf8(shown: str, text: str) -> None:
    """Raise KvprobeError if ``text``, an argument of the command line, was not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        # how Python represents a byte that it could not decode
        byte = ord(text[error.start]) - 0xDC00
        at = len(text[: error.start].encode())
        raise KvprobeError(
            f"{shown} is not UTF-8: byte 0x{byte & 0xFF:02x} at offset {at}; convert it to UTF-8 first"
        ) from None


def _read(source: BinaryIO, shown: str, n_bytes: int | None = None) -> tuple[str, str, Cut | None]:
    """The fingerprint of ``source``, its text, and how much of it was read."""
    digest, decoder = hashlib.sha256(), codecs.getincrementaldecoder("utf-8")()
    size, n_read, pieces = _bytes_left(source), 0, []
    block = source.read(BLOCK)
    while block and (n_bytes is None or n_read < n_bytes):
        if (nul := block.find(b"\0")) >= 0:
            raise KvprobeError(f"{shown} is binary: a NUL byte at offset {n_read + nul}; give a plain UTF-8 text file")
        digest.update(block)
        n_read += len(block)
        pieces.append(_decoded(decoder, block, n_read, shown))
        if n_bytes is None and n_read > MOST_HASHED:
            said = "{0} has more than {1:,} bytes, too many to read all: use {tokens}"
            raise KvprobeError(Wording(said, shown, MOST_HASHED))
        block = source.read(BLOCK)
    cut = None
    if block:
        hashed_whole = size is not None and size <= MOST_HASHED
        while block and hashed_whole:
            digest.update(block)
            block = source.read(BLOCK)
        cut = Cut(n_read, size, hashed_whole)
    else:
        pieces.append(_decoded(decoder, b"", n_read, shown))
    text = "".join(pieces).removeprefix("\ufeff")
    if not text.strip():
        raise KvprobeError(f"{shown} holds no text ({cut or f'{n_read} bytes'}); give a file with words in it")
    return digest.hexdigest(), text.replace("\r\n", "\n").replace("\r", "\n"), cut


def _decoded(decoder: codecs.IncrementalDecoder, block: bytes, n_read: int, shown: str) -> str:
    """The characters that end in ``block``, the last of ``n_read`` bytes; an empty block checks the end."""
    try:
        return decoder.decode(block, final=not block)
    except UnicodeDecodeError as error:
        # the decoder may have kept back the first bytes of a character
        at = n_read - len(error.object) + error.start
        raise KvprobeError(
            f"{shown} is not UTF-8: byte 0x{error.object[error.start]:02x} at offset {at}; convert it to UTF-8 first"
        ) from None


def _bytes_left(source: BinaryIO) -> int | None:
    """The bytes left in an ordinary file; None for a pipe, a device, or a file of /proc, which has no size."""
    try:
        about = os.fstat(source.fileno())
        return (about.st_size - source.tell()) if stat.S_ISREG(about.st_mode) and about.st_size else None
    except OSError:
        return None


def _unread(path: str, error: OSError) -> KvprobeError:
    known = f"or use a built-in text: {', '.join(TEXTS)}"
    if isinstance(error, FileNotFoundError):
        return KvprobeError(
            f"no text named {path!r}: no such file; {did_you_mean(path, TEXTS, f'check the path, {known}')}"
        )
    if isinstance(error, IsADirectoryError):
        return KvprobeError(f"{path!r} is a directory; name one UTF-8 file in it, {known}")
    return KvprobeError(f"cannot read {path!r} ({error.strerror}); fix that, {known}")
