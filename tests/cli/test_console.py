"""What progress says where standard error is no terminal: where work begins, where it ends, and how it goes between."""

from itertools import pairwise

import pytest

from kvprobe.cli.console import Lines


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def said(capfd):
    """Reports steps at given seconds: the lines on standard error so far."""
    clock = Clock()
    lines = Lines(clock)

    def at(second, *step):
        clock.now = second
        lines(*step)
        return capfd.readouterr().err.splitlines()

    return at


def test_short_work_has_its_first_and_its_last_step(said):
    assert said(0.0, "evaluating", 0, 3, "passes") == ["evaluating: 0 of 3 passes"]
    assert said(0.1, "evaluating", 1, 3, "passes") == said(0.2, "evaluating", 2, 3, "passes") == []
    assert said(0.3, "evaluating", 3, 3, "passes") == ["evaluating: 3 of 3 passes"]
    # a second report of the same is no news
    assert said(20.0, "evaluating", 3, 3, "passes") == []


def test_long_work_has_lines_every_ten_seconds_and_later_every_minute(said):
    # a step a second for an hour
    times = [second for second in range(3600) if said(float(second), "training", second, 3600, "steps")]
    gaps = [after - before for before, after in pairwise(times)]
    assert (times[0], times[1]) == (0, 10)
    assert gaps == sorted(gaps)
    assert (gaps[0], gaps[-1]) == (10, 60)
    assert said(3600.0, "training", 3600, 3600, "steps") == ["training: 3,600 of 3,600 steps"]


def test_each_piece_of_work_has_its_own_lines_and_a_repeated_one_its_own_end(said):
    assert said(0.0, "fitting", 0, None) == ["fitting"]
    assert said(1.0, "waiting", 1, None, "s") == ["waiting: 1 s"]
    assert said(2.0, "recompute", 0, 2) == ["recompute: 0 of 2"]
    assert said(3.0, "recompute", 2, 2) == ["recompute: 2 of 2"]
    assert said(4.0, "recompute", 0, 2) == []
    assert said(5.0, "recompute", 2, 2) == ["recompute: 2 of 2"]
    assert said(11.5, "waiting", 11, None, "s") == ["waiting: 11 s"]
