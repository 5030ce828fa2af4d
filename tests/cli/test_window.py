"""``kvprobe window`` as its users meet it, and its picture."""

import json
import os
import signal
import subprocess
import sys
from functools import partial

import pytest
from matplotlib.figure import Figure

from kvprobe.plots import window as plot
from support.models import document, write_random

FIELDS = [
    "window", "n_sink", "positions", "loss", "perplexity", "delta", "delta_low", "delta_high", "cache_tokens",
    "sink_choice", "sink_positions", "bos_kept", "local_layers", "has_sink_logits", "sink_logits_dropped",
]  # fmt: skip


@pytest.fixture
def run(main):
    return partial(main, "window")


def test_one_document_with_the_grid_in_it(run, tiny_llama):
    done = run(
        tiny_llama, "--tokens", 64, "--window", 8, "--window", 16, "--sinks", 0, "--sinks", 2, "--format", "json"
    )
    found = document(done)
    assert found["analysis"] == "window"
    assert list(found["rows"][0]) == FIELDS
    cells = [(row["window"], row["n_sink"], row["cache_tokens"]) for row in found["rows"]]
    assert cells == [(None, 0, 64), (8, 0, 8), (8, 2, 10), (16, 0, 16), (16, 2, 18)]
    record = found["run"]
    assert (record["score_from"], record["n_targets"], record["positions"]) == (32, 31, "absolute")
    assert record["model"] == "tiny-llama"
    assert str(tiny_llama) not in done.stdout


def test_the_defaults_are_the_published_grid(run, tiny_llama):
    rows = document(run(tiny_llama, "--tokens", 256, "--format", "json"))["rows"]
    assert [(row["window"], row["n_sink"]) for row in rows] == [(None, 0), (256, 0), (256, 1), (256, 4)]
    assert max(abs(row["delta"]) for row in rows) < 1e-6


@pytest.mark.parametrize("positions", ["cache", "recompute"])
def test_every_row_names_its_positions(run, tiny_llama, positions):
    done = run(tiny_llama, "--tokens", 48, "--window", 8, "--positions", positions, "--format", "json")
    first, *rows = document(done)["rows"]
    assert first["positions"] == "absolute"
    assert {row["positions"] for row in rows} == {positions}
    assert [row["n_sink"] for row in rows] == ([0] if positions == "recompute" else [0, 1, 4])


def test_the_table_says_what_was_read(run, tiny_llama):
    done = run(tiny_llama, "--tokens", 48, "--window", 8, "--sinks", 3, "--sink-choice", "heaviest", "--quiet")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[0].split()[:4] == ["window", "n_sink", "positions", "sink_choice"]
    assert lines[2].split()[:4] == ["8", "3", "absolute", "heaviest"]
    assert "48 tokens (no BOS), 23 targets from 25 on" in lines[-1]
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--window", 0], "--window must be at least 1 (the query itself), got 0"),
        (["--sinks", -1], "--sinks must be between 0 and 64 for 64 tokens, got -1"),
        (["--score-from", 64], "--score-from must be between 0 and 61 for --tokens 64"),
        (["--positions", "recompute", "--sinks", 4], "--sinks do not apply to --positions recompute, got 4"),
        (["--positions", "cache"], "--positions cache: family gpt2 has no rotary position embedding"),
        (
            ["--sink-choice", "bos", "--sinks", 1],
            "--sink-choice bos: the passage has no BOS; use --bos add, or another --sink-choice",
        ),
        (["--drop-sink-logits"], "no learned sink logits to drop (gpt-oss has); leave out --drop-sink-logits"),
        (["--tokens", 257], "256 positions"),
    ],
)
def test_what_the_user_can_mend_is_one_line(run, gpt2_random, arguments, says):
    tokens = () if "--tokens" in arguments else ("--tokens", 64)
    done = run(gpt2_random, *tokens, "--quiet", *arguments)
    assert done.returncode == 1
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


def test_a_window_no_smaller_than_the_passage_is_said_to_cut_nothing(run, tiny_llama):
    done = run(tiny_llama, "--tokens", 48, "--window", 47, "--window", 48, "--window", 64, "--sinks", 0)
    assert done.stdout.splitlines()[-1] == "a window of 48 and 64 tokens cuts nothing: the passage has 48"
    assert "cuts nothing" not in run(tiny_llama, "--tokens", 48, "--window", 47, "--sinks", 0).stdout


def test_the_picture_is_written(run, tiny_llama, tmp_path):
    done = run(tiny_llama, "--tokens", 48, "--window", 8, "--plot", tmp_path / "window.svg", "--quiet")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "window.svg").read_text()
    assert "window 8" in text
    assert "full context" in text


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A kvprobe directory of its own: what is kept in it and what is removed can be seen."""
    monkeypatch.setenv("KVPROBE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


STREAM = ("--stream", "--sinks", 0, "--sinks", 2, "--positions", "cache", "--format", "json")
EIGHT = ("--window", 8)


def test_a_stream_reads_the_whole_text_and_gives_a_row_a_result(run, tiny_llama, home, tmp_path):
    (tmp_path / "text").write_text("ab,cd." * 150)
    found = document(run(tiny_llama, *STREAM, *EIGHT, "--text", tmp_path / "text", "--every", 300))
    assert set(FIELDS) < set(found["rows"][0])
    cells = [(row["window"], row["n_sink"], row["at_token"], row["tokens_scored"]) for row in found["rows"]]
    assert cells == [(8, n, at, at - 1) for n in (0, 2) for at in (300, 600, 900)]
    assert {row["delta"] for row in found["rows"]} == {None}
    record = found["run"]
    assert (record["n_tokens"], record["score_from"], record["n_targets"], record["stream"]) == (900, 0, 899, True)
    assert str(tmp_path) not in json.dumps(found)
    # nothing of a finished stream is kept
    assert list((home / "streams").iterdir()) == []


def test_a_stream_reads_as_many_tokens_as_the_user_gave_and_is_the_mask(run, tiny_llama, home):
    # 1024 as well, which is the default of --tokens
    found = document(run(tiny_llama, *STREAM, *EIGHT, "--tokens", 1024))
    assert [row["at_token"] for row in found["rows"]] == [1024, 1024]
    for positions in ("absolute", "cache"):
        sinks_and_format = [*STREAM[1:5], *STREAM[7:]]
        shared = (tiny_llama, *sinks_and_format, *EIGHT, "--tokens", 200, "--score-from", 50, "--positions", positions)
        _, *masked = document(run(*shared))["rows"]
        streamed = document(run("--stream", *shared))["rows"]
        assert [row["loss"] for row in streamed] == pytest.approx([row["loss"] for row in masked], abs=1e-5)
        assert [row["tokens_scored"] for row in streamed] == [149, 149]


# dies by SIGKILL when the second result is on disk; where no time passes, each is put there at once
DIES = """
import os, signal
from types import SimpleNamespace
from kvprobe.cli.main import main
from kvprobe.experiments import stream_checkpoint, streaming

write = stream_checkpoint.StreamCheckpoint.save

def write_and_die(state, now, cache=None):
    write(state, now, cache)
    if len(now.segments) == 2:
        os.kill(os.getpid(), signal.SIGKILL)

streaming.time = SimpleNamespace(monotonic=lambda: 0.0)
stream_checkpoint.StreamCheckpoint.save = write_and_die
main()
"""


def test_a_killed_stream_is_resumed_by_the_same_command(run, tiny_llama, home, tmp_path):
    (tmp_path / "text").write_text("".join(chr(33 + i * i % 89) for i in range(3000)))
    command = [tiny_llama, *STREAM, "--window", 32, "--text", tmp_path / "text", "--every", 500]
    expected = document(run(*command))["rows"]
    killed = subprocess.run(
        [sys.executable, "-c", DIES, "window", *map(str, command)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stderr=subprocess.DEVNULL,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL
    again = run(*command)
    # the second result, of 1,000 tokens, is in the chunk of 32 that ends there
    assert "resuming window 32 + 0 sinks at token 1,024 of 3,000 (--no-resume starts afresh)" in again.stderr
    found = document(again)
    assert found["rows"] == expected
    assert found["run"]["n_resumed"] == 1
    assert list((home / "streams").iterdir()) == []


def stopped_at(monkeypatch, token):
    """Ctrl-C once this token is read."""
    from kvprobe.cli import console

    class Stop:
        def __init__(self, quiet):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def __call__(self, what, done, total, unit=""):
            if what.startswith("window") and done > token:
                raise KeyboardInterrupt

    monkeypatch.setattr(console, "progress_bar", Stop)


def test_ctrl_c_keeps_the_state_and_says_how_to_resume(run, tiny_llama, home, monkeypatch, tmp_path):
    state = tmp_path / "mine"
    command = (tiny_llama, *STREAM, *EIGHT, "--tokens", 600, "--every", 100, "--state", state)
    expected = document(run(*command))["rows"]
    assert not state.exists()
    with monkeypatch.context() as patched:
        stopped_at(patched, 450)
        done = run(*command)
    assert done.returncode == 130
    assert "kept: the same command resumes window 8 + 0 sinks at token " in done.stderr
    assert done.stdout == ""
    refused = run(*(200 if argument == 100 else argument for argument in command))
    assert refused.returncode == 1
    assert "the state mine belongs to another stream: every is 100 there and 200 here" in refused.stderr
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["mine"]
    kept = state.read_bytes()
    again = run(*command)
    assert "resuming window 8 + 0 sinks at token " in again.stderr
    assert document(again)["rows"] == expected
    state.write_bytes(kept)
    afresh = run(*command, "--no-resume")
    assert "resuming" not in afresh.stderr
    assert document(afresh)["rows"] == expected
    assert document(afresh)["run"]["n_resumed"] == 0


def test_a_result_that_could_not_be_written_is_still_there(run, tiny_llama, home, monkeypatch):
    from kvprobe.cli import console

    command = (tiny_llama, *STREAM, *EIGHT, "--tokens", 100)
    with monkeypatch.context() as patched:
        patched.setattr(console, "emit", lambda *_, **__: 1 / 0)
        assert run(*command).returncode == 1
    again = run(*command)
    assert "resuming at the end: the result is there" in again.stderr
    assert len(document(again)["rows"]) == 2


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["--positions", "recompute"], 2, "--positions recompute does not work with --stream"),
        (["--sink-choice", "random"], 2, "--sink-choice other than first does not work with --stream"),
        (["--drop-sink-logits"], 2, "--drop-sink-logits does not work with --stream"),
        (["--plot", "x.svg"], 2, "--plot does not work with --stream"),
        ([], 1, "more than the model's 256 positions: learned positions have no entry beyond them"),
        (
            ["--positions", "cache"],
            1,
            "--positions cache: this model's positions are learned, added to the hidden state, and cannot be moved",
        ),
        (["--tokens", 64, "--every", 0], 1, "--every must be at least 1 token, got 0"),
        (["--tokens", 64, "--score-from", 64], 1, "--score-from must be between 0 and 61 for --tokens 64"),
        (["--tokens", 64, "--window", 0], 1, "--window must be at least 1 (the query itself), got 0"),
        (["--tokens", 64, "--state", __file__], 1, "test_window.py is not a state of a stream"),
    ],
)
def test_what_cannot_be_streamed_is_refused(run, gpt2_random, home, arguments, status, says):
    done = run(gpt2_random, "--stream", "--quiet", *arguments)
    assert (done.returncode, done.stdout) == (status, "")
    assert says in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("option", [("--every", 5), ("--every", 0), ("--state", "x"), ("--no-resume",)])
def test_options_of_a_stream_alone_are_refused(run, tiny_llama, option):
    done = run(tiny_llama, *option)
    assert done.returncode == 2
    assert f"{option[0]} needs --stream" in done.stderr


def test_families_that_the_decoder_has_not_are_named(run, gpt2_tokenizer_files, home, tmp_path):
    model = write_random(tmp_path, "gpt_neox", gpt2_tokenizer_files)
    done = run(model, "--stream", "--quiet")
    assert done.returncode == 1
    assert "unknown family gpt_neox: the decoder reads gpt2, llama" in done.stderr


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


def test_a_window_beyond_the_memory_is_estimated_and_leaves_no_state(main, tiny_llama, tmp_path, monkeypatch):
    monkeypatch.setenv("KVPROBE_HOME", str(tmp_path))
    arguments = ["--window", 2**38, "--positions", "cache"]
    done = main("window", tiny_llama, "--stream", "--tokens", 64, *arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert "a rolling cache of 274,877,906,948 tokens would need" in done.stderr
    assert done.stderr.rstrip().endswith("are free in memory: use a smaller --window or fewer --sinks")
    assert [path for path in tmp_path.rglob("*") if path.is_file() and not path.name.endswith(".lock")] == []
    done = main("memory", tiny_llama, "--context", 8, "--window", 2**38)
    assert (done.returncode, done.stdout) == (1, "")
    assert "a rolling cache of 274,877,906,948 tokens would need" in done.stderr
