"""`kvprobe evaluate` as its users meet it."""

import hashlib
import subprocess
import sys

import pytest

import kvprobe
from support.models import document, only_document

MINE = """
from neighbour import N

def last(call):
    print("layer", call.layer)
    return call.attend(keep=call.last(N))

def find():
    raise KeyError("nothing there")

def raises(call):
    return find() if call.layer == 1 else call.attend()

def odd(call):
    return call.query[:, :1]

number = 3
"""


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "neighbour.py").write_text("N = 6\n")
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path / "mine.py"


def test_rows_record_and_picture(main, tiny_llama, mine, tmp_path):
    picture = tmp_path / "mine.svg"
    asked = ("--tokens", 64, "--score-from", 20, "--format", "json", "--plot", picture, "--quiet")
    done = main("evaluate", tiny_llama, "--attend", f"{mine}:last", *asked)
    result = document(done)
    assert result["analysis"] == "evaluate"
    assert list(result["rows"][1]) == [
        "attend", "loss", "perplexity", "delta", "delta_low", "delta_high", "kld_mean", "kld_p99", "top1_agreement",
    ]  # fmt: skip
    assert [row["attend"] for row in result["rows"]] == [None, "mine.py:last"]
    digest = hashlib.sha256(mine.read_bytes()).hexdigest()
    assert result["run"]["attend"] == [{"name": "mine.py:last", "file": "mine.py", "sha256": digest}]
    assert (result["run"]["score_from"], result["run"]["n_targets"]) == (20, 43)
    assert str(tmp_path) not in done.stdout
    # what the function prints is not in the document
    assert "layer 2" in done.stderr
    assert "mine.py:last" in picture.read_text(encoding="utf-8")

    def same(call):
        return call.attend(keep=call.keep.triu(-5))

    subject = kvprobe.prepare(str(tiny_llama), tokens=64, device="cpu")
    (_, own) = kvprobe.evaluate(subject, same, score_from=20).rows
    assert result["rows"][1] == own | {"attend": "mine.py:last"}


def test_the_table_ends_in_the_finding(main, tiny_llama, mine):
    done = main("evaluate", tiny_llama, "--attend", f"{mine}:last", "--tokens", 64)
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[0].split()[0] == "attend"
    assert lines[-1].startswith("tiny-llama, bundled, 64 tokens")
    assert "with mine.py:last the loss" in lines[-1]
    assert "evaluating: 0 of 2 passes" in done.stderr


@pytest.mark.parametrize(
    ("attend", "says"),
    [
        ("nowhere.py:last", "there is no file 'nowhere.py' with a function last: give FILE.py:NAME"),
        ("mine.py", "--attend must be FILE.py:NAME, as in mine.py:last_64, got 'mine.py'"),
        ("mine.py:", "--attend must be FILE.py:NAME, as in mine.py:last_64, got 'mine.py:'"),
        ("mine.py:first", "mine.py has no 'first'; its functions: last, find, raises, odd"),
        ("mine.py:number", "mine.py:number must be a function of one call, not int"),
        ("mine.py:raises", "mine.py:raises failed in layer 1: KeyError: 'nothing there' (mine.py, line 9)"),
        ("mine.py:odd", "mine.py:odd returned [1, 1, 64, 8] in layer 0, needs [batch, n_heads, q_len, v_head_dim] = "),
        ("broken.py:last", "broken.py cannot be run: SyntaxError: invalid syntax (broken.py, line 2)"),
        ("ends.py:last", "ends.py cannot be run: SystemExit: 3 (ends.py, line 1)"),
        ("words.txt:last", "'words.txt' is not a Python file"),
    ],
)
def test_what_cannot_be_used_is_one_line(main, tiny_llama, mine, monkeypatch, attend, says):
    monkeypatch.chdir(mine.parent)
    (mine.parent / "broken.py").write_text("x = 1\nx = = 2\n")
    (mine.parent / "ends.py").write_text("raise SystemExit(3)\n")
    (mine.parent / "words.txt").write_text("words")
    done = main("evaluate", tiny_llama, "--attend", attend, "--tokens", 64, "--quiet")
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"kvprobe: {says}")


@pytest.mark.parametrize(
    ("arguments", "says"), [([], "'--attend'"), (["--attend", "a.py:b", "--score-from", "x"], "--score-from")]
)
def test_a_wrong_option_is_a_usage_error(main, arguments, says):
    done = main("evaluate", "nowhere", *arguments)
    assert done.returncode == 2
    assert says in done.stderr


def test_the_help_says_that_the_file_is_run(main):
    done = main("evaluate", "--help")
    assert "FILE.py is run: name only a file whose code you trust" in done.stdout
    assert done.stdout.count("\n    kvprobe evaluate ") == 3


def test_ctrl_c_inside_the_function_is_130_and_leaves_no_file(tiny_llama, tmp_path):
    (tmp_path / "slow.py").write_text(
        "import os, signal\ndef stop(call):\n    os.kill(os.getpid(), signal.SIGINT)\n    return call.attend()\n"
    )
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "from kvprobe.cli.main import main; main()"
    command = [sys.executable, "-c", code, "evaluate", str(tiny_llama), "--attend", "slow.py:stop"]
    command += ["--tokens", "64", "--quiet", "--out", "result.txt"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.returncode, done.stdout, done.stderr.strip()) == (130, "", "kvprobe: interrupted")
    assert not (tmp_path / "result.txt").exists()


def test_json_with_quiet_says_nothing_else(main, tiny_llama, tmp_path):
    (tmp_path / "plain.py").write_text("def own(call):\n    return call.attend()\n")
    asked = ("--tokens", 32, "--format", "json", "--quiet")
    rows = only_document(main("evaluate", tiny_llama, "--attend", f"{tmp_path / 'plain.py'}:own", *asked))["rows"]
    assert rows[1] | {"attend": None} == rows[0]
