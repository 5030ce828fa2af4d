"""Each family of GGUF as transformers' own class, with the settings written by hand and the weights put back."""

import gguf
import numpy as np
import torch

from support.gguf_files import (
    CONTEXT,
    EXPERTS,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    MLP,
    TOKENS,
)

EPS = 1e-3
ROPE = {"rope_type": "default", "rope_theta": 5000.0}
SIZES = {"vocab_size": len(TOKENS), "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "intermediate_size": MLP}
SIZES |= {"num_attention_heads": HEADS, "max_position_embeddings": CONTEXT, "tie_word_embeddings": False}
GROUPED = SIZES | {"num_key_value_heads": KV_HEADS}
RMS = GROUPED | {"rms_norm_eps": EPS, "rope_parameters": ROPE}
MOE = {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 6}


# the class of transformers and the settings that the keys of gguf_files mean
BY_HAND = {
    "llama": ("Llama", RMS | {"head_dim": 8}),
    "qwen2": ("Qwen2", RMS),
    "qwen3": ("Qwen3", RMS | {"head_dim": 8}),
    "qwen2moe": ("Qwen2Moe", RMS | MOE | {"shared_expert_intermediate_size": 40, "norm_topk_prob": False}),
    "qwen3moe": ("Qwen3Moe", RMS | MOE | {"head_dim": 8, "norm_topk_prob": True}),
    "gemma2": (
        "Gemma2",
        RMS | GEMMA | {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0, "tie_word_embeddings": True},
    ),
    "gemma3": (
        "Gemma3",
        RMS
        | GEMMA
        | {"rope_parameters": {"full_attention": ROPE, "sliding_attention": {**ROPE, "rope_theta": 10000.0}}},
    ),
    "phi3": (
        "Phi3",
        RMS | {"rope_parameters": ROPE | {"partial_rotary_factor": 0.75}, "sliding_window": 5, "pad_token_id": 0},
    ),
    "gpt2": (
        "GPT2",
        {"vocab_size": len(TOKENS), "n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "n_positions": CONTEXT}
        | {"n_inner": MLP, "layer_norm_epsilon": EPS, "tie_word_embeddings": False},
    ),
    "bloom": (
        "Bloom",
        {"vocab_size": len(TOKENS), "hidden_size": HIDDEN, "n_layer": LAYERS, "n_head": HEADS}
        | {"layer_norm_epsilon": EPS, "tie_word_embeddings": False},
    ),
    "starcoder2": ("Starcoder2", GROUPED | {"norm_epsilon": EPS, "rope_parameters": ROPE}),
    "stablelm": (
        "StableLm",
        GROUPED | {"layer_norm_eps": EPS, "rope_parameters": ROPE | {"partial_rotary_factor": 0.5}},
    ),
    "nemotron": (
        "Nemotron",
        GROUPED | {"norm_eps": EPS, "rope_parameters": ROPE | {"partial_rotary_factor": 0.5}},
    ),
    "falcon": (
        "Falcon",
        {"vocab_size": len(TOKENS), "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "tie_word_embeddings": False}
        | {"num_attention_heads": HEADS, "ffn_hidden_size": MLP, "layer_norm_epsilon": EPS}
        | {"rope_parameters": ROPE | {"rope_theta": 10000.0}},
    ),
}


def halves(rows, n_heads):
    """llama.cpp keeps the rotary pairs of a head side by side, transformers in two halves: row 2i goes to i."""
    by_head = rows.reshape(n_heads, -1, *rows.shape[1:])
    return np.concatenate([by_head[:, 0::2], by_head[:, 1::2]], axis=1).reshape(rows.shape)


def by_heads(rows):
    """Bloom's fused rows: all queries, keys, values in a file; head by head in transformers."""
    return np.stack([part.reshape(HEADS, 8, *rows.shape[1:]) for part in np.split(rows, 3)], axis=1).reshape(rows.shape)


def put_back(architecture, name, values):
    """What llama.cpp's own converter did to a tensor, undone."""
    if architecture == "llama" and ("attn_q." in name or "attn_k." in name):
        return halves(values, HEADS if "attn_q." in name else KV_HEADS)
    if architecture in ("gemma2", "gemma3", "nemotron") and "norm.weight" in name:
        return values - 1
    if architecture == "gpt2" and ".ffn_" + "norm" not in name and values.ndim == 2 and name.startswith("blk."):
        return values.T
    if architecture == "bloom" and "attn_qkv" in name:
        return by_heads(values)
    return values


def their_model(architecture, tensors, **changed):
    """transformers' own model of the family, holding the tensors."""
    import transformers

    kind, settings = BY_HAND[architecture]
    config = getattr(transformers, f"{kind}{'Text' if kind == 'Gemma3' else ''}Config")(**(settings | changed))
    model = getattr(transformers, f"{kind}{'LMHeadModel' if kind == 'GPT2' else 'ForCausalLM'}")(config).eval()
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, LAYERS)
    filled = {}
    for name in model.state_dict():
        stem, _, ending = name.rpartition(".")
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            block = f"blk.{name.split('.')[2]}.ffn_"
            parts = ("gate", "up") if "gate_up" in name else ("down",)
            values = np.concatenate([tensors[f"{block}{part}_exps.weight"] for part in parts], axis=1)
        else:
            found = (
                "token_embd"
                if stem == "lm_head" and "output.weight" not in tensors
                else names.get_name(stem) or names.get_name(stem.removeprefix("transformer."))
            )
            values = put_back(architecture, f"{found}.{ending}", tensors[f"{found}.{ending}"])
        filled[name] = torch.from_numpy(np.ascontiguousarray(values)).reshape(model.state_dict()[name].shape)
    model.load_state_dict(filled, strict=True)
    return model


def logits(model):
    ids = torch.arange(3, 3 + 40)[None] % len(TOKENS)
    with torch.no_grad():
        return model(ids, use_cache=False).logits
