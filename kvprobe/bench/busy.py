"""Did anything else use the processors while we measured? By the kernel's accounting, over the timed spans only.

The work of others is what all processors did, less what this process did: other programs, our own child processes
(nothing timed runs in one) and, on a virtual machine, what its host took away. Load averages, pressure and context
switches do not measure it: they also rise if we have more threads than processors.
"""

import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

from kvprobe.results.result import Row

STAT = Path("/proc/stat")

# Others' cores on average. An idle machine's daemons use some hundredths; two busy loops use at least two thirds, even
# if they share one or two processors with four threads of ours.
OTHERS_CORES = 0.25
# Others' cores in the worst second: enough for a daemon that wakes up, too few for a program that spoils one row.
PEAK_CORES = 0.5
# Kernels count in ticks of up to 10 ms: over a second, two processors' ticks are right within a tenth of a core.
ENOUGH_S = 1.0
# The interquartile range, over the median, of scattered runs, and the runs that make quartiles meaningful.
SPREAD = 1.0
SPREAD_RUNS = 5
# Changing clocks and waking threads scatter and reorder short runs even on an idle machine (seen: 2.3 to 7.8 ms; 2.5 ms
# at 64 tokens and 4.2 at 16), so nothing is concluded from runs below this.
LEAST_MS = 10.0
# How many times as fast a longer context may be, quartile to quartile: an idle machine drifts by several hundredths.
FASTER = 1.25


@dataclass(frozen=True)
class CpuTimes:
    """Seconds: of the clock, of all processors' work, of what a host took from them, and of this process's work."""

    wall: float = 0.0
    used: float = 0.0
    stolen: float = 0.0
    own: float = 0.0

    def __add__(self, other: "CpuTimes") -> "CpuTimes":
        """Both spans together."""
        return CpuTimes(
            self.wall + other.wall, self.used + other.used, self.stolen + other.stolen, self.own + other.own
        )

    def __sub__(self, before: "CpuTimes") -> "CpuTimes":
        """The span from ``before`` to here."""
        return CpuTimes(
            self.wall - before.wall, self.used - before.used, self.stolen - before.stolen, self.own - before.own
        )

    @property
    def others(self) -> float:
        """Cores that others used in this span. Stolen time may be counted as our own, so it is always added."""
        return (max(0.0, self.used - self.own) + self.stolen) / self.wall


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def read() -> CpuTimes:
    """The counters of the processors that we may use. Raises OSError, ValueError or ImportError without them."""
    wall, own = time.monotonic(), time.process_time()
    if sys.platform == "linux":
        used, stolen = _of_linux()
        return CpuTimes(wall, used, stolen, own)
    import psutil

    times = psutil.cpu_times()
    return CpuTimes(wall, times.user + times.system + getattr(times, "nice", 0.0), 0.0, own)


def _of_linux() -> tuple[float, float]:
    """Seconds used and stolen, from /proc/stat: psutil's numbering skips processors that are off."""
    ours = {f"cpu{i}" for i in os.sched_getaffinity(0)}
    counters = []
    for line in STAT.read_text(encoding="ascii").splitlines():
        name, *counts = line.split()
        if name in ours:
            user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, counts[:8])
            counters.append((user + nice + system + irq + softirq, steal))
    if not counters:
        raise ValueError("/proc/stat names none of our processors")
    second = os.sysconf("SC_CLK_TCK")
    return sum(used for used, _ in counters) / second, sum(steal for _, steal in counters) / second


@dataclass
class Watch:
    """Add up what others did in timed spans: ``with watch.span(): timed(run)``, as often as needed."""

    reader: Callable[[], CpuTimes] | None = None
    spans: list[CpuTimes] = field(default_factory=list)
    failed: str | None = None

    @contextmanager
    def span(self) -> Iterator[None]:
        """Count what others do in this block."""
        before = self._now()
        try:
            yield
        finally:
            after = self._now()
            if before is not None and after is not None:
                self.spans.append(after - before)

    def record(self, rows: Sequence[Row] = (), *, device: str = "cpu") -> dict[str, Any]:
        """``busy`` and ``load`` of a run record.

        ``busy`` lists the reasons not to quote what was timed: what others used, and what in ``rows`` (those of
        ``kvprobe latency``) an idle machine would not give. It is empty if there are none, and None if that is not
        known. ``load`` has the counters, in cores, or the reason as ``unknown``.
        """
        total = sum(self.spans, CpuTimes())
        unknown = self._unknown(total)
        load: dict[str, Any] = {}
        reasons = []
        if unknown is None:
            load = {
                "seconds": round(total.wall, 3),
                "cores": cores(),
                "own_cores": round(total.own / total.wall, 3),
                "others_cores": round(total.others, 3),
                "peak_cores": round(self._peak(), 3),
                "stolen_cores": round(total.stolen / total.wall, 3),
            }
            reasons += _used(load)
            if not device.startswith("cpu"):
                unknown = f"what else ran on {device} is not counted"
        if unknown is not None:
            load["unknown"] = unknown
        reasons += [*_scattered(rows), *_upside_down(rows)]
        return {"busy": reasons or (None if unknown else []), "load": load}

    def _now(self) -> CpuTimes | None:
        try:
            return (self.reader or read)()
        except (OSError, ValueError, ImportError) as error:
            self.failed = f"the system's counters of processor time cannot be read ({type(error).__name__})"
            return None

    def _unknown(self, total: CpuTimes) -> str | None:
        if self.failed is not None:
            return self.failed
        if total.wall < ENOUGH_S:
            return f"{total.wall:.1f} s were timed, and the system counts too coarsely for less than {ENOUGH_S:g}"
        # a sandbox may have counters that stand still
        if total.own - total.used - total.stolen > OTHERS_CORES * total.wall:
            return "the system's counters of processor time leave out our own"
        return None

    def _peak(self) -> float:
        """The most that others used, in cores, over consecutive spans that are long enough together."""
        peak, block = 0.0, CpuTimes()
        for span in self.spans:
            block += span
            if block.wall >= ENOUGH_S:
                peak, block = max(peak, block.others), CpuTimes()
        return peak


def _used(load: Mapping[str, Any]) -> list[str]:
    of = f"of {load['cores']:,} {'core' if load['cores'] == 1 else 'cores'}"
    if load["others_cores"] > OTHERS_CORES:
        return [f"other work used {load['others_cores']:.2f} {of} while it was timed"]
    if load["peak_cores"] > PEAK_CORES:
        return [f"other work used {load['peak_cores']:.2f} {of} for a part of the time"]
    return []


def _scattered(rows: Sequence[Row]) -> list[str]:
    return [
        f"half of the runs of {_named(row)} lie outside {row['ms_low']:,.1f} to {row['ms_high']:,.1f} ms"
        for row in rows
        if row["n_runs"] >= SPREAD_RUNS
        and row["ms_median"] >= LEAST_MS
        and row["ms_high"] - row["ms_low"] > SPREAD * row["ms_median"]
    ]


def _upside_down(rows: Sequence[Row]) -> list[str]:
    """For each phase, batch and step, the two contexts that contradict each other most."""
    alike: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        alike[row["phase"], row["batch"], row["step"]].append(row)
    reasons = []
    for group in alike.values():
        pairs = combinations(sorted(group, key=lambda row: row["context"]), 2)
        slow = ((short, long) for short, long in pairs if short["ms_median"] >= LEAST_MS)
        odd = [(short, long) for short, long in slow if short["ms_low"] > FASTER * long["ms_high"]]
        if odd:
            short, long = max(odd, key=lambda pair: pair[0]["ms_low"] / pair[1]["ms_high"])
            slower = f"{short['ms_median']:,.1f} ms at {short['context']:,}"
            reasons.append(f"{_named(long)} took {long['ms_median']:,.1f} ms, and {slower}")
    return reasons


def _named(row: Row) -> str:
    return f"{row['phase']} at {row['context']:,} tokens" + (f", batch {row['batch']:,}" if row["batch"] > 1 else "")
