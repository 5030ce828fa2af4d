"""The published small GPT at fewer KV heads: its numbers without training, and the study on a tiny protocol."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import filelock
import pytest
import torch
from safetensors.torch import load_file

from analyses import gqa as study
from analyses import train_speed
from kvprobe.cells.run_store import FORMAT, RunStore, TrainingRun, finish_all, gpt_config, shape_row
from kvprobe.errors import KvprobeError
from kvprobe.experiments.gqa import sentences
from kvprobe.experiments.gqa_training import QUICK, Protocol, cells, summary, words_of
from kvprobe.results.result import Result
from kvprobe.text.corpus import LETTERS, Corpus, characters
from kvprobe.text.texts import Text
from kvprobe.training import loop
from kvprobe.training.checkpoint import Snapshot
from kvprobe.training.loop import TrainConfig, gradients, seeded, train, validate

TINY = Protocol(
    n_layers=1, width=16, length=8, n_train=40, n_valid=8, plan=TrainConfig(steps=3, batch=4, validate_every=2)
)
WORDS = "it was the best of times it was the worst of times "


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "times.txt"
    path.write_text(WORDS * 5)
    return str(path)


def corpus():
    return characters(Text("times", "", WORDS * 5), length=8, n_train=40, n_valid=8)


@pytest.mark.parametrize(
    ("n_kv_heads", "parameters", "bytes_a_layer"),
    [(8, 262_144, 2048), (4, 196_608, 1024), (2, 163_840, 512), (1, 147_456, 256)],
)
def test_the_module_table_to_the_unit(n_kv_heads, parameters, bytes_a_layer):
    config = gpt_config(n_kv_heads, vocab=28)
    decoder = seeded(config, seed=0)
    attention = decoder.blocks[0].attention
    assert sum(parameter.numel() for parameter in attention.parameters()) == parameters
    cache = decoder.full_cache(100)
    storages = {
        buffer.untyped_storage().data_ptr(): buffer.untyped_storage().nbytes()
        for one in cache.buffers()
        for buffer in (one.keys, one.values)
    }
    assert sum(storages.values()) == 100 * 6 * bytes_a_layer
    corpus = Corpus("c", "", "ids", 28, torch.zeros(300, dtype=torch.long), n_train=64, n_valid=1)
    (cell,) = cells(corpus, Protocol(n_train=64, n_valid=1), kv_heads=[n_kv_heads], seeds=[0])
    assert cell.config == config
    assert shape_row(config) == {"attention_params": parameters, "cache_bytes_per_token": 6 * bytes_a_layer}


def test_the_protocol_is_the_published_one():
    protocol = Protocol()
    config = gpt_config(8, vocab=len(LETTERS), n_layers=protocol.n_layers, width=protocol.width)
    assert (config.n_layers, config.hidden, config.n_heads, config.mlp_width, config.vocab) == (6, 256, 8, 682, 28)
    assert (config.rotary.theta, config.rotary.interleaved) == (1e4, True)
    assert (config.norm, config.activation) == ("rms", "swiglu")
    assert (config.qkv_bias, config.out_bias, config.mlp_bias) == (False, False, False)
    assert config.tied_head
    assert seeded(config, seed=0).embedding.weight.std().item() == pytest.approx(0.02, rel=0.05)
    plan = protocol.plan
    assert (plan.batch, plan.learning_rate, plan.schedule, plan.steps) == (64, 1e-3, "constant", 600)
    assert (plan.weight_decay, plan.clip, plan.warm_up, plan.dtype, plan.validate_every) == (0, None, 0, "float32", 100)
    assert (protocol.n_train, protocol.n_valid) == (100_000, 3_000)


@pytest.mark.parametrize(
    ("changed", "corpus_changed", "says"),
    [
        ({}, {}, "the published protocol"),
        ({"n_layers": 1}, {}, "not the published"),
        ({"width": 16}, {}, "not the published"),
        ({"plan": TrainConfig(steps=3)}, {}, "not the published"),
        ({}, {"length": 64}, "not the published"),
        ({"length": 64}, {"length": 64}, "not the published"),
        ({}, {"n_train": 99}, "not the published"),
        ({}, {"n_valid": 99}, "not the published"),
        ({}, {"name": "times.txt"}, "not the published"),
        ({}, {"kind": "tokens"}, "not the published"),
    ],
)
def test_only_every_published_setting_is_the_published_protocol(changed, corpus_changed, says):
    ids = torch.zeros(103_128, dtype=torch.long)
    text = replace(Corpus("time-machine", "", "characters", 28, ids), **corpus_changed)
    assert words_of(replace(Protocol(), **changed), text).startswith(says)


def test_quick_changed_is_no_longer_called_quick():
    text = Corpus("time-machine", "", "characters", 28, torch.zeros(103_128, dtype=torch.long))
    assert "fewer steps" in words_of(QUICK, text)
    assert "settings" in words_of(replace(QUICK, plan=replace(QUICK.plan, steps=6000)), text)


def test_cells_of_the_protocol_that_were_trained_are_found_again():
    # a renamed field, or another default of one that stands, would orphan what hours have trained
    trained = [*(Path(study.__file__).parents[1] / "results/gqa").glob("*.json")]
    sha256 = json.loads(trained[0].read_text())["identity"]["corpus"]["corpus_sha256"]
    text = Corpus("time-machine", sha256, "characters", 28, torch.zeros(103_128, dtype=torch.long))
    wanted = {cell.name: cell for cell in cells(text, Protocol(), kv_heads=study.KV_HEADS, seeds=range(study.SEEDS))}
    assert {path.stem for path in trained} <= wanted.keys()
    for path in trained:
        assert RunStore(path.parent).read(wanted[path.stem]) is not None


def test_a_default_that_changes_would_serve_old_cells_as_new_ones():
    # identities leave defaults out: with another default here, cells.FORMAT must rise
    assert asdict(TrainConfig()) == {
        "steps": 600, "batch": 64, "micro_batch": 8, "learning_rate": 1e-3, "schedule": "constant", "warm_up": 0,
        "floor": 0.0, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "clip": None, "validate_every": 100,
        "dtype": "float32", "seed": 0, "skip": 0,
    }  # fmt: skip
    assert asdict(gpt_config(8, vocab=28)) == {
        "n_layers": 6, "n_heads": 8, "n_kv_heads": 8, "head_dim": 32, "hidden": 256, "mlp_width": 682, "vocab": 28,
        "max_positions": 128, "rotary": {"theta": 1e4, "frequencies": None, "scale": 1.0, "interleaved": True},
        "local_rotary": None, "windows": (), "norm": "rms", "norm_eps": 1e-5, "norm_offset": 0.0, "post_norms": False,
        "qk_norm": False, "activation": "swiglu", "qkv_bias": False, "out_bias": False, "mlp_bias": False,
        "scale": None, "scale_by_layer": False, "embedding_scale": 1.0, "tied_head": True, "final_softcap": None,
    }  # fmt: skip
    assert FORMAT == 1


def test_the_study_has_every_cell_and_its_record_names_those_that_are_missing(tmp_path, text):
    settings = {"text": text, "protocol": TINY, "seeds": 2}
    store = tmp_path / "cells"
    with pytest.raises(KvprobeError, match=f"none of these models is in {re.escape(str(store))}: name the dir"):
        study.run(store, **settings, collect=True)
    some = study.run(store, **settings | {"seeds": 1}, kv_heads=(8, 2))
    assert [(row["n_kv_heads"], row["seed"]) for row in some.rows] == [(8, 0), (2, 0)]
    assert some.run["missing"] == []
    assert [cell["validations"][-1][0] for cell in some.run["cells"]] == [3, 3]
    collected = study.run(store, **settings, kv_heads=(8, 2), collect=True)
    assert collected.rows == some.rows
    assert collected.run["missing"] == ["8 KV heads, seed 1", "2 KV heads, seed 1"]
    assert Result.from_json(collected.to_json()) == collected


def test_batches_and_seeds_are_paired_and_best_is_the_lowest_validation(tmp_path):
    store = RunStore(tmp_path)
    kept = finish_all(cells(corpus(), TINY, kv_heads=(8, 1), seeds=(4,)), store)
    for found in kept:
        assert found["row"]["best_val_loss"] == min(loss for _, loss in found["validations"])
        assert [step for step, _ in found["validations"]] == [2, 3]
    assert {found["identity"]["seed"] for found in kept} == {4}


def test_models_of_one_seed_read_the_same_batches_in_the_same_order(monkeypatch):
    read = {}
    for n_kv_heads in (8, 1):
        seen = read[n_kv_heads] = []

        def watch(decoder, windows, plan, seen=seen):
            seen.append(windows)
            return gradients(decoder, windows, plan)

        monkeypatch.setattr(loop, "gradients", watch)
        train(seeded(gpt_config(n_kv_heads, vocab=28, length=8, n_layers=1, width=16), seed=4), corpus(), TINY.plan)
    assert len(read[8]) == TINY.plan.steps
    assert all(torch.equal(one, other) for one, other in zip(read[8], read[1], strict=True))
    assert not torch.equal(read[8][0], read[8][1])


def test_uptraining_goes_on_with_the_batches_that_the_parent_would_have_read_next():
    (whole,) = cells(corpus(), TINY, kv_heads=(8,), seeds=(0,))
    child = whole.uptrained(1, steps=1)
    assert (child.plan.skip, child.plan.steps) == (TINY.plan.steps, 1)
    assert child.uptrained(1, steps=2).plan.skip == TINY.plan.steps + 1


def test_a_cell_without_its_parent_is_refused(tmp_path):
    (whole,) = cells(corpus(), TINY, kv_heads=(8,), seeds=(0,))
    with pytest.raises(ValueError, match="the multi-head cell from which 1 KV head, seed 0, uptrained continues is"):
        finish_all([whole.uptrained(1, steps=1)], RunStore(tmp_path))


def test_a_finished_cell_leaves_no_lock(tmp_path):
    finish_all(cells(corpus(), TINY, kv_heads=(2,), seeds=(0,)), RunStore(tmp_path))
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]


def test_a_cell_that_another_process_trains_is_left_to_it(tmp_path):
    store, (cell,) = RunStore(tmp_path), cells(corpus(), TINY, kv_heads=(2,), seeds=(0,))
    with filelock.FileLock(tmp_path / f".{cell.name}.lock"):
        assert store.finish(cell) is None
    assert store.finish(cell)["row"]["n_kv_heads"] == 2


def test_a_kept_file_that_is_cut_or_of_other_settings_is_no_result(tmp_path):
    store, (cell,) = RunStore(tmp_path), cells(corpus(), TINY, kv_heads=(2,), seeds=(0,))
    first = store.finish(cell)
    path = tmp_path / f"{cell.name}.json"
    assert store.read(cell) == json.loads(path.read_text()) == first
    path.write_text(path.read_text()[:100])
    assert store.read(cell) is None
    assert store.finish(cell)["row"] == first["row"]
    path.write_text(json.dumps(first | {"identity": {}}))
    assert store.read(cell) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("best_val_loss", 0.5), ("best_val_loss", -4), ("best_val_loss", True), ("best_val_loss", None),
        ("seed", 77), ("n_kv_heads", 8), ("attention_params", 1), ("cache_bytes_per_token", 1), ("zzz", 1),
    ],
)  # fmt: skip
def test_a_row_that_somebody_has_edited_is_no_result(tmp_path, field, value):
    store, (cell,) = RunStore(tmp_path), cells(corpus(), TINY, kv_heads=(2,), seeds=(0,))
    kept = store.finish(cell)
    (tmp_path / f"{cell.name}.json").write_text(json.dumps(kept | {"row": kept["row"] | {field: value}}))
    assert store.read(cell) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("validations", 1), ("validations", []), ("validations", [[2, 1.0]]), ("run", "x"), ("run", {}),
        ("seconds", "x"), ("seconds", None), ("resumed", None), ("row", []),
    ],
)  # fmt: skip
def test_a_cell_that_lost_a_part_is_no_result(tmp_path, field, value):
    store, (cell,) = RunStore(tmp_path), cells(corpus(), TINY, kv_heads=(2,), seeds=(0,))
    path, kept = tmp_path / f"{cell.name}.json", store.finish(cell)
    path.write_text(json.dumps(kept | {field: value}))
    assert store.read(cell) is None
    del kept[field]
    path.write_text(json.dumps(kept))
    assert store.read(cell) is None


def test_a_file_beside_a_finished_cell_that_is_none_of_ours_stays(tmp_path):
    store, (cell,) = RunStore(tmp_path), cells(corpus(), TINY, kv_heads=(2,), seeds=(0,))
    first, other = store.finish(cell), tmp_path / f"{cell.name}.safetensors"
    other.write_bytes(b"mine")
    assert store.finish(cell) == first
    assert other.read_bytes() == b"mine"


def test_weights_that_are_not_the_cells_are_not_uptrained(tmp_path):
    store, (whole,) = RunStore(tmp_path), cells(corpus(), TINY, kv_heads=(8,), seeds=(0,))
    store.finish(whole)
    snapshot = Snapshot(tmp_path / f"{whole.name}.safetensors", whole.identity)
    saved, tensors = snapshot.read()
    for changed, words in (
        (
            {name: torch.zeros_like(tensor) for name, tensor in tensors.items()},
            "a loss of 3.332, but training ended at",
        ),
        ({name: tensor[:1] for name, tensor in tensors.items()}, "is not a snapshot of a training run that"),
        ({name: tensor for name, tensor in tensors.items() if "embedding" not in name}, "is not a snapshot of a"),
    ):
        snapshot.write(saved, changed)
        with pytest.raises(KvprobeError, match=words):
            store.finish(whole.uptrained(1, steps=1))


def test_every_setting_gives_a_cell_a_name_of_its_own():
    base = TrainingRun(gpt_config(2, vocab=28, length=8, n_layers=1, width=16), corpus(), TINY.plan)
    others = [
        replace(base, config=replace(base.config, n_layers=2)),
        replace(base, plan=replace(base.plan, seed=1)),
        replace(base, plan=replace(base.plan, learning_rate=2e-3)),
        replace(base, corpus=replace(base.corpus, n_valid=7)),
        replace(base, corpus=replace(base.corpus, sha256="other")),
        replace(base, parent=base),
        replace(base, device="cuda"),
    ]
    assert len({cell.name for cell in [base, *others]}) == 8


def test_weights_of_a_multi_head_cell_are_kept_and_missing_ones_are_said(tmp_path):
    store = RunStore(tmp_path)
    whole, one = cells(corpus(), TINY, kv_heads=(8, 1), seeds=(0,))
    finish_all([whole, one], store)
    assert [path.name for path in tmp_path.glob("*.safetensors")] == [f"{whole.name}.safetensors"]
    kept = load_file(tmp_path / f"{whole.name}.safetensors")
    assert {name.split("/")[0] for name in kept} == {"weights"}
    assert validate(store.weights(whole), whole.corpus, whole.plan) == store.read(whole)["validations"][-1][1]
    child = whole.uptrained(1, steps=1)
    (tmp_path / f"{whole.name}.safetensors").unlink()
    with pytest.raises(KvprobeError, match="the weights of 8 KV heads, seed 0 are no longer in"):
        store.finish(child)


def test_the_summary_pairs_by_seed_over_the_seeds_that_both_have():
    rows = [row_of(8, 0, 1.5), row_of(8, 1, 1.6), row_of(1, 1, 1.601), row_of(1, 0, 1.499), row_of(1, 2, 3.0)]
    whole, one, two = summary([*rows, row_of(2, 0, 1.5, best_step=300)], margin=0.05)
    assert (whole["mean"], whole["n_seeds"], whole["verdict"]) == (pytest.approx(1.55), 2, None)
    # t(0.975, 1) = 12.7062 times the standard error 0.05: the interval of a mean is of 95 %
    assert (whole["low"], whole["high"]) == (pytest.approx(1.55 - 0.63531, abs=1e-5), pytest.approx(2.18531, abs=1e-5))
    assert (one["mean"], one["n_seeds"], one["n_pairs"]) == (pytest.approx(2.0333333), 3, 2)
    assert (whole["n_pairs"], two["n_pairs"]) == (None, 1)
    assert (whole["best_steps"], two["best_steps"], whole["last"]) == ([100, 200], [300, 300], pytest.approx(2.05))
    assert one["difference"] == pytest.approx(0.0)
    # t(0.95, 1) = 6.3138 times the standard error 0.001
    assert one["difference_high"] == pytest.approx(0.0063138, abs=1e-6)
    assert one["verdict"] == "equivalent"
    assert (two["low"], two["difference_low"], two["verdict"]) == (None, None, "undecided")


def row_of(n, seed, loss, best_step=None):
    best = {"best_val_loss": loss, "best_step": best_step or 100 * (seed + 1), "last_val_loss": loss + 0.5}
    return {"n_kv_heads": n, "seed": seed, "cache_bytes_per_token": n, **best}


def test_the_sentences_say_which_step_was_best_and_over_how_many_pairs():
    shared = {"pool": False, "corpus": "c", "steps": 300, "protocol": "p", "n_heads": 8, "kv_heads": [8, 1]}
    shared |= {"margin": 0.05, "uptrain": None, "missing": []}
    rows = [row_of(8, 0, 1.5), row_of(8, 1, 1.6), row_of(1, 1, 1.601), row_of(1, 0, 1.499), row_of(1, 2, 3.0)]
    _, whole, one = sentences(Result("gqa", rows, shared | {"summary": summary(rows, margin=0.05)}))
    assert whole.startswith("8 KV heads: best validation loss 1.550 (")
    assert whole.endswith(", 2 seeds; at steps 100 to 200, 2.050 after the last)")
    assert "; against multi-head over the 2 seeds of both +0.000 nat a token (90 %" in one
    # no seed in common: said, and not passed over
    rows = [row_of(8, 0, 1.5), row_of(1, 1, 1.6)]
    _, _, one = sentences(Result("gqa", rows, shared | {"summary": summary(rows, margin=0.05)}))
    assert one.endswith("; at step 200, 2.100 after the last); not compared: no seed in common with multi-head")


def test_the_speed_benchmark_times_models_of_one_size():
    result = train_speed.run(n_layers=1, width=16, length=8, batch=4, threads=1, repeats=2)
    assert [row["way"] for row in result.rows] == [train_speed.OURS, train_speed.PLAIN, train_speed.SAME_HABITS]
    assert len({row["parameters"] for row in result.rows}) == 1
    assert result.rows[0]["ratio"] == 1
    for row in result.rows:
        assert row["tokens_per_s"] == pytest.approx(4 * 8 / row["ms_median"] * 1e3)
