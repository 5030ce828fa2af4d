"""A stream of a few windows, and where it is kept."""

from dataclasses import asdict

from kvprobe.experiments.stream_checkpoint import StreamCheckpoint, identity
from kvprobe.experiments.streaming import StreamConfig

SOME = StreamConfig(windows=(8, 5), sinks=(0, 3), positions="cache", every=50, chunk=7)


def state_of(path, config, ids, **other):
    record = {"revision": "r", "dtype": "float32", "device": "cpu", "passage_sha256": "p", "bos": "auto", "n_tokens": 9}
    return StreamCheckpoint(path, identity(record | other, ids, asdict(config)))
