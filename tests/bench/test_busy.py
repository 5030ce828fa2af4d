"""What else ran is read off the kernel's counters, over the timed spans alone, and unknown is never quiet."""

import itertools

import pytest

from kvprobe.bench import busy
from kvprobe.bench.busy import CpuTimes, Watch
from kvprobe.results.phrases import BUSY, busy_lines, with_busy


class Kernel:
    """Counters that stand still but for `run`: so many seconds in which so many cores worked."""

    def __init__(self):
        self.now = CpuTimes(1e6, 5e5, 100.0, 30.0)

    def run(self, seconds, *, own=1.0, others=0.0, stolen=0.0):
        self.now += CpuTimes(seconds, seconds * (own + others), seconds * stolen, seconds * own)

    def watch(self, *spans):
        watch = Watch(lambda: self.now)
        for span in spans:
            with watch.span():
                self.run(**span)
        return watch


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(busy, "cores", lambda: 2)
    return Kernel()


def timed(phase, context, low, median, high, *, batch=1, step="numba", n_runs=20):
    times = {"ms_low": low, "ms_median": median, "ms_high": high, "n_runs": n_runs}
    return {"phase": phase, "context": context, "batch": batch, "step": step, **times}


@pytest.mark.parametrize("threads", [0.0, 0.5, 1.0, 2.0, 64.0])
def test_our_own_work_is_quiet_and_a_core_of_others_is_not_whatever_the_threads(kernel, threads):
    quiet = kernel.watch({"seconds": 5, "own": threads}).record()
    assert quiet["busy"] == []
    assert quiet["load"] == {
        **{"seconds": 5, "cores": 2, "own_cores": threads},
        **{"others_cores": 0, "peak_cores": 0, "stolen_cores": 0},
    }
    loaded = kernel.watch({"seconds": 5, "own": threads, "others": 1.0}).record()
    assert loaded["busy"] == ["other work used 1.00 of 2 cores while it was timed"]


def test_spans_add_up_and_what_is_between_them_does_not(kernel):
    # 0.25 and then 0.375 core in as many seconds: 0.3125, and neither span is long enough for itself
    watch = kernel.watch({"seconds": 0.5, "others": 0.25})
    kernel.run(1000, others=2.0)
    with watch.span():
        kernel.run(0.5, others=0.375)
    found = watch.record()
    assert (found["load"]["seconds"], found["load"]["others_cores"]) == (1.0, 0.312)
    assert found["busy"] == ["other work used 0.31 of 2 cores while it was timed"]


@pytest.mark.parametrize(("others", "is_busy"), [(0.0, False), (0.1, False), (0.24, False), (0.26, True), (2.0, True)])
def test_daemons_are_no_load(kernel, others, is_busy):
    assert bool(kernel.watch({"seconds": 2, "others": others}).record()["busy"]) is is_busy


def test_what_a_host_takes_is_others_even_where_it_counts_as_ours(kernel):
    assert kernel.watch({"seconds": 2, "stolen": 1.0}).record()["busy"] != []
    kernel.now = CpuTimes()
    watch = Watch(lambda: kernel.now)
    with watch.span():
        # a kernel that knows of no host charges us for two seconds: one that we had and one that was stolen
        kernel.now = CpuTimes(2.0, 1.0, 1.0, 2.0)
    assert watch.record()["load"]["others_cores"] == 0.5


def test_what_spoils_one_row_of_many_is_seen(kernel):
    quiet, hit = {"seconds": 2}, {"seconds": 0.5, "others": 0.75}
    # neighbours that are too short for themselves are judged together: 0.05 on average, 0.75 in their second
    found = kernel.watch(*[quiet] * 7, hit, hit).record()
    assert found["busy"] == ["other work used 0.75 of 2 cores for a part of the time"]
    assert found["load"]["others_cores"] == 0.05
    assert kernel.watch(*[quiet] * 7, hit).record()["busy"] == []


def test_a_block_that_is_interrupted_counts(kernel):
    watch = Watch(lambda: kernel.now)

    def interrupted():
        with watch.span():
            kernel.run(2, others=1.0)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert watch.record()["busy"] != []


def broken():
    raise PermissionError("/proc/stat")


UNKNOWN = {
    "no counters": (broken, "the system's counters of processor time cannot be read (PermissionError)"),
    "too short": (
        (CpuTimes(0.01 * i, 0.02 * i, 0.0, 0.01 * i) for i in itertools.count()).__next__,
        "0.0 s were timed, and the system counts too coarsely for less than 1",
    ),
    "counters that stand still": (
        (CpuTimes(2.0 * i, 0.0, 0.0, 2.0 * i) for i in itertools.count()).__next__,
        "the system's counters of processor time leave out our own",
    ),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_is_never_quiet(name):
    reader, why = UNKNOWN[name]
    watch = Watch(reader)
    with watch.span():
        pass
    found = watch.record()
    assert found == {"busy": None, "load": {"unknown": why}}
    assert busy_lines(found) == [f"whether the machine was busy is not known: {why}"]
    assert with_busy("as it is", found) == "as it is"
    # what the rows show is known all the same
    rows = [timed("cached", 8, 10, 10, 10), timed("cached", 16, 5, 5, 5)]
    assert watch.record(rows)["busy"] == ["cached at 16 tokens took 5.0 ms, and 10.0 ms at 8"]


def test_nothing_timed_is_unknown():
    assert Watch().record()["busy"] is None


def test_of_a_gpu_the_processors_are_half_of_it(kernel):
    quiet = kernel.watch({"seconds": 2}).record(device="cuda:0")
    assert quiet["busy"] is None
    assert quiet["load"]["unknown"] == "what else ran on cuda:0 is not counted"
    assert quiet["load"]["others_cores"] == 0
    loaded = kernel.watch({"seconds": 2, "others": 1.0}).record(device="cuda:0")
    assert loaded["busy"] == ["other work used 1.00 of 2 cores while it was timed"]


def test_a_longer_context_is_never_much_faster(kernel):
    def reasons(*rows):
        return kernel.watch({"seconds": 2}).record(rows)["busy"]

    short = timed("cached", 128, 10.0, 12.0, 14.0)
    # a quarter faster, quartile against quartile, is 8 ms
    assert reasons(short, timed("cached", 512, 6, 7, 7.9)) == ["cached at 512 tokens took 7.0 ms, and 12.0 ms at 128"]
    assert reasons(timed("cached", 512, 6, 7, 7.9), short) != []
    for other in (
        timed("cached", 512, 6, 7, 8.0),
        timed("cached", 512, 20, 21, 22),
        timed("cached", 64, 6, 7, 7.9),
        timed("naive", 512, 6, 7, 7.9),
        timed("cached", 512, 6, 7, 7.9, batch=4),
        timed("cached", 512, 6, 7, 7.9, step="torch"),
    ):
        assert reasons(short, other) == []
    # of what takes less than 10 ms nothing is concluded
    assert reasons(timed("cached", 8, 9.0, 9.9, 11), timed("cached", 16, 1, 1, 1)) == []
    # the worst pair of three stands for all, with its batch
    three = [timed("cached", n, ms, ms, ms, batch=2) for n, ms in ((8, 20), (16, 12), (32, 9))]
    assert reasons(*three) == ["cached at 32 tokens, batch 2 took 9.0 ms, and 20.0 ms at 8"]


def test_runs_that_scatter_as_wide_as_they_take(kernel):
    def reasons(*rows):
        return kernel.watch({"seconds": 2}).record(rows)["busy"]

    wide = timed("naive", 8, 9.0, 12.0, 22.5)
    assert reasons(wide) == ["half of the runs of naive at 8 tokens lie outside 9.0 to 22.5 ms"]
    for fine in ({"ms_high": 21.0}, {"n_runs": 4}, {"ms_low": 8.0, "ms_median": 9.9, "ms_high": 22.0}):
        assert reasons(wide | fine) == []


def test_words_and_reasons():
    run = {"busy": ["this", "that"], "load": {}}
    assert with_busy("It is fast", run) == "It is fast; busy machine, not to be quoted"
    assert with_busy("", run) == BUSY
    assert busy_lines(run) == ["busy machine, not to be quoted: this; that"]
    # quiet, and a record from before it was counted
    for other in ({"busy": [], "load": {"others_cores": 0.0}}, {}):
        assert (with_busy("It is fast", other), with_busy("", other), busy_lines(other)) == ("It is fast", "", [])


def test_counters_of_linux_are_those_of_our_processors(monkeypatch, tmp_path):
    """By hand: user, nice, system, irq and softirq are work; idle and waiting are not; the guest is in user already."""
    stat = tmp_path / "stat"
    stat.write_text(
        "cpu  9 9 9 9 9 9 9 9 9 9\ncpu1 100 20 30 7000 900 4 5 60 50 0\ncpu3 1000 0 0 1 1 0 0 2 0 0\n"
        "cpu11 77 0 0 0 0 0 0 0 0 0\nintr 5 1 1\nctxt 12\n"
    )
    monkeypatch.setattr(busy, "STAT", stat)
    monkeypatch.setattr(busy.os, "sched_getaffinity", lambda _: {1, 3}, raising=False)
    monkeypatch.setattr(busy.os, "sysconf", lambda name: {"SC_CLK_TCK": 100}[name])
    assert busy._of_linux() == (11.59, 0.62)
    monkeypatch.setattr(busy.os, "sched_getaffinity", lambda _: {7}, raising=False)
    with pytest.raises(ValueError, match="none of our processors"):
        busy._of_linux()
    stat.write_text("cpu7 1 2 3\n")
    with pytest.raises(ValueError, match="not enough values"):
        busy._of_linux()


def test_this_machine_has_counters_and_they_never_fall():
    before = busy.read()
    sum(range(10**6))
    span = busy.read() - before
    assert span.wall > 0
    assert span.own > 0
    assert span.used >= 0
    assert span.stolen >= 0
