"""Every analysis runs, on a tiny model, and gives rows with a record; a file that has no test here is found missing."""

import ast
import json
import subprocess
import sys
from contextlib import redirect_stdout
from importlib import import_module
from io import StringIO
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from analyses import gqa_module, memory, relief_map, roofline, same_logits, sinks_cost, timing, window, window_cost
from analyses.common import keep, show
from kvprobe.bench import machine
from kvprobe.bench.busy import Watch
from kvprobe.errors import KvprobeError
from kvprobe.results.result import Result
from support.models import write_random

FILES = {path.stem for path in Path(timing.__file__).parent.glob("*.py")} - {"__init__"}
# the options with which the others take seconds, on a model of 256 positions
SHORT = ["--text", "bundled", "--tokens", "64"]
QUICK = {
    "sinks": [*SHORT, "--queries-from", "8"],
    "window": [*SHORT, "--score-from", "20", "--window", "8"],
    "same_logits": [],
    "latency": ["--context", "8", "--context", "20", "--repeats", "2", "--seconds", "0"],
    "end_to_end": ["--prompt-tokens", "20", "--new-tokens", "3", "--naive-samples", "2"],
    "memory": ["--context", "8", "--context", "40"],
    "roofline": ["--context", "20", "--repeats", "2"],
    "gqa_module": [],
    "relief_map": [*SHORT, "--score-from", "20"],
}


@pytest.fixture(scope="module")
def llama(gpt2_tokenizer_files, tmp_path_factory):
    return str(write_random(tmp_path_factory.mktemp("analyses") / "llama", "llama", gpt2_tokenizer_files))


@pytest.fixture
def quick_machine(monkeypatch):
    measured = machine.measure_machine
    sizes = {"buffer_bytes": 2**20, "gemm_widths": (32,), "seconds": 0.0}
    monkeypatch.setattr(machine, "measure_machine", lambda *args, **named: measured(*args, **named, **sizes))


def imported(test):
    """What a test file imports from analyses; it uses it, or the linter would find it."""
    statements = [node for node in ast.walk(ast.parse(test.read_text("utf-8"))) if isinstance(node, ast.ImportFrom)]
    files = {node.module.partition(".")[2] for node in statements if node.module.startswith("analyses.")}
    return files | {each.name for node in statements if node.module == "analyses" for each in node.names}


def test_no_analysis_is_without_a_test():
    elsewhere = set().union(*map(imported, Path(__file__).parents[1].rglob("test_*.py")))
    assert FILES - QUICK.keys() - elsewhere == set()


@pytest.mark.parametrize("name", QUICK)
def test_every_analysis_keeps_a_table_with_its_record(name, llama, quick_machine, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = import_module(f"analyses.{name}")
    done = CliRunner().invoke(module.main, [llama, *QUICK[name]], catch_exceptions=False)
    assert done.exit_code == 0
    found = json.loads((tmp_path / "results" / f"{name}.json").read_text())
    assert found["analysis"] == name
    assert found["run"]["model"] == "llama"
    assert {"versions", "cpu", "date", "dtype", "device", "revision"} <= found["run"].keys()
    assert str(llama) not in json.dumps(found)
    lines = (tmp_path / "results" / f"{name}.csv").read_text().splitlines()
    # a list has a column an entry
    parts = {name: range(len(value)) if isinstance(value, list) else None for name, value in found["rows"][0].items()}
    columns = [
        cell for name, part in parts.items() for cell in ([name] if part is None else [f"{name}_{i}" for i in part])
    ]
    assert lines[0].split(",") == columns
    # the table that was printed has a line a row under its header
    assert len(done.stdout.splitlines()) >= 1 + len(found["rows"])


def test_the_window_study_has_every_cell_of_its_grid(llama):
    result = window.run(llama, text="bundled", tokens=48, score_from=20, windows=(8, 16), sinks=(0, 2))
    assert Result.from_json(result.to_json()) == result
    assert result.rows[0]["window"] is None
    cells = [(row["window"], row["n_sink"], row["sink_choice"]) for row in result.rows[1:]]
    assert cells == [
        *[(8, 0, None), (8, 2, "first"), (16, 0, None), (16, 2, "first")],
        *[(size, 2, choice) for choice in ("random", "heaviest") for size in (8, 16)],
    ]
    assert result.run["sink_choice"] == ["first", "random", "heaviest"]


def test_a_cache_of_the_small_decoders_changes_logits_by_rounding_alone(llama, monkeypatch):
    result = same_logits.run(llama)
    assert [row["positions"] for row in result.rows] == ["rope", "learned", "rope"]
    for row in result.rows:
        assert 0 < row["max_abs_difference"] < 1e-5 * row["max_abs_logit"]
    # a decoder that forgets where it is: its steps are another model's
    steps = same_logits.Decoder.forward
    monkeypatch.setattr(
        same_logits.Decoder,
        "forward",
        lambda self, ids, **more: steps(self, ids, **more, positions=torch.arange(ids.shape[1])),
    )
    assert all(row["max_abs_difference"] > 1e-3 for row in same_logits.run().rows)
    with pytest.raises(ValueError, match="prefill must be between 1 and 47 for 48 tokens, got 48"):
        same_logits.run(prefill=48)


def test_shared_heads_are_repeated_heads(llama, monkeypatch):
    rows = gqa_module.run().rows
    assert [row["attention_params"] for row in rows] == [262_144, 196_608, 163_840, 147_456]
    assert [row["cache_bytes_per_token_layer"] for row in rows] == [2048, 1024, 512, 256]
    assert [row["closed_form_params"] for row in rows] == [row["attention_params"] for row in rows]
    assert all(row["max_abs_difference"] < 1e-6 for row in rows)
    assert [row["n_kv_heads"] for row in gqa_module.run(llama).rows] == [4, 2, 1]
    # heads repeated in another order are other heads
    repeat = torch.Tensor.repeat_interleave
    monkeypatch.setattr(
        torch.Tensor, "repeat_interleave", lambda self, times, dim: repeat(self, times, dim=dim).roll(1, dim)
    )
    assert all(row["max_abs_difference"] > 1e-4 for row in gqa_module.run(kv_heads=(4, 2)).rows)


def test_turned_keys_beside_views_hold_what_was_published(gpt2_random):
    rows = {row["cache"]: row for row in memory.run(str(gpt2_random), contexts=(16,)).rows}
    # multi-head attention: the views keep q, k and v for k and v; turned keys come on top
    assert (rows["fused views"]["ratio"], rows["fused views, K turned"]["ratio"]) == (1.5, 2.0)
    assert rows["fused views, K turned"]["pinned_bytes"] == rows["full"]["formula_bytes"]


def test_the_text_counts_products_with_weights_and_every_logit(llama, quick_machine):
    prefill, decode = roofline.run(llama, context=20, repeats=1, seconds=0).rows
    assert (prefill["phase"], decode["phase"]) == ("prefill", "cached")
    # 3 layers of 32 · 64 for query and out, 32 · 32 for key and value, 3 · 32 · 48 for the MLP; a head of 97
    matrices = 3 * (32 * 64 + 32 * 32 + 3 * 32 * 48)
    assert decode["published_flops"] == 2 * (matrices + 97 * 32)
    assert prefill["published_flops"] == 20 * decode["published_flops"]
    assert decode["published_intensity"] == decode["published_flops"] / decode["bytes_moved"]


def test_every_lever_of_the_relief_map_is_a_point(llama):
    result = relief_map.run(llama, text="bundled", tokens=64, score_from=20, windows=(16,), ranks=(8,))
    assert [row["kind"] for row in result.rows] == ["model", "window", "latent", "latent", "bits", "bits"]
    assert all(row["loss"] > 0 and row["bytes_per_token"] > 0 for row in result.rows)
    # its front by another road: of those who have not seen the scored tokens, from the smallest on, who is the best yet
    honest = [row for row in result.rows if row["basis"] != "oracle"]
    front, least = set(), float("inf")
    for row in sorted(honest, key=lambda row: (row["bytes"], row["loss"])):
        if row["loss"] < least:
            front.add(row["lever"])
            least = row["loss"]
    assert {row["lever"] for row in result.rows if row["on_front"]} == front
    assert 1 < len(front) < len(honest)


def test_the_cost_benchmarks_time_every_way_against_the_plain_pass(llama, monkeypatch):
    grown, peak = {"plain": 1.0, "token 0": 2.0, "every position": 4.0}, [7 * sinks_cost.GIB]

    def growing(way, call):
        def grow(subject):
            call(subject)
            peak[0] += round(grown[way] * sinks_cost.GIB)

        return grow

    def in_this_process(command, **_):
        with redirect_stdout(StringIO()) as said:
            exec(command[2], {})
        return subprocess.CompletedProcess(command, 0, said.getvalue())

    for way, call in sinks_cost.WAYS.items():
        monkeypatch.setitem(sinks_cost.WAYS, way, growing(way, call))
    monkeypatch.setattr(sinks_cost.subprocess, "run", in_this_process)
    monkeypatch.setattr(sinks_cost, "_peak_bytes", lambda: peak[0])
    result = sinks_cost.run(llama, [80], text="bundled", repeats=2)
    assert {row["way"]: row["peak_gib"] for row in result.rows} == grown
    assert result.rows[0]["ratio"] == 1
    monkeypatch.setattr(window_cost, "WINDOWS", (8, 16))
    monkeypatch.setattr(window_cost, "RECOMPUTE_WINDOW", 8)
    rows = window_cost.run(llama, text="bundled", tokens=40, repeats=2).rows
    assert [row["way"] for row in rows] == [
        "plain",
        *[
            f"window {window}, {n_sink}, {positions}"
            for window in (8, 16)
            for n_sink, positions in (("0 sinks", "absolute"), ("4 sinks", "absolute"), ("4 sinks", "cache"))
        ],
        "window 8, recompute",
    ]


def test_the_peak_is_of_the_process_itself_and_not_of_the_one_that_started_it():
    held = b"1" * 2**29
    # each is let go before the peak is asked for; the first is above all that the imports have held
    code = (
        "from analyses.sinks_cost import _peak_bytes\nlen(b'1' * 2**28)\nbefore = _peak_bytes()\n"
        "len(b'1' * (2**28 + 2**26))\nprint(_peak_bytes() - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    del held
    # the interpreter's own few pages beside
    assert int(done.stdout) == pytest.approx(2**26, rel=0.05)


def test_an_analysis_tells_errors_in_one_line():
    done = subprocess.run(
        [sys.executable, "-m", "analyses.window", "/nope/x", "--text", "bundled"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("kvprobe: there is no directory /nope/x")


def test_a_result_that_cannot_be_kept_says_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").touch()
    with pytest.raises(KvprobeError, match=r"sinks.json could not be written to results: .*; use --no-save"):
        keep(Result("sinks", [{"layer": 0}]))


def test_compare_gives_medians_quartiles_and_ratios_of_neighbours(monkeypatch):
    clock = iter([0, 1, 1, 3, 10, 12, 12, 18, 20, 23, 23, 32])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    plain, slow = timing.compare({"plain": lambda: None, "slow": lambda: None}, repeats=3, warm_up=1)
    assert (plain["ms_median"], slow["ms_median"]) == (2000, 6000)
    # 2/1, 6/2 and 9/3: the slow way is three times the plain one in most turns
    assert (plain["ratio"], slow["ratio"]) == (1, 3)
    # 1, 2 and 3 s: the quartiles of what was measured, never outside of it
    assert (plain["ms_low"], plain["ms_high"]) == (1500, 2500)


def test_an_analysis_that_was_timed_on_a_busy_machine_says_so_below_its_table(capsys, busy_machine):
    watch = Watch()
    rows = timing.compare({"plain": lambda: None}, repeats=2, watch=watch)
    show(Result("cost", rows, watch.record()), save=False, summary=["", "a summary"])
    reason = "other work used 1.00 of 2 cores while it was timed"
    assert capsys.readouterr().out.splitlines()[-2:] == ["a summary", f"busy machine, not to be quoted: {reason}"]
