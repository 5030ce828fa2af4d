"""Each recipe runs, and gives what another road gives."""

import json
import math
import runpy
from pathlib import Path

import pytest
import torch

import kvprobe
from kvprobe.experiments.lowrank import Lowrank
from kvprobe.experiments.window import Window
from support.harness import FILLER, harness, its_own_warnings, write_passwords
from support.models import write_random
from support.notebooks import executed, outputs

RECIPES = Path(__file__).parents[2] / "recipes"
NOTEBOOK = RECIPES / "notebook.ipynb"
# one in printable ASCII, each character a token of the tiny models
PROMPT = "Boats came in with the tide, and people carried baskets of fish to market."


def recipe(name):
    return runpy.run_path(str(RECIPES / f"{name}.py"))["run"]


def test_each_is_short_and_begins_with_its_question():
    files = sorted(RECIPES.glob("*.py"))
    assert [path.stem for path in files] == ["frames", "hf_generate", "lm_eval_both_ways", "model_in_memory"]
    for path in files:
        lines = path.read_text(encoding="utf-8").splitlines()
        assert len(lines) <= 30
        assert "?" in lines[0]


def test_generate_with_a_cache_of_its_own_writes_what_our_rolling_cache_writes(gpt2_random):
    made = recipe("hf_generate")(str(gpt2_random), FILLER, max_new_tokens=16)
    ours = {"max_new_tokens": 16, "engine": "torch"}
    rolling = kvprobe.generate(str(gpt2_random), FILLER, window=64, n_sink=0, positions="absolute", **ours)
    assert made == list(rolling.token_ids[0])
    assert made != list(kvprobe.generate(str(gpt2_random), FILLER, **ours).token_ids[0])


def test_models_in_memory_have_the_losses_that_they_themselves_say(tiny_llama):
    losses = recipe("model_in_memory")(str(tiny_llama), PROMPT, steps=2, rate=0.01)
    loaded = kvprobe.load(str(tiny_llama))
    model, ids = loaded.model, loaded.tokenizer(PROMPT, return_tensors="pt").input_ids
    start = {name: value.clone() for name, value in model.state_dict().items()}
    steps = [model(ids, labels=ids).loss.item()]
    for _ in range(2):
        model.requires_grad_(True)(ids, labels=ids).loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad
        model.zero_grad()
        steps.append(model(ids, labels=ids).loss.item())
    with torch.no_grad():
        for name, value in model.state_dict().items():
            value.lerp_(start[name], 0.5)
    between = model(ids, labels=ids).loss.item()
    wanted = {"before": steps[0], "tuned": steps[2], "merged": between}
    assert losses == pytest.approx(wanted, abs=1e-5)
    assert losses["tuned"] < losses["merged"] < losses["before"]


def test_generate_stops_at_a_text_inside_the_block_as_outside(gpt2_tokenizer_files, tmp_path):
    loaded = kvprobe.load(str(write_random(tmp_path / "llama", "llama", gpt2_tokenizer_files)))
    read = loaded.tokenizer(PROMPT, return_tensors="pt")
    how = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    made = loaded.model.generate(**read, **how)[0, read.input_ids.shape[1] :]
    stop = loaded.tokenizer.decode(made[3:5])
    how |= {"stop_strings": [stop], "tokenizer": loaded.tokenizer}
    plain = loaded.model.generate(**read, **how)
    with kvprobe.attending(loaded.model, lambda call: call.attend()):
        inside = loaded.model.generate(**read, **how)
    assert inside.tolist() == plain.tolist()
    assert plain.shape[1] < read.input_ids.shape[1] + 12


def test_the_pivot_has_each_measurement_in_its_place(gpt2_tokenizer_files, tmp_path):
    names = [str(write_random(tmp_path / family, family, gpt2_tokenizer_files)) for family in ("llama", "qwen3")]
    table = recipe("frames")(*names, tokens=96)
    assert [*table.columns] == ["llama", "qwen3"]
    assert [*table.index] == [("lowrank", 4), ("lowrank", 8), ("window", 32), ("window", 64)]
    for name in names:
        subject = kvprobe.prepare(name, tokens=96)
        window = Window(windows=(64,), sinks=(4,)).run(subject).rows[1]["delta"]
        rank = Lowrank(ranks=(8,)).run(subject).rows[-1]["delta"]
        assert table[Path(name).name]["window", 64] == pytest.approx(window, abs=1e-9)
        assert table[Path(name).name]["lowrank", 8] == pytest.approx(rank, abs=1e-9)


def test_the_harness_answers_alike_by_all_three_ways(gpt2_random, tmp_path):
    harness()
    with its_own_warnings():
        ways = recipe("lm_eval_both_ways")(str(gpt2_random), "passwords", str(write_passwords(tmp_path, n_items=6)))
    around, ours, cached = ways["around"], ways["ours"], ways["cached"]
    assert around["sample_len"] == 6
    assert around["acc,none"] == ours["acc,none"] == cached["acc,none"]
    assert math.isfinite(around["acc,none"])


def test_the_notebook_is_kept_without_outputs():
    assert outputs(json.loads(NOTEBOOK.read_text(encoding="utf-8"))) == []


@pytest.mark.smollm2
@pytest.mark.usefixtures("smollm2")
def test_the_notebook_shows_a_table_and_a_picture(tmp_path, monkeypatch):
    shown = [kind for output in outputs(executed(NOTEBOOK, tmp_path, monkeypatch)) for kind in output.get("data", {})]
    assert (shown.count("text/html"), shown.count("image/png")) == (1, 1)
