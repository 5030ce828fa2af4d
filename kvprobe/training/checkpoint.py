"""How far was a run when it was killed, and is this the same run? Tensors and progress in one atomic file."""

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from kvprobe.errors import KvprobeError, Wording
from kvprobe.files.store import disk_error

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class CheckpointWords:
    """What a file is a checkpoint of: ``key`` marks it; the others word an error (``what``: a snapshot of a run)."""

    key: str
    what: str
    run: str
    hint: str
    afresh: str


TRAINING = CheckpointWords(
    key="kvprobe training",
    what="snapshot",
    run="training run",
    hint="remove it to start the training afresh",
    afresh="remove it or move it",
)


def fingerprint(identity: Mapping[str, Any]) -> str:
    """Sixteen hexadecimal digits that identify a run by its settings, in whatever order they are given."""
    return hashlib.sha256(json.dumps(dict(identity), sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Snapshot:
    """A file from which a killed run resumes: safetensors, with everything but tensors as JSON in its header.

    The file must have been written for the same ``identity``. Each write replaces the file atomically. A snapshot has
    one writer at a time: use a lock. Raises KvprobeError for a file of another run, naming what differs, for a file
    that is not of this kind, and if it cannot be written.
    """

    path: Path
    identity: Mapping[str, Any] = field(default_factory=dict)
    words: CheckpointWords = TRAINING

    def read(self) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """What was saved, and the tensors, as last given to :meth:`write`; None if there is no file."""
        saved = self.saved()
        return None if saved is None else (saved, self.tensors())

    def saved(self) -> dict[str, Any] | None:
        """What was saved, without reading the tensors."""
        if not self.path.exists():
            return None
        there, saved = self._about()
        here = json.loads(json.dumps(dict(self.identity)))
        if differing := [name for name in {**there, **here} if there.get(name) != here.get(name)]:
            differs = "; ".join(f"{name} is {there.get(name)} there and {here.get(name)} here" for name in differing)
            said = "the {0} {1} belongs to another {2}: {3}; " + self.words.afresh
            raise KvprobeError(Wording(said, self.words.what, self.path.name, self.words.run, differs))
        return saved

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of an existing file."""
        from safetensors.torch import load_file

        return load_file(self.path)

    def write(self, saved: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Replace the file."""
        from safetensors.torch import save

        # `standing` is the file's own word, and finished models are kept in such files
        about = {"format": FORMAT, "identity": dict(self.identity), "standing": dict(saved)}
        # a float64 written as JSON reads back as the same bits
        header = {self.words.key: json.dumps(about, allow_nan=False)}
        data = save({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata=header)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._partial.write_bytes(data)
            self._partial.replace(self.path)
        except OSError as error:
            self.clear_partial()
            raise disk_error(error, self.path) from error

    def remove(self) -> None:
        """Remove the file, if there is one. A file that is not of this kind is refused, not removed."""
        if self.path.exists():
            self._about()
            self.path.unlink()
        self.clear_partial()

    def clear_partial(self) -> None:
        """Remove what a kill during a write left."""
        with suppress(OSError):
            self._partial.unlink()

    def foreign(self) -> KvprobeError:
        """The error for a file that is not of this kind."""
        words = self.words
        said = "{0} is not a {1} of a {2} that this version reads: " + words.hint
        return KvprobeError(Wording(said, self.path, words.what, words.run))

    @property
    def _partial(self) -> Path:
        # one name for all writes, so that kills leave at most one file
        return self.path.with_name(f".{self.path.name}.partial")

    def _about(self) -> tuple[dict[str, Any], dict[str, Any]]:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.path, framework="pt") as file:
                about = json.loads((file.metadata() or {})[self.words.key])
            if about["format"] == FORMAT:
                return about["identity"], about["standing"]
        except (SafetensorError, OSError, ValueError, KeyError, TypeError, RecursionError):
            pass
        raise self.foreign()
