"""Where was a stream when it was killed, and is this the same stream? Running sums and a cache in one file."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from kvprobe.caches.rolling import RollingCache
from kvprobe.errors import KvprobeError, Wording
from kvprobe.files.store import try_lock
from kvprobe.training.checkpoint import CheckpointWords, Snapshot, fingerprint

STREAM = CheckpointWords(
    key="kvprobe stream",
    what="state",
    run="stream",
    hint="give another {state}",
    afresh="give another {state}, or {no_resume} to start afresh",
)


@dataclass(frozen=True)
class Segment:
    """The sums once ``at_token`` tokens of the text are read: ``n_scored`` targets, ``nll`` nat in all (float64)."""

    at_token: int
    n_scored: int
    nll: float


@dataclass(frozen=True)
class StreamProgress:
    """How far a stream is: the segments of the cells that are ``done``, those of the next, and its running sums.

    ``length`` tokens are in its cache. ``seconds`` and ``resumed`` are those of the whole stream.
    """

    done: tuple[tuple[Segment, ...], ...] = ()
    segments: tuple[Segment, ...] = ()
    nll: float = 0.0
    n_scored: int = 0
    length: int = 0
    seconds: float = 0.0
    resumed: int = 0

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "StreamProgress":
        """The progress that ``dataclasses.asdict`` gave, after JSON."""

        def these(segments: Sequence[Mapping[str, Any]]) -> tuple[Segment, ...]:
            return tuple(Segment(**segment) for segment in segments)

        done = tuple(these(cell) for cell in fields["done"])
        return cls(**{**fields, "done": done, "segments": these(fields["segments"])})

    def add(self, first: int, losses: Tensor, *, every: int, n_tokens: int) -> "StreamProgress":
        """With the ``losses`` ``[n]`` of the targets from ``first`` on, cut where a result is due."""
        nll, n_scored, segments = self.nll, self.n_scored, [*self.segments]
        while len(losses):
            end = min(n_tokens, (first // every + 1) * every)
            part, losses = losses[: end - first], losses[end - first :]
            nll, n_scored, first = nll + float(part.sum()), n_scored + len(part), first + len(part)
            if first == end:
                segments.append(Segment(end, n_scored, nll))
        return replace(self, nll=nll, n_scored=n_scored, segments=tuple(segments))


def identity(record: Mapping[str, Any], input_ids: Tensor, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint belongs to: the model's revision, the passage and every setting that could change a bit.

    ``record`` is a run record (:meth:`kvprobe.models.subject.Subject.record`), ``settings`` the fields of the config.
    """
    names = ("revision", "dtype", "device", "passage_sha256", "bos", "n_tokens")
    ids = hashlib.sha256(input_ids.cpu().numpy().tobytes()).hexdigest()
    return {**{name: record[name] for name in names}, "ids_sha256": ids, **json.loads(json.dumps(dict(settings)))}


@dataclass(frozen=True)
class StreamCheckpoint(Snapshot):
    """A file from which a killed stream continues: its progress is what stands there, its cache the tensors."""

    words: CheckpointWords = STREAM

    @classmethod
    def within(cls, directory: Path, identity: Mapping[str, Any]) -> "StreamCheckpoint":
        """The file in ``directory`` for this identity, so that the same run finds it again."""
        return cls(directory / f"{fingerprint(identity)}.safetensors", identity)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Only one run at a time; another is refused (KvprobeError). The lock is released when its process dies."""
        with try_lock(self.path) as locked:
            if not locked:
                raise KvprobeError(
                    Wording("another run of this stream is in progress: wait for it, or give another {state}")
                )
            yield

    def progress(self) -> StreamProgress | None:
        """How far the run was; None if there is no file."""
        saved = self.saved()
        try:
            return None if saved is None else StreamProgress.of(saved)
        except (KeyError, TypeError):
            raise self.foreign() from None

    def save(self, progress: StreamProgress, cache: RollingCache | None = None) -> None:
        """Replace what stood there."""
        self.write(asdict(progress), {} if cache is None else cache.state())
