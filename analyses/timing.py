"""How long does each of several ways take? Alternating runs, medians and ratios within one run.

Machines are shared and their speed drifts: a ratio of neighbours in time says more than two absolute times.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

from kvprobe.bench.busy import Watch
from kvprobe.bench.timing import Timing
from kvprobe.results.result import Row


def compare(
    ways: Mapping[str, Callable[[], object]], *, watch: Watch | None = None, repeats: int = 7, warm_up: int = 1
) -> list[Row]:
    """Time every way ``repeats`` times in turn; the first is the reference of the ratios.

    Rows: ``way, ms_median, ms_low, ms_high`` (quartiles, in milliseconds) and ``ratio``, the median over the turns
    of a way's time to the reference's time in the same turn. ``watch`` counts what else ran, for the record.
    """
    for _ in range(warm_up):
        for run in ways.values():
            run()
    times: dict[str, list[float]] = {name: [] for name in ways}
    with watch.span() if watch is not None else nullcontext():
        for _ in range(repeats):
            for name, run in ways.items():
                started = time.perf_counter()
                run()
                times[name].append(time.perf_counter() - started)
    reference = times[next(iter(ways))]
    rows = []
    for name, taken in times.items():
        ratio = statistics.median(time / base for time, base in zip(taken, reference, strict=True))
        rows.append({"way": name, **in_ms(taken), "ratio": ratio})
    return rows


def in_ms(seconds: Sequence[float]) -> Row:
    """The median and the quartiles of what was timed, ``ms_median, ms_low, ms_high``."""
    timing = Timing(tuple(seconds))
    return {"ms_median": 1e3 * timing.median, "ms_low": 1e3 * timing.low, "ms_high": 1e3 * timing.high}
