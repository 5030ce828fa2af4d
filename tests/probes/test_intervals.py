"""The interval of a difference agrees with closed forms, and blocks of any length make its mean."""

import pytest
import torch

from kvprobe.probes.intervals import default_block_length, paired_interval


def test_equal_losses_have_an_interval_of_exactly_zero():
    losses = torch.rand(200, dtype=torch.float64)
    interval = paired_interval(losses, losses.clone())
    assert (interval.delta, interval.low, interval.high) == (0.0, 0.0, 0.0)


def test_independent_differences_give_the_normal_interval():
    n = 2000
    difference = torch.randn(n, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    interval = paired_interval(difference + 5, torch.full((n,), 5.0).double(), block_length=1)
    half = 1.959964 * float(difference.std()) / n**0.5
    assert interval.delta == pytest.approx(float(difference.mean()), abs=1e-12)
    assert interval.low == pytest.approx(interval.delta - half, abs=0.04 * half)
    assert interval.high == pytest.approx(interval.delta + half, abs=0.04 * half)


def test_neighbours_that_move_together_widen_the_interval_as_they_should():
    # x_t = rho x_{t-1} + e: the variance of the mean is (1 + rho) / (1 - rho) times that of independent tokens
    n, rho = 4000, 0.6
    noise = torch.randn(n, generator=torch.Generator().manual_seed(4), dtype=torch.float64).tolist()
    series = [0.0]
    for e in noise[1:]:
        series.append(rho * series[-1] + e)
    losses, zero = torch.tensor(series).double(), torch.zeros(n).double()
    alone, blocks = (paired_interval(losses, zero, block_length=length) for length in (1, 60))
    ratio = (blocks.high - blocks.low) / (alone.high - alone.low)
    assert ratio == pytest.approx(((1 + rho) / (1 - rho)) ** 0.5, rel=0.15)
    default = paired_interval(losses, zero)
    assert default.block_length == default_block_length(n) == 32
    assert default.high - default.low > 1.6 * (alone.high - alone.low)


def test_blocks_that_fill_the_series_unevenly_still_make_its_mean():
    # 7 = 3 + 3 + 1: of a constant every resample is the constant, so a block lost or counted twice would show
    interval = paired_interval(torch.full((7,), 2.0), torch.zeros(7), block_length=3)
    assert (interval.low, interval.high) == pytest.approx((2.0, 2.0))
    sums = paired_interval(torch.tensor([0.0, 0.0, 6.0, 0.0]), torch.zeros(4), block_length=3, n_resamples=4000)
    # starts 0 and 1 for the block of three (6 either way), 0 to 1 for the single one (always 0): no spread
    assert (sums.low, sums.high) == pytest.approx((1.5, 1.5))


def test_the_seed_makes_the_interval():
    losses, zero = torch.rand(100), torch.zeros(100)
    assert paired_interval(losses, zero, seed=1) == paired_interval(losses, zero, seed=1)
    assert paired_interval(losses, zero, seed=1).low != paired_interval(losses, zero, seed=2).low


@pytest.mark.parametrize("block_length", [0, 11])
def test_a_block_length_outside_the_targets_is_refused(block_length):
    with pytest.raises(ValueError, match=rf"between 1 and 10 targets, got {block_length}"):
        paired_interval(torch.rand(10), torch.rand(10), block_length=block_length)


def test_intervals_need_two_targets_in_pairs():
    with pytest.raises(ValueError, match="at least 2 targets, got 1"):
        paired_interval(torch.rand(1), torch.rand(1))
    with pytest.raises(ValueError, match=r"\[10\], \[9\]"):
        paired_interval(torch.rand(10), torch.rand(9))
