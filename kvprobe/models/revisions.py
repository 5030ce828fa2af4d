"""Which weights are these? An identifier of a directory's, and one of those in memory."""

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

from kvprobe.errors import KvprobeError
from kvprobe.files.store import read_manifest
from kvprobe.models.headers import LIMIT, weight_files

_SAMPLED = 64


def revision_of(directory: Path) -> str:
    """An identifier of the weights, without reading them all.

    With our manifest: ``manifest:`` and the start of the SHA-256 over the SHA-256 of every file. Otherwise ``sample:``
    and the SHA-256 over the configuration and each safetensors file's size, header, first and last MiB: it tells
    checkpoints apart, but does not prove them equal.
    """
    digest = hashlib.sha256()
    if checksums := _checksums(directory):
        digest.update(json.dumps(checksums).encode())
        return f"manifest:{digest.hexdigest()[:16]}"
    digest.update((directory / "config.json").read_bytes())
    for path in _weights_there(directory):
        size = path.stat().st_size
        with path.open("rb") as file:
            (header,) = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))
            digest.update(f"{path.name} {size}".encode())
            digest.update(file.read(min(header, size, LIMIT) + 2**20))
            file.seek(max(0, size - 2**20))
            digest.update(file.read())
    return f"sample:{digest.hexdigest()[:16]}"


def weights_digest(model: Any) -> str:
    """16 hexadecimal digits over name, shape, dtype and some elements of every parameter of a torch module.

    They tell weights apart, but do not prove them equal.
    """
    digest = hashlib.sha256()
    for path, parameter in model.named_parameters():
        digest.update(f"{path} {[*parameter.shape]} {parameter.dtype}".encode())
        flat = parameter.detach().flatten()
        # spread over the whole tensor: fine-tuning changes nearly all of it
        some = flat[:: max(1, len(flat) // _SAMPLED)][:_SAMPLED]
        digest.update(some.float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def _checksums(directory: Path) -> dict[str, str]:
    """The SHA-256 of every file by our manifest; empty without a manifest, or if it is not ours."""
    files = (read_manifest(directory) or {}).get("files", {})
    sums = {file: of.get("sha256") for file, of in sorted(files.items())}
    return sums if all(isinstance(checksum, str) for checksum in sums.values()) else {}


def _weights_there(directory: Path) -> list[Path]:
    try:
        return weight_files(directory)
    except KvprobeError:  # loading it will raise this
        return []
