"""What does a GGUF file's header say, and can all of it be true?

The layout is that of ggml's ``gguf.md``, versions 2 and 3. Every claim of the file is checked against its size before
it is used, and no tensor's data is read.
"""

import math
import mmap
import re
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvprobe.errors import KvprobeError

# by ggml's type number: name, numbers a block, bytes a block, of the types that can be converted to float32
TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
}
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

# more than any model has: the largest vocabularies have 262,144 tokens with half a million merges, 10 MB of text
MOST_KEYS, MOST_TENSORS, MOST_STRINGS, MOST_TEXT = 10_000, 200_000, 2_000_000, 2**25
# longer texts and rows of numbers are skipped, since none is needed
MOST_KEPT_TEXT, MOST_KEPT, MOST_KEPT_IN_ALL = 2**20, 10_000, 1_000_000
DEEPEST, MOST_NESTED = 4, 10_000


@dataclass(frozen=True)
class Tensor:
    """One tensor: its shape in torch's order (rows first), its ggml type, and where it lies in its file."""

    path: Path
    name: str
    shape: tuple[int, ...]
    type: int
    start: int
    n_bytes: int

    @property
    def n_elements(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Skipped:
    """A long text or row of numbers, of which only the length is kept."""

    count: int


@dataclass(frozen=True)
class Header:
    """Keys with their values (numbers, strings, lists, or `Skipped`), and tensors by name, of a file or its parts."""

    path: Path
    keys: dict[str, Any]
    tensors: dict[str, Tensor]
    spans: dict[str, tuple[int, int]] = field(repr=False)
    """Where a key and its value are in the file: the first byte, and one past the last."""
    parts: tuple["Header", ...] = ()
    """The files of a split model."""

    @property
    def files(self) -> tuple[Path, ...]:
        """The file, or all of its parts in order."""
        return tuple(part.path for part in self.parts) or (self.path,)


def shown(name: str) -> str:
    """A name from a file, quoted, without control characters and no longer than a line."""
    return ascii(name) if len(name) <= 80 else f"{name[:80]!a}…"


def read_header(path: Path) -> Header:
    """The header of one file, checked: counts, keys, and that each tensor is inside the file, aligned, without overlap.

    Raises KvprobeError, naming the file and what is wrong.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise KvprobeError(f"{path.name} is not a GGUF file: it does not begin with the letters GGUF")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reading(path, data, size).header()


class _Reading:
    """A pass through one header; ``at`` is the current byte."""

    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self.path, self.data, self.size, self.at = path, data, size, 4
        self.n_strings = self.n_text = self.n_kept = 0

    def header(self) -> Header:
        version = self.number("I")
        if version not in (2, 3):
            if version & 0xFFFF == 0 and version:
                raise self.wrong("is big-endian; convert it on a machine like yours")
            raise self.wrong(f"is of GGUF version {version}; versions 2 and 3 are read: convert it again")
        n_tensors, n_keys = self.number("Q"), self.number("Q")
        # the fewest bytes of a tensor (length and letter of a name, dimensions, one size, type, offset) and of a key
        self.counted(n_tensors, 33, MOST_TENSORS, "tensors")
        self.counted(n_keys, 14, MOST_KEYS, "keys")
        keys, spans = self.all_keys(n_keys)
        alignment = keys.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= 2**20 or alignment & (alignment - 1):
            raise self.wrong(f"has the alignment {alignment!r}, which is not a power of two")
        described = [self.tensor() for _ in range(n_tensors)]
        start = -(-self.at // alignment) * alignment if described else self.at
        return Header(self.path, keys, self.placed(described, start, alignment), spans)

    def wrong(self, what: str) -> KvprobeError:
        return KvprobeError(f"{self.path.name} {what}")

    def room(self, n_bytes: int) -> None:
        """Check that the next ``n_bytes`` are in the file."""
        if n_bytes > self.size - self.at:
            raise self.wrong(
                f"is cut or damaged inside its header: byte {self.at:,} asks for {n_bytes:,} bytes more and "
                f"{self.size - self.at:,} are left; fetch it again"
            )

    def counted(self, count: int, least: int, most: int, what: str) -> None:
        if count * least > self.size - self.at or count > most:
            raise self.wrong(f"claims {count:,} {what}, which its {self.size:,} bytes cannot hold; fetch it again")

    def number(self, code: str) -> Any:
        width = struct.calcsize("<" + code)
        self.room(width)
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += width
        return value

    def name(self, what: str) -> str:
        """A short text, which must be valid."""
        length = self.number("Q")
        self.room(length)
        if length > 65_535:
            raise self.wrong(f"has {what} of {length:,} bytes; 65,535 are allowed: it is damaged; fetch it again")
        self.at += length
        return self.decoded(self.data[self.at - length : self.at], what)

    def decoded(self, text: bytes, what: str) -> str:
        try:
            return text.decode("utf-8")
        except UnicodeDecodeError:
            raise self.wrong(
                f"has {what} before byte {self.at:,} that is not UTF-8: it is damaged; fetch it again"
            ) from None

    def strings(self, count: int, key: str) -> list[Any]:
        """``count`` texts: a loop without calls, since a vocabulary has a million."""
        self.n_strings += count
        self.counted(count, 8, MOST_STRINGS, f"texts in {shown(key)}")
        self.counted(self.n_strings, 0, MOST_STRINGS, "texts")
        unpack, data, size, at = struct.Struct("<Q").unpack_from, self.data, self.size, self.at
        texts: list[Any] = []
        for _ in range(count):
            (length,) = unpack(data, at) if size - at >= 8 else (size,)
            at += 8
            if length > size - at:
                self.at = at
                self.room(length)
            if length > MOST_KEPT_TEXT:
                texts.append(Skipped(length))
            else:
                self.n_text += length
                try:
                    texts.append(data[at : at + length].decode("utf-8"))
                except UnicodeDecodeError:
                    self.at = at + length
                    self.decoded(data[at : self.at], f"a text of {shown(key)}")
            at += length
            if self.n_text > MOST_TEXT:
                raise self.wrong(f"has more than {MOST_TEXT:,} bytes of text in its header, more than any model")
        self.at = at
        return texts

    def all_keys(self, count: int) -> tuple[dict[str, Any], dict[str, tuple[int, int]]]:
        keys: dict[str, Any] = {}
        spans = {}
        for _ in range(count):
            begin = self.at
            key = self.name("a key")
            if key in keys:
                raise self.wrong(f"has the key {shown(key)} twice")
            keys[key] = self.value(self.number("I"), key, depth=0)
            spans[key] = (begin, self.at)
        return keys, spans

    def value(self, kind: int, key: str, *, depth: int) -> Any:
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind == _STRING:
            return self.strings(1, key)[0]
        if kind == _ARRAY and depth < DEEPEST:
            return self.array(key, depth)
        raise self.wrong(
            f"gives {shown(key)} the type {kind}, which GGUF does not have: it is damaged; fetch it again"
            if kind != _ARRAY
            else f"has arrays nested {depth} deep in {shown(key)}"
        )

    def array(self, key: str, depth: int) -> Any:
        kind, count = self.number("I"), self.number("Q")
        if kind in _NUMBERS:
            code = _NUMBERS[kind]
            n_bytes = count * struct.calcsize(code)
            self.room(n_bytes)
            self.at += n_bytes
            self.n_kept += count
            if count > MOST_KEPT or self.n_kept > MOST_KEPT_IN_ALL:
                return Skipped(count)
            return list(struct.unpack_from(f"<{count}{code}", self.data, self.at - n_bytes))
        if kind == _STRING:
            return self.strings(count, key)
        self.counted(count, 12, MOST_NESTED, f"arrays in {shown(key)}")
        return [self.value(kind, key, depth=depth + 1) for _ in range(count)]

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape, type and offset, each checked by itself."""
        name = self.name("the name of a tensor")
        n_dims = self.number("I")
        if not 1 <= n_dims <= 4:
            raise self.wrong(f"gives the tensor {shown(name)} {n_dims:,} dimensions; 1 to 4 are possible")
        shape = tuple(reversed([self.number("Q") for _ in range(n_dims)]))
        type_, offset = self.number("I"), self.number("Q")
        if type_ not in TYPES:
            raise self.wrong(f"has {shown(name)} in the ggml type {type_}, which cannot be converted to float32")
        block = TYPES[type_][1]
        if not all(0 < size < 2**48 for size in shape) or shape[-1] % block:
            raise self.wrong(f"gives the tensor {shown(name)} the shape {shape}, impossible for {TYPES[type_][0]}")
        return name, shape, type_, offset

    def placed(
        self, described: list[tuple[str, tuple[int, ...], int, int]], start: int, alignment: int
    ) -> dict[str, Tensor]:
        """The tensors at their places: aligned, end to end, inside the file."""
        tensors: dict[str, Tensor] = {}
        before, end = "the header", start
        for name, shape, type_, offset in sorted(described, key=lambda entry: entry[3]):
            if name in tensors:
                raise self.wrong(f"has the tensor {shown(name)} twice")
            _, block, n_bytes = TYPES[type_]
            tensor = Tensor(self.path, name, shape, type_, start + offset, math.prod(shape) // block * n_bytes)
            if offset % alignment:
                raise self.wrong(f"has {shown(name)} at the offset {offset:,}, not aligned to {alignment:,} bytes")
            if tensor.start < end:
                raise self.wrong(f"is damaged: {shown(name)} lies over {before}")
            # ggml refuses gaps too: a wrong type or size leaves one
            if tensor.start > end + -end % alignment:
                raise self.wrong(f"is damaged: {tensor.start - end:,} bytes before {shown(name)} belong to no tensor")
            tensors[name], before, end = tensor, shown(name), tensor.start + tensor.n_bytes
        if end > self.size:
            raise self.wrong(f"is cut: {self.size:,} bytes of {end:,}; fetch it again")
        return tensors


_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def read_whole(path: Path) -> Header:
    """The header of a file, or of all parts of a split model, whichever part is given.

    Raises KvprobeError as `read_header` does, and if parts are missing or do not belong together.
    """
    header = read_header(path)
    count = header.keys.get("split.count", 1)
    if type(count) is not int or count <= 1:
        return header
    named = _PART.fullmatch(path.name)
    if named is None or int(named["count"]) != count:
        raise KvprobeError(
            f"{path.name} is one of {count:,} parts, but its name does not say which: "
            f"restore its name, such as NAME-00001-of-{count:05}.gguf, beside the others"
        )
    paths = [path.with_name(f"{named['stem']}-{n:05}-of-{count:05}.gguf") for n in range(1, count + 1)]
    missing = [part.name for part in paths if not part.is_file()]
    if missing:
        raise KvprobeError(
            f"{path.name} is one of {count:,} parts, and {len(missing):,} of them "
            f"{'is' if len(missing) == 1 else 'are'} not beside it, first {missing[0]}: fetch {missing[0]} too"
        )
    return _joined(tuple(read_header(part) for part in paths))


def _joined(parts: tuple[Header, ...]) -> Header:
    first = parts[0]
    tensors: dict[str, Tensor] = {}
    for number, part in enumerate(parts):
        place = (part.keys.get("split.no"), part.keys.get("split.count"))
        if place != (number, len(parts)):
            raise KvprobeError(
                f"{part.path.name} says that it is part {place[0]} (from 0) of {place[1]}: fetch it again"
            )
        for key, value in part.keys.items():
            if not key.startswith("split.") and first.keys.get(key) != value:
                raise KvprobeError(
                    f"{part.path.name} and {first.path.name} differ in {shown(key)}: they belong to two models"
                )
        if twice := sorted(tensors.keys() & part.tensors.keys()):
            raise KvprobeError(f"{part.path.name} has {shown(twice[0])}, which another part has too")
        tensors |= part.tensors
    total = first.keys.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise KvprobeError(f"the parts of {first.path.name} hold {len(tensors):,} tensors but claim {total!r}")
    return Header(first.path, first.keys, tensors, first.spans, parts)
