"""``kvprobe latency`` as its users meet it. No time is asserted anywhere: machines differ."""

import itertools
import json
import math

import pytest
from matplotlib.figure import Figure

from kvprobe.bench import busy, machine
from kvprobe.experiments.latency import Latency
from kvprobe.plots import latency as plot
from kvprobe.plots import roofline
from kvprobe.results.result import Result
from support.models import only_document

FIELDS = """context batch dtype phase ms_median ms_low ms_high tokens_per_s bytes_moved flops intensity
ceiling_tokens_per_s fraction_of_ceiling attention_intensity step"""


@pytest.fixture(autouse=True)
def quick_machine(monkeypatch):
    measured = machine.measure_machine
    sizes = {"buffer_bytes": 2**20, "gemm_widths": (32,), "seconds": 0.0}
    monkeypatch.setattr(machine, "measure_machine", lambda *args, **named: measured(*args, **named, **sizes))


@pytest.fixture
def run(main):
    return lambda *arguments: main("latency", *arguments, "--repeats", 2, "--seconds", 0)


@pytest.fixture
def document(run):
    return lambda *arguments: only_document(run(*arguments, "--format", "json", "--quiet"))


def test_rows_and_record(document, tiny_llama):
    found = document(tiny_llama, "--context", 8, "--context", 20, "--batch", 1, "--batch", 4, "--no-compile")
    assert found["analysis"] == "latency"
    rows, run = found["rows"], found["run"]
    assert [(row["phase"], row["context"], row["batch"]) for row in rows] == [
        *((phase, context, 1) for context in (8, 20) for phase in ("naive", "prefill", "cached")),
        *(("cached", context, 4) for context in (8, 20)),
    ]
    ridge = run["matrix_flops_per_s"] / run["bandwidth_bytes_per_s"]
    assert run["ridge_point"] == pytest.approx(ridge)
    for row in rows:
        assert set(FIELDS.split()) <= row.keys()
        assert row["ms_low"] <= row["ms_median"] <= row["ms_high"]
        assert (row["step"], row["dtype"]) == ("torch", "float32")
        tokens = row["batch"] * (row["context"] if row["phase"] == "prefill" else 1)
        assert row["tokens_per_s"] == pytest.approx(1e3 * tokens / row["ms_median"])
        assert row["intensity"] == pytest.approx(row["flops"] / row["bytes_moved"])
        assert row["bound"] == ("bandwidth" if row["intensity"] < run["ridge_point"] else "arithmetic")
        assert row["fraction_of_ceiling"] == pytest.approx(row["tokens_per_s"] / row["ceiling_tokens_per_s"])
        if row["phase"] == "cached":
            # 4 query heads on 2, float32
            assert row["attention_intensity"] == 1.0
    assert run["start_up_s"].keys() == {"torch step"}
    assert run["arithmetic_binds_at_batch"].keys() == {"8", "20"}
    named = """model revision source family dtype device bandwidth_kernels matrix_kernels cores torch_threads compiled
    repeats seconds seed versions cpu wall_s"""
    assert set(named.split()) <= run.keys()
    assert str(tiny_llama) not in json.dumps(found)


def test_compiling_is_the_default_and_is_named(document, tiny_llama):
    pytest.importorskip("numba")
    found = document(tiny_llama, "--context", 8, "--phase", "cached", "--batch", 1, "--batch", 2)
    assert [(row["batch"], row["step"]) for row in found["rows"]] == [(1, "numba"), (2, "numba")]
    assert found["run"]["start_up_s"].keys() >= {"numba step"}


def test_random_weights_need_a_configuration_alone(document, tmp_path):
    config = {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 8, "n_positions": 64, "vocab_size": 10}
    (tmp_path / "shape").mkdir()
    (tmp_path / "shape" / "config.json").write_text(json.dumps(config))
    found = document(tmp_path / "shape", "--random-weights", "--phase", "cached", "--no-compile")
    # no default context fits: all positions instead
    assert [row["context"] for row in found["rows"]] == [64]
    assert (found["run"]["model"], found["run"]["source"]) == ("shape", "random weights, directory")
    # 12 · 8² in the block, 80 in the head
    assert found["rows"][0]["weight_flops"] == 2 * (768 + 80)


@pytest.mark.parametrize("name", ["gpt-124m", "gpt-124m-rope"])
def test_the_published_model_goes_by_name(document, name):
    found = document(name, "--random-weights", "--context", 16, "--phase", "cached", "--no-compile")
    (row,) = found["rows"]
    assert row["weight_flops"] == 247_064_064
    assert row["bytes_moved"] == 494_204_928 + 16 * 72 * 1024


def test_end_to_end(document, tiny_llama):
    sizes = ("--prompt-tokens", 20, "--new-tokens", 5, "--naive-samples", 2)
    found = document(tiny_llama, "--context", 8, "--phase", "prefill", "--end-to-end", *sizes, "--no-compile")
    assert [(row["phase"], row["context"]) for row in found["rows"]] == [
        ("prefill", 8),
        ("end_to_end_cached", 20),
        ("end_to_end_naive", 20),
    ]
    for row in found["rows"][1:]:
        assert row["tokens_per_s"] == pytest.approx(5e3 / row["ms_median"])
    assert (found["run"]["new_tokens"], found["run"]["naive_samples"]) == (5, 2)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--context", 0], "--context must be at least 1 token, got 0"),
        (["--batch", 0], "--batch must be at least 1, got 0"),
        (["--context", 300], "--context must be at most 256, the model's positions, got 300"),
        (
            ["--end-to-end"],
            "--prompt-tokens 3584 and --new-tokens 256 need more than the model's 256 positions: give fewer",
        ),
        (["--batch", 10**10], "would need"),
    ],
)
def test_what_cannot_be_is_one_line_and_comes_first(run, tiny_llama, arguments, says):
    done = run(tiny_llama, *arguments, "--quiet")
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert says in line


def test_the_table_and_the_picture(run, tiny_llama, tmp_path):
    done = run(tiny_llama, "--context", 8, "--context", 16, "--batch", 1, "--batch", 2, "--plot", tmp_path / "l.svg")
    assert done.returncode == 0
    assert done.stdout.splitlines()[0].split()[:4] == ["phase", "context", "batch", "step"]
    assert "ridge point" in done.stdout
    assert "attention's own intensity is 1 FLOP/B at every length" in done.stdout
    assert "arithmetic binds decode from: 8 tokens: " in done.stdout
    svg = (tmp_path / "l.svg").read_text()
    assert all(text in svg for text in ("ms a step", "batch (rows decoded at once)", "arithmetic intensity"))


def test_a_busy_machine_is_named_in_table_picture_and_record(run, document, tiny_llama, tmp_path, busy_machine):
    reason = "other work used 1.00 of 2 cores while it was timed"
    some = (tiny_llama, "--context", 8, "--phase", "cached")
    done = run(*some, "--plot", tmp_path / "l.svg", "--quiet")
    assert f"busy machine, not to be quoted: {reason}" in done.stdout.splitlines()
    assert "busy machine, not to be quoted" in (tmp_path / "l.svg").read_text()
    found = document(*some)["run"]
    assert found["busy"] == [reason]
    # two spans of ceilings and one of the row, a second each
    assert (found["load"]["seconds"], found["load"]["others_cores"]) == (3, 1)
    csv = run(*some, "--format", "csv")
    assert f"busy machine, not to be quoted: {reason}" in csv.stderr.splitlines()
    assert reason not in csv.stdout


def test_a_whole_answer_is_watched_as_rows_are(document, tiny_llama, busy_machine):
    sizes = ("--prompt-tokens", 20, "--new-tokens", 5, "--naive-samples", 2)
    found = document(tiny_llama, "--context", 8, "--phase", "naive", "--end-to-end", *sizes, "--no-compile")["run"]
    # ceilings twice, one row, an answer with a cache and two tokens without
    assert found["load"]["seconds"] == 6


def test_a_quiet_machine_is_not_named(run, document, tiny_llama, tmp_path, monkeypatch):
    readings = (busy.CpuTimes(wall=i, used=2.0 * i, own=2.0 * i) for i in itertools.count())
    monkeypatch.setattr(busy, "read", lambda: next(readings))
    monkeypatch.setattr(busy, "LEAST_MS", math.inf)
    some = (tiny_llama, "--context", 8, "--phase", "cached")
    assert document(*some)["run"]["busy"] == []
    assert "busy" not in run(*some, "--plot", tmp_path / "l.svg").stdout
    assert "busy" not in (tmp_path / "l.svg").read_text()


def test_what_is_above_its_ceiling_is_explained():
    of_all = {"context": 8, "batch": 1, "attention_intensity": 1.0}
    run = {"model": "m", "source": "s", "dtype": "d", "device": "cpu", "start_up_s": {}, "ridge_point": 4.0}
    run |= {"bandwidth_bytes_per_s": 1e9, "matrix_flops_per_s": 1e9, "arithmetic_binds_at_batch": {}}
    above, below = (
        Latency.summary(Result("latency", [of_all | {"phase": "cached", "fraction_of_ceiling": fraction}], run))
        for fraction in (1.09, 0.9)
    )
    assert any(line.startswith("a row above 100%: what it reads stays in") for line in above)
    assert not any("100%" in line for line in below)


def row(phase, context, ms, batch=1, **more):
    times = {"ms_median": ms, "ms_low": ms - 1, "ms_high": ms + 2, "ms_ceiling": ms / 2}
    return {"phase": phase, "context": context, "batch": batch, **times, **more}


def test_lines_are_the_rows():
    rows = [row("naive", 8, 40), row("cached", 8, 4), row("prefill", 8, 30), row("cached", 16, 6)]
    ax = plot.draw(rows, Figure().subplots())
    bars = {bar.get_label(): bar for bar in ax.containers}
    assert bars["naive"][0].get_xydata().tolist() == [[8, 40]]
    assert bars["cached"][0].get_xydata().tolist() == [[8, 4], [16, 6]]
    assert [segment.tolist() for segment in bars["cached"][2][0].get_segments()] == [
        [[8, 3], [8, 6]],
        [[16, 5], [16, 8]],
    ]
    (ceiling,) = (line for line in ax.lines if line.get_linestyle() == "--")
    assert ceiling.get_xydata().tolist() == [[8, 2], [16, 3]]


def test_batches_are_the_rows():
    rates = {1: 10, 4: 30}
    rows = [row("cached", 8, 4, batch, tokens_per_s=rates[batch], ceiling_tokens_per_s=50 * batch) for batch in (4, 1)]
    ax = plot.draw_batches(rows, Figure().subplots())
    assert [line.get_xydata().tolist() for line in ax.lines[:2]] == [[[1, 10], [4, 30]], [[1, 50], [4, 200]]]


def test_the_roof_bends_at_the_ridge():
    rows = [row("cached", 8, 4, intensity=0.5, flops_per_s=2e9), row("prefill", 8, 4, intensity=90, flops_per_s=3e10)]
    ax = roofline.draw(rows, Figure().subplots(), bandwidth=1e10, matrix_rate=4e10)
    roof = ax.lines[0].get_xydata().tolist()
    assert roof[1] == [4, 40]
    assert roof[0][1] == pytest.approx(10 * roof[0][0])
    assert roof[2][1] == 40
    marks = {line.get_label(): line.get_xydata().tolist() for line in ax.lines[2:]}
    assert marks == {"cached": [[0.5, 2]], "prefill": [[90, 30]]}
