"""The published small GPT at fewer KV heads: its numbers without training, and the study on a tiny protocol."""

import json
from dataclasses import replace

import filelock
import pytest
import torch
from safetensors.torch import load_file

from analyses import gqa as study
from analyses import train_speed
from kvprobe.cells import Cell, Shelf, config_of, finish_all, shape_row
from kvprobe.corpus import LETTERS, Corpus, characters
from kvprobe.errors import KvprobeError
from kvprobe.experiments.gqa import Protocol, cells, summary
from kvprobe.results import Result
from kvprobe.texts import Text
from kvprobe.training import Plan, seeded, validate

TINY = Protocol(n_layers=1, width=16, n_train=40, n_valid=8, plan=Plan(steps=3, batch=4, validate_every=2))
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
    config = config_of(n_kv_heads, vocab=28)
    decoder = seeded(config, seed=0)
    attention = decoder.blocks[0].attention
    assert sum(parameter.numel() for parameter in attention.parameters()) == parameters
    cache = decoder.full_cache(100)
    storages = {buffer.untyped_storage().data_ptr(): buffer.untyped_storage().nbytes() for buffer in cache._buffers()}
    assert sum(storages.values()) == 100 * 6 * bytes_a_layer
    corpus = Corpus("c", "", "ids", 28, torch.zeros(300, dtype=torch.long), n_train=64, n_valid=1)
    (cell,) = cells(corpus, Protocol(n_train=64, n_valid=1), kv_heads=[n_kv_heads], seeds=[0])
    assert cell.config == config
    assert shape_row(config) == {"attention_params": parameters, "cache_bytes_per_token": 6 * bytes_a_layer}


def test_the_protocol_is_the_published_one():
    protocol = Protocol()
    config = config_of(8, vocab=len(LETTERS), n_layers=protocol.n_layers, width=protocol.width)
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


def test_the_study_has_every_cell_and_its_record_names_those_that_are_missing(tmp_path, text):
    settings = {"text": text, "protocol": TINY, "length": 8, "seeds": (0, 1)}
    shelf = tmp_path / "cells"
    with pytest.raises(KvprobeError, match="none of the cells asked for is trained yet"):
        study.run(shelf, **settings, collect=True)
    some = study.run(shelf, **settings | {"seeds": (0,)}, kv_heads=(8, 2))
    assert [(row["n_kv_heads"], row["seed"]) for row in some.rows] == [(8, 0), (2, 0)]
    assert some.run["missing"] == []
    assert [cell["validations"][-1][0] for cell in some.run["cells"]] == [3, 3]
    collected = study.run(shelf, **settings, kv_heads=(8, 2), collect=True)
    assert collected.rows == some.rows
    assert collected.run["missing"] == ["8 KV heads, seed 1", "2 KV heads, seed 1"]
    assert Result.from_json(collected.to_json()) == collected


def test_batches_and_seeds_are_paired_and_best_is_the_lowest_validation(tmp_path):
    shelf = Shelf(tmp_path)
    kept = finish_all(cells(corpus(), TINY, kv_heads=(8, 1), seeds=(4,)), shelf)
    for found in kept:
        assert found["row"]["best_val_loss"] == min(loss for _, loss in found["validations"])
        assert [step for step, _ in found["validations"]] == [2, 3]
    assert {found["identity"]["seed"] for found in kept} == {4}


def test_a_cell_that_another_process_trains_is_left_to_it(tmp_path):
    shelf, (cell,) = Shelf(tmp_path), cells(corpus(), TINY, kv_heads=(2,), seeds=(0,))
    with filelock.FileLock(tmp_path / f".{cell.name}.lock"):
        assert shelf.finish(cell) is None
    assert shelf.finish(cell)["row"]["n_kv_heads"] == 2


def test_a_kept_file_that_is_cut_or_of_other_settings_is_no_result(tmp_path):
    shelf, (cell,) = Shelf(tmp_path), cells(corpus(), TINY, kv_heads=(2,), seeds=(0,))
    first = shelf.finish(cell)
    path = tmp_path / f"{cell.name}.json"
    assert shelf.read(cell) == json.loads(path.read_text()) == first
    path.write_text(path.read_text()[:100])
    assert shelf.read(cell) is None
    assert shelf.finish(cell)["row"] == first["row"]
    path.write_text(json.dumps(first | {"identity": {}}))
    assert shelf.read(cell) is None


def test_every_setting_gives_a_cell_a_name_of_its_own():
    base = Cell(config_of(2, vocab=28, length=8, n_layers=1, width=16), corpus(), TINY.plan)
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
    shelf = Shelf(tmp_path)
    whole, one = cells(corpus(), TINY, kv_heads=(8, 1), seeds=(0,))
    finish_all([whole, one], shelf)
    assert [path.name for path in tmp_path.glob("*.safetensors")] == [f"{whole.name}.safetensors"]
    kept = load_file(tmp_path / f"{whole.name}.safetensors")
    assert {name.split("/")[0] for name in kept} == {"weights"}
    assert validate(shelf.weights(whole), whole.corpus, whole.plan) == shelf.read(whole)["validations"][-1][1]
    child = whole.uptrained(1, steps=1)
    (tmp_path / f"{whole.name}.safetensors").unlink()
    with pytest.raises(KvprobeError, match="the weights of 8 KV heads, seed 0 are not in"):
        shelf.finish(child)


def test_the_summary_pairs_by_seed_over_the_seeds_that_both_have():
    def row(n, seed, loss):
        return {"n_kv_heads": n, "seed": seed, "best_val_loss": loss, "cache_bytes_per_token": n}

    rows = [row(8, 0, 1.5), row(8, 1, 1.6), row(1, 1, 1.601), row(1, 0, 1.499), row(1, 2, 3.0), row(2, 0, 1.5)]
    whole, one, two = summary(rows, margin=0.05)
    assert (whole["mean"], whole["n_seeds"], whole["verdict"]) == (pytest.approx(1.55), 2, None)
    assert (one["mean"], one["n_seeds"]) == (pytest.approx(2.0333333), 3)
    assert one["difference"] == pytest.approx(0.0)
    # t(0.95, 1) = 6.3138 times the standard error 0.001
    assert one["difference_high"] == pytest.approx(0.0063138, abs=1e-6)
    assert one["verdict"] == "equivalent"
    assert (two["low"], two["difference_low"], two["verdict"]) == (None, None, "undecided")


def test_the_speed_benchmark_times_models_of_one_size():
    result = train_speed.run(n_layers=1, width=16, length=8, batch=4, threads=1, repeats=2)
    assert [row["way"] for row in result.rows] == [train_speed.OURS, train_speed.PLAIN, train_speed.SAME_HABITS]
    assert len({row["parameters"] for row in result.rows}) == 1
    assert result.rows[0]["ratio"] == 1
    for row in result.rows:
        assert row["tokens_per_s"] == pytest.approx(4 * 8 / row["ms_median"] * 1e3)
