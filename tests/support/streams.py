"""A stream of a few windows, and where it is kept."""

from dataclasses import asdict

from kvprobe.experiments.stream_checkpoint import State, identity
from kvprobe.experiments.streaming import Plan

SOME = Plan(windows=(8, 5), sinks=(0, 3), positions="cache", every=50, chunk=7)


def state_of(path, plan, ids, **other):
    record = {"revision": "r", "dtype": "float32", "device": "cpu", "passage_sha256": "p", "bos": "auto", "n_tokens": 9}
    return State(path, identity(record | other, ids, asdict(plan)))
