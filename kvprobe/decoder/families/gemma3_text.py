"""Gemma 3 as it reads text: norms before and after, local layers with their own rotation, bounded logits."""

from typing import Any

from torch import nn

from kvprobe.decoder.config import DecoderConfig
from kvprobe.decoder.families import llama
from kvprobe.decoder.families.family import WINDOW, Family, refuse, rotary_of, windows_by_type


def _config(model: nn.Module) -> DecoderConfig:
    given: Any = model.config
    refuse("gemma3_text", "activation", given.hidden_activation, allowed=("gelu_pytorch_tanh",))
    bidirectional = bool(given.use_bidirectional_attention)
    refuse("gemma3_text", "use_bidirectional_attention", bidirectional, allowed=(False,))
    windows = windows_by_type("gemma3_text", given)
    # local layers have their own theta; a model may have layers of one kind only
    head_dim = llama.head_dim_of(given)
    rotaries = {kind: rotary_of(model, head_dim, f"{kind}_") for kind in set(given.layer_types)}
    local = rotaries.get("sliding_attention")
    return llama.config_of(
        model,
        rotary=rotaries.get("full_attention", local),
        local_rotary=local,
        windows=windows,
        norm_offset=1.0,
        post_norms=True,
        qk_norm=True,
        activation="geglu",
        scale=given.query_pre_attn_scalar**-0.5,
        embedding_scale=given.hidden_size**0.5,
        final_softcap=given.final_logit_softcapping,
    )


FAMILY = Family(
    name="gemma3_text",
    config=_config,
    outer=llama.OUTER,
    # it norms before and after, and so calls another norm "post_attention"
    inner=llama.INNER
    | {
        "attention_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    },
    tiny=(
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        llama.TINY
        | {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
        | {"head_dim": 12, "query_pre_attn_scalar": 10},
    ),
)
