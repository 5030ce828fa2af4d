"""A time is median and quartiles of the runs that count, on a clock that waits for its device."""

import pytest
import torch

from kvprobe.bench.timing import Timing, timed
from kvprobe.decoder.torch_engine import device_clock
from support.clocks import Ticking


def test_median_and_quartiles():
    timing = Timing((5.0, 1.0, 3.0, 2.0, 4.0))
    assert (timing.low, timing.median, timing.high) == (2.0, 3.0, 4.0)
    assert (Timing((7.0,)).low, Timing((7.0,)).high) == (7.0, 7.0)
    assert (Timing((1.0, 2.0)).low, Timing((1.0, 2.0)).high) == (1.25, 1.75)
    with pytest.raises(ValueError, match="nothing was timed"):
        Timing(())


def test_warm_up_does_not_count_and_preparing_is_outside_the_time():
    clock, calls = Ticking(100, 2, 4, 6), []

    def prepare():
        clock.now += 1000
        calls.append("prepare")

    timing = timed(lambda: calls.append("run"), clock=clock, repeats=3, warm_up=1, prepare=prepare)
    assert timing.seconds == (2, 4, 6)
    assert calls == ["prepare", "run"] * 4


@pytest.mark.parametrize(("seconds", "expected"), [(None, 10), (100, 10), (15, 3), (1, 2), (0, 2)])
def test_a_row_stops_when_its_time_is_spent_but_not_before_it_has_enough(seconds, expected):
    ticks = []
    timing = timed(lambda: None, clock=Ticking(*[5] * 11), repeats=10, seconds=seconds, at_least=2, tick=ticks.append)
    assert len(timing.seconds) == expected
    assert ticks == list(range(1, expected + 2))


def test_few_repeats_are_enough_where_few_were_asked_for():
    assert len(timed(lambda: None, clock=Ticking(), repeats=1, seconds=0).seconds) == 1
    with pytest.raises(ValueError, match="repeats must be at least 1, got 0"):
        timed(lambda: None, repeats=0)


def test_the_clock_of_a_gpu_waits_for_it(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: waited.append(str(device)))
    device_clock("cuda:0")()
    assert waited == ["cuda:0"]
    device_clock("cpu")()
    assert waited == ["cuda:0"]
