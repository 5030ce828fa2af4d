"""How do the parts of a split GGUF file become one file, bit for bit as it was before the split?"""

import struct
from pathlib import Path
from typing import BinaryIO

from kvprobe.models.gguf_header import Header, Tensor


def join(header: Header, into: Path) -> None:
    """Write the parts as one file with the same tensors and keys, except the keys about the split."""
    alignment = header.keys.get("general.alignment", 32)
    kept = [span for key, span in header.spans.items() if not key.startswith("split.")]
    with into.open("wb") as out:
        out.write(b"GGUF" + struct.pack("<IQQ", 3, len(header.tensors), len(kept)))
        with header.path.open("rb") as first:
            for begin, end in kept:
                first.seek(begin)
                out.write(first.read(end - begin))
        offset = 0
        for tensor in header.tensors.values():
            out.write(_entry(tensor, offset))
            offset += tensor.n_bytes + -tensor.n_bytes % alignment
        _pad(out, alignment)
        for tensor in header.tensors.values():
            with tensor.path.open("rb") as part:
                part.seek(tensor.start)
                _copy(part, out, tensor.n_bytes)
            _pad(out, alignment)


def _entry(tensor: Tensor, offset: int) -> bytes:
    name = tensor.name.encode("utf-8")
    sizes = tensor.shape[::-1]
    return struct.pack(f"<Q{len(name)}sI{len(sizes)}QIQ", len(name), name, len(sizes), *sizes, tensor.type, offset)


def _pad(out: BinaryIO, alignment: int) -> None:
    out.write(bytes(-out.tell() % alignment))


def _copy(part: BinaryIO, out: BinaryIO, n_bytes: int) -> None:
    while n_bytes:
        block = part.read(min(n_bytes, 1 << 22))
        if not block:
            raise EOFError(f"{n_bytes} bytes are missing")
        out.write(block)
        n_bytes -= len(block)
