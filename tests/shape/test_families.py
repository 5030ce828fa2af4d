"""What families of every kind keep, worked out by hand; their defaults against transformers' own; what is refused."""

import json
import time
from pathlib import Path

import pytest

from kvprobe.errors import UnsupportedModelError
from kvprobe.shape import families
from kvprobe.shape.cache_bytes import bill
from kvprobe.shape.layers import as_runs, from_runs
from kvprobe.shape.levers import levers
from kvprobe.shape.spec import Spec

CASES = Path(__file__).parents[1] / "cases"
F32 = 4

# each by hand, in float32 elements a token, of the state, and in all at 8,192 tokens where a window or a ratio matters
RIGHT = {
    # attn_layer_indices names 3 of 32 layers, 8 KV heads of 128; the other 29 are Mamba-2: 128 heads of 64 × 128, and
    # a convolution over 2·4096 channels, B and C of one group of 128, four inputs deep
    "bamba": (3 * 2 * 8 * 128, 29 * (128 * 64 * 128 + (8192 + 2 * 128) * 4), None),
    # kv_n_heads stands in attn_config
    "dbrx": (40 * 2 * 8 * 128, 0, None),
    # 43 layers keep 128 tokens of one vector of 512; of 21 layers a vector and an indexer's key for every 4 tokens, of
    # 20 one for every 128: at 8,192 tokens 2,048 and 64 of them
    "deepseek-v4": (
        21 * (512 + 128) // 4 + 20 * 512 // 128,
        0,
        43 * 128 * 512 + 21 * 2048 * (512 + 128) + 20 * 64 * 512,
    ),
    # latent, rotary key, and the indexer's key
    "dsv32-indexer": (61 * (512 + 64 + 128), 0, None),
    "glm5-indexer": (78 * (512 + 64 + 128), 0, None),
    # LLLG: 16 of 64 layers are global, 48 keep 4,096 tokens
    "exaone4-pattern": (16 * 2 * 8 * 128, 0, (16 * 8192 + 48 * 4096) * 2 * 8 * 128),
    # of 35 layers the last 15 read earlier ones; of the first 20 every fifth is full, the others keep 512
    "gemma3n": (4 * 2 * 2 * 256, 0, (4 * 8192 + 16 * 512) * 2 * 2 * 256),
    # 5 full layers of 2 heads of 512, 25 sliding ones of 8 heads of 256 over 1,024
    "gemma4": (5 * 2 * 2 * 512, 0, 5 * 2 * 2 * 512 * 8192 + 25 * 2 * 8 * 256 * 1024),
    # 4 heads, key width 1024 · 0.5 / 4 = 128, value width 256
    "gla": (0, 24 * 4 * 128 * 256, None),
    # every second layer reads its neighbour's
    "hunyuan-cla": (32 * 2 * 8 * 80, 0, None),
    # 24 layers of MLA; 69 with 96 heads of 128 × 128 and q, k, v of 96·128 convolved four deep
    "kimi-linear": (24 * (512 + 64), 69 * (96 * 128 * 128 + 3 * 96 * 128 * 4), None),
    # every fourth of 48 layers sees everything, the others a chunk of 8,192
    "llama4-chunked": (12 * 2 * 8 * 128, 0, 48 * 8192 * 2 * 8 * 128),
    # two attentions in each of 28 layers
    "longcat": (56 * (512 + 64), 0, None),
    # 128 heads of 64 × 128; 8,192 channels, B and C of 8 groups of 128, four deep
    "mamba2": (0, 64 * (128 * 64 * 128 + (8192 + 2 * 8 * 128) * 4), None),
    # use_sliding_window is false
    "mimo-7b": (36 * 2 * 8 * 128, 0, None),
    # 9 zeros are full layers of 4 heads, 39 ones keep 128 tokens of 8; K 192 wide and V 128
    "mimo-v2-flash": (9 * 4 * (192 + 128), 0, (9 * 4 * 8192 + 39 * 8 * 128) * (192 + 128)),
    "minicpm3-undone": (62 * (256 + 32), 0, None),
    # 10 of 80 layers are softmax attention; the others have a state of 64 heads of 128 × 128
    "minimax-m1": (10 * 2 * 8 * 128, 70 * 64 * 128 * 128, None),
    # six *, 23 M, and E that keeps nothing
    "nemotron-h": (6 * 2 * 2 * 128, 23 * (64 * 64 * 128 + (64 * 64 + 2 * 8 * 128) * 4), None),
    # 31 of 80 attentions are no_op; 64 heads in groups of 8 are 8 KV heads
    "nemotron-nas": (49 * 2 * 8 * 128, 0, None),
    # 8 of 26 layers keep 2,048 tokens; 18 keep 2,560 numbers and the three inputs before the newest
    "recurrentgemma": (0, 18 * (2560 + 3 * 2560), 8 * 2 * 256 * 2048 + 18 * (2560 + 3 * 2560)),
}
NEVER_STOPS = set(RIGHT) - {"gla", "mamba2", "recurrentgemma"}


def case(name):
    return json.loads((CASES / f"{name}.json").read_text())


@pytest.mark.parametrize("name", RIGHT)
def test_published_configurations_that_were_read_wrongly(name):
    token, state, total = RIGHT[name]
    spec = Spec.from_config(case(name))
    found = bill(spec)
    assert spec.support == "known"
    assert (found.next_token(8192 if name != "recurrentgemma" else 2048), found.state) == (token * F32, state * F32)
    assert found.total(8192) == F32 * (total if total is not None else state + 8192 * token)
    assert (found.stops_at is None) == (name in NEVER_STOPS)


def test_chunks_end_beyond_the_first():
    # 12 full layers, 36 of a chunk of 8,192
    assert bill(Spec.from_config(case("llama4-chunked"))).total(131_072) == (12 * 131_072 + 36 * 8192) * 2 * 8 * 128 * 4


def test_a_window_that_is_switched_off_stays_off_beyond_it():
    assert bill(Spec.from_config(case("mimo-7b"))).next_token(65_536) == 36 * 2 * 8 * 128 * 4


def undone(name, lever):
    return next(found.bill for found in levers(Spec.from_config(case(name))) if found.name == lever)


def test_what_makers_did_is_undone_layer_by_layer():
    # no v_head_dim: values are 2,560 / 40 = 64 wide, keys 64 + 32
    assert undone("minicpm3-undone", "without its latent").next_token(0) == 62 * 40 * (96 + 64) * 4
    # 24 layers of MLA; the states of the other 69 stay
    assert undone("kimi-linear", "without its latent").next_token(0) == 24 * 96 * (128 + 64 + 128) * 4
    # 16 heads everywhere: of 512 in 5 layers, of 256 in 25
    assert undone("gemma4", "as MHA, 16 KV heads").next_token(0) == 2 * 16 * (5 * 512 + 25 * 256) * 4
    assert undone("gemma4", "all layers full").next_token(9999) == 2 * (5 * 2 * 512 + 25 * 8 * 256) * 4
    assert undone("gemma4", "GQA, 4/1 KV heads").next_token(0) == 2 * (5 * 1 * 512 + 25 * 4 * 256) * 4
    # 8 sliding layers of one head of 256 keep every token, and so do the 18 recurrent ones with K and V in their place
    assert undone("recurrentgemma", "all layers full").next_token(9999) == 26 * 2 * 256 * 4
    assert undone("hunyuan-cla", "no layer shares").next_token(0) == 64 * 2 * 8 * 80 * 4
    assert undone("nemotron-nas", "as MHA, 64 KV heads").next_token(0) == 49 * 2 * 64 * 128 * 4
    assert undone("jamba-like", "all layers full").next_token(0) == 8 * 2 * 2 * 16 * 4


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("cpm-ant", "family cpmant: .* learned prompt"),
        ("bert", "family bert: it is an encoder"),
        ("t5-11b", "family t5: it is an encoder–decoder"),
        ("layers-1e9", "says 1,000,000,000 for n_layers: kvprobe reads at most 10,000 layers"),
        ("mlp-width-float", r"says 1\.5 for intermediate_size .* whole number"),
    ],
)
def test_what_has_no_bill_is_refused_by_name(name, says):
    with pytest.raises(UnsupportedModelError, match=says):
        Spec.from_config(case(name))


def in_transformers():
    from transformers import CONFIG_MAPPING

    # GPT-SW3 writes itself as GPT-2
    return sorted(set(families.known()) & set(CONFIG_MAPPING) - {"gpt-sw3"})


@pytest.mark.parametrize("family", in_transformers())
def test_defaults_are_those_of_transformers(family):
    from transformers import CONFIG_MAPPING

    full = json.loads(CONFIG_MAPPING[family]().to_json_string(use_diff=False))
    assert Spec.from_config({"model_type": family}) == Spec.from_config(full)


@pytest.mark.slow
@pytest.mark.parametrize("family", in_transformers())
def test_what_twice_the_width_leaves_out_is_read_as_transformers_reads_it(family):
    from transformers import CONFIG_MAPPING

    usual = CONFIG_MAPPING[family]()
    try:
        wide = CONFIG_MAPPING[family](
            hidden_size=2 * usual.hidden_size, num_attention_heads=2 * usual.num_attention_heads
        )
    except (AttributeError, ValueError, TypeError) as error:
        pytest.skip(f"no such configuration: {error}")
    # as it is written, without what equals the defaults
    short, full = (json.loads(wide.to_json_string(use_diff=brief)) for brief in (True, False))
    assert Spec.from_config({"model_type": family} | short) == Spec.from_config(full)


def test_every_causal_class_of_transformers_is_known_or_refused():
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    # wrappers of a text part, which is looked at instead
    wrappers = {"emu3", "fuyu", "gemma3", "gemma3n", "gemma4", "gemma4_unified", "got_ocr2", "llama4", "mllama"}
    wrappers |= {"qwen3_5", "qwen3_5_moe", "gemma4_assistant", "gemma4_unified_assistant", "moss_transcribe_diarize"}
    assert set(CAUSAL) <= set(families.known()) | set(families.REFUSED) | wrappers


SIZES = {"hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"vocab_size": 97, "intermediate_size": 64, "max_position_embeddings": 512}
KV = 2 * 2 * 16
MAMBA1 = {"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2}

# (what is added to SIZES, elements a token at 511 tokens, elements of state): more spellings of the same kinds
SPELLINGS = {
    "every eighth, the fifth of them": (
        {"model_type": "jamba", "attn_layer_period": 8, "attn_layer_offset": 4} | MAMBA1,
        (1 * KV, 7 * 2 * 64 * (16 + 4)),
    ),
    "a shared block beside a state": (
        {"model_type": "zamba2", "hybrid_layer_ids": [3, 5], "mamba_d_state": 16, "mamba_d_conv": 4}
        | {"mamba_expand": 2, "n_mamba_heads": 8, "mamba_ngroups": 1, "attention_head_dim": 32},
        # attention is twice as wide as the model
        (2 * 2 * 2 * 32, 8 * (128 * 16 + (128 + 2 * 16) * 4)),
    ),
    "attention and a state in every layer": (
        {"model_type": "falcon_h1", "mamba_d_ssm": 48, "mamba_n_heads": 6, "mamba_d_head": 8, "mamba_d_state": 16}
        | {"mamba_n_groups": 1, "mamba_d_conv": 4, "head_dim": 16},
        (8 * KV, 8 * (48 * 16 + (48 + 2 * 16) * 4)),
    ),
    "the last of every third": (
        {"model_type": "qwen3_next", "head_dim": 16, "full_attention_interval": 3, "linear_num_key_heads": 2}
        | {"linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
        (2 * KV, 6 * (4 * 8 * 8 + (2 * 16 + 32) * 4)),
    ),
    "short convolutions": (
        {"model_type": "lfm2", "full_attn_idxs": [2, 5], "conv_L_cache": 3},
        (2 * KV, 6 * 64 * 3),
    ),
    "names of blocks": (
        {"model_type": "nemotron_h", "layers_block_type": ["mamba", "mlp", "attention", "moe"] * 2, "head_dim": 16}
        | {"mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 16, "n_groups": 2, "conv_kernel": 4},
        (2 * KV, 2 * (4 * 8 * 16 + (32 + 2 * 2 * 16) * 4)),
    ),
    "layer_types with mamba": (
        {"model_type": "granitemoehybrid", "layer_types": ["mamba"] * 7 + ["attention"], "mamba_n_heads": 8}
        | {"mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2},
        (KV, 7 * (128 * 16 + (128 + 2 * 16) * 4)),
    ),
    "groups of linear layers": (
        {"model_type": "bailing_moe_linear", "layer_group_size": 3, "head_dim": 16},
        # 3 and 6, and what is left after the last group: 7 and 8
        (4 * KV, 4 * 4 * 16 * 16),
    ),
    "heads of each layer": (
        {"model_type": "deci", "num_key_value_heads": None, "num_key_value_heads_per_layer": [1] * 5 + [4] * 3},
        ((5 + 3 * 4) * 2 * 16, 0),
    ),
    "every third layer of eight shared": (
        {"model_type": "hunyuan", "use_cla": True, "cla_share_factor": 3},
        # layers 0, 3 and 6 have their own
        (3 * KV, 0),
    ),
    "layers of cross-attention": (
        {"model_type": "mllama_text_model", "cross_attention_layers": [3, 7]},
        (6 * KV, 0),
    ),
    "RWKV": (
        {"model_type": "rwkv6", "attention_hidden_size": 64, "head_size": 16, "num_attention_heads": 4},
        (0, 8 * (4 * 16 * 16 + 2 * 64)),
    ),
    "RWKV-4": ({"model_type": "rwkv"}, (0, 8 * (3 * 64 + 2 * 64))),
    "indexers of some layers": (
        {"model_type": "glm_moe_dsa", "index_topk_pattern": "FSSFSSFS", "index_head_dim": 8, "kv_lora_rank": 24}
        | {"qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8},
        (8 * (24 + 4) + 3 * 8, 0),
    ),
    "indexers of the first and every fourth from the second on": (
        {"model_type": "hy_v4", "index_head_dim": 8, "kv_lora_rank": 24, "num_key_value_heads": 4}
        | {"qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8},
        (8 * (24 + 4) + 3 * 8, 0),  # layers 0, 1 and 5
    ),
    "indexers in the sparse layers, as published": (
        {"model_type": "minimax_m3_vl_text", "head_dim": 16, "index_head_dim": 32}
        | {"sparse_attention_config": {"sparse_attention_freq": [0, 0, 0, 1, 1, 1, 1, 1], "sparse_index_dim": 8}},
        (8 * KV + 5 * 8, 0),
    ),
    "indexers in the sparse layers, as transformers writes them": (
        {"model_type": "minimax_m3_vl_text", "head_dim": 16, "index_head_dim": 8}
        | {"layer_types": ["full_attention"] * 3 + ["minimax_m3_sparse"] * 5},
        (8 * KV + 5 * 8, 0),
    ),
    # every high cycle runs the low stack L_cycles times and the high one once
    "runs of two stacks": (
        {"model_type": "hrm_text", "head_dim": 16, "num_hidden_layers": 2, "H_cycles": 2, "L_cycles": 3},
        (2 * 2 * (3 + 1) * KV, 0),
    ),
    "runs of two stacks, counted": (
        {"model_type": "hrm_text", "head_dim": 16, "num_layers_per_stack": 1, "H_cycles": 2, "L_cycles": 3},
        (8 * KV, 0),
    ),
    "twice the heads where they slide": (
        {"model_type": "mimo_v2_flash", "head_dim": 16, "v_head_dim": 8, "hybrid_layer_pattern": [0] + [1] * 7}
        | {"sliding_window": 1024},
        (2 * (16 + 8) + 7 * 4 * (16 + 8), 0),
    ),
    "an MLA of nobody known": (
        {"model_type": "unheard_of", "kv_lora_rank": 24, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8},
        (8 * (24 + 4), 0),
    ),
    "multi-query by a flag": ({"model_type": "gpt_bigcode", "num_key_value_heads": None}, (8 * 2 * 16, 0)),
    "a period of windows": (
        {"model_type": "cohere2", "sliding_window_pattern": 2, "sliding_window": 32},
        (4 * KV, 0),
    ),
    "layers of a family nobody knows": (
        {"model_type": "unheard_of", "layer_types": ["full_attention", "sliding_attention"] * 4, "sliding_window": 32},
        (4 * KV, 0),
    ),
    "a window that is longer than the positions": ({"model_type": "llama", "sliding_window": 512}, (8 * KV, 0)),
    "a text part within a part": (
        {"model_type": "omni", "thinker_config": {"model_type": "omni_thinker", "text_config": {}}},
        None,
    ),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_other_spellings(name):
    config, right = SPELLINGS[name]
    if right is None:
        text = SIZES | {"model_type": "qwen3", "head_dim": 16, "use_sliding_window": False, "sliding_window": 32}
        config, right = {"model_type": "omni", "thinker_config": {"model_type": "x", "text_config": text}}, (8 * KV, 0)
        found = bill(Spec.from_config(config))
    else:
        found = bill(Spec.from_config(SIZES | config))
    # recurrent states are elements of four bytes in float32 too
    assert (found.next_token(511), found.state) == (right[0] * F32, right[1] * F32)


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"cla_share_factor": 2}, "cla_share_factor"),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers"),
        ({"hybrid_override_pattern": "M*" * 4}, "hybrid_override_pattern"),
        ({"attn_layer_indices": [3]}, "attn_layer_indices"),
        ({"mamba_d_state": 16}, "mamba_d_state"),
        ({"index_head_dim": 64}, "index_head_dim"),
        ({"sparse_config": {"kernel_size": 32}}, "sparse_config"),
        ({"attn_config": {"kv_n_heads": 1}}, "attn_config.kv_n_heads"),
        ({"multi_query": True}, "multi_query"),
        ({"sliding_window_pattern": 4, "sliding_window": 32}, "sliding_window_pattern"),
        ({"sliding_window": 32}, "sliding_window"),
        ({"global_head_dim": 32}, "global_head_dim"),
        ({"use_cla": True}, "use_cla"),
        ({"attention_config": {"num_key_value_heads": 1}}, "attention_config.num_key_value_heads"),
        ({"transformer_config": {"head_dim": 8}}, "transformer_config.head_dim"),
        ({"decoder": {"sliding_window": 32}}, "decoder.sliding_window"),
        ({"layers": [{"kv": 1}] * 3}, "layers"),
        ({"arrangement": ["mamba", "attn"] * 4}, "arrangement"),
        ({"softmax_layers": [1, 3]}, "softmax_layers"),
        ({"attn_layer_ids": [1, 3]}, "attn_layer_ids"),
        ({"full_layers": [1]}, "full_layers"),
        ({"max_attention_span": 64}, "max_attention_span"),
        ({"attn_kind": "mqa"}, "attn_kind"),
        ({"tie_kv": True}, "tie_kv"),
        ({"k_eq_v": True}, "k_eq_v"),
        ({"d_k": 8}, "d_k"),
        ({"q_per_k": 4}, "q_per_k"),
        ({"total_ut_steps": 4}, "total_ut_steps"),
        ({"mean_recurrence": 8}, "mean_recurrence"),
        ({"n_unroll": 4}, "n_unroll"),
        ({"feature_map": "elu"}, "feature_map"),
        ({"expand_k": 0.5}, "expand_k"),
        ({"num_encoder_layers": 8}, "num_encoder_layers"),
        ({"multi_query_group_num": 2}, "multi_query_group_num"),
        ({"qk_head_dim": 8}, "qk_head_dim"),
    ],
)
def test_a_key_that_could_change_what_is_kept_is_refused_in_an_unknown_family(config, key):
    with pytest.raises(UnsupportedModelError, match=rf"unheard_of model says .*{key}"):
        Spec.from_config(SIZES | {"model_type": "unheard_of"} | config)


@pytest.mark.parametrize("key", ["cla_share_factor", "num_kv_shared_layers", "index_head_dim", "block_configs"])
def test_a_known_family_is_refused_with_a_key_of_another(key):
    with pytest.raises(UnsupportedModelError, match=f"llama model says {key}"):
        Spec.from_config(SIZES | {"model_type": "llama", key: 2})


# what published configurations say beside their sizes, of families that are read by generic keys
HARMLESS = {
    "use_cache": True,
    "attn_implementation": "eager",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_by_inverse_layer_idx": False,
    "rope_local_base_freq": 1e4,
    "n_shared_experts": 2,
    "decoder_sparse_step": 1,
    "moe_layer_freq": 1,
    "expert_layer_period": 2,
    "chunk_size_feed_forward": 0,
    "cross_attention_hidden_size": None,
    "is_encoder_decoder": False,
    "image_token_index": 7,
    "sliding_window": None,
    "use_sliding_window": False,
    "num_nextn_predict_layers": 1,
    "cache_implementation": "hybrid",
    "lm_head_bias": True,
    "offset_alibi": 100,
    "transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}},
    "quantization_config": {"group_size": 128, "modules_to_not_convert": ["lm_head"]},
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vision_config": {"num_hidden_layers": 2, "window_size": 112},
    "task_specific_params": {"text-generation": {"max_length": 50}},
    "tokenizer_class": "XverseTokenizer",
    "num_beam_groups": 1,
    "diversity_penalty": 0.0,
    "encoder_no_repeat_ngram_size": 2,
    "return_dict": True,
    "clip_qkv": 8.0,
    "local_rank": 3,
    "global_step": 700,
    "global_view_pos": "head",
    "use_kv_cache": True,
    "pre_allocate_kv_cache": True,
    "memory_efficient_attention": True,
    "add_classification_head": True,
    "compression_config": {"format": "dense"},
    "_attn_implementation_internal": "sdpa",
    "skip_special_tokens": True,
    "conv_template": "chat",
    "attention_norm_eps": 1e-5,
    "classifier_dropout": 0.1,
    "compression_ratio": 1.0,
    "total_ut_steps": 1,
}


def test_harmless_keys_are_not_refused():
    spec = Spec.from_config(SIZES | {"model_type": "unheard_of"} | HARMLESS)
    assert spec.support == "plain"
    assert bill(spec).next_token(0) == 8 * KV * F32


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -3, 2.5, True, "8", [8], {"a": 1}, 2**60])
@pytest.mark.parametrize(
    ("family", "key"),
    [
        *((family, key) for family in ("llama", "unheard_of") for key in SIZES),
        ("jamba", "attn_layer_period"),
        ("jamba", "mamba_d_state"),
        ("bamba", "mamba_n_heads"),
        ("qwen3_next", "linear_key_head_dim"),
        ("deepseek_v32", "index_head_dim"),
        ("gemma3n_text", "num_kv_shared_layers"),
        ("mixtral", "num_local_experts"),
        ("llama4_text", "attention_chunk_size"),
    ],
)
def test_numbers_that_cannot_be_are_refused_with_their_key(family, key, value):
    if key == "intermediate_size" and value == [8]:
        pytest.skip("a width a layer is read")
    with pytest.raises(UnsupportedModelError, match=rf"{family} model "):
        Spec.from_config(SIZES | {"model_type": family} | {key: value})


@pytest.mark.parametrize("value", [3, "x", {"a": 1}, [None], [[1]], [{"a": 1}], ["nosuch"], [float("nan")], [-1] * 8])
@pytest.mark.parametrize(
    ("family", "key"),
    [
        ("llama", "layer_types"),
        ("bamba", "attn_layer_indices"),
        ("minimax_m1", "attn_type_list"),
        ("mimo_v2_flash", "hybrid_layer_pattern"),
        ("nemotron-nas", "block_configs"),
        ("deci", "num_key_value_heads_per_layer"),
        ("gpt_neo", "attention_types"),
        ("nemotron_h", "hybrid_override_pattern"),
        ("deepseek_v4", "compress_ratios"),
        ("llama4_text", "no_rope_layers"),
        ("kimi_linear", "linear_attn_config"),
        ("mpt", "attn_config"),
    ],
)
def test_lists_that_cannot_be_are_refused(family, key, value):
    if isinstance(value, dict) and key in ("linear_attn_config", "attn_config"):
        pytest.skip("an object is right here")
    with pytest.raises(UnsupportedModelError, match=rf"{family} model "):
        Spec.from_config(SIZES | {"model_type": family, "head_dim": 16, "layer_types": None} | {key: value})


def test_thousands_of_layers_are_read_kept_and_added_up_at_once():
    kinds = ["sliding_attention", "full_attention"] * 5000
    config = SIZES | {"model_type": "gemma2", "head_dim": 16, "num_hidden_layers": 10_000, "sliding_window": 32}
    started = time.process_time()
    spec = Spec.from_config(config | {"layer_types": kinds})
    found = levers(spec)
    kept = as_runs(spec.layers)
    # processor time, and twenty times what it takes: with layers squared it would be minutes
    assert time.process_time() - started < 10
    assert found[0].bill.total(100) == 5000 * (100 + 32) * KV * F32
    assert len(kept["different"]) == 2
    assert from_runs(json.loads(json.dumps(kept))) == spec.layers


def test_the_table_of_families_says_of_each_how_it_is_read():
    rows = families.table()
    assert {support for _, support, _ in rows} == {"known", "plain", "refused"}
    assert len({name for name, _, _ in rows}) == len(rows)
    said = {name: (support, how) for name, support, how in rows}
    assert said["jamba"] == ("known", "kinds by period, mamba1 states")
    assert said["llama"] == ("known", "every layer keeps every token")
    assert said["bert"][0] == "refused"
