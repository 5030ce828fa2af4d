"""Tiny random models of every family the seam is tested on: three layers, seeded, float32, in eval mode.

The weights are drawn wide enough that attention is far from uniform, so that a wrong scale, mask or head is seen.
"""

from typing import Any

import pytest
import torch
from packaging.version import Version

from kvprobe.decoder.families.family import N_LAYERS, VOCAB, WINDOW
from kvprobe.decoder.families.llama import TINY
from kvprobe.decoder.weights import FAMILIES as OURS
from kvprobe.models import older_releases

# the release that constraints.txt names: it has every family below
TESTED = "5.24.0"

_HALVES = TINY
_MHA: dict[str, Any] = {k: v for k, v in _HALVES.items() if k not in ("num_key_value_heads", "head_dim")}
_MLA: dict[str, Any] = _MHA | {
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
}
_LONGCAT = (
    "vocab_size",
    "hidden_size",
    "num_attention_heads",
    "max_position_embeddings",
    "q_lora_rank",
    "kv_lora_rank",
)
_LONGCAT += ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "n_routed_experts", "bos_token_id", "eos_token_id")
_LOCAL: dict[str, Any] = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}

# family -> (configuration class, model class, what it is built from)
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {name: family.tiny for name, family in OURS.items()} | {
    "gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        # a low cap, so that dropping it changes the weights
        _HALVES | _LOCAL | {"query_pre_attn_scalar": 12, "attn_logit_softcapping": 2.0},
    ),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", _MHA | {"rotary_pct": 0.5}),
    "opt": ("OPTConfig", "OPTForCausalLM", _MHA | {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "phi": ("PhiConfig", "PhiForCausalLM", _MHA | {"num_key_value_heads": 2, "partial_rotary_factor": 0.5}),
    "phi3": (
        "Phi3Config",
        "Phi3ForCausalLM",
        {k: v for k, v in _HALVES.items() if k != "head_dim"} | {"original_max_position_embeddings": 256},
    ),
    "gpt_oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        _HALVES
        | _LOCAL
        | {"num_local_experts": 4, "num_experts_per_tok": 2}
        # YaRN as the published checkpoints have it: it stretches the angles and scales cos and sin
        | {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
            }
        },
    ),
    "deepseek_v2": (
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        _MLA | {"topk_method": "greedy"},
    ),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", _MLA),
    "qwen3_next": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        _HALVES
        | {"layer_types": ["linear_attention", "full_attention", "full_attention"], "partial_rotary_factor": 0.5}
        | {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
        | {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4}
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        | {"shared_expert_intermediate_size": 16},
    ),
    "falcon": ("FalconConfig", "FalconForCausalLM", _MHA | {"multi_query": True}),
    "bloom": ("BloomConfig", "BloomForCausalLM", {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 3, "n_head": 4}),
    "mpt": (
        "MptConfig",
        "MptForCausalLM",
        {"vocab_size": VOCAB, "d_model": 32, "n_layers": N_LAYERS, "n_heads": 4, "max_seq_len": 256},
    ),
    "gpt_neo": (
        "GPTNeoConfig",
        "GPTNeoForCausalLM",
        {"vocab_size": VOCAB, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "intermediate_size": 48}
        | {"attention_types": [[["global", "local"], 1]], "window_size": WINDOW, "max_position_embeddings": 256}
        | {"bos_token_id": 1, "eos_token_id": 2},
    ),
}

_DSA: dict[str, Any] = _MLA | {"index_n_heads": 2, "index_head_dim": 8, "index_topk": 4}
_VISION: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "image_size": 28}
_VISION |= {"patch_size": 14, "num_hidden_layers": 5}
_QWEN_VISION: dict[str, Any] = {"depth": 5, "num_heads": 2, "patch_size": 14}
_MROPE: dict[str, Any] = _HALVES | {
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
}
# every fourth layer of the published models, here the last, has no position encoding
_NOPE: dict[str, Any] = _HALVES | {"num_hidden_layers": 4}
_NOPE_LOCAL: dict[str, Any] = _NOPE | {"sliding_window": WINDOW, "layer_types": ["sliding_attention"] * 3}
_NOPE_LOCAL |= {"layer_types": [*_NOPE_LOCAL["layer_types"], "full_attention"]}
_GPTJ: dict[str, Any] = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 4, "rotary_dim": 4}
_GPTJ |= {"n_positions": 256, "bos_token_id": 1, "eos_token_id": 2}

# families of whom one thing is special; they have their own tests
SPECIAL: dict[str, tuple[str, str, dict[str, Any]]] = {
    # attention reads only the keys that an indexer chooses, fewer than the tests' texts have
    "deepseek_v32": ("DeepseekV32Config", "DeepseekV32ForCausalLM", _DSA),
    "glm_moe_dsa": ("GlmMoeDsaConfig", "GlmMoeDsaForCausalLM", _DSA),
    "axk2": ("AXK2Config", "AXK2ForCausalLM", _DSA | {"head_dim": 4}),
    "hy_v4": ("HYV4Config", "HYV4ForCausalLM", _DSA),
    "minimax_m3_vl_text": (
        "MiniMaxM3VLTextConfig",
        "MiniMaxM3VLForCausalLM",
        _HALVES
        | {"layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"]}
        | {"index_n_heads": 2, "index_head_dim": 8, "index_block_size": 4, "index_topk_blocks": 2}
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "dense_intermediate_size": 48},
    ),
    # layers without position encoding beside others
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM", _NOPE | {"no_rope_layers": [1, 1, 1, 0]}),
    "cohere2": ("Cohere2Config", "Cohere2ForCausalLM", _NOPE_LOCAL),
    "exaone4": ("Exaone4Config", "Exaone4ForCausalLM", _NOPE_LOCAL),
    "afmoe": (
        "AfmoeConfig",
        "AfmoeForCausalLM",
        _NOPE_LOCAL | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_dense_layers": 1},
    ),
    "llama4_text": (
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        _NOPE
        | {"no_rope_layers": [1, 1, 1, 0], "attention_chunk_size": WINDOW, "intermediate_size_mlp": 48}
        | {"num_local_experts": 2, "num_experts_per_tok": 1},
    ),
    # sines kept in a table, not made from frequencies
    "gptj": ("GPTJConfig", "GPTJForCausalLM", _GPTJ),
    "codegen": ("CodeGenConfig", "CodeGenForCausalLM", _GPTJ),
    # turns the other way
    "nanochat": ("NanoChatConfig", "NanoChatForCausalLM", _HALVES),
    # two attentions a layer
    "longcat_flash": (
        "LongcatFlashConfig",
        "LongcatFlashForCausalLM",
        {k: v for k, v in _MLA.items() if k in _LONGCAT}
        | {"num_layers": 2, "head_dim": 4, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 16}
        | {"zero_expert_num": 1, "moe_topk": 2},
    ),
    # a part that reads images, with more layers than the one that reads text
    "gemma3": (
        "Gemma3Config",
        "Gemma3ForConditionalGeneration",
        {"text_config": _HALVES | _LOCAL, "vision_config": _VISION, "mm_tokens_per_image": 4},
    ),
    "llava": (
        "LlavaConfig",
        "LlavaForConditionalGeneration",
        {"text_config": _HALVES | {"model_type": "llama"}}
        | {"vision_config": _VISION | {"model_type": "clip_vision_model", "projection_dim": 16}},
    ),
    "qwen2_vl": (
        "Qwen2VLConfig",
        "Qwen2VLForConditionalGeneration",
        {"text_config": _MROPE, "vision_config": _QWEN_VISION | {"embed_dim": 16, "hidden_size": 32}},
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLConfig",
        "Qwen2_5_VLForConditionalGeneration",
        {"text_config": _MROPE}
        | {"vision_config": _QWEN_VISION | {"hidden_size": 16, "intermediate_size": 32, "out_hidden_size": 32}},
    ),
    "qwen3_vl": (
        "Qwen3VLConfig",
        "Qwen3VLForConditionalGeneration",
        {"text_config": _MROPE}
        | {"vision_config": _QWEN_VISION | {"hidden_size": 16, "intermediate_size": 32, "out_hidden_size": 32}},
    ),
}

# the families whose attention passes through transformers' attention interface, and those that bypass it
HOOKED = tuple(family for family in FAMILIES if family not in ("falcon", "bloom", "mpt", "gpt_neo"))
BYPASSING = ("falcon", "bloom", "mpt", "gpt_neo")


def skip_before(version: str, why: str) -> None:
    """Skip a test on a transformers older than ``version``."""
    import transformers

    if Version(transformers.__version__) < Version(version):
        pytest.skip(f"transformers {transformers.__version__}: {why}")


def skip_unless_there(name: str) -> None:
    """Skip a test if the installed transformers is older than its class ``name``; those of the newest are all there."""
    import transformers

    if not hasattr(transformers, name):
        version = transformers.__version__
        assert Version(version) < Version(TESTED), f"transformers {version} has no {name}"
        pytest.skip(f"transformers {version} has no {name}")


def tiny_config(family: str, **overrides: Any) -> Any:
    """The configuration alone; `overrides` are the family's own configuration keys."""
    import transformers

    name, _, settings = (FAMILIES | SPECIAL)[family]
    skip_unless_there(name)
    config_class = getattr(transformers, name)
    of_type = {"model_type": config_class.model_type, **settings, **overrides}
    return config_class(**{k: v for k, v in older_releases.for_installed(family, of_type).items() if k != "model_type"})


def tiny_model(family: str, seed: int = 0, *, std: float = 0.2, **overrides: Any) -> Any:
    """A random model of `family`, with every vector (norms, biases, learned sink logits) off its usual value too."""
    import transformers

    config = tiny_config(family, **overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # some families draw their vectors too when they are built
        model = getattr(transformers, (FAMILIES | SPECIAL)[family][1])(config)
    if family not in BYPASSING and not model._can_set_attn_implementation():
        skip_before(TESTED, f"{family} goes round the attention interface")
    capped = getattr(config, "attn_logit_softcapping", None)
    rescaled = getattr(config, "scale_attn_by_inverse_layer_idx", False) or not getattr(config, "scale_attn_weights", 1)
    if capped or (rescaled and Version(transformers.__version__) < Version("5.12")):
        # sdpa, which older releases take for these too, drops both without a word
        model.set_attn_implementation("eager")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith(("sinks", "A_log", "dt_bias")):
                parameter.copy_(noise)
            elif parameter.dim() > 1:
                parameter.copy_(noise * std)
            else:
                # norms begin at one in most families, at zero in Gemma's, biases at zero: keep what they begin at
                parameter.add_(noise * 0.1)
    return model.to(torch.float32).eval().requires_grad_(False)


def tiny_ids(n_tokens: int = 24, *, batch: int = 1, seed: int = 0) -> torch.Tensor:
    """Random token ids `[batch, n_tokens]`, none of them a special one."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (batch, n_tokens), generator=generator)
