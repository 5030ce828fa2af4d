"""What a directory, a repository or a cache entry is not: an adapter, an encoder, a tokenizer that breaks down."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvprobe.errors import KvprobeError, UnsupportedModelError
from kvprobe.files.jsonfile import read_object
from kvprobe.files.store import home, write_manifest
from kvprobe.models import hub, loading
from kvprobe.results.result import Result
from kvprobe.shape.spec import Spec
from kvprobe.text import passages, texts
from kvprobe.text.tokenizer_panics import guarded
from support.models import document, write_random
from support.tiny import tiny_ids, tiny_model


@pytest.fixture
def llama(tiny_llama, tmp_path):
    """A copy of the tiny llama that a test may damage."""
    return Path(shutil.copytree(tiny_llama, tmp_path / "llama"))


@pytest.fixture
def own_home(monkeypatch, tmp_path):
    monkeypatch.setenv("KVPROBE_HOME", str(tmp_path / "home"))


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def refusal(name, kind=KvprobeError):
    with pytest.raises(kind) as refused:
        loading.load(str(name), device="cpu")
    assert "\n" not in str(refused.value)
    return str(refused.value)


# --- what is no causal model


@pytest.mark.parametrize("base", ["meta-llama/Llama-3.1-8B", "/home/someone/models/Llama-3.1-8B/"])
def test_an_adapter_says_whose_it_is_and_how_to_merge(base, llama, tmp_path):
    adapter = tmp_path / "my-lora"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": base}))
    told = refusal(adapter, UnsupportedModelError)
    assert told.startswith("my-lora is an adapter of ")
    assert "Llama-3.1-8B, not a model by itself" in told
    assert "merge_and_unload().save_pretrained" in told
    assert "someone" not in told
    # beside whole weights too: with peft at hand transformers would put it on top
    shutil.copy(adapter / "adapter_config.json", llama)
    assert "llama is an adapter of" in refusal(llama)


@pytest.mark.parametrize("text", ["{}", '{"base_model_name_or_path": 5}', "[]", "", "[" * 50_000])
def test_an_adapter_that_says_nothing_is_one_line_too(text, tmp_path):
    (tmp_path / "adapter_config.json").write_text(text)
    assert tmp_path.name in refusal(tmp_path)


def test_an_encoder_is_not_a_causal_model(gpt2_tokenizer_files, tmp_path):
    from transformers import BertConfig, BertLMHeadModel

    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    directory = write_random(tmp_path / "bert", "gpt2", gpt2_tokenizer_files)
    with loading.quiet():
        BertLMHeadModel(BertConfig(vocab_size=97, **shape)).save_pretrained(directory)
    told = refusal(directory, UnsupportedModelError)
    assert told.startswith("kvprobe does not read the family bert: it is an encoder and not a causal model")


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"model_type": "bert"}, "bert is an encoder"),
        ({"model_type": "roberta", "is_decoder": False}, "roberta is an encoder"),
        ({"model_type": "bart"}, "bart is an encoder with a decoder"),
        ({"model_type": "t5"}, "has no class for it"),
        ({"model_type": "vit"}, "has no class for it"),
        ({"model_type": "modernbert"}, "has no class for it"),
        ({"model_type": "xlnet"}, "xlnet reads a text from both sides"),
        ({"model_type": "llama", "is_encoder_decoder": True}, "llama is an encoder with a decoder"),
        ({"model_type": "qwen2", "is_causal": False}, "says False for is_causal"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "says True for use_bidirectional_att"),
        ({"model_type": "gemma4_text", "use_bidirectional_attention": "all"}, "says 'all' for use_bidirectional_att"),
        ({"model_type": "gemma3", "text_config": {"use_bidirectional_attention": True}}, "from both sides"),
    ],
)
def test_what_predicts_no_next_token_is_refused_by_its_family(config, why):
    from kvprobe.models.checkpoint_checks import refuse_foreign

    with pytest.raises(UnsupportedModelError, match=f"^mine is not a causal language model.*: .*{why}"):
        refuse_foreign("mine", config)


CAUSAL = ["llama", "gpt2", "gpt_neox", "gpt_neox_japanese", "opt", "mpt", "gemma3", "gemma3_text", "llava", "qwen2_vl"]
CAUSAL += ["mamba", "rwkv", "longcat_flash", "recurrent_gemma", "gpt_oss", "deepseek_v3", "codegen", "cohere2"]


@pytest.mark.parametrize("family", CAUSAL)
def test_what_predicts_the_next_token_is_let_through(family):
    from kvprobe.models.checkpoint_checks import refuse_foreign

    refuse_foreign("mine", {"model_type": family})


@pytest.mark.parametrize(
    "said",
    [{"is_causal": True}, {"is_causal": None}]
    + [{"use_bidirectional_attention": value} for value in (False, None, "vision")],
)
def test_a_text_that_is_read_from_its_beginning_is_let_through(said):
    from kvprobe.models.checkpoint_checks import refuse_foreign

    refuse_foreign("mine", {"model_type": "gemma3_text", **said})


def test_a_decoder_that_reads_images_is_its_text_model_when_it_reads_text(llama):
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    text = LlamaConfig(**json.loads((llama / "config.json").read_text()))
    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14
    )
    plain = tiny_model("llama")
    with loading.quiet():
        both = LlavaForConditionalGeneration(LlavaConfig(text_config=text, vision_config=vision))
        both.model.language_model.load_state_dict(plain.model.state_dict())
        both.lm_head.load_state_dict(plain.lm_head.state_dict())
        both.save_pretrained(llama)
    loaded, ids = loading.load(str(llama), device="cpu"), tiny_ids(12)
    assert torch.equal(loaded.model(ids, use_cache=False).logits, plain(ids, use_cache=False).logits)
    assert loaded.spec.n_layers == 3


# --- whose code


def test_a_stock_class_in_place_of_the_repositorys_code_says_so(llama, main):
    edit(llama / "config.json", auto_map={"AutoModelForCausalLM": "modeling_mine.Mine"})
    code = "transformers' own class, the repository's code is not run"
    assert loading.load(str(llama), device="cpu").record()["code"] == code
    done = main("sinks", llama, "--tokens", 32, "--queries-from", 4, "--format", "json")
    assert document(done)["run"]["code"] == code
    assert f"llama: {code}" in done.stderr


def test_a_repository_without_code_says_nothing_of_it(tiny_llama):
    assert "code" not in loading.load(str(tiny_llama), device="cpu").record()


# --- what the configuration claims


def test_a_family_without_a_closed_form_is_measured_before_it_takes_memory(llama):
    """OLMo 2 with experts' worth of MLP: 2^31 parameters a layer, of which the file holds nothing."""
    edit(llama / "config.json", model_type="olmo2", architectures=["Olmo2ForCausalLM"], intermediate_size=1 << 26)
    assert "config.json of llama describes" in refusal(llama)


@pytest.mark.parametrize("key", ["num_attention_heads", "num_key_value_heads", "num_local_experts", "n_routed_experts"])
def test_counts_beyond_belief_are_refused(llama, key):
    edit(llama / "config.json", **{key: 10**9})
    assert f"says 1,000,000,000 for {key}: more than 10,000" in refusal(llama)


@pytest.mark.parametrize("width", [1.5, -3, 0, "48", True, [48, 48.0, 48], {"a": 1}])
def test_a_width_that_is_no_whole_number_is_refused_whatever_is_asked(llama, width, main):
    edit(llama / "config.json", intermediate_size=width)
    assert "for intermediate_size: it must be a whole number" in refusal(llama)
    done = main("cache", llama, "--context", 64)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1


def test_the_vocabulary_has_other_names_too():
    shape = {"model_type": "chatglm", "num_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
    assert Spec.from_config(shape | {"padded_vocab_size": 65_024}).vocab_size == 65_024


# --- tokenizers

PANICS = r"(a|a|b|.)*(.|.)*(x+x+)+y"


def with_tokenizer(directory, **changes):
    """The directory with other keys in its tokenizer.json."""
    edit(directory / "tokenizer.json", **changes)
    return directory


def split(pattern):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def test_a_pattern_on_which_the_tokenizer_breaks_down_is_one_line(llama, main):
    sequence = [split(PANICS), {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}]
    with_tokenizer(llama, pre_tokenizer={"type": "Sequence", "pretokenizers": sequence})
    done = main("sinks", llama, "--tokens", 32, "--queries-from", 4, "--quiet")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "the tokenizer of llama crashed" in done.stderr


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"model": {"type": "BPE"}}', "[" * 50_000, '{"a":' * 50_000, '{"model": null}', "\0"]
)
def test_a_tokenizer_that_is_none_is_one_line(llama, text):
    (llama / "tokenizer.json").write_text(text)
    assert "llama has no tokenizer that can be loaded" in refusal(llama, UnsupportedModelError)


@pytest.mark.parametrize(
    ("file", "said"),
    [
        (
            "tokenizer_config.json",
            "llama has no tokenizer that can be loaded: tokenizer_config.json of llama is nested too",
        ),
        ("special_tokens_map.json", "llama has no tokenizer that can be loaded: maximum recursion depth"),
        ("generation_config.json", "transformers cannot load llama (RecursionError: "),
    ],
)
def test_the_files_beside_it_are_no_trap_either(llama, file, said):
    (llama / file).write_text('{"a":' * 50_000)
    assert refusal(llama).startswith(said)


def test_a_tokenizer_that_gives_no_ids_is_refused(llama):
    tokenizer = json.loads((llama / "tokenizer.json").read_text())
    with_tokenizer(llama, model=tokenizer["model"] | {"vocab": {}, "merges": []})
    assert refusal(llama) == "the tokenizer of llama gives no ids at all: check its tokenizer.json"


class PanicException(BaseException):
    """Named as the tokenizers library names its own, which cannot be imported."""


def test_a_panic_is_told_and_nothing_else_is_swallowed(capfd):
    with (
        pytest.raises(KvprobeError, match=r"the tokenizer of mine crashed \(no luck\)"),
        guarded("mine"),
    ):
        raise PanicException("no luck\nat all")
    for other in (KeyboardInterrupt, SystemExit, ValueError):
        with pytest.raises(other), guarded("mine"):
            raise other
    with guarded("mine"):
        import os

        os.write(2, b"a warning of somebody's\n")
    assert capfd.readouterr().err == "a warning of somebody's\n"


def test_a_panic_while_a_passage_is_cut_names_the_model():
    class Tokenizer:
        name_or_path = "mine"

        def __call__(self, text, **options):
            raise PanicException("no luck")

    with pytest.raises(KvprobeError, match="the tokenizer of mine crashed"):
        passages.encode(Tokenizer(), texts.read_text("bundled"), n_tokens=8)


# --- JSON, manifests and cache entries

DEEP = ["[" * 50_000, '{"a":' * 50_000]


@pytest.mark.parametrize("text", DEEP)
def test_json_without_end_is_one_line(text, tmp_path, own_home, main):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(KvprobeError, match=r"^mine is nested too deeply to be read$"):
        read_object(path, "mine")
    with pytest.raises(ValueError, match="nested too deeply"):
        Result.from_json(text)
    done = main("cache", tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)


def test_json_that_is_none_is_one_line(tmp_path):
    not_json = "is not JSON"
    for text, told in ((b"\xff", not_json), (b"{", not_json), (b"5", "not a JSON object"), (b"", not_json)):
        (tmp_path / "a.json").write_bytes(text)
        with pytest.raises(KvprobeError, match=f"mine .*{told}"):
            read_object(tmp_path / "a.json", "mine")
    with pytest.raises(KvprobeError, match="mine cannot be read"):
        read_object(tmp_path, "mine")


ODD = [
    '{"files":{}}',
    '{"files":[]}',
    '{"files":{"config.json":5}}',
    '{"files":{"config.json":{"bytes":2}}}',
    "[]",
    "5",
]
# what lies elsewhere, and what has no end
ODD += ['{"files":{"/dev/zero":{"bytes":0,"sha256":"0"}}}', '{"files":{"../tiny":{"bytes":0,"sha256":"0"}}}']
ODD += ['{"files":{},"name":5}', '{"files":{},"name":null}', "null", '"files"', "", *DEEP]


@pytest.mark.parametrize("manifest", ODD)
def test_an_odd_manifest_breaks_neither_the_list_nor_an_unknown_name(manifest, own_home, main):
    for entry in (home() / "gguf" / "00ff", home() / "models" / "smollm2-135m"):
        entry.mkdir(parents=True)
        (entry / "config.json").write_text("{}")
        (entry / "gone").symlink_to("nowhere")
        (entry / "kvprobe.json").write_text(manifest)
    done = main("models")
    assert (done.returncode, done.stdout) == (0, "")
    names = {row["name"]: row["state"] for row in loading.available()}
    assert names.keys() >= {"smollm2-135m", "gemma3-270m"}
    assert "gguf" not in names.values()
    done = main("sinks", "./nowhere")
    assert done.returncode == 1
    assert done.stderr.startswith("kvprobe: there is no directory ./nowhere")


@pytest.mark.parametrize("manifest", ODD)
def test_an_odd_manifest_in_a_models_directory_is_no_fingerprint(manifest, llama, tiny_llama):
    (llama / "kvprobe.json").write_text(manifest)
    assert loading.revision_of(llama) == loading.revision_of(tiny_llama)


def test_a_flipped_bit_under_a_manifest_is_refused_and_a_whole_directory_is_not(llama):
    write_manifest(llama, {"name": "mine"})
    assert loading.load(str(llama), device="cpu").revision.startswith("manifest:")
    weights = llama / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(
        KvprobeError, match=r"is damaged: model.safetensors has the SHA-256 .*; if intended, remove its kvprobe.json"
    ):
        loading.load(str(llama), device="cpu")
    (llama / "kvprobe.json").unlink()
    assert loading.load(str(llama), device="cpu").revision.startswith("sample:")


def test_a_damaged_entry_of_the_hubs_cache_breaks_no_other(llama, tmp_path, monkeypatch, own_home):
    from huggingface_hub import constants

    cache = tmp_path / "hub"
    for name in ("good", "cut", "outside", "odd"):
        snapshot = cache / f"models--some--{name}" / "snapshots" / "c0ffee"
        snapshot.parent.mkdir(parents=True)
        shutil.copytree(llama, snapshot)
        (cache / f"models--some--{name}" / "refs").mkdir()
        (cache / f"models--some--{name}" / "refs" / "main").write_text("c0ffee")
        if name != "good":
            (snapshot / "model.safetensors").unlink()
    index = "model.safetensors.index.json"
    (cache / "models--some--cut" / "snapshots" / "c0ffee" / index).write_text('{"weight_map": {"a": "b.safetensors"}}')
    (cache / "models--some--outside" / "snapshots" / "c0ffee" / index).write_text('{"weight_map": {"a": "../../x"}}')
    (cache / "models--some--odd" / "snapshots" / "c0ffee" / index).write_text(DEEP[0])
    (cache / "models--some").mkdir()
    (cache / "stray").write_text("")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub.cached("some/good") is not None
    assert [row["name"] for row in loading.available() if row["state"] == "hub cache"] == ["some/good"]
    with pytest.raises(KvprobeError, match=r"no model 'some/cut'.*is damaged \(.*b\.safetensors is missing"):
        loading.load("some/cut")


# --- weights that are not there


def test_weights_of_which_some_are_missing_are_named(llama):
    weights = load_file(llama / "model.safetensors")
    (llama / "model.safetensors").unlink()
    names = sorted(weights)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for shard, held in shards.items():
        save_file({key: weights[key] for key in held}, llama / shard, {"format": "pt"})
    assert "llama has model-00001-of-00002.safetensors, but neither model.safetensors nor the model.s" in refusal(llama)
    index = {key: shard for shard, held in shards.items() for key in held}
    (llama / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    assert loading.load(str(llama), device="cpu").spec.n_layers == 3
    (llama / "model-00002-of-00002.safetensors").unlink()
    assert "llama is incomplete: model-00002-of-00002.safetensors is missing" in refusal(llama)


# --- names that are no model's


def test_a_name_that_cannot_be_a_model_says_why(own_home, tmp_path, tiny_llama, main, monkeypatch):
    (tmp_path / "notes.txt").write_text("a text")
    foreign = tmp_path / os.fsdecode(b"caf\xe9")
    shutil.copytree(tiny_llama, foreign)
    for name, why in {
        "": "the name of the model is empty",
        str(tmp_path / "notes.txt"): "is a file, and only files that end in .gguf are models",
        str(foreign): "is not UTF-8: rename it",
    }.items():
        done = main("sinks", name)
        assert (done.returncode, done.stderr.count("\n")) == (1, 1)
        assert why in done.stderr
    done = main("sinks", tiny_llama, "--text", "")
    assert done.stderr.startswith("kvprobe: the name of the text is empty; a file, or one of bundled")
    monkeypatch.setenv("KVPROBE_HOME", str(foreign))
    done = main("models")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "not UTF-8: set it to a writable directory" in done.stderr


def test_a_file_that_cannot_be_written_is_named_as_it_was_given(main):
    done = main("cache", "gpt2", "--out", "/proc/result.json")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("/proc/result.json")
