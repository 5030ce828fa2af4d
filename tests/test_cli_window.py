"""``kvprobe window`` as its users meet it, and its picture."""

import json
from types import SimpleNamespace

import pytest
from matplotlib.figure import Figure

from conftest import write_random
from kvprobe import cli
from kvprobe.plots import window as plot

FIELDS = [
    "window", "n_sink", "positions", "loss", "perplexity", "delta", "delta_low", "delta_high", "cache_tokens",
    "sink_choice", "sink_positions", "bos_kept", "local_layers", "has_sink_logits", "sink_logits_dropped",
]  # fmt: skip


@pytest.fixture
def run(capfd):
    def once(*arguments):
        with pytest.raises(SystemExit) as stopped:
            cli.main(["window", *map(str, arguments)])
        captured = capfd.readouterr()
        return SimpleNamespace(returncode=stopped.value.code, stdout=captured.out, stderr=captured.err)

    return once


@pytest.fixture(scope="module")
def llama(gpt2_tokenizer_files, tmp_path_factory):
    return write_random(tmp_path_factory.mktemp("llama") / "tiny-llama", "llama", gpt2_tokenizer_files)


def document(done):
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_one_document_with_the_grid_in_it(run, llama):
    done = run(llama, "--tokens", 64, "--window", 8, "--window", 16, "--sinks", 0, "--sinks", 2, "--format", "json")
    found = document(done)
    assert found["analysis"] == "window"
    assert list(found["rows"][0]) == FIELDS
    cells = [(row["window"], row["n_sink"], row["cache_tokens"]) for row in found["rows"]]
    assert cells == [(None, 0, 64), (8, 0, 8), (8, 2, 10), (16, 0, 16), (16, 2, 18)]
    record = found["run"]
    assert (record["score_from"], record["n_targets"], record["positions"]) == (32, 31, "absolute")
    assert record["model"] == "tiny-llama"
    assert str(llama) not in done.stdout


def test_the_defaults_are_the_published_grid(run, llama):
    rows = document(run(llama, "--tokens", 256, "--format", "json"))["rows"]
    assert [(row["window"], row["n_sink"]) for row in rows] == [(None, 0), (256, 0), (256, 1), (256, 4)]
    assert max(abs(row["delta"]) for row in rows) < 1e-6


@pytest.mark.parametrize("positions", ["cache", "recompute"])
def test_every_row_names_its_positions(run, llama, positions):
    done = run(llama, "--tokens", 48, "--window", 8, "--positions", positions, "--format", "json")
    first, *rows = document(done)["rows"]
    assert first["positions"] == "absolute"
    assert {row["positions"] for row in rows} == {positions}
    assert [row["n_sink"] for row in rows] == ([0] if positions == "recompute" else [0, 1, 4])


def test_the_table_says_what_was_read(run, llama):
    done = run(llama, "--tokens", 48, "--window", 8, "--sinks", 3, "--sink-choice", "heaviest", "--quiet")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[0].split()[:4] == ["window", "n_sink", "positions", "sink_choice"]
    assert lines[2].split()[:4] == ["8", "3", "absolute", "heaviest"]
    assert "48 tokens (no BOS), 23 targets from 25 on" in lines[-1]
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--window", 0], "window must be at least 1 (the query itself), got 0"),
        (["--sinks", -1], "got -1"),
        (["--score-from", 64], "score-from must be between 0 and 61 for 64 tokens"),
        (["--positions", "recompute", "--sinks", 4], "sinks do not apply to positions recompute, got 4"),
        (["--positions", "cache"], "family gpt2 has no rotary position embedding"),
        (["--sink-choice", "bos", "--sinks", 1], "the passage has no BOS; use --bos add"),
        (["--drop-sink-logits"], "no learned sink logits to drop"),
        (["--tokens", 257], "256 positions"),
    ],
)
def test_what_the_user_can_mend_is_one_line(run, gpt2_random, arguments, says):
    done = run(gpt2_random, "--tokens", 64, "--quiet", *arguments)
    assert done.returncode == 1
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


def test_the_picture_is_written(run, llama, tmp_path):
    done = run(llama, "--tokens", 48, "--window", 8, "--plot", tmp_path / "window.svg", "--quiet")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "window.svg").read_text()
    assert "window 8" in text
    assert "full context" in text


ROWS = [
    {"window": None, "n_sink": 0, "delta": 0.0, "delta_low": 0.0, "delta_high": 0.0},
    {"window": 256, "n_sink": 0, "delta": 0.5, "delta_low": 0.4, "delta_high": 0.7},
    {"window": 256, "n_sink": 4, "delta": 0.1, "delta_low": 0.0, "delta_high": 0.15},
    {"window": 64, "n_sink": 0, "delta": 0.9, "delta_low": 0.8, "delta_high": 1.2},
    {"window": 64, "n_sink": 4, "delta": 0.3, "delta_low": 0.1, "delta_high": 0.4},
]


def test_points_and_intervals_are_the_rows():
    ax = plot.draw(ROWS, Figure().subplots())
    assert [label.get_text() for label in ax.get_xticklabels()] == ["64", "256"]
    drawn = {}
    for container in ax.containers:
        line, _, (bars,) = container.lines
        drawn[container.get_label()] = (
            line.get_ydata().tolist(),
            [segment[:, 1].tolist() for segment in bars.get_segments()],
        )
    assert drawn == {
        "no sinks": ([0.9, 0.5], [pytest.approx([0.8, 1.2]), pytest.approx([0.4, 0.7])]),
        "4 sinks": ([0.3, 0.1], [pytest.approx([0.1, 0.4]), pytest.approx([0.0, 0.15])]),
    }


def test_one_window_has_its_sinks_across():
    ax = plot.draw([row for row in ROWS if row["window"] != 64], Figure().subplots())
    assert [label.get_text() for label in ax.get_xticklabels()] == ["0", "4"]
    line = ax.containers[0].lines[0]
    assert line.get_xydata().tolist() == [[0, 0.5], [1, 0.1]]
    assert ax.containers[0].get_label() == "window 256"


def test_the_full_pass_without_sink_logits_is_a_line_of_its_own():
    dropped = {"window": None, "n_sink": 0, "delta": 0.25, "delta_low": 0.2, "delta_high": 0.3}
    ax = plot.draw([ROWS[0], dropped | {"sink_logits_dropped": True}, *ROWS[1:]], Figure().subplots())
    (line,) = [line for line in ax.lines if line.get_label() == "full context, sink logits dropped"]
    assert list(line.get_ydata()) == [0.25, 0.25]
