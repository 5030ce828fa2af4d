"""``kvprobe memory`` as its users meet it."""

import json
from functools import partial

import pytest
from matplotlib.figure import Figure

from kvprobe.plots import memory as plot
from support.models import only_document, write_random


@pytest.fixture
def run(main):
    return partial(main, "memory")


@pytest.fixture
def document(run):
    return lambda *arguments: only_document(run(*arguments, "--format", "json", "--quiet"))


def test_rows_and_record(document, tiny_llama):
    found = document(tiny_llama, "--context", 5, "--context", 40, "--window", 6, "--sinks", 2, "--dtype", "bfloat16")
    assert found["analysis"] == "memory"
    token = 3 * 2 * 2 * 8 * 2
    expected = {"full": token, "rolling": token, "hf dynamic": token, "hf static": token, "fused views": 2 * token}
    slots = {(context, name): 8 if name == "rolling" else context for context in (5, 40) for name in expected}
    assert {(row["context"], row["cache"]): row["measured_bytes"] for row in found["rows"]} == {
        (context, name): count * expected[name] for (context, name), count in slots.items()
    }
    for row in found["rows"]:
        assert {"context", "formula_bytes", "measured_bytes", "pinned_bytes", "cache"} <= row.keys()
        assert row["excess_bytes"] == row["measured_bytes"] - row["formula_bytes"]
    named = "model revision source family dtype device contexts batch window n_sink counted_by seed versions cpu wall_s"
    assert set(named.split()) <= found["run"].keys()
    assert found["run"]["counted_by"] == "unique storages"
    assert str(tiny_llama) not in json.dumps(found)


def test_the_published_bill_is_what_is_held(document):
    found = document("gpt-124m", "--random-weights", "--context", 64)
    assert found["run"]["source"] == "random weights, catalogue"
    held = {row["cache"]: row["measured_bytes"] for row in found["rows"]}
    # 72 KiB a token
    assert held["full"] == held["hf dynamic"] == held["hf static"] == 64 * 72 * 1024
    assert held["fused views"] == 64 * 108 * 1024


def test_the_table_says_what_views_keep(run, tiny_llama):
    done = run(tiny_llama, "--context", 40, "--quiet")
    assert done.returncode == 0
    assert done.stdout.splitlines()[0].split()[:4] == ["context", "cache", "formula_bytes", "measured_bytes"]
    assert "to the byte what the formula says: full, rolling, hf dynamic, hf static" in done.stdout
    # 4 heads of 8 in three layers, 40 tokens, float32
    assert "fused views: at 40 tokens views keep 15 KiB alive that nothing reads, 2.00 times" in done.stdout


def test_a_family_without_plain_keys_and_values_says_so(run, tmp_path, gpt2_tokenizer_files):
    directory = write_random(tmp_path / "latent", "deepseek_v3", gpt2_tokenizer_files)
    done = run(directory, "--context", 8)
    assert done.returncode == 0
    assert "kvprobe's own caches are left out: the deepseek_v3 family" in done.stderr
    assert "fused views" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--context", 0], "--context must be at least 1 token, got 0"),
        (["--context", 300], "--context must be at most 256, the model's positions, got 300"),
        (["--window", 0], "--window must be at least 1"),
    ],
)
def test_bad_numbers_are_one_line(run, tiny_llama, arguments, says):
    done = run(tiny_llama, *arguments, "--quiet")
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert says in line


def test_the_picture_is_written_whole(run, tiny_llama, tmp_path):
    done = run(tiny_llama, "--context", 8, "--plot", tmp_path / "held.svg", "--quiet")
    assert done.returncode == 0
    assert "pinned by views" in (tmp_path / "held.svg").read_text()


def test_bars_are_the_rows():
    sizes = {"cache": "a", "formula_bytes": 2 * plot.MIB, "measured_bytes": 5 * plot.MIB, "pinned_bytes": 3 * plot.MIB}
    rows = [sizes, sizes | {"cache": "b", "measured_bytes": 2 * plot.MIB, "pinned_bytes": 0}]
    ax = plot.draw(rows, Figure().subplots())
    assert [bar.get_width() for bar in ax.patches] == [2, 2, 3, 0]
    assert [bar.get_x() for bar in ax.patches] == [0, 0, 2, 2]
    assert ax.lines[0].get_xydata().tolist() == [[2, 0], [2, 1]]
    assert [text.get_text() for text in ax.get_yticklabels()] == ["a", "b"]
