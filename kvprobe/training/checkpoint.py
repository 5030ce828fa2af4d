"""Where was a run when it was killed, and is this the same run? Tensors and standing in one whole file."""

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from kvprobe.errors import KvprobeError
from kvprobe.files.store import disk_error

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What a file is of: ``key`` marks it, the others are the words of a refusal (``what``: a snapshot of a run)."""

    key: str
    what: str
    run: str
    hint: str
    afresh: str


TRAINING = Kind(
    key="kvprobe training",
    what="snapshot",
    run="training run",
    hint="remove it, and the training starts afresh",
    afresh="remove it or move it",
)


def fingerprint(identity: Mapping[str, Any]) -> str:
    """Sixteen hexadecimal digits of what a run is: the same settings give the same, in any order of their names."""
    return hashlib.sha256(json.dumps(dict(identity), sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Snapshot:
    """A file from which a killed run goes on: safetensors, with what is no tensor as JSON in its header.

    ``identity`` is what the file must have been written for. Each write replaces the file whole or leaves the one
    before. A snapshot has one writer at a time: see to that with a lock. Raises KvprobeError for a file of another run,
    naming what differs, for one that is none of this kind, and where it cannot be written.
    """

    path: Path
    identity: Mapping[str, Any] = field(default_factory=dict)
    kind: Kind = TRAINING

    def read(self) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """The standing and the tensors that :meth:`write` was given last; None if there is no file."""
        standing = self.standing()
        return None if standing is None else (standing, self.tensors())

    def standing(self) -> dict[str, Any] | None:
        """The standing alone, without reading the tensors."""
        if not self.path.exists():
            return None
        there, standing = self._about()
        here = json.loads(json.dumps(dict(self.identity)))
        if differing := [name for name in {**there, **here} if there.get(name) != here.get(name)]:
            differs = "; ".join(f"{name} is {there.get(name)} there and {here.get(name)} here" for name in differing)
            raise KvprobeError(
                f"the {self.kind.what} {self.path.name} belongs to another {self.kind.run}: {differs}; "
                f"{self.kind.afresh}"
            )
        return standing

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of a file that is there."""
        from safetensors.torch import load_file

        return load_file(self.path)

    def write(self, standing: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Replace what stood there."""
        from safetensors.torch import save

        about = {"format": FORMAT, "identity": dict(self.identity), "standing": dict(standing)}
        # JSON writes a float64 so that it reads back as the same bits
        header = {self.kind.key: json.dumps(about, allow_nan=False)}
        data = save({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata=header)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._partial.write_bytes(data)
            self._partial.replace(self.path)
        except OSError as error:
            self.clear_partial()
            raise disk_error(error, self.path) from error

    def remove(self) -> None:
        """Forget the run, if there was one. A file that is none of this kind is refused, not removed."""
        if self.path.exists():
            self._about()
            self.path.unlink()
        self.clear_partial()

    def clear_partial(self) -> None:
        """Remove what a kill in the middle of a write left."""
        with suppress(OSError):
            self._partial.unlink()

    def foreign(self) -> KvprobeError:
        """The refusal of a file that is none of this kind."""
        kind = self.kind
        return KvprobeError(f"{self.path} is no {kind.what} of a {kind.run} that this version reads: {kind.hint}")

    @property
    def _partial(self) -> Path:
        # one name for all writes, so that kills leave no more than one file
        return self.path.with_name(f".{self.path.name}.partial")

    def _about(self) -> tuple[dict[str, Any], dict[str, Any]]:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.path, framework="pt") as file:
                about = json.loads((file.metadata() or {})[self.kind.key])
            if about["format"] == FORMAT:
                return about["identity"], about["standing"]
        except (SafetensorError, OSError, ValueError, KeyError, TypeError, RecursionError):
            pass
        raise self.foreign()
