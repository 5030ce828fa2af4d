"""Which tensor of a Hugging Face model is which of the decoder's? Read by name and shape, shared and never copied.

Reads a loaded model's ``config`` and ``state_dict`` and imports nothing of transformers.
"""

from typing import Any

import torch
from torch import Tensor, nn

from kvprobe.decoder.config import DecoderConfig, Rotary
from kvprobe.errors import UnsupportedModelError

FAMILIES = ("gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma3_text")

# the decoder's module -> the checkpoint's, outside the blocks and inside one
_OUTER = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head", "blocks": "model.layers"}
_INNER = {
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
# Gemma 3 norms before and after, and so calls another norm "post_attention"
_INNER_GEMMA = _INNER | {
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
_OUTER_GPT2 = {
    "embedding": "transformer.wte",
    "position": "transformer.wpe",
    "norm": "transformer.ln_f",
    "head": "lm_head",
    "blocks": "transformer.h",
}
_INNER_GPT2 = {
    "attention_norm": "ln_1",
    "attention.query": "attn.q",
    "attention.key": "attn.k",
    "attention.value": "attn.v",
    "attention.out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}


def config_of(model: nn.Module) -> DecoderConfig:
    """The decoder that computes what ``model`` computes.

    Raises UnsupportedModelError, naming the family and the setting, for what the decoder has not.
    """
    family = _family(model)
    given: Any = model.config
    if family == "gpt2":
        return _gpt2(given, model)
    heads, kv_heads, hidden = given.num_attention_heads, given.num_key_value_heads, given.hidden_size
    head_dim = getattr(given, "head_dim", None) or hidden // heads
    gemma = family == "gemma3_text"
    activation = given.hidden_activation if gemma else given.hidden_act
    _refuse(family, "activation", activation, allowed=("gelu_pytorch_tanh",) if gemma else ("silu", "swish"))
    if gemma:
        _refuse(family, "use_bidirectional_attention", bool(given.use_bidirectional_attention), allowed=(False,))
    windows = _windows(family, given)
    local_rotary = None
    if gemma:
        # Gemma 3 turns its local layers by a theta of their own; a model may have layers of one kind only
        rotaries = {kind: _rotary(model, head_dim, f"{kind}_") for kind in set(given.layer_types)}
        local_rotary = rotaries.get("sliding_attention")
        rotary = rotaries.get("full_attention", local_rotary)
    else:
        rotary = _rotary(model, head_dim, "")
    attention_bias = bool(getattr(given, "attention_bias", False))
    return DecoderConfig(
        n_layers=given.num_hidden_layers,
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=head_dim,
        hidden=hidden,
        mlp_width=given.intermediate_size,
        vocab=given.vocab_size,
        max_positions=given.max_position_embeddings,
        rotary=rotary,
        local_rotary=local_rotary,
        windows=windows if any(windows) else (),
        norm_eps=given.rms_norm_eps,
        norm_offset=1.0 if gemma else 0.0,
        post_norms=gemma,
        qk_norm=family in ("qwen3", "gemma3_text"),
        activation="geglu" if gemma else "swiglu",
        qkv_bias=family == "qwen2" or attention_bias,
        out_bias=attention_bias,
        mlp_bias=bool(getattr(given, "mlp_bias", False)),
        scale=given.query_pre_attn_scalar**-0.5 if gemma else None,
        embedding_scale=hidden**0.5 if gemma else 1.0,
        tied_head=_tied(model, "model.embed_tokens.weight"),
        final_softcap=given.final_logit_softcapping if gemma else None,
    )


def load_weights(decoder: nn.Module, model: nn.Module) -> None:
    """Give ``decoder`` the weights of ``model``: the same storage, GPT-2's as transposed views of it.

    Raises UnsupportedModelError naming the tensor that is missing, left over, or of another shape.
    """
    family = _family(model)
    state = model.state_dict()
    outer, inner = (_OUTER_GPT2, _INNER_GPT2) if family == "gpt2" else (_OUTER, _INNER)
    if family == "gemma3_text":
        inner = _INNER_GEMMA
    if family == "gpt2":
        state = _unfused(state)
    if not hasattr(decoder, "head"):
        state.pop("lm_head.weight", None)
    found: dict[str, Tensor] = {}
    for ours, wanted in decoder.state_dict().items():
        theirs = _name(ours, outer, inner)
        if theirs not in state:
            raise UnsupportedModelError(f"family {family}: the model has no tensor {theirs!r}")
        tensor = state.pop(theirs)
        if tensor.shape != wanted.shape:
            raise UnsupportedModelError(
                f"family {family}: {theirs!r} is {[*tensor.shape]}, its config asks for {[*wanted.shape]}"
            )
        if tensor.is_meta:
            raise UnsupportedModelError(f"{theirs!r} is not in memory: load the model without offloading")
        found[ours] = tensor
    if state:
        raise UnsupportedModelError(f"family {family}: the decoder has no place for the tensor {next(iter(state))!r}")
    decoder.load_state_dict(found, assign=True)


def _gpt2(given: Any, model: nn.Module) -> DecoderConfig:
    _refuse("gpt2", "activation_function", given.activation_function, allowed=("gelu_new", "gelu_pytorch_tanh"))
    _refuse("gpt2", "add_cross_attention", given.add_cross_attention, allowed=(False,))
    if given.reorder_and_upcast_attn:
        # scores in float32: what float32 does anyway
        _refuse("gpt2", "reorder_and_upcast_attn at dtype", next(model.parameters()).dtype, allowed=(torch.float32,))
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
        tied_head=_tied(model, "transformer.wte.weight"),
    )


def _unfused(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """GPT-2's state with q, k and v apart. Its Conv1D weights are (in, out): transposed views, not copies."""
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


def _name(ours: str, outer: dict[str, str], inner: dict[str, str]) -> str:
    module, _, leaf = ours.rpartition(".")
    if not module.startswith("blocks."):
        return f"{outer[module]}.{leaf}"
    _, layer, part = module.split(".", 2)
    return f"{outer['blocks']}.{layer}.{inner[part]}.{leaf}"


def _family(model: nn.Module) -> str:
    family = str(getattr(model.config, "model_type", type(model).__name__))
    if family not in FAMILIES:
        raise UnsupportedModelError(f"the decoder has no family {family}; it reads {', '.join(FAMILIES)}")
    return family


def _windows(family: str, given: Any) -> tuple[int | None, ...]:
    window, kinds = getattr(given, "sliding_window", None), getattr(given, "layer_types", None)
    if kinds is None:
        # without layer types a window is every layer's (Mistral)
        return (window if family == "mistral" else None,) * given.num_hidden_layers
    for kind in kinds:
        _refuse(family, "layer type", kind, allowed=("full_attention", "sliding_attention"))
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _rotary(model: nn.Module, head_dim: int, prefix: str) -> Rotary:
    """The frequencies that the model itself turns with, whatever scaling (linear, Llama 3, YaRN) made them."""
    family = _family(model)
    module: Any = model.get_submodule("model.rotary_emb")
    kind = module.rope_type[prefix.rstrip("_")] if prefix else module.rope_type
    if kind in ("dynamic", "longrope"):
        raise UnsupportedModelError(f"family {family} with {kind} RoPE: its frequencies change with the length")
    frequencies = getattr(module, f"{prefix}inv_freq")
    if 2 * len(frequencies) != head_dim:
        raise UnsupportedModelError(
            f"family {family} turns {2 * len(frequencies)} of {head_dim} components; the decoder turns whole heads"
        )
    return Rotary(frequencies=tuple(frequencies.tolist()), scale=float(getattr(module, f"{prefix}attention_scaling")))


def _tied(model: nn.Module, embedding: str) -> bool:
    state = model.state_dict()
    head = state.get("lm_head.weight")
    return head is None or head is state[embedding] or head.data_ptr() == state[embedding].data_ptr()


def _refuse(family: str, setting: str, value: Any, *, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        wanted = ", ".join(str(option) for option in allowed)
        raise UnsupportedModelError(f"family {family} with {setting} {value}: the decoder has {wanted}")
