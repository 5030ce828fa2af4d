import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvprobe.errors import KvprobeError, UnsupportedModelError
from kvprobe.files import store
from kvprobe.models import loading, pull
from support.hub import COMMIT, Hub
from support.models import write_gpt2_random, write_random
from support.tiny import tiny_ids, tiny_model

# run apart: the hub client reads its settings once, when it is imported
LOAD = """
import json, sys
from kvprobe.models.loading import load, load_spec
steps = []
try:
    found = {call}(sys.argv[1], progress=lambda what, done, total, unit="": steps.append([what, done, total, unit]))
    if hasattr(found, "model"):
        out = dict(name=found.name, source=found.source, revision=found.revision, n_layers=found.spec.n_layers,
                   first=float(found.model.transformer.wte.weight[0, 0]), ids=found.tokenizer("Hello world").input_ids)
    else:
        out = dict(n_layers=found.n_layers, torch="torch" in sys.modules)
except Exception as error:
    out = dict(error=str(error), kind=type(error).__name__)
print(json.dumps(out | dict(steps=steps)))
"""


def run_apart(name, *, home, endpoint="http://127.0.0.1:1", call="load", **more):
    """What `load` makes of a name in a process with its own caches; nothing but one JSON document on its output."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "KVPROBE_"))}
    environment |= {"HF_HOME": str(home / "hf"), "KVPROBE_HOME": str(home / "kvprobe"), "HF_ENDPOINT": endpoint}
    environment |= {"PYTHONPATH": str(Path(loading.__file__).parents[2]), "OMP_NUM_THREADS": "1"} | more
    run = subprocess.run(
        [sys.executable, "-c", LOAD.replace("{call}", call), name],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stderr == ""
    return json.loads(run.stdout)


@pytest.fixture(autouse=True)
def own_home(monkeypatch, tmp_path, request):
    if "smollm2" not in request.keywords:
        monkeypatch.setenv("KVPROBE_HOME", str(tmp_path / "home"))


@pytest.fixture(scope="module")
def repository(gpt2_random, tmp_path_factory):
    """As the hub has GPT-2: with other frameworks' weights, which nobody wants downloaded."""
    directory = tmp_path_factory.mktemp("repository") / "gpt2"
    shutil.copytree(gpt2_random, directory)
    for other in ("pytorch_model.bin", "tf_model.h5", "model.onnx", "README.md"):
        (directory / other).write_bytes(b"not wanted")
    return directory


# --- directories


def test_a_directory_loads_as_it_was_saved(gpt2_random):
    loaded = loading.load(str(gpt2_random), device="cpu")
    saved = tiny_model("gpt2", vocab_size=50257, bos_token_id=50256, eos_token_id=50256)
    ids = tiny_ids(16)
    assert torch.equal(loaded.model(ids).logits, saved(ids).logits)
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert (loaded.name, loaded.source, loaded.spec.n_layers) == ("gpt2-random", "directory", 3)
    assert loaded.tokenizer("Hello world").input_ids == [15496, 995]
    assert loaded.tokenizer.bos_token == "<|endoftext|>"


def test_dtype_is_float32_whatever_the_checkpoint_has_and_what_is_asked_for(gpt2_random, tmp_path):
    half = tmp_path / "half"
    shutil.copytree(gpt2_random, half)
    loading.load(str(gpt2_random), device="cpu").model.to(torch.bfloat16).save_pretrained(half)
    assert json.loads((half / "config.json").read_text())["dtype"] == "bfloat16"
    assert {p.dtype for p in loading.load(str(half), device="cpu").model.parameters()} == {torch.float32}
    asked = loading.load(str(half), dtype="bfloat16", device="cpu")
    assert {p.dtype for p in asked.model.parameters()} == {torch.bfloat16}
    with pytest.raises(ValueError, match="'float8'"):
        loading.load(str(half), dtype="float8")


def test_the_spec_of_a_directory_needs_no_weights(gpt2_random, tmp_path):
    only = tmp_path / "only-config"
    only.mkdir()
    shutil.copy(gpt2_random / "config.json", only)
    assert loading.load_spec(str(only)) == loading.load(str(gpt2_random), device="cpu").spec
    assert run_apart(str(only), home=tmp_path, call="load_spec") == {"n_layers": 3, "torch": False, "steps": []}


def test_the_revision_of_a_directory_tells_weights_apart(gpt2_random, gpt2_tokenizer_files, tmp_path):
    again = write_gpt2_random(tmp_path / "again", gpt2_tokenizer_files)
    other = write_gpt2_random(tmp_path / "other", gpt2_tokenizer_files, seed=1)
    revision = loading.revision_of(gpt2_random)
    assert revision.startswith("sample:")
    assert loading.revision_of(again) == revision
    assert loading.revision_of(other) != revision


def test_pickled_weights_are_refused_by_file(gpt2_random, tmp_path):
    shutil.copytree(gpt2_random, tmp_path / "pickled")
    (tmp_path / "pickled" / "model.safetensors").rename(tmp_path / "pickled" / "pytorch_model.bin")
    with pytest.raises(UnsupportedModelError, match=r"pickled has only pickled weights \(pytorch_model\.bin\)"):
        loading.load(str(tmp_path / "pickled"))


def test_code_of_the_repository_is_never_run(gpt2_random, tmp_path):
    own = tmp_path / "own-code"
    shutil.copytree(gpt2_random, own)
    config = json.loads((own / "config.json").read_text())
    config |= {"model_type": "novel", "auto_map": {"AutoModelForCausalLM": "modeling_novel.Novel"}}
    (own / "config.json").write_text(json.dumps(config))
    witness = tmp_path / "ran"
    (own / "modeling_novel.py").write_text(f"open({str(witness)!r}, 'w')\nclass Novel: pass\n")
    with pytest.raises(UnsupportedModelError, match=r"own-code needs Python code.*modeling_novel\.Novel"):
        loading.load(str(own))
    # a family that transformers has is loaded as that, whatever else the repository offers
    (own / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}))
    assert type(loading.load(str(own), device="cpu").model).__module__.startswith("transformers.")
    assert not witness.exists()


def test_a_checkpoint_that_lacks_a_weight_is_refused_not_filled_with_random_numbers(gpt2_random, tmp_path):
    from safetensors.torch import load_file, save_file

    lacking = tmp_path / "lacking"
    shutil.copytree(gpt2_random, lacking)
    weights = load_file(lacking / "model.safetensors")
    removed = weights.pop("transformer.h.1.attn.c_attn.weight")
    assert removed.numel()
    save_file(weights, lacking / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(KvprobeError, match=r"lacks 1 of the model's weights, first transformer\.h\.1\.attn\.c_attn"):
        loading.load(str(lacking))


def test_a_safetensors_file_that_was_cut_is_refused(gpt2_random, tmp_path):
    cut = tmp_path / "cut"
    shutil.copytree(gpt2_random, cut)
    file = cut / "model.safetensors"
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(KvprobeError, match="the safetensors of cut are damaged"):
        loading.load(str(cut))
    os.truncate(file, 100)
    with pytest.raises(KvprobeError, match="the safetensors of cut are damaged"):
        loading.load(str(cut))


def test_a_model_beyond_the_free_memory_is_refused_with_both_numbers(gpt2_random, monkeypatch):
    import psutil

    n_elements = sum(p.numel() for p in loading.load(str(gpt2_random), device="cpu").model.parameters())

    class Memory:
        available = 4 * n_elements - 1

    monkeypatch.setattr(psutil, "virtual_memory", Memory)
    with pytest.raises(KvprobeError, match=r"would need 0\.01 GiB .* 0\.01 GiB are free in memory.*bfloat16"):
        loading.load(str(gpt2_random), device="cpu")
    assert loading.load(str(gpt2_random), device="cpu", dtype="bfloat16").dtype == "bfloat16"


@pytest.mark.parametrize("device", ["cuda:63", "nowhere"])
def test_a_device_that_is_not_there_is_named(gpt2_random, device):
    with pytest.raises(KvprobeError, match=f"device {device} cannot be used here"):
        loading.load(str(gpt2_random), device=device)


def test_a_directory_without_a_tokenizer_says_so(gpt2_random, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(gpt2_random, bare)
    for name in ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json"):
        (bare / name).unlink()
    with pytest.raises(UnsupportedModelError, match="bare has no tokenizer"):
        loading.load(str(bare))


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_neox", "deepseek_v3"])
def test_other_families_load_too(family, gpt2_tokenizer_files, tmp_path):
    directory = write_random(tmp_path / family, family, gpt2_tokenizer_files)
    loaded, ids = loading.load(str(directory), device="cpu"), tiny_ids(12)
    assert torch.equal(loaded.model(ids, use_cache=False).logits, tiny_model(family)(ids, use_cache=False).logits)
    assert loaded.spec.family == family
    assert loaded.tokenizer.decode(loaded.tokenizer("abc").input_ids) == "abc"


def test_loading_leaves_the_settings_of_transformers_as_they_were(gpt2_random, capfd):
    from transformers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    loading.load(str(gpt2_random), device="cpu")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before
    assert capfd.readouterr() == ("", "")


# --- names


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "a/b/c"])
def test_what_looks_like_a_path_is_never_asked_of_the_hub(name):
    with pytest.raises(KvprobeError, match=f"there is no directory {name}; no model is on this machine yet; `kvprobe"):
        loading.load(name)


def test_a_name_of_the_catalogue_is_pulled_first():
    with pytest.raises(KvprobeError, match=r"smollm2-135m is not on this machine yet: .*`kvprobe pull smollm2-135m`"):
        loading.load("smollm2-135m")
    with pytest.raises(KvprobeError, match="a tokenizer without weights"):
        loading.load("gpt2-tokenizer")


def test_available_lists_the_catalogue_with_licences():
    rows = {row["name"]: row for row in loading.available()}
    assert rows["smollm2-135m"] | {"what": ""} == {
        "name": "smollm2-135m",
        "kind": "model",
        "state": "not pulled",
        "bytes": None,
        "licence": "Apache-2.0",
        "what": "",
    }
    assert set(pull.CATALOGUE) <= set(rows)


# --- the hub


def test_a_hub_that_does_not_answer_is_asked_once_and_given_seconds(monkeypatch):
    import huggingface_hub
    from huggingface_hub import constants

    asked = []

    def silence(self, repo, *, timeout):
        asked.append((repo, timeout))
        raise TimeoutError

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", silence)
    with pytest.raises(KvprobeError, match=r"could not be reached \(TimeoutError\)"):
        loading.load("nobody/nothing")
    assert asked == [("nobody/nothing", 4.0)]


def test_no_network_is_told_with_what_can_be_loaded(tmp_path):
    out = run_apart("gpt2", home=tmp_path)
    assert out["kind"] == "KvprobeError"
    assert "\n" not in out["error"]
    for part in ("'gpt2'", "http://127.0.0.1:1 could not be reached", "`kvprobe pull NAME` fetches smollm2-135m"):
        assert part in out["error"]


def test_a_hub_model_downloads_with_progress_and_then_needs_no_hub(repository, tmp_path):
    with Hub({"openai-community/gpt2": repository}, aliases={"gpt2": "openai-community/gpt2"}) as hub:
        hub.cut, hub.cuts = 100_000, 1  # a connection that breaks once is taken up again in the same run
        first = run_apart("gpt2", home=tmp_path, endpoint=hub.url)
        fetched = {path.rsplit("/", 1)[1] for verb, path, _ in hub.requests if verb == "GET" and "/resolve/" in path}
    assert len(hub.asked("GET", f"{COMMIT}/model.safetensors")) == 2
    assert (first["name"], first["source"], first["revision"]) == ("gpt2", "hub", COMMIT)
    assert first["first"] == float(loading.load(str(repository), device="cpu").model.transformer.wte.weight[0, 0])
    assert first["ids"] == [15496, 995]
    assert fetched.isdisjoint({"pytorch_model.bin", "tf_model.h5", "model.onnx", "README.md"})
    steps = [step for step in first["steps"] if step[0] == "downloading gpt2" and step[2]]
    total = sum((repository / name).stat().st_size for name in fetched)
    assert steps[-1][1:] == [total, total, "bytes"]
    second = run_apart("gpt2", home=tmp_path, endpoint=hub.url)
    assert {**second, "steps": 0} == {**first, "steps": 0}
    assert not any(step[0].startswith(("asking", "downloading")) for step in second["steps"])


def test_the_spec_of_a_hub_model_downloads_its_configuration_alone(repository, tmp_path):
    with Hub({"someone/small": repository}) as hub:
        assert run_apart("someone/small", home=tmp_path, endpoint=hub.url, call="load_spec")["n_layers"] == 3
        assert {path.rsplit("/", 1)[1] for verb, path, _ in hub.requests if "/resolve/" in path} == {"config.json"}
    assert run_apart("someone/small", home=tmp_path, endpoint=hub.url, call="load_spec")["n_layers"] == 3
    # a configuration alone is no model
    assert "could not be reached" in run_apart("someone/small", home=tmp_path, endpoint=hub.url)["error"]


def test_a_download_cut_in_the_middle_is_mended_by_the_next_run(repository, tmp_path):
    with Hub({"someone/small": repository}) as hub:
        hub.cut, hub.cuts = (repository / "model.safetensors").stat().st_size // 2, 99
        broken = run_apart("someone/small", home=tmp_path, endpoint=hub.url)
        assert "the download of someone/small" in broken["error"]
        assert "broke off" in broken["error"]
        assert not list((tmp_path / "hf").rglob("*.incomplete"))
        hub.cuts = 0
        del hub.requests[:]
        mended = run_apart("someone/small", home=tmp_path, endpoint=hub.url)
        again = {path.rsplit("/", 1)[1] for verb, path, _ in hub.requests if verb == "GET" and "/resolve/" in path}
    assert again == {"model.safetensors"}
    assert mended["first"] == float(loading.load(str(repository), device="cpu").model.transformer.wte.weight[0, 0])


def test_a_file_that_comes_damaged_is_removed_and_told(repository, tmp_path):
    with Hub({"someone/small": repository}) as hub:
        hub.wrong = True
        out = run_apart("someone/small", home=tmp_path, endpoint=hub.url)
    expected = store.sha256(repository / "model.safetensors")
    assert f"model.safetensors of someone/small arrived damaged: expected SHA-256 {expected}" in out["error"]
    assert not list((tmp_path / "hf").rglob("model.safetensors"))
    assert not list((tmp_path / "hf").rglob(expected))


def test_a_hub_repository_with_pickles_alone_is_refused_before_a_download(repository, tmp_path):
    pickled = tmp_path / "pickled"
    shutil.copytree(repository, pickled)
    (pickled / "model.safetensors").unlink()
    with Hub({"someone/pickled": pickled}) as hub:
        out = run_apart("someone/pickled", home=tmp_path, endpoint=hub.url)
        assert out["kind"] == "UnsupportedModelError"
        assert "someone/pickled has only pickled weights (pytorch_model.bin)" in out["error"]
        assert not any("/resolve/" in path for _, path, _ in hub.requests)
        assert "no such repository" in run_apart("someone/other", home=tmp_path, endpoint=hub.url)["error"]


# --- the real models


@pytest.mark.smollm2
def test_smollm2_is_what_its_authors_say(smollm2):
    spec = smollm2.spec
    assert (spec.n_layers, spec.n_heads, spec.n_kv_heads, spec.head_dim) == (30, 9, 3, 64)
    assert (spec.hidden_size, spec.intermediate_size, spec.vocab_size, spec.max_positions) == (576, 1536, 49152, 8192)
    assert (spec.rope_theta, spec.tied) == (100000.0, True)
    assert sum(p.numel() for p in smollm2.model.parameters()) == 134_515_008
    tokenizer = smollm2.tokenizer
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    # digits stand alone, so that the two spaces before one are one token
    assert tokenizer.convert_ids_to_tokens(tokenizer("a  1984").input_ids) == ["a", "ĠĠ", "1", "9", "8", "4"]
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n")


@pytest.mark.smollm2
def test_smollm2_knows_its_capitals(smollm2):
    ids = smollm2.tokenizer("The capital of France is", return_tensors="pt").input_ids
    best = smollm2.model(ids, use_cache=False).logits[0, -1].argmax()
    assert smollm2.tokenizer.decode(best) == " Paris"


def test_converted_gguf_files_are_listed_in_rows_like_the_others(tmp_path, monkeypatch):
    from kvprobe.files.store import write_manifest
    from kvprobe.results.result import Result

    monkeypatch.setenv("KVPROBE_HOME", str(tmp_path))
    directory = tmp_path / "gguf" / "0123abcd"
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    write_manifest(directory, {"name": "mine"})
    rows = Result("models", loading.available()).rows
    assert [row["name"] for row in rows if row["state"] == "gguf"] == ["mine.gguf"]
