import pytest
from scipy import stats

from kvprobe.probes.equivalence import mean_interval, paired, tost

SAMPLES = {
    "near zero": [0.01, -0.02, 0.015, 0.0],
    "beyond": [0.2, 0.24, 0.19],
    "far below": [-0.4, -0.35, -0.38, -0.41],
    "wide": [0.1, -0.1, 0.05],
    "at the margin": [0.04, 0.06, 0.05],
}


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("level", [0.9, 0.95])
def test_the_interval_is_scipys(name, level):
    expected = stats.ttest_1samp(SAMPLES[name], 0).confidence_interval(level)
    found = mean_interval(SAMPLES[name], level=level)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), rel=1e-9)


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("margin", [0.05, 0.3])
def test_tost_is_scipys_two_one_sided_tests(name, margin):
    sample = SAMPLES[name]
    above = stats.ttest_1samp(sample, -margin, alternative="greater").pvalue
    below = stats.ttest_1samp(sample, margin, alternative="less").pvalue
    found = tost(sample, margin=margin)
    assert found.p_value == pytest.approx(max(above, below), rel=1e-9)
    assert (found.verdict == "equivalent") == (max(above, below) < 0.05)
    beyond = [stats.ttest_1samp(sample, margin, alternative="greater").pvalue]
    beyond += [stats.ttest_1samp(sample, -margin, alternative="less").pvalue]
    assert (found.verdict == "different") == (min(beyond) < 0.05)
    interval = stats.ttest_1samp(sample, 0).confidence_interval(0.9)
    assert found.difference[1:] == pytest.approx((interval.low, interval.high), rel=1e-9)


def test_pairing_is_scipys_paired_test():
    ours, theirs = {0: 1.52, 1: 1.55, 2: 1.50}, {2: 1.49, 0: 1.53, 1: 1.51}
    found = tost(paired(ours, theirs), margin=0.05)
    expected = stats.ttest_rel([1.52, 1.55, 1.50], [1.53, 1.51, 1.49]).confidence_interval(0.9)
    assert found.difference[1:] == pytest.approx((expected.low, expected.high))


def test_the_three_verdicts():
    # t(0.95, 1) = 6.3138, standard error 0.001: an interval of 0.0063 to either side
    for middle, verdict in ((0.0, "equivalent"), (0.04, "equivalent"), (0.045, "undecided"), (0.055, "undecided")):
        for sign in (1, -1):
            assert tost([sign * middle - 0.001, sign * middle + 0.001], margin=0.05).verdict == verdict
    for sign in (1, -1):
        assert tost([sign * 0.057 - 0.001, sign * 0.057 + 0.001], margin=0.05).verdict == "different"


def test_one_seed_has_no_interval_and_decides_nothing():
    assert mean_interval([1.5]) == (1.5, None, None)
    found = tost([0.0], margin=0.05)
    assert (found.difference, found.p_value, found.verdict) == ((0.0, None, None), None, "undecided")


def test_differences_that_are_all_the_same():
    assert tost([0.0, 0.0], margin=0.05).verdict == "equivalent"
    assert tost([0.0, 0.0], margin=0.05).p_value == 0
    assert tost([0.25, 0.25], margin=0.05).verdict == "different"
    assert tost([0.25, 0.25], margin=0.05).p_value == 1


def test_only_seeds_that_both_have_are_paired():
    assert paired({0: 1.0, 2: 4.0, 5: 9.0}, {2: 1.5, 0: 0.5, 7: 1.0}) == [0.5, 2.5]


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match="margin must be above 0 nat and finite, got inf"):
        tost([0.1, 0.2], margin=float("inf"))
    with pytest.raises(ValueError, match="margin must be above 0 nat and finite, got 0"):
        tost([0.1, 0.2], margin=0)
    with pytest.raises(ValueError, match="at least one value"):
        mean_interval([])
