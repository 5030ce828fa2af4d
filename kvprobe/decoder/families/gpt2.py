"""GPT-2: learned positions, LayerNorm, one fused projection stored by inputs."""

from typing import Any

import torch
from torch import Tensor, nn

from kvprobe.decoder.config import DecoderConfig
from kvprobe.decoder.families.family import N_LAYERS, VOCAB, Family, is_tied, refuse


def _config(model: nn.Module) -> DecoderConfig:
    given: Any = model.config
    refuse("gpt2", "activation_function", given.activation_function, allowed=("gelu_new", "gelu_pytorch_tanh"))
    refuse("gpt2", "add_cross_attention", given.add_cross_attention, allowed=(False,))
    if given.reorder_and_upcast_attn:
        # scores in float32: what float32 does anyway
        refuse("gpt2", "reorder_and_upcast_attn at dtype", next(model.parameters()).dtype, allowed=(torch.float32,))
    head_dim = given.n_embd // given.n_head
    return DecoderConfig(
        n_layers=given.n_layer,
        n_heads=given.n_head,
        n_kv_heads=given.n_head,
        head_dim=head_dim,
        hidden=given.n_embd,
        mlp_width=given.n_inner or 4 * given.n_embd,
        vocab=given.vocab_size,
        max_positions=given.n_positions,
        rotary=None,
        norm="layer",
        norm_eps=given.layer_norm_epsilon,
        activation="gelu_tanh",
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        scale=head_dim**-0.5 if given.scale_attn_weights else 1.0,
        scale_by_layer=given.scale_attn_by_inverse_layer_idx,
        tied_head=is_tied(model, "transformer.wte.weight"),
    )


def _unfused(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state with q, k and v apart. GPT-2's Conv1D weights are (in, out): transposed views, not copies."""
    apart: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name.startswith("transformer.h.") and tensor.ndim == 2:
            tensor = tensor.T
        if ".attn.c_attn." not in name:
            apart[name] = tensor
            continue
        for part, third in zip("qkv", tensor.chunk(3), strict=True):
            apart[name.replace("c_attn", part)] = third
    return apart


FAMILY = Family(
    name="gpt2",
    config=_config,
    state=_unfused,
    outer={
        "embedding": "transformer.wte",
        "position": "transformer.wpe",
        "norm": "transformer.ln_f",
        "head": "lm_head",
        "blocks": "transformer.h",
    },
    inner={
        "attention_norm": "ln_1",
        "attention.query": "attn.q",
        "attention.key": "attn.k",
        "attention.value": "attn.v",
        "attention.out": "attn.c_proj",
        "mlp_norm": "ln_2",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    },
    tiny=(
        "GPT2Config",
        "GPT2LMHeadModel",
        {"vocab_size": VOCAB, "n_embd": 32, "n_layer": N_LAYERS, "n_head": 4, "n_positions": 256}
        | {"bos_token_id": 1, "eos_token_id": 2},
    ),
)
