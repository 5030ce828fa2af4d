"""``kvprobe gqa`` as its users meet it, and its picture."""

import json

import pytest
import torch
from matplotlib.figure import Figure

from kvprobe.experiments import gqa_training
from kvprobe.experiments.gqa_training import Protocol
from kvprobe.models import loading
from kvprobe.plots import gqa as plot
from kvprobe.probes.losses import token_losses
from kvprobe.text.passages import encode
from kvprobe.text.texts import read_text
from kvprobe.training.loop import TrainConfig
from support.models import document, write_random

FIELDS = ["n_kv_heads", "seed", "best_val_loss", "attention_params", "cache_bytes_per_token"]
OF_TRAINING = ["best_step", "last_val_loss"]
WORDS = "it was the best of times it was the worst of times "
TINY = Protocol(
    n_layers=1,
    width=16,
    length=8,
    n_train=40,
    n_valid=8,
    plan=TrainConfig(steps=2, batch=4, validate_every=1),
)


@pytest.fixture
def run(main, monkeypatch, tmp_path):
    monkeypatch.setattr(gqa_training, "QUICK", TINY)
    place = tmp_path / "home"

    def once(*arguments, pooled=False):
        if not pooled:
            monkeypatch.setenv("KVPROBE_HOME", str(place))
        done = main("gqa", *arguments)
        done.home = place
        return done

    return once


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "times.txt"
    path.write_text(WORDS * 5)
    return path


def test_one_document_with_a_row_a_head_count_and_seed(run, corpus):
    found = document(run("--quick", "--corpus", corpus, "--seeds", 2, "--format", "json"))
    assert found["analysis"] == "gqa"
    assert list(found["rows"][0]) == [*FIELDS, *OF_TRAINING]
    for row, cell in zip(found["rows"], found["run"]["cells"], strict=True):
        assert [row["best_step"], row["best_val_loss"]] in cell["validations"]
        assert row["last_val_loss"] == cell["validations"][-1][1]
    assert [(row["n_kv_heads"], row["seed"]) for row in found["rows"]] == [(n, s) for s in (0, 1) for n in (8, 4, 2, 1)]
    assert {row["n_kv_heads"]: row["attention_params"] for row in found["rows"]} == {8: 1024, 4: 768, 2: 640, 1: 576}
    record = found["run"]
    assert (record["corpus"], record["steps"], record["batch"]) == ("times.txt", 2, 4)
    assert record["protocol"].startswith("not the published protocol: a smaller model")
    assert record["summary"][0]["verdict"] is None
    assert [row["n_seeds"] for row in record["summary"]] == [2, 2, 2, 2]
    assert len(record["corpus_sha256"]) == 64
    assert str(corpus) not in json.dumps(found)


def test_quick_says_that_it_is_not_the_protocol(run, corpus):
    done = run("--quick", "--corpus", corpus, "--kv-heads", 8, "--seeds", 1)
    assert done.returncode == 0, done.stderr
    assert "not the published protocol" in done.stderr
    assert "not the published protocol" in done.stdout


def test_finished_cells_are_kept_and_not_run_again(run, corpus, monkeypatch):
    from kvprobe.cells import run_store

    first = document(run("--quick", "--corpus", corpus, "--kv-heads", 8, "--kv-heads", 2, "--format", "json"))
    trained = []
    train = run_store.train
    monkeypatch.setattr(
        run_store, "train", lambda *given, **more: trained.append(more["what"]) or train(*given, **more)
    )
    done = run("--quick", "--corpus", corpus, "--kv-heads", 2, "--kv-heads", 1, "--seeds", 2, "--format", "json")
    found = document(done)
    assert trained == ["1 KV head, seed 0", "1 KV head, seed 1"]
    kept = {(row["n_kv_heads"], row["seed"]): row for row in first["rows"]}
    assert [row for row in found["rows"] if row["n_kv_heads"] == 2] == [kept[2, 0], kept[2, 1]]
    assert all(row["verdict"] is None for row in found["run"]["summary"])
    assert len(list((done.home / "gqa").glob("*.json"))) == 8
    # one that somebody has edited is trained again
    edited = next((done.home / "gqa").glob("kv2-seed0*.json"))
    edited.write_text(edited.read_text().replace('"best_val_loss": ', '"best_val_loss": null, "was": '))
    document(run("--quick", "--corpus", corpus, "--kv-heads", 2, "--seeds", 1, "--format", "json"))
    assert trained.pop() == "2 KV heads, seed 0"
    # other settings are other cells
    document(run("--quick", "--corpus", corpus, "--kv-heads", 2, "--steps", 3, "--seeds", 1, "--format", "json"))
    assert trained[2:] == ["2 KV heads, seed 0"]


def test_an_interrupted_run_says_that_it_goes_on_and_exits_with_130(run, corpus, monkeypatch):
    from kvprobe.cells import run_store

    def interrupted(*_given, **_more):
        raise KeyboardInterrupt

    monkeypatch.setattr(run_store, "train", interrupted)
    done = run("--quick", "--corpus", corpus)
    assert done.returncode == 130
    assert "kept: the same command continues" in done.stderr


def test_uptraining_reports_the_loss_before_right_after_and_at_the_end(run, corpus):
    done = run("--quick", "--corpus", corpus, "--uptrain", 0.5, "--kv-heads", 8, "--kv-heads", 1, "--format", "json")
    found = document(done)
    whole, one = found["rows"][:2]
    assert list(whole) == [*FIELDS, "loss_before", "loss_pooled", "uptrain_steps", "loss_after", *OF_TRAINING]
    assert [row["n_kv_heads"] for row in found["rows"]] == [8, 1] * 3
    # with eight heads of eight nothing is pooled: the control that trains on as long
    assert whole["loss_before"] == whole["loss_pooled"] == one["loss_before"]
    assert one["loss_pooled"] != one["loss_before"]
    assert whole["uptrain_steps"] == 1
    assert one["loss_after"] == one["best_val_loss"] != one["loss_pooled"]


def test_uptrain_without_a_number_is_a_twentieth(run, corpus):
    done = run(
        "--quick", "--corpus", corpus, "--steps", 40, "--kv-heads", 2, "--seeds", 1, "--format", "json", "--uptrain"
    )
    assert document(done)["rows"][0]["uptrain_steps"] == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--kv-heads", 3], "8 query heads cannot share 3 key/value heads evenly"),
        (["--kv-heads", 0], "8 query heads cannot share 0 key/value heads evenly"),
        (["--kv-heads", 8, "--kv-heads", 8], "8 KV heads are given twice"),
        (["--train-windows", 10_000], "times.txt is too small: --train-windows 10,000 and --valid-windows 8, of 8 + 1"),
        (["--corpus", "absent.txt"], "no text named 'absent.txt'"),
    ],
)
def test_what_the_user_can_mend_is_one_line_before_any_step(run, corpus, monkeypatch, arguments, says):
    from kvprobe.cells import run_store

    monkeypatch.setattr(run_store, "train", None)
    text = () if "--corpus" in arguments else ("--corpus", corpus)
    done = run("--quick", "--quiet", *text, *arguments)
    assert done.returncode == 1
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["smollm2-135m"], "MODEL 'smollm2-135m' is only read with --pool"),
        (["smollm2-135m", "--pool", "--quick"], "--quick trains small models: leave out --pool"),
        (["--text", "bundled"], "--text reads a pretrained model: give --pool too"),
        (["--dtype", "float16"], "use bfloat16 or float32"),
        (["--seeds", "0"], "0 is not in the range 1<=x<=1000"),
        (["--uptrain", "2"], "2.0 is not in the range"),
    ],
)
def test_options_that_would_do_nothing_are_refused(run, arguments, says):
    done = run(*arguments)
    assert done.returncode == 2
    assert says in done.stderr


def test_a_pretrained_models_heads_are_pooled(run, tiny_llama):
    found = document(run(tiny_llama, "--pool", "--tokens", 48, "--format", "json", pooled=True))
    whole, one = found["rows"]
    assert list(whole)[:5] == FIELDS
    assert (whole["n_kv_heads"], one["n_kv_heads"], one["seed"]) == (2, 1, None)
    assert (whole["delta"], whole["delta_low"], whole["delta_high"]) == (0, 0, 0)
    assert one["delta_low"] < one["delta"] < one["delta_high"]
    # 3 layers, K and V, one head of 8 float32
    assert (whole["cache_bytes_per_token"], one["cache_bytes_per_token"]) == (384, 192)
    assert found["run"]["n_targets"] == 23

    # another road: the same model with both heads set to their mean, through transformers
    loaded = loading.load(str(tiny_llama), device="cpu")
    ids = encode(loaded.tokenizer, read_text("bundled"), n_tokens=48).ids
    assert float(token_losses(loaded.model, ids, score_from=24).mean()) == pytest.approx(
        whole["best_val_loss"], abs=1e-5
    )
    with torch.no_grad():
        for layer in loaded.model.model.layers:
            for linear in (layer.self_attn.k_proj, layer.self_attn.v_proj):
                first, second = linear.weight.chunk(2)
                linear.weight.copy_(((first + second) / 2).repeat(2, 1))
    expected = float(token_losses(loaded.model, ids, score_from=24).mean())
    assert one["best_val_loss"] == pytest.approx(expected, abs=1e-5)


def test_a_gpt2_goes_down_its_whole_ladder(run, gpt2_random):
    done = run(gpt2_random, "--pool", "--tokens", 32, "--quiet", pooled=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["4", "2", "1"]
    assert "4 KV heads to 1: loss" in lines[-1]
    assert done.stderr == ""
    done = run(gpt2_random, "--pool", "--tokens", 32, "--kv-heads", 3, "--quiet", pooled=True)
    assert done.returncode == 1
    assert "--kv-heads: 4 key/value heads cannot be pooled to 3 evenly: it can be 1, 2, 4" in done.stderr


def test_one_kv_head_leaves_nothing_to_pool(run, gpt2_tokenizer_files, tmp_path):
    model = write_random(tmp_path / "mqa", "llama", gpt2_tokenizer_files, num_key_value_heads=1)
    done = run(model, "--pool", "--tokens", 32, "--quiet", pooled=True)
    assert done.returncode == 1
    assert "mqa has one KV head for all its query heads" in done.stderr


@pytest.mark.smollm2
def test_smollm2_loses_far_more_than_a_nat_when_its_three_kv_heads_become_one(run, smollm2):
    found = document(run("smollm2-135m", "--pool", "--tokens", 128, "--format", "json", pooled=True))
    assert [row["n_kv_heads"] for row in found["rows"]] == [3, 1]
    assert found["rows"][1]["delta_low"] > 1


def test_the_plot_is_written(run, corpus, tmp_path):
    picture = tmp_path / "gqa.svg"
    done = run("--quick", "--corpus", corpus, "--kv-heads", 8, "--kv-heads", 1, "--quiet", "--plot", picture)
    assert done.returncode == 0, done.stderr
    # K and V of one layer, heads of 2, float32
    for label in ("128 B", "8 KV heads", "16 B", "1 KV head"):
        assert f">{label}<" in picture.read_text()


def summary_row(n, mean, low, high):
    return {"n_kv_heads": n, "cache_bytes_per_token": 1536 * n, "mean": mean, "low": low, "high": high}


def test_the_picture_shows_the_table():
    rows = [summary_row(8, 1.5, 1.45, 1.55), summary_row(1, 1.6, None, None), summary_row(2, 1.4, 1.3, 1.6)]
    cells = [{"cache_bytes_per_token": 1536, "best_val_loss": 1.6}]
    ax = plot.draw(rows, Figure().subplots(), cells=cells)
    line, *_ = ax.get_lines()
    assert line.get_xydata().tolist() == [[1536, 1.6], [3072, 1.4], [12288, 1.5]]
    bars = ax.containers[0].lines[2][0].get_segments()
    assert [bar.tolist() for bar in bars] == [
        [[3072, pytest.approx(1.3)], [3072, pytest.approx(1.6)]],
        [[12288, pytest.approx(1.45)], [12288, pytest.approx(1.55)]],
    ]
    assert [tick.get_text() for tick in ax.get_xticklabels()] == [
        "1.50 KiB\n1 KV head", "3 KiB\n2 KV heads", "12 KiB\n8 KV heads",
    ]  # fmt: skip
    assert [line.get_ydata().tolist() for line in ax.get_lines() if line.get_label() == "one seed"] == [[1.6]]


@pytest.mark.parametrize(
    ("seeds", "kind", "name", "loss"),
    [
        ((3, 3), "characters", "mean over 3 seeds", "best validation loss (nat per character)"),
        ((2, 3), "tokens", "mean over 2 to 3 seeds", "best validation loss (nat per token)"),
        ((1, 1), "characters", "one seed each", "best validation loss (nat per character)"),
    ],
)
def test_the_picture_of_a_training_says_over_how_many_seeds_and_of_what(seeds, kind, name, loss):
    rows = [summary_row(n, 1.5, 1.4, 1.6) | {"n_seeds": n_seeds} for n, n_seeds in zip((8, 1), seeds, strict=True)]
    cells = [{"cache_bytes_per_token": 1536, "best_val_loss": 1.6}]
    ax = plot.draw_training(cells, {"summary": rows, "corpus_kind": kind}, Figure().subplots())
    labels = [line.get_label() for line in ax.get_lines()]
    assert labels[0] == name
    assert ("one seed" in labels) is (max(seeds) > 1)
    assert ax.get_ylabel() == loss


def test_head_counts_that_do_not_divide_are_refused_before_a_text_is_read(run, monkeypatch):
    from kvprobe.text import texts

    monkeypatch.setattr(texts, "read_text", None)
    done = run("--kv-heads", 3)
    assert (done.returncode, done.stdout) == (1, "")
    said = "--kv-heads: 8 query heads cannot share 3 key/value heads evenly: use 8, 4, 2, 1"
    assert done.stderr == f"kvprobe: {said}\n"


def test_quick_needs_no_network_and_no_text_of_the_users(run, monkeypatch):
    def connect(*_, **__):
        raise AssertionError("the network was asked")

    monkeypatch.setattr("socket.socket.connect", connect)
    found = document(run("--quick", "--kv-heads", 1, "--seeds", 1, "--format", "json", "--quiet"))
    assert found["run"]["corpus"] == "time-machine"
    # what hours of the published training read too
    assert found["run"]["corpus_sha256"] == "4149e15a170aa94068969282e8b2cee7aaab0d889bf1c0d684378177040267dd"
