"""What published models with keys of their own keep, worked out by hand; and which of their keys are refused."""

import pytest

from kvprobe.errors import UnsupportedModelError
from kvprobe.shape.cache_bytes import bill
from kvprobe.shape.spec import Spec
from kvprobe.shape.suspects import suspects

F32 = 4
SIZES = {"hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4, "vocab_size": 97}
SIZES |= {"intermediate_size": 64, "max_position_embeddings": 512}
MLA = {"kv_lora_rank": 24, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
FLA = {"hidden_size": 2048, "num_hidden_layers": 24, "vocab_size": 32000}

# (configuration, bytes a token, bytes of state)
RIGHT = {
    # K and V of 32 layers, 32 heads of 128
    "Qwen-7B": (
        {"model_type": "qwen", "tokenizer_class": "QWenTokenizer", "hidden_size": 4096, "num_hidden_layers": 32}
        | {"num_attention_heads": 32, "vocab_size": 151936, "kv_channels": 128, "seq_length": 8192},
        (1_048_576, 0),
    ),
    # of 40 layers, 40 heads of 128
    "Baichuan2-13B": (
        {"model_type": "baichuan", "tokenizer_class": "BaichuanTokenizer", "hidden_size": 5120, "vocab_size": 125696}
        | {"num_hidden_layers": 40, "num_attention_heads": 40, "model_max_length": 4096},
        (1_638_400, 0),
    ),
    # of 12 layers, 10 heads of 128: the part does not say its family, the whole says it all
    "DeepSeek-OCR": (
        {"model_type": "deepseek_vl_v2", "global_view_pos": "head", "hidden_size": 1280, "num_hidden_layers": 12}
        | {"num_attention_heads": 10, "num_key_value_heads": 10, "vocab_size": 129280, "kv_lora_rank": None}
        | {"use_mla": False, "v_head_dim": 0, "language_config": {"hidden_size": 1280, "num_hidden_layers": 12}},
        (122_880, 0),
    ),
    # 64 layers of 8,192 channels, which expand · hidden_size are not, each of 16 and four inputs
    "Falcon-Mamba-7B": (
        {"model_type": "falcon_mamba", "hidden_size": 4096, "expand": 16, "intermediate_size": 8192}
        | {"num_hidden_layers": 64, "state_size": 16, "conv_kernel": 4, "vocab_size": 65024},
        (0, 41_943_040),
    ),
    # 4 heads with keys of 2048 · 0.5 / 4 and values of 2048 / 4, and two inputs
    "RWKV-6 of flash-linear-attention": (
        FLA | {"model_type": "rwkv6", "num_heads": 4, "expand_k": 0.5, "expand_v": 1.0},
        (0, 24 * (4 * 256 * 512 + 2 * 2048) * F32),
    ),
    # 16 heads of 128 × 128
    "RWKV-7 with wide heads": (FLA | {"model_type": "rwkv7", "head_dim": 128, "num_heads": 16}, (0, 25_559_040)),
    "RWKV-7 with its usual heads": (FLA | {"model_type": "rwkv7"}, (0, 24 * (32 * 64 * 64 + 2 * 2048) * F32)),
    # 8 value heads of 128 × 128, keys and queries of 4; the convolution runs over both
    "more value heads": (
        {"model_type": "gated_deltanet", "num_heads": 4, "num_v_heads": 8, "head_dim": 128, "expand_v": 1.0}
        | {"hidden_size": 1024, "num_hidden_layers": 4, "conv_size": 4, "vocab_size": 100},
        (0, 4 * (8 * 128 * 128 + (2 * 4 + 8) * 128 * 4) * F32),
    ),
    # 8 layers of 2 KV heads of 16
    "use_mla false": (
        SIZES | MLA | {"model_type": "deepseek_v2", "use_mla": False, "num_key_value_heads": 2},
        (8 * 2 * 2 * 16 * F32, 0),
    ),
    # Hunyuan-Large writes the widths of an MLA that it does not have
    "use_mla false of another family": (
        SIZES | MLA | {"model_type": "hunyuan_v1_moe", "use_mla": False, "num_key_value_heads": 2},
        (8 * 2 * 2 * 16 * F32, 0),
    ),
    "use_mla true": (SIZES | MLA | {"model_type": "unheard_of", "use_mla": True}, (8 * (24 + 4) * F32, 0)),
    # vision alone looks both ways
    "bidirectional over images": (
        SIZES | {"model_type": "llama", "use_bidirectional_attention": "vision"},
        (8 * 2 * 64 * F32, 0),
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_kept(name):
    config, right = RIGHT[name]
    found = bill(Spec.from_config(config))
    assert (found.next_token(511), found.state) == right


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "unheard_of", "use_mla": True}, "says use_mla but not kv_lora_rank"),
        ({"model_type": "ouro", "total_ut_steps": 4}, "says total_ut_steps"),
        ({"model_type": "rwkv7", "attn": {"layers": [3], "num_heads": 4}}, "says attn,"),
        ({"model_type": "mamba2", "attn": {"layers": [3]}}, "says attn,"),
        ({"model_type": "mamba", "attn_layer_idx": [3]}, "says attn_layer_idx"),
        ({"model_type": "rwkv7", "head_dim": 16, "value_dim": [64] * 7 + [128]}, "says value_dim"),
        ({"model_type": "glm", "block_position_encoding": True}, "says block_position_encoding"),
        ({"model_type": "glm", "spell_func": "lstm"}, "says spell_func"),
        ({"model_type": "chatglm", "pre_seq_len": 128}, "says pre_seq_len"),
        ({"model_type": "jamba", "attn_layer_period": 4, "attn_layer_offset": 4}, "says 4 for attn_layer_offset"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "True for use_bidirectional_attention"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": "all"}, "'all' for use_bidirectional"),
        ({"model_type": "qwen2", "is_causal": False}, "False for is_causal"),
        *(
            ({"model_type": name}, f"family {name}: its attention is not causal")
            for name in ("llama_bidirec", "Dream", "llada")
        ),
        *(
            ({"model_type": name}, f"family {name}: its name is that of a recurrent or linear")
            for name in ("rwkv8", "my_mamba", "rwkv6qwen2", "linear_attn", "hgrn2", "mega", "lolcats_llama", "s4")
        ),
    ],
)
def test_what_is_refused(config, says):
    with pytest.raises(UnsupportedModelError, match=says):
        Spec.from_config(SIZES | config)


@pytest.mark.parametrize("name", ["megatron_gpt", "megrez", "glamour", "jamba_like", "deepseek_next"])
def test_names_that_only_look_like_it_are_read(name):
    assert bill(Spec.from_config(SIZES | {"model_type": name})).next_token(0) == 8 * 2 * 64 * F32


@pytest.mark.parametrize(
    ("family", "config", "says"),
    [
        ("llama", {"num_kv_heads": 2}, "says 2 for num_kv_heads, a name that the family does not read"),
        ("llama", {"n_kv_heads": 2}, "says 2 for n_kv_heads"),
        ("llama", {"kv_channels": 32}, "says 32 for kv_channels"),
        ("llama", {"v_head_dim": 8}, "says 8 for v_head_dim"),
        ("llama", MLA, "says 24 for kv_lora_rank|says 8 for v_head_dim"),
        ("llama", {"qk_head_dim": 8}, "says qk_head_dim"),
        ("llama", {"multi_query_group_num": 2}, "says 2 for multi_query_group_num"),
        ("gpt2", {"num_key_value_heads": 2}, "says 2 for num_key_value_heads"),
        ("gpt2", {"head_dim": 8}, "says 8 for head_dim"),
        ("gpt2", {"n_layer": 4}, "says 4 for n_layer and 8 for num_hidden_layers"),
        ("opt", {"num_key_value_heads": 2}, "says 2 for num_key_value_heads"),
        ("gpt_neox", {"num_key_value_heads": 2}, "says 2 for num_key_value_heads"),
        ("chatglm", {"num_layers": 4}, "says 4 for num_layers and 8 for num_hidden_layers"),
        ("unheard_of", {"num_key_value_heads": 4, "num_kv_heads": 2}, "says 2 for num_kv_heads and 4 for num_key"),
        ("xlstm", {"embedding_dim": 32}, "says 32 for embedding_dim and 64 for hidden_size"),
    ],
)
def test_names_that_disagree_or_that_the_family_does_not_read_are_refused(family, config, says):
    with pytest.raises(UnsupportedModelError, match=says):
        Spec.from_config(SIZES | {"model_type": family} | config)


# 8 layers of 4 heads of 16, whatever they are called besides; null and 0 say nothing
@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("llama", {"num_kv_heads": 4, "kv_channels": 16, "v_head_dim": 16, "qk_head_dim": None}),
        ("llama", {"num_kv_heads": None, "kv_lora_rank": 0, "v_head_dim": 0, "n_layers": 8}),
        ("gpt2", {"num_key_value_heads": 4, "head_dim": 16, "n_layer": 8, "n_embd": 64}),
        ("opt", {"num_key_value_heads": 4}),
        ("chatglm", {"num_layers": 8, "kv_channels": 16, "pre_seq_len": None}),
        ("deepseek_v2", MLA | {"use_mla": False, "num_key_value_heads": 4, "qk_head_dim": 12}),
    ],
)
def test_names_that_say_the_same_are_read(family, config):
    assert bill(Spec.from_config(SIZES | {"model_type": family} | config)).next_token(0) == 8 * 2 * 64 * F32


def test_what_transformers_saves_of_generation_is_harmless():
    from transformers import GenerationConfig

    # as transformers 4 wrote them into every configuration too
    older = "return_dict output_hidden_states torchscript use_bfloat16 pruned_heads chunk_size_feed_forward is_decoder"
    older += " tie_encoder_decoder num_beams num_beam_groups diversity_penalty finetuning_task tokenizer_class prefix"
    older += " problem_type encoder_no_repeat_ngram_size xla_device gradient_checkpointing suppress_tokens"
    saved = dict.fromkeys((*GenerationConfig().to_dict(), *older.split()), 1)
    assert list(suspects(saved)) == []
