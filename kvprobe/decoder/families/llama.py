"""Llama, and what the families after it share: RMSNorm, RoPE, grouped heads, a gated MLP."""

from typing import Any

from torch import nn

from kvprobe.decoder.config import DecoderConfig
from kvprobe.decoder.families.family import N_LAYERS, VOCAB, Family, family_of, is_tied, refuse, rotary_of

OUTER = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head", "blocks": "model.layers"}
INNER = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
TINY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": N_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def head_dim_of(given: Any) -> int:
    """The width of a head, or the hidden width over the heads if the configuration does not say."""
    return getattr(given, "head_dim", None) or given.hidden_size // given.num_attention_heads


def config_of(model: nn.Module, **of_the_family: Any) -> DecoderConfig:
    """The decoder of a Llama, except for ``of_the_family``; ``windows`` has an entry a layer, None if global."""
    given: Any = model.config
    if "activation" not in of_the_family:
        refuse(family_of(model), "activation", given.hidden_act, allowed=("silu", "swish"))
    attention_bias = bool(getattr(given, "attention_bias", False))
    settings = {
        "rotary": None if "rotary" in of_the_family else rotary_of(model, head_dim_of(given)),
        "activation": "swiglu",
        "qkv_bias": attention_bias,
        "out_bias": attention_bias,
        "mlp_bias": bool(getattr(given, "mlp_bias", False)),
    } | of_the_family
    windows = settings.pop("windows", ())
    return DecoderConfig(
        n_layers=given.num_hidden_layers,
        n_heads=given.num_attention_heads,
        n_kv_heads=given.num_key_value_heads,
        head_dim=head_dim_of(given),
        hidden=given.hidden_size,
        mlp_width=given.intermediate_size,
        vocab=given.vocab_size,
        max_positions=given.max_position_embeddings,
        windows=windows if any(windows) else (),
        norm_eps=given.rms_norm_eps,
        tied_head=is_tied(model, "model.embed_tokens.weight"),
        **settings,
    )


FAMILY = Family(
    name="llama", config=config_of, outer=OUTER, inner=INNER, tiny=("LlamaConfig", "LlamaForCausalLM", TINY)
)
