"""Parameters counted from the configuration, against transformers' own models and against published counts."""

import json

import pytest

from kvprobe.shape import parameters, published
from kvprobe.shape.spec import Spec
from support.tiny import FAMILIES, tiny_config

# as the checkpoints' own headers count them, DeepSeek-V3 without its extra prediction layer
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3.1-405b": 405_853_388_800,
    "mistral-7b": 7_241_732_096,
    "tinyllama": 1_100_048_384,
    "smollm2-135m": 134_515_008,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-72b": 72_706_203_648,
    "deepseek-v2": 235_741_434_880,
    "gemma-3-270m": 268_098_176,
    "gpt-oss-20b": 20_914_757_184,
}


def real_count(config):
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    # checkpoints of DeepSeek-V3 hold the routing bias, which transformers keeps as a buffer
    routing = [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
    return sum(tensor.numel() for tensor in [*model.parameters(), *routing])


def counted(config):
    return Spec.from_config(json.loads(config.to_json_string(use_diff=True))).n_parameters


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_counts_are_those_of_transformers_models(family):
    config = tiny_config(family)
    if family == "falcon":  # reads ffn_hidden_size; what it does not read would be written into its config.json too
        del config.intermediate_size
    assert counted(config) == real_count(config)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("qwen3", {"attention_bias": True}),
        ("phi", {"qk_layernorm": True}),
        ("opt", {"enable_bias": False}),
        ("gpt_neox", {"attention_bias": False}),
        ("deepseek_v2", {"q_lora_rank": None, "n_shared_experts": 3}),
        ("deepseek_v3", {"first_k_dense_replace": 2, "attention_bias": True}),
        ("qwen3_next", {"mlp_only_layers": [1], "linear_conv_kernel_dim": 3, "linear_value_head_dim": 6}),
        ("falcon", {"parallel_attn": False, "bias": True, "ffn_hidden_size": 40}),
        ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 40}),
    ],
)
def test_counts_follow_the_options_of_a_family(family, overrides):
    config = tiny_config(family, **overrides)
    if family == "falcon":
        del config.intermediate_size
    assert counted(config) == real_count(config)


@pytest.mark.parametrize("family", ["mixtral", "gemma", "gptj", "gpt_bigcode"])
def test_counts_from_the_family_defaults(family):
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[family]()
    assert Spec.from_config({"model_type": family}).n_parameters == real_count(config)


@pytest.mark.parametrize("name", PUBLISHED)
def test_counts_are_the_published_ones(name):
    assert published.look_up(name).spec.n_parameters == PUBLISHED[name]


def test_an_unknown_family_or_variant_has_no_count():
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "vocab_size": 97}
    assert Spec.from_config({"model_type": "nosuch"} | sizes).n_parameters is None
    assert Spec.from_config({"model_type": "opt", "word_embed_proj_dim": 512} | sizes).n_parameters is None


def test_attention_parameters_by_hand():
    # W_Q 10 × 4·3, W_K 10 × 2·3, W_V 10 × 2·5, W_O 4·5 × 10
    made = parameters.attention_parameters(hidden_size=10, n_heads=4, n_kv_heads=2, head_dim=3, v_head_dim=5)
    assert made == 120 + 60 + 100 + 200
