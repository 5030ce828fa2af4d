"""Where was a training run when it was killed, and is this the same run? Tensors and standing in one whole file."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from kvprobe.errors import KvprobeError
from kvprobe.results import write_whole
from kvprobe.store import disk_error

FORMAT = 1
_KEY = "kvprobe training"


def fingerprint(identity: Mapping[str, Any]) -> str:
    """Sixteen hexadecimal digits of what a run is: the same settings give the same, in any order of their names."""
    return hashlib.sha256(json.dumps(dict(identity), sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Snapshot:
    """A file from which a killed run goes on: safetensors, with what is no tensor as JSON in its header.

    ``identity`` is what the file must have been written for. Each write replaces the file whole or leaves the one
    before. Raises KvprobeError for a file of another run, naming what differs, for one that is none of ours, and
    where it cannot be written.
    """

    path: Path
    identity: Mapping[str, Any] = field(default_factory=dict)

    def read(self) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """The standing and the tensors that :meth:`write` was given last; None if there is no file."""
        if not self.path.exists():
            return None
        there, standing = self._about()
        here = json.loads(json.dumps(dict(self.identity)))
        if differing := [name for name in {**there, **here} if there.get(name) != here.get(name)]:
            what = "; ".join(f"{name} is {there.get(name)} there and {here.get(name)} here" for name in differing)
            raise KvprobeError(f"the snapshot {self.path.name} belongs to another run: {what}; remove it or move it")
        from safetensors.torch import load_file

        return standing, load_file(self.path)

    def write(self, standing: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Replace what stood there."""
        from safetensors.torch import save

        about = {"format": FORMAT, "identity": dict(self.identity), "standing": dict(standing)}
        # JSON writes a float64 so that it reads back as the same bits
        header = {_KEY: json.dumps(about, allow_nan=False)}
        data = save({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata=header)
        try:
            write_whole(self.path, data)
        except OSError as error:
            raise disk_error(error, self.path) from error

    def remove(self) -> None:
        """Forget the run, if there was one. A file that is no snapshot is refused, not removed."""
        if self.path.exists():
            self._about()
            self.path.unlink()

    def _about(self) -> tuple[dict[str, Any], dict[str, Any]]:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.path, framework="pt") as file:
                about = json.loads((file.metadata() or {})[_KEY])
            if about["format"] == FORMAT:
                return about["identity"], about["standing"]
        except (SafetensorError, OSError, ValueError, KeyError, TypeError):
            pass
        raise KvprobeError(f"{self.path.name} is no snapshot of a training run that this version reads: move it away")
