"""Are two ways of training the same for practice, different, or has nobody trained often enough to say?

Differences are paired by seed. Intervals are Student's t, two-sided.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from scipy import stats

from kvprobe.errors import Wording

Verdict = Literal["equivalent", "different", "undecided"]


class Mean(NamedTuple):
    """A mean with its interval; ``low`` and ``high`` are None for a single value, which has none."""

    mean: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Equivalence:
    """What a TOST found: the mean difference, its interval of level 1 - 2 alpha, p and the verdict."""

    difference: Mean
    p_value: float | None
    verdict: Verdict


def mean_interval(values: Sequence[float], *, level: float = 0.95) -> Mean:
    """The mean of ``values`` and its t-interval of ``level``. Raises ValueError without a value."""
    if not len(values):
        raise ValueError("a mean needs at least one value, got none")
    mean = float(np.mean(values))
    if len(values) == 1:
        return Mean(mean, None, None)
    half = float(stats.t.ppf((1 + level) / 2, len(values) - 1)) * _standard_error(values)
    return Mean(mean, mean - half, mean + half)


def tost(differences: Sequence[float], *, margin: float, alpha: float = 0.05) -> Equivalence:
    """Two one-sided t-tests (Schuirmann, 1987) of ``differences`` against ``-margin`` and ``margin``.

    *equivalent*: both reject at ``alpha``, which is to say that the interval of level ``1 - 2 alpha`` lies inside the
    margin. *different*: that interval lies wholly beyond it, so that the difference is larger than the margin.
    *undecided*: it holds a margin, or there is one value only and no interval. ``p_value`` is the larger of the two
    one-sided ones. Raises ValueError for a margin that is not above 0 and for no differences.
    """
    if not 0 < margin < math.inf:
        raise ValueError(Wording("{margin} must be above 0 nat and finite, got {0}", margin))
    difference = mean_interval(differences, level=1 - 2 * alpha)
    if difference.low is None or difference.high is None:
        return Equivalence(difference, None, "undecided")
    verdict: Verdict = "undecided"
    if -margin < difference.low and difference.high < margin:
        verdict = "equivalent"
    elif difference.low > margin or difference.high < -margin:
        verdict = "different"
    inside = margin - abs(difference.mean)
    error = _standard_error(differences)
    # differences that are all the same leave no doubt on either side
    p_value = float(stats.t.sf(inside / error, len(differences) - 1)) if error else float(inside <= 0)
    return Equivalence(difference, p_value, verdict)


def paired(values: Mapping[int, float], reference: Mapping[int, float]) -> list[float]:
    """``values - reference`` of every seed that both have, in the order of the seeds."""
    return [values[seed] - reference[seed] for seed in sorted(values.keys() & reference.keys())]


def _standard_error(values: Sequence[float]) -> float:
    return float(np.std(values, ddof=1)) / len(values) ** 0.5
