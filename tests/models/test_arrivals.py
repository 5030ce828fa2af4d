"""Every tensor of a checkpoint arrives as the number that it stands for, or the checkpoint is refused by name."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvprobe.errors import KvprobeError, UnsupportedModelError
from kvprobe.models import loading
from support.models import write_random
from support.tiny import tiny_ids


@pytest.fixture
def llama(tiny_llama, tmp_path):
    """A copy of the tiny llama that a test may damage, and what changes it."""
    return Checkpoint(shutil.copytree(tiny_llama, tmp_path / "llama"))


class Checkpoint:
    def __init__(self, directory):
        self.directory = Path(directory)
        self.weights = load_file(self.directory / "model.safetensors")

    def load(self, **config):
        """What comes of it with these weights and these keys in its configuration."""
        save_file(self.weights, self.directory / "model.safetensors", {"format": "pt"})
        path = self.directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
        return loading.load(str(self.directory), device="cpu").model

    def refused(self, kind=KvprobeError, **config):
        with pytest.raises(kind) as refused:
            self.load(**config)
        assert "\n" not in str(refused.value)
        return str(refused.value)


def projections(weights):
    return [key for key in weights if key.endswith("_proj.weight")]


def same(one, other):
    ids = tiny_ids(12)
    return torch.equal(one(ids, use_cache=False).logits, other(ids, use_cache=False).logits)


# --- weights that are codes


def test_float8_with_scales_that_nobody_reads_is_refused(llama):
    for key in projections(llama.weights):
        scale = llama.weights[key].abs().max() / 448
        llama.weights |= {key: (llama.weights[key] / scale).to(torch.float8_e4m3fn), f"{key}_scale": scale}
    told = llama.refused(UnsupportedModelError)
    assert re.match(r"llama is quantised without a quantization_config in config\.json \(model\..*, F8_E4M3\)", told)
    (llama.directory / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    assert "llama is quantised as ModelOpt does it (hf_quant_config.json)" in llama.refused(UnsupportedModelError)
    assert "llama is quantised by ModelOpt" in llama.refused(quantization_config={"quant_method": "modelopt"})


@pytest.mark.parametrize("beside", ["weight_scale", "input_scale", "weight_zero_point", "k_scale", "qzeros", "g_idx"])
def test_scales_without_a_word_in_the_configuration_are_refused(llama, beside):
    llama.weights[f"model.layers.1.self_attn.k_proj.{beside}"] = torch.ones(1)
    assert f"k_proj.{beside}, F32" in llama.refused(UnsupportedModelError)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8", "uint8", "int16", "int32", "int64", "bool"])
def test_one_weight_in_codes_is_enough(llama, dtype):
    key = "model.layers.2.mlp.down_proj.weight"
    llama.weights[key] = llama.weights[key].to(getattr(torch, dtype))
    assert key in llama.refused(UnsupportedModelError)


@pytest.mark.parametrize(
    ("said", "by"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}}, "GPTQ"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "AWQ"),
        ({"quantization_config": {"load_in_4bit": True, "quant_method": "bitsandbytes"}}, "bitsandbytes"),
        ({"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"}}, "compressed-"),
        ({"quantization_config": {"quant_method": "novel"}}, "novel"),
        ({"quantization": {"group_size": 64, "bits": 4}}, "MLX"),
        ({"quantization_config": {"group_size": 64, "bits": 4}}, "MLX"),
        ({"quantization_config": "int4"}, "int4"),
    ],
)
def test_a_method_that_is_not_turned_back_here_is_named(llama, said, by):
    told = llama.refused(UnsupportedModelError, **said)
    assert told.startswith(f"llama is quantised by {by}")
    assert "take the checkpoint that it was made from" in told


def test_a_quantization_config_of_nothing_says_nothing(llama, tiny_llama):
    plain = loading.load(str(tiny_llama), device="cpu").model
    assert same(llama.load(quantization_config=None, quantization=None), plain)


def in_blocks(weights, rows=8, columns=8):
    """FP8 as DeepSeek publishes it, and the same numbers multiplied out: a scale for each block of 8 by 8."""
    codes, numbers = dict(weights), dict(weights)
    for key in projections(weights):
        tall, wide = weights[key].shape
        blocks = weights[key].reshape(tall // rows, rows, wide // columns, columns)
        scale = blocks.abs().amax(dim=(1, 3)) / 448
        code = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
        codes |= {key: code.reshape(tall, wide), f"{key}_scale_inv": scale}
        numbers[key] = (code.float() * scale[:, None, :, None]).reshape(tall, wide)
    return codes, numbers


FP8 = {"quant_method": "fp8", "weight_block_size": [8, 8], "activation_scheme": "dynamic"}


def test_fp8_that_transformers_multiplies_out_is_the_same_model(llama):
    codes, llama.weights = in_blocks(llama.weights)
    plain = llama.load()
    llama.weights = codes
    for more in ({}, {"modules_to_not_convert": ["model.layers.1.self_attn.v_proj", "lm_head"]}):
        found = llama.load(quantization_config=FP8 | more)
        assert {parameter.dtype for parameter in found.parameters()} == {torch.float32}
        assert same(found, plain)


def test_fp8_without_one_of_its_scales_is_refused(llama):
    llama.weights, _ = in_blocks(llama.weights)
    key = "model.layers.1.self_attn.v_proj.weight"
    del llama.weights[f"{key}_scale_inv"]
    assert f"nothing says how {key} (F8_E4M3) is scaled" in llama.refused(quantization_config=FP8)


@pytest.mark.parametrize("shape", [(1, 1), (), (4, 1), (8, 8), (2, 4, 4)])
def test_fp8_with_scales_that_do_not_fit_the_declared_blocks_is_refused(llama, shape):
    llama.weights, _ = in_blocks(llama.weights)
    key = "model.layers.1.self_attn.q_proj.weight"
    assert llama.weights[f"{key}_scale_inv"].shape == (4, 4)
    llama.weights[f"{key}_scale_inv"] = torch.ones(shape)
    told = llama.refused(UnsupportedModelError, quantization_config=FP8)
    assert f"{key}_scale_inv of the shape [{', '.join(map(str, shape))}], which does not fit {key} of" in told
    assert "[32, 32] by a weight_block_size of 8 × 8" in told


def test_fp8_in_blocks_of_another_size_than_declared_is_refused(llama):
    llama.weights, _ = in_blocks(llama.weights)
    for size in ([16, 16], [8, 16], [8], "8", None):
        told = llama.refused(UnsupportedModelError, quantization_config=FP8 | {"weight_block_size": size})
        assert "which does not fit" in told


def test_fp8_with_blocks_that_run_over_the_edge_is_refused(llama):
    """32 rows in blocks of 24 are 24 and 8; transformers would make them 16 and 16."""
    key = "model.layers.1.self_attn.q_proj.weight"
    llama.weights |= {key: llama.weights[key].to(torch.float8_e4m3fn), f"{key}_scale_inv": torch.ones(2, 1)}
    told = llama.refused(UnsupportedModelError, quantization_config=FP8 | {"weight_block_size": [24, 64]})
    assert f"{key} of the shape [32, 32], not a multiple of blocks of 24 × 64" in told


def test_fp8_with_one_scale_a_tensor_is_the_same_model(llama):
    key = "model.layers.1.self_attn.q_proj.weight"
    codes = llama.weights[key].to(torch.float8_e4m3fn)
    llama.weights[key] = codes.float() * 0.5
    plain = llama.load()
    for shape in ((), (1,), (1, 1)):
        llama.weights |= {key: codes, f"{key}_scale_inv": torch.full(shape, 0.5)}
        assert same(llama.load(quantization_config=FP8 | {"weight_block_size": None}), plain)


def test_fp8_with_a_scale_that_belongs_to_nothing_is_refused(llama):
    llama.weights, _ = in_blocks(llama.weights)
    llama.weights["model.layers.1.self_attn.q_proj.input_scale"] = torch.ones(1)
    assert "first model.layers.1.self_attn.q_proj" in llama.refused(quantization_config=FP8)


def test_mxfp4_that_transformers_multiplies_out_is_the_same_model(gpt2_tokenizer_files, tmp_path):
    """GPT-OSS as it is published: two 4-bit numbers a byte, and an exponent of two for each 32 of them."""
    directory = write_random(tmp_path / "oss", "gpt_oss", gpt2_tokenizer_files, intermediate_size=32)
    checkpoint = Checkpoint(directory)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])  # of E2M1, by its code
    codes = dict(checkpoint.weights)
    generator = torch.Generator().manual_seed(0)
    for key in [key for key in codes if key.endswith(("gate_up_proj", "down_proj"))]:
        experts, wide, tall = codes.pop(key).shape  # [expert, in, out]; the codes are [expert, out, in / 32, 16]
        blocks = torch.randint(0, 256, (experts, tall, wide // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(122, 126, (experts, tall, wide // 32), generator=generator, dtype=torch.uint8)
        codes |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
        numbers = torch.stack([values[(blocks & 15).long()], values[(blocks >> 4).long()]], dim=-1).flatten(-2)
        numbers = numbers * 2.0 ** (scales.float() - 127)[..., None]
        checkpoint.weights[key] = numbers.flatten(-2).transpose(1, 2).contiguous()
    plain = checkpoint.load()
    checkpoint.weights = codes
    said = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    assert same(checkpoint.load(quantization_config=said), plain)
    del checkpoint.weights["model.layers.1.mlp.experts.down_proj_scales"]
    assert "down_proj_blocks (U8) is scaled" in checkpoint.refused(quantization_config=said)


# --- weights that are missing or left over


def test_what_transformers_would_leave_is_refused_by_name(llama):
    llama.weights["model.layers.1.mlp.extra_gate.weight"] = torch.ones(4)
    told = llama.refused()
    assert "llama holds 1 tensors that transformers' model does not take, first model.layers.1.mlp.extra_gate" in told


def test_a_bias_that_the_configuration_denies_is_refused(llama):
    llama.weights["model.layers.0.self_attn.q_proj.bias"] = torch.ones(32)
    assert "first model.layers.0.self_attn.q_proj.bias" in llama.refused()


def test_layers_that_the_configuration_does_not_count_are_refused(llama):
    assert "first model.layers.2." in llama.refused(num_hidden_layers=2)


def test_a_shape_that_the_configuration_denies_is_refused_with_both(llama):
    llama.weights["model.layers.0.mlp.gate_proj.weight"] = torch.ones(5, 32)
    told = llama.refused()
    assert re.search(r"model\.layers\.0\.mlp\.gate_proj\.weight of the shape \[5, 32\] where its config", told)


def test_every_single_weight_is_missed(tiny_llama, tmp_path):
    whole = Checkpoint(tiny_llama).weights
    for number, key in enumerate(sorted(whole)[::3]):
        checkpoint = Checkpoint(shutil.copytree(tiny_llama, tmp_path / str(number)))
        del checkpoint.weights[key]
        assert f"lacks 1 of the model's weights, first {key}" in checkpoint.refused()


def test_what_is_made_anew_may_be_left(llama, tiny_llama):
    plain = loading.load(str(tiny_llama), device="cpu").model
    for layer in range(3):
        llama.weights[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = frequencies(10_000)
        llama.weights[f"model.layers.{layer}.self_attn.rotary_emb.cos_cached"] = torch.ones(1, 1, 16, 8)
        llama.weights[f"model.layers.{layer}.self_attn.masked_bias"] = torch.tensor(-1e9)
        llama.weights[f"model.layers.{layer}.attn.bias"] = torch.ones(1, 1, 16, 16, dtype=torch.uint8)
    llama.weights["model.position_ids"] = torch.arange(16)[None]
    assert same(llama.load(), plain)
    # under the mask's name, but of a vector's shape
    llama.weights["model.layers.1.attn.bias"] = torch.ones(32)
    assert "first model.layers.1.attn.bias" in llama.refused()


def frequencies(base):
    """Of RoPE over a head of 8 components: one for each pair i, the base to the power of -2i / 8."""
    return torch.tensor([1, base**-0.25, base**-0.5, base**-0.75])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_frequencies_of_another_base_are_refused_and_rounded_ones_are_not(llama, dtype):
    key = "model.layers.1.self_attn.rotary_emb.inv_freq"
    llama.weights[key] = frequencies(10_000).to(getattr(torch, dtype))
    llama.load()
    llama.load(rope_scaling={"rope_type": "linear", "factor": 4.0})  # which scales positions, not what is in the file
    llama.weights[key] = frequencies(20_000).to(getattr(torch, dtype))
    assert re.match(rf"llama has a RoPE in {re.escape(key)} \(4 frequencies down to 0\.00059", llama.refused())
    llama.load(rope_theta=20_000.0)


@pytest.mark.parametrize(
    "held", [torch.ones(2), torch.ones(0), torch.ones(4, dtype=torch.int64), torch.ones(4) * float("nan")]
)
def test_frequencies_that_are_none_of_this_head_are_refused(llama, held):
    llama.weights["model.rotary_emb.inv_freq"] = held
    assert "llama has a RoPE in model.rotary_emb.inv_freq" in llama.refused()


@pytest.mark.parametrize("head", ["score.weight", "classifier.bias", "v_head.summary.weight"])
def test_a_head_for_another_task_is_left_with_a_notice(llama, tiny_llama, head):
    plain = loading.load(str(tiny_llama), device="cpu").model
    llama.weights[head] = torch.ones(2, 32)
    assert same(llama.load(), plain)
    told = []
    loading.load(str(llama.directory), device="cpu", progress=lambda what, *_: told.append(what))
    assert f"llama: {head} belongs to a head for another task and is not read" in told
    llama.weights[f"model.layers.1.{head}"] = torch.ones(2, 32)
    assert f"first model.layers.1.{head}" in llama.refused()


def test_layers_that_predict_a_later_token_may_be_left(llama, tiny_llama):
    plain = loading.load(str(tiny_llama), device="cpu").model
    last = {key: tensor for key, tensor in llama.weights.items() if key.startswith("model.layers.2.")}
    llama.weights |= {key.replace("layers.2.", "layers.3."): tensor.clone() for key, tensor in last.items()}
    llama.weights["mtp.fc.weight"] = torch.ones(4)
    assert "first model.layers.3." in llama.refused()
    llama.weights["model.layers.3.eh_proj.weight"] = torch.ones(4)
    assert same(llama.load(), plain)


def test_gpt2_as_it_is_published_loads(gpt2_random, tmp_path):
    """Its names lack the prefix, and its causal masks are in the file."""
    old = Checkpoint(shutil.copytree(gpt2_random, tmp_path / "old"))
    plain = loading.load(str(gpt2_random), device="cpu").model
    old.weights = {key.removeprefix("transformer."): tensor for key, tensor in old.weights.items()}
    for layer in range(3):
        old.weights[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 256, 256, dtype=torch.uint8).tril()
    assert same(old.load(), plain)


@pytest.mark.parametrize("family", ["qwen3_next", "gpt_oss", "gpt_neo", "bloom", "falcon", "mpt"])
def test_no_family_is_refused_as_it_was_saved(family, gpt2_tokenizer_files, tmp_path):
    directory = write_random(tmp_path / family, family, gpt2_tokenizer_files)
    assert loading.load(str(directory), device="cpu").spec.n_layers >= 2


# --- before torch is there

REFUSED = """
import sys
from kvprobe.errors import KvprobeError
from kvprobe.models import loading
for name in sys.argv[1:]:
    try:
        loading.load(name, device="cpu")
    except KvprobeError as error:
        print(error)
assert "torch" not in sys.modules
"""


def test_what_headers_and_configuration_show_is_refused_before_torch(llama, tmp_path):
    huge = shutil.copytree(llama.directory, tmp_path / "huge")
    config = json.loads((huge / "config.json").read_text())
    (huge / "config.json").write_text(json.dumps(config | {"vocab_size": 10**12}))
    deep = shutil.copytree(llama.directory, tmp_path / "deep")
    (deep / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 10**9}))
    wide = shutil.copytree(llama.directory, tmp_path / "wide")
    (wide / "config.json").write_text(json.dumps(config | {"intermediate_size": 1.5}))
    novel = shutil.copytree(llama.directory, tmp_path / "novel")
    (novel / "config.json").write_text(json.dumps(config | {"model_type": "olmo2", "num_hidden_layers": 9_000}))
    nested = shutil.copytree(llama.directory, tmp_path / "nested")
    (nested / "config.json").write_text('{"a":' * 50_000)
    coded = Checkpoint(shutil.copytree(llama.directory, tmp_path / "coded"))
    coded.weights["lm_head.weight"] = coded.weights["lm_head.weight"].to(torch.float8_e5m2)
    save_file(coded.weights, coded.directory / "model.safetensors", {"format": "pt"})
    names = [str(path) for path in (huge, deep, wide, novel, nested, coded.directory)]
    run = subprocess.run([sys.executable, "-c", REFUSED, *names], capture_output=True, text=True, check=True)
    told = run.stdout.splitlines()
    assert len(told) == 6, run.stdout
    assert told[0].startswith("config.json of huge describes")
    assert told[1] == "config.json of deep says 1,000,000,000 for num_hidden_layers: more than 10,000"
    assert told[2] == "config.json of wide says 1.5 for intermediate_size: it must be a whole number, at least 1"
    assert re.match(r"config\.json of novel describes 9,000 layers, but its weights are \d+ tensors", told[3])
    assert told[4] == "the config.json of nested is nested too deeply to be read"
    assert told[5].startswith("coded is quantised without a quantization_config")
