"""Which tensors do a model's safetensors files hold, by their headers alone, and is every file there and complete?"""

import math
import struct
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeGuard

from kvprobe.errors import KvprobeError, short
from kvprobe.files.jsonfile import parse_json, read_object

INDEX = "model.safetensors.index.json"
_ONE = "model.safetensors"
LIMIT = 1 << 25
"""The longest header that is read, in bytes: room for a quarter of a million tensors in one file."""
# the width of an element, by safetensors' name of its type
BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}


@dataclass(frozen=True)
class Tensor:
    """What a header says about one tensor; ``file`` is the name of its file."""

    dtype: str
    shape: tuple[int, ...]
    file: str

    @property
    def n_elements(self) -> int:
        """Stored elements; a scalar has 1."""
        return math.prod(self.shape)


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a model directory; none if it has neither model.safetensors nor an index.

    Chosen as transformers does (`PreTrainedModel.from_pretrained`): only model.safetensors if it exists, otherwise what
    the index names. Raises KvprobeError if the index is damaged, or if a file that it names is missing or outside the
    directory.
    """
    if _by_index(directory):
        return [_checked(directory, name) for name in sorted(set(_index(directory).values()))]
    single = directory / _ONE
    return [_checked(directory, _ONE)] if single.is_symlink() or single.exists() else []


def read_tensors(name: str, directory: Path, files: list[Path]) -> dict[str, Tensor]:
    """Every tensor of `files`, by name; ``name`` is the model's, for errors.

    Raises KvprobeError for a file that is truncated or damaged, if two files hold the same tensor, if the index places
    one in a file that lacks it, and if the directory has shards that the index does not name.
    """
    tensors: dict[str, Tensor] = {}
    for path in files:
        for key, tensor in read_header(path, f"the safetensors of {name} are damaged: {path.name}").items():
            if key in tensors:
                raise KvprobeError(f"{name} holds {key} twice, in {tensors[key].file} and in {tensor.file}")
            tensors[key] = tensor
    if _by_index(directory):
        _check_index(name, directory, tensors, files)
    return tensors


def read_header(path: Path, what: str) -> dict[str, Tensor]:
    """The tensors of one safetensors file. Raises KvprobeError, beginning with ``what``, for an invalid file.

    It checks everything that readers rely on: known types, integer shapes, and data that the tensors fill from the
    first byte to the last without overlap.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))
        if length > max(0, size - 8):
            raise KvprobeError(f"{what} claims a header of {length:,} bytes and has {size:,}: fetch it again")
        if length > LIMIT:
            raise KvprobeError(f"{what} has a header of {length:,} bytes, more than {LIMIT:,}")
        header = parse_json(file.read(length), f"{what} has a header that", unique=True)
    if not isinstance(header, dict):
        raise KvprobeError(f"{what} has a header that is not a JSON object")
    header.pop("__metadata__", None)
    places = []
    tensors = {}
    for key, entry in header.items():
        begin, end, tensors[key] = _entry(key, entry, path.name, what)
        places.append((begin, end, key))
    reached = 0
    for begin, end, key in sorted(places):
        if begin != reached:
            raise KvprobeError(f"{what} has {key} at byte {begin:,} of the data, where {reached:,} is expected")
        reached = end
    if reached != size - 8 - length:
        why = "it is truncated: fetch it again" if reached > size - 8 - length else "the rest is not a tensor"
        raise KvprobeError(f"{what} has {size:,} bytes of {reached + 8 + length:,}: {why}")
    return tensors


def _entry(key: str, entry: Any, file: str, what: str) -> tuple[int, int, Tensor]:
    if not isinstance(entry, dict):
        raise KvprobeError(f"{what} does not describe {key} as a tensor")
    dtype, shape, place = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in BITS:
        raise KvprobeError(f"{what} has {key} of the unknown type {dtype!r}")
    if not _counts(shape) or len(shape) > 64:
        raise KvprobeError(f"{what} has {key} of the shape {short(shape)}, which is not a list of whole numbers")
    if not _counts(place) or len(place) != 2:
        raise KvprobeError(f"{what} has {key} at {short(place)}, which is not a place in the file")
    tensor, (begin, end) = Tensor(dtype, tuple(shape), file), place
    if end - begin != -(-tensor.n_elements * BITS[dtype] // 8):
        raise KvprobeError(f"{what} gives {end - begin:,} bytes to {key}, {dtype} of the shape {short(shape)}")
    return begin, end, tensor


def _counts(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 63 for item in value)


def _by_index(directory: Path) -> bool:
    return (directory / INDEX).is_file() and not (directory / _ONE).is_file()


def _index(directory: Path) -> dict[str, str]:
    """The file that the index names for each tensor."""
    what = f"{INDEX} in {directory.resolve().name}"
    placed = read_object(directory / INDEX, what).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise KvprobeError(f"{what} is damaged (no weight_map that names files): fetch it again")
    for key, name in placed.items():
        if not isinstance(name, str) or not name or "\0" in name:
            raise KvprobeError(f"{what} is damaged ({key} is in {short(name)}, not a file name): fetch it again")
    return placed


def _checked(directory: Path, name: str) -> Path:
    """The file of that name. Raises KvprobeError if it is missing or its content is outside the directory.

    Links into the hub's cache are allowed: its snapshots are links to the blobs of their repository, and so may be the
    files of any directory.
    """
    path, parts = directory / name, PurePosixPath(name.replace("\\", "/"))
    root = directory.resolve()  # "." has no name, and a link another one
    inside = not parts.is_absolute() and ".." not in parts.parts and not Path(name).is_absolute()
    if inside:
        try:
            target = path.resolve()
        except (OSError, RuntimeError) as error:  # a link to itself
            raise KvprobeError(f"{name} of {root.name} cannot be found: {error}") from error
        roots = [root]
        if root.parent.name == "snapshots":
            roots.append(root.parent.parent / "blobs")
        inside = any(allowed in target.parents for allowed in roots) or _is_blob(target)
    if not inside:
        raise KvprobeError(f"{root.name} names weights outside its directory ({name}), which are not read")
    if not path.is_file():
        raise KvprobeError(f"{root.name} is incomplete: {name} is missing, fetch it again")
    return path


def _is_blob(path: Path) -> bool:
    return path.parent.name == "blobs" and path.parent.parent.name.startswith("models--")


def _check_index(name: str, directory: Path, tensors: dict[str, Tensor], files: list[Path]) -> None:
    for key, file in _index(directory).items():
        if key not in tensors or tensors[key].file != Path(file).name:
            raise KvprobeError(f"the index of {name} has {key} in {file}, which does not hold it")
    shards = {path.name for path in directory.glob("model-*-of-*.safetensors")}
    if spare := sorted(shards - {path.name for path in files}):
        raise KvprobeError(
            f"{name} has weights in {spare[0]} that its index does not name: remove what does not belong to it"
        )
