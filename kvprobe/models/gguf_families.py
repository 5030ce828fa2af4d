"""Which tensors, of which shapes, does each GGUF architecture have, and which settings do its keys make?

Sizes are letters: ``C`` positions, ``D`` a head, ``E`` experts, ``F`` the MLP, ``H`` the hidden size, ``K`` all key
heads, ``N`` tokens, ``M`` an expert's MLP, ``Q`` all query heads, ``S`` the shared expert's MLP; + adds.
"""

from dataclasses import dataclass, field

_GATED = {"ffn_gate.weight": "F H", "ffn_up.weight": "F H", "ffn_down.weight": "H F"}
_SEPARATE = {"attn_q.weight": "Q H", "attn_k.weight": "K H", "attn_v.weight": "K H", "attn_output.weight": "H Q"}
_QKV_BIAS = {"attn_q.bias": "Q", "attn_k.bias": "K", "attn_v.bias": "K"}
_NORMS = {"attn_norm.weight": "H", "ffn_norm.weight": "H"}
_NORM_BIASES = {"attn_norm.bias": "H", "ffn_norm.bias": "H"}
_HEAD_NORMS = {"attn_q_norm.weight": "D", "attn_k_norm.weight": "D"}
_PLAIN = {"ffn_up.weight": "F H", "ffn_down.weight": "H F"}
_PLAIN_BIASES = {"ffn_up.bias": "F", "ffn_down.bias": "H"}
_FUSED = {"attn_qkv.weight": "Q+K+K H", "attn_output.weight": "H Q"}
_FUSED_BIASES = {"attn_qkv.bias": "Q+K+K", "attn_output.bias": "H"}
_EXPERTS = {"ffn_gate_inp.weight": "E H", "ffn_gate_exps.weight": "E M H"}
_EXPERTS |= {"ffn_up_exps.weight": "E M H", "ffn_down_exps.weight": "E H M"}
_SHARED = {"ffn_gate_inp_shexp.weight": "H", "ffn_gate_shexp.weight": "S H"}
_SHARED |= {"ffn_up_shexp.weight": "S H", "ffn_down_shexp.weight": "H S"}

_OUTSIDE = {"token_embd.weight": "N H", "output_norm.weight": "H"}
_OUTSIDE_BIAS = _OUTSIDE | {"output_norm.bias": "H"}

_RMS = "attention.layer_norm_rms_epsilon"
_LAYER = "attention.layer_norm_epsilon"


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture: its tensors, and the configuration setting that each of its own keys becomes."""

    layer: dict[str, str]
    """Tensors of each layer, by their names after ``blk.N.``, with their shapes."""
    outside: dict[str, str] = field(default_factory=lambda: dict(_OUTSIDE))
    biases: dict[str, dict[str, str]] = field(default_factory=dict)
    """Groups of tensors that either all layers have or none, by the setting that says so."""
    epsilon: tuple[str, str] = (_RMS, "rms_norm_eps")
    keys: tuple[str, ...] = ()
    """Keys beyond those of every family."""
    needs: tuple[str, ...] = ()
    """Required keys, beyond those of every family."""
    partial_rotary: bool = False
    rotary: bool = True
    local: bool = False
    """Whether the family has sliding layers."""
    untied: bool = True
    """Whether it may have its own output matrix."""
    kv_heads: bool = True
    """Whether the number of KV heads is a separate setting."""


_LLAMA = _NORMS | _SEPARATE | _GATED
_GEMMA2 = _LLAMA | {"post_attention_norm.weight": "H", "post_ffw_norm.weight": "H"}
_EXPERT_KEYS = ("expert_count", "expert_used_count", "expert_feed_forward_length")
SOFTCAPS = ("attn_logit_softcapping", "final_logit_softcapping")

FAMILIES: dict[str, Family] = {
    "llama": Family(
        layer=_LLAMA,
        biases={
            "attention_bias": _QKV_BIAS | {"attn_output.bias": "H"},
            "mlp_bias": {"ffn_gate.bias": "F", "ffn_up.bias": "F", "ffn_down.bias": "H"},
        },
    ),
    "qwen2": Family(layer=_LLAMA | _QKV_BIAS),
    "qwen3": Family(layer=_LLAMA | _HEAD_NORMS),
    "qwen2moe": Family(
        layer=_NORMS | _SEPARATE | _QKV_BIAS | _EXPERTS | _SHARED,
        keys=(*_EXPERT_KEYS, "expert_shared_feed_forward_length"),
        needs=_EXPERT_KEYS[:2],
    ),
    "qwen3moe": Family(layer=_NORMS | _SEPARATE | _HEAD_NORMS | _EXPERTS, keys=_EXPERT_KEYS, needs=_EXPERT_KEYS[:2]),
    "gemma2": Family(layer=_GEMMA2, keys=SOFTCAPS, needs=("attention.sliding_window",), local=True, untied=False),
    "gemma3": Family(
        layer=_GEMMA2 | _HEAD_NORMS,
        keys=SOFTCAPS,
        needs=("attention.sliding_window", "rope.freq_base"),
        local=True,
    ),
    "phi3": Family(
        layer=_NORMS | _FUSED | {"ffn_up.weight": "F+F H", "ffn_down.weight": "H F"}, partial_rotary=True, local=True
    ),
    "gpt2": Family(
        layer=_NORMS | _NORM_BIASES | _FUSED | _FUSED_BIASES | _PLAIN | _PLAIN_BIASES,
        outside=_OUTSIDE_BIAS | {"position_embd.weight": "C H"},
        epsilon=(_LAYER, "layer_norm_epsilon"),
        rotary=False,
        kv_heads=False,
    ),
    "bloom": Family(
        layer=_NORMS | _NORM_BIASES | _FUSED | _FUSED_BIASES | _PLAIN | _PLAIN_BIASES,
        outside=_OUTSIDE_BIAS | {"token_embd_norm.weight": "H", "token_embd_norm.bias": "H"},
        epsilon=(_LAYER, "layer_norm_epsilon"),
        rotary=False,
        kv_heads=False,
    ),
    "starcoder2": Family(
        layer=_NORMS | _NORM_BIASES | _SEPARATE | _QKV_BIAS | {"attn_output.bias": "H"} | _PLAIN | _PLAIN_BIASES,
        outside=_OUTSIDE_BIAS,
        epsilon=(_LAYER, "norm_epsilon"),
    ),
    "stablelm": Family(
        layer=_NORMS | _NORM_BIASES | _SEPARATE | _GATED,
        outside=_OUTSIDE_BIAS,
        biases={"use_qkv_bias": _QKV_BIAS},
        epsilon=(_LAYER, "layer_norm_eps"),
        partial_rotary=True,
    ),
    "nemotron": Family(
        layer=_NORMS | _NORM_BIASES | _SEPARATE | _PLAIN,
        outside=_OUTSIDE_BIAS,
        epsilon=(_LAYER, "norm_eps"),
        partial_rotary=True,
    ),
    "falcon": Family(
        layer={"attn_norm.weight": "H", "attn_norm.bias": "H"} | _FUSED | _PLAIN,
        outside=_OUTSIDE_BIAS,
        epsilon=(_LAYER, "layer_norm_epsilon"),
        kv_heads=False,
    ),
}

# transformers reads these specially, from these keys; a missing tensor is noticed during conversion
_COMMON: tuple[str, ...] = (
    "context_length",
    "block_count",
    "embedding_length",
    "feed_forward_length",
    "vocab_size",
    _RMS,
)
_COMMON += ("attention.head_count", "attention.head_count_kv", "rope.freq_base")
_QWEN35: tuple[str, ...] = (
    *_COMMON,
    "attention.key_length",
    "attention.value_length",
    "rope.dimension_count",
    "rope.dimension_sections",
    "full_attention_interval",
)
_QWEN35 += ("nextn_predict_layers", *(f"ssm.{name}" for name in ("conv_kernel", "state_size", "group_count")))
_QWEN35 += ("ssm.time_step_rank", "ssm.inner_size")
OTHERS: dict[str, tuple[str, ...]] = {
    "lfm2": (*_COMMON, "shortconv.l_cache"),
    "mamba": (*_COMMON[:7], *(f"ssm.{name}" for name in ("conv_kernel", "state_size", "time_step_rank", "inner_size"))),
    "minimax-m2": (*_COMMON, "rope.dimension_count", "attention.key_length", *_EXPERT_KEYS, "expert_gating_func"),
    "qwen35": _QWEN35,
    "qwen35moe": (*_QWEN35, *_EXPERT_KEYS, "expert_shared_feed_forward_length"),
}
NOT_CAUSAL = ("t5", "t5encoder", "umt5", "bert", "nomic-bert", "jina-bert-v2", "clip", "whisper")
