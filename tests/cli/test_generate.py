import io
import json
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

from kvprobe.cli import main

FIELDS = [
    "prompt",
    "text",
    "token_ids",
    "n_prompt",
    "n_new",
    "prefill_ms",
    "decode_ms_median",
    "tokens_per_s",
    "cache_bytes",
    "stopped_by",
]


@pytest.fixture
def run(capfd):
    """Runs ``kvprobe generate`` in this process, which has paid for its imports."""

    def once(*arguments):
        with pytest.raises(SystemExit) as stopped:
            main.main(["generate", *map(str, arguments)])
        captured = capfd.readouterr()
        return SimpleNamespace(code=stopped.value.code, out=captured.out, err=captured.err)

    return once


@pytest.fixture(scope="module")
def llama_random(gpt2_tokenizer_files, tmp_path_factory):
    from support.models import write_random

    return write_random(tmp_path_factory.mktemp("models") / "llama-random", "llama", gpt2_tokenizer_files)


def test_text_on_standard_output_and_its_speed_on_standard_error(run, gpt2_random):
    done = run(gpt2_random, "The time", "--max-new-tokens", 6)
    assert done.code == 0, done.err
    assert done.out.startswith("The time")
    assert "6 new (length): time to first token" in done.err
    assert "tokens/s; cache 0.01 MiB" in done.err
    quiet = run(gpt2_random, "The time", "--max-new-tokens", 6, "--quiet")
    assert (quiet.out, quiet.err) == (done.out, "")


def test_speed_on_a_busy_machine_is_not_to_be_quoted(run, gpt2_random, busy_machine):
    done = run(gpt2_random, "The time", "--max-new-tokens", 6)
    assert done.err.endswith("tokens/s; cache 0.01 MiB; busy machine, not to be quoted\n")
    record = json.loads(run(gpt2_random, "The time", "--max-new-tokens", 6, "--format", "json").out)["run"]
    assert record["busy"] == ["other work used 1.00 of 2 cores while it was timed"]


def test_json_is_one_document_and_says_what_was_printed(run, gpt2_random):
    printed = run(gpt2_random, "The time", "--max-new-tokens", 6).out
    done = run(gpt2_random, "The time", "--max-new-tokens", 6, "--format", "json", "--seed", 3)
    document = json.loads(done.out)
    (row,) = document["rows"]
    assert document["analysis"] == "generate"
    assert row.keys() >= set(FIELDS)
    assert printed == row["prompt"] + row["text"] + "\n"
    assert (row["n_prompt"], row["n_new"], len(row["token_ids"]), row["stopped_by"]) == (2, 6, 6, "length")
    # 3 layers of 4 heads of 8, keys and values, 2 + 6 - 1 tokens
    assert row["cache_bytes"] == 2 * 3 * 32 * 7 * 4
    for field in [
        "model",
        "revision",
        "source",
        "dtype",
        "device",
        "family",
        "seed",
        "temperature",
        "max_new_tokens",
        "versions",
        "cpu",
        "date",
    ]:
        assert field in document["run"]
    assert "/" not in document["run"]["model"]


def rows(run, *arguments):
    done = run(*arguments, "--format", "json")
    assert done.code == 0, done.err
    document = json.loads(done.out)
    return document["rows"][0], document["run"]


def test_without_a_cache_the_tokens_are_the_same(run, gpt2_random):
    cached, _ = rows(run, gpt2_random, "The time", "--max-new-tokens", 8)
    naive, record = rows(run, gpt2_random, "The time", "--max-new-tokens", 8, "--no-cache")
    assert naive["token_ids"] == cached["token_ids"]
    assert (naive["cache_bytes"], record["cache"]) == (0, False)


def test_sampling_options_act_and_the_seed_repeats(run, gpt2_random):
    def tokens(*options):
        return rows(run, gpt2_random, "The time", "--max-new-tokens", 8, *options)[0]["token_ids"]

    drawn = ("--temperature", 2.0)
    assert tokens(*drawn, "--seed", 1) == tokens(*drawn, "--seed", 1) != tokens(*drawn, "--seed", 2)
    assert tokens(*drawn, "--top-k", 1) == tokens(*drawn, "--top-p", 1e-6) == tokens()


@pytest.mark.parametrize(("model", "positions"), [("gpt2_random", "absolute"), ("llama_random", "cache")])
def test_a_window_keeps_four_sinks_and_the_positions_the_model_can_have(run, request, model, positions):
    directory = request.getfixturevalue(model)
    row, record = rows(run, directory, "The time", "--max-new-tokens", 40, "--window", 8)
    assert (record["window"], record["n_sink"], record["positions"]) == (8, 4, positions)
    elements = 2 * 3 * 32 * 12 if positions == "absolute" else 3 * 16 * (2 * 12 + 4)
    assert row["cache_bytes"] == 4 * elements
    none, record = rows(run, directory, "The time", "--max-new-tokens", 40, "--window", 8, "--sinks", 0)
    assert record["n_sink"] == 0
    assert none["token_ids"] != row["token_ids"]


def test_a_window_by_slot_goes_on_beyond_the_models_positions(run, llama_random, tmp_path):
    endless = shutil.copytree(llama_random, tmp_path / "endless")
    for file in ("config.json", "generation_config.json"):
        settings = json.loads((endless / file).read_text())
        (endless / file).write_text(json.dumps(settings | {"eos_token_id": None}))
    long = (endless, "The time", "--max-new-tokens", 300)
    row, _ = rows(run, *long, "--window", 8)
    assert (row["n_new"], row["stopped_by"]) == (300, "length")
    for options in ((), ("--window", 8, "--positions", "absolute")):
        done = run(*long, *options)
        assert done.code == 1
        assert "more than the 256 positions of endless" in done.err


def test_the_prompt_may_come_from_standard_input_and_the_text_go_to_a_file(run, gpt2_random, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"The time")))
    done = run(gpt2_random, "-", "--max-new-tokens", 4, "--out", tmp_path / "text.txt")
    assert (done.code, done.out) == (0, "")
    assert (tmp_path / "text.txt").read_text() == run(gpt2_random, "The time", "--max-new-tokens", 4).out


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (["--top-p", "2"], 2, "'--top-p': 2.0 is not in the range 0<x<=1"),
        (["--top-k", "0"], 2, "'--top-k': 0 is not in the range x>=1"),
        (["--temperature", "-1"], 2, "'--temperature': -1.0 is not in the range x>=0"),
        (["--temperature", "1e-9"], 2, "--temperature must be 0 (greedy) or at least 0.0001, got 1e-09"),
        (["--max-new-tokens", "0"], 2, "'--max-new-tokens': 0 is not in the range x>=1"),
        (["--max-new-tokens", "300"], 1, "--max-new-tokens 300 are more than the 256 positions of gpt2-random"),
        (["--window", "0"], 2, "'--window': 0 is not in the range x>=1"),
        (["--window", "8", "--sinks", "-1"], 2, "'--sinks': -1 is not in the range x>=0"),
        (
            ["--window", "8", "--positions", "cache"],
            1,
            "--positions cache needs rotary positions",
        ),
        (["--sinks", "4"], 2, "give it too"),
        (["--window", "8", "--no-cache"], 2, "give only one of them"),
        (["--window", "8", "--cache", "full"], 2, "--window needs --cache rolling, not full"),
        (["--cache", "full", "--no-cache"], 2, "give only one of them"),
        (["more", "words"], 2, "one prompt: put it in quotes"),
    ],
)
def test_what_cannot_be_done_is_one_line(run, gpt2_random, options, code, says):
    done = run(gpt2_random, "The time", *options)
    assert done.code == code
    assert says in done.err
    assert "Traceback" not in done.err
    assert done.out == ""


def test_an_empty_prompt_and_a_single_positional(run, gpt2_random, monkeypatch):
    done = run(gpt2_random, "")
    assert (done.code, done.out) == (1, "")
    assert "the prompt has no tokens" in done.err
    # one positional is the prompt, of gpt2
    from kvprobe.models import loading

    asked = []

    def load(name, **options):
        asked.append(name)
        raise ValueError("enough")

    monkeypatch.setattr(loading, "load", load)
    assert run("The time").code == 1
    assert asked == ["gpt2"]


def test_a_fresh_process_ends_in_order(gpt2_random):
    # the compiled step's threads must be gone before the interpreter is
    code = "import sys; from kvprobe.cli.main import main; main(sys.argv[1:])"
    for _ in range(2):
        command = [sys.executable, "-c", code, "generate", str(gpt2_random), "The time", "--max-new-tokens", "20"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, "terminate" in done.stderr) == (0, False), done.stderr
