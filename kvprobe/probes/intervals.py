"""Is the difference between two passes over the same tokens more than chance?"""

from dataclasses import dataclass

import numpy as np
from torch import Tensor


@dataclass(frozen=True)
class Interval:
    """A mean difference in nat per token with its 95 % interval, and what is needed to make it again."""

    delta: float
    low: float
    high: float
    block_length: int
    seed: int


def default_block_length(n_targets: int) -> int:
    """Block length of :func:`paired_interval` for ``n_targets`` tokens: ``2 * n ** (1/3)``, at most half of them.

    The rate n^(1/3) is the best for the variance of a mean (Künsch, 1989). For differences whose neighbours
    correlate by rho the best factor is ``(6 rho² / (1 - rho²)²) ** (1/3)``: two serves rho = 0.65, more than the
    differences of token losses show, and too long a block costs less than too short a one.
    """
    return max(1, min(round(2 * n_targets ** (1 / 3)), n_targets // 2))


def paired_interval(
    losses: Tensor,
    reference: Tensor,
    *,
    block_length: int | None = None,
    n_resamples: int = 10_000,
    seed: int = 0,
) -> Interval:
    """Mean of ``losses - reference`` and its 95 % interval, from a paired moving-block bootstrap over tokens.

    Both ``[n_targets]``, of the same targets in order. Neighbouring tokens are not independent, so whole blocks of
    ``block_length`` neighbouring differences are drawn (Künsch, 1989; the last one cut to make n) and the interval
    is the 2.5 and 97.5 percentiles of their means. These are centred on ``delta``: a moving block draws the first
    and last tokens less often, which would shift it. Raises ValueError for shapes that differ, fewer than two
    targets, or a block length outside 1 to n.
    """
    if losses.shape != reference.shape or losses.ndim != 1:
        raise ValueError(f"losses and reference must both be [n_targets], got {[*losses.shape]}, {[*reference.shape]}")
    difference = (losses.double() - reference.double()).cpu().numpy()
    n = len(difference)
    if n < 2:
        raise ValueError(f"an interval needs at least 2 targets, got {n}")
    block = default_block_length(n) if block_length is None else block_length
    if not 1 <= block <= n:
        raise ValueError(f"block length must be between 1 and {n} targets, got {block}")
    full, rest = divmod(n, block)
    n_starts = n - block + 1
    until = np.concatenate([[0.0], np.cumsum(difference)])
    block_sums = until[block:] - until[:n_starts]
    rest_sums = until[rest : rest + n_starts] - until[:n_starts]
    rng = np.random.default_rng(seed)
    sums = rest_sums[rng.integers(n_starts, size=n_resamples)]
    sums += block_sums[rng.integers(n_starts, size=(n_resamples, full))].sum(axis=1)
    expected = full * block_sums.mean() + rest_sums.mean()
    low, high = np.quantile((sums - expected) / n, [0.025, 0.975])
    delta = float(difference.mean())
    return Interval(delta=delta, low=delta + float(low), high=delta + float(high), block_length=block, seed=seed)
