"""How long does it take? Median and quartiles of repeated runs."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvprobe.decoder.torch_engine import Clock


@dataclass(frozen=True)
class Timing:
    """The seconds of each run, in order."""

    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.seconds:
            raise ValueError("nothing was timed")

    @property
    def median(self) -> float:
        """Seconds."""
        return statistics.median(self.seconds)

    @property
    def low(self) -> float:
        """The lower quartile, seconds; a single run's own time."""
        return self._quartile(0)

    @property
    def high(self) -> float:
        """The upper quartile, seconds."""
        return self._quartile(2)

    def _quartile(self, index: int) -> float:
        if len(self.seconds) == 1:
            return self.seconds[0]
        # inclusive: never outside the measured range
        return statistics.quantiles(self.seconds, n=4, method="inclusive")[index]


def timed(
    run: Callable[[], object],
    *,
    clock: Clock = time.perf_counter,
    repeats: int = 20,
    seconds: float | None = None,
    at_least: int = 3,
    warm_up: int = 1,
    prepare: Callable[[], object] = lambda: None,
    tick: Callable[[int], object] = lambda done: None,
) -> Timing:
    """Time ``run`` ``repeats`` times, after ``warm_up`` runs that do not count.

    It stops early after ``seconds`` of counted time, but not before ``at_least`` runs. ``prepare`` is called before
    every run, outside its time; ``tick`` gets the number of runs done, warm-up included.
    """
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}")
    taken: list[float] = []
    for done in range(warm_up + repeats):
        enough = len(taken) >= min(at_least, repeats)
        if seconds is not None and enough and sum(taken) >= seconds:
            break
        prepare()
        started = clock()
        run()
        ended = clock()
        if done >= warm_up:
            taken.append(ended - started)
        tick(done + 1)
    return Timing(tuple(taken))
