"""Every analysis runs, on a tiny model, and gives rows with a record."""

import pytest

from analyses import sinks_cost, timing, window, window_cost
from conftest import write_random
from kvprobe.results import Result


@pytest.fixture(scope="module")
def llama(gpt2_tokenizer_files, tmp_path_factory):
    return str(write_random(tmp_path_factory.mktemp("analyses") / "llama", "llama", gpt2_tokenizer_files))


def test_the_window_study_has_every_cell_of_its_grid(llama):
    result = window.run(llama, text="bundled", tokens=48, score_from=20, window=8, sinks=(0, 2))
    assert Result.from_json(result.to_json()) == result
    assert result.rows[0]["window"] is None
    cells = [(row["window"], row["n_sink"], row["sink_choice"]) for row in result.rows[1:]]
    assert cells == [(8, 0, None), (8, 2, "first"), (8, 2, "random"), (8, 2, "heaviest")]


def test_the_cost_benchmarks_time_every_way_against_the_plain_pass(llama, monkeypatch):
    monkeypatch.setattr(sinks_cost, "_peak_in_a_fresh_process", lambda *_: 0.5)
    result = sinks_cost.run(llama, [80], text="bundled", repeats=2)
    assert [(row["way"], row["peak_gib"]) for row in result.rows] == [(way, 0.5) for way in sinks_cost.WAYS]
    assert result.rows[0]["ratio"] == 1
    monkeypatch.setattr(window_cost, "WINDOWS", (8, 16))
    monkeypatch.setattr(window_cost, "RECOMPUTE_WINDOW", 8)
    result = window_cost.run(llama, text="bundled", tokens=40, repeats=2)
    assert result.rows[0]["way"] == "plain"
    assert len(result.rows) == 1 + 2 * 3 + 1


def test_compare_gives_medians_quartiles_and_ratios_of_neighbours(monkeypatch):
    clock = iter([0, 1, 1, 3, 10, 12, 12, 18, 20, 23, 23, 32])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    plain, slow = timing.compare({"plain": lambda: None, "slow": lambda: None}, repeats=3, warm_up=1)
    assert (plain["ms_median"], slow["ms_median"]) == (2000, 6000)
    # 2/1, 6/2 and 9/3: the slow way is three times the plain one in most turns
    assert (plain["ratio"], slow["ratio"]) == (1, 3)
    assert plain["ms_low"] <= plain["ms_median"] <= plain["ms_high"]
