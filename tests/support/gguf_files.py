"""Tiny GGUF files: the keys and tensors of any family that is read, with weights drawn at random."""

import string
from typing import Any

import gguf
import numpy as np

from kvprobe.models.gguf_families import FAMILIES

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, EXPERTS, CONTEXT = 2, 32, 4, 2, 8, 48, 4, 64

# every byte as GPT-2 spells it is more than is needed: letters, the space, and one merge
TOKENS = ["<s>", "</s>", "<unk>", *string.ascii_letters, *string.digits, *".,;:-'?!\"()", "Ġ", "Ċ", "th", "ĠĠ"]

COUNTS: dict[str, Any] = {
    "block_count": LAYERS,
    "context_length": CONTEXT,
    "embedding_length": HIDDEN,
    "feed_forward_length": MLP,
    "attention.head_count": HEADS,
}
_ROTARY = {"attention.head_count_kv": KV_HEADS, "rope.freq_base": 5000.0}
_MOE = {"expert_count": EXPERTS, "expert_used_count": 2, "expert_feed_forward_length": 24}
OWN: dict[str, dict[str, Any]] = {
    "llama": _ROTARY | {"rope.dimension_count": HEAD_DIM},
    "qwen2": _ROTARY,
    "qwen3": _ROTARY | {"attention.key_length": HEAD_DIM, "attention.value_length": HEAD_DIM},
    "qwen2moe": _ROTARY | _MOE | {"expert_shared_feed_forward_length": 40},
    "qwen3moe": _ROTARY | _MOE | {"attention.key_length": HEAD_DIM, "attention.value_length": HEAD_DIM},
    "gemma2": _ROTARY
    | {"attention.key_length": HEAD_DIM, "attention.value_length": HEAD_DIM, "attention.sliding_window": 6}
    | {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0},
    "gemma3": _ROTARY
    | {"attention.key_length": HEAD_DIM, "attention.value_length": HEAD_DIM, "attention.sliding_window": 6},
    "phi3": _ROTARY | {"rope.dimension_count": 6, "attention.sliding_window": 5},
    "gpt2": {},
    "bloom": {"feed_forward_length": 4 * HIDDEN},
    "starcoder2": _ROTARY,
    "stablelm": _ROTARY | {"rope.dimension_count": 4, "use_parallel_residual": False},
    "nemotron": _ROTARY | {"rope.dimension_count": 4},
    "falcon": {"attention.head_count_kv": 1, "tensor_data_layout": "jploski"},
}


def keys_of(architecture: str) -> dict[str, Any]:
    """Keys of the architecture, without its name before them."""
    key, _ = FAMILIES[architecture].epsilon
    return COUNTS | OWN[architecture] | {key: 1e-3}


def vocabulary() -> dict[str, Any]:
    """A byte-level vocabulary."""
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(TOKENS) - 3),
        "tokenizer.ggml.merges": ["t h", "Ġ Ġ"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
    }


def shapes_of(architecture: str, *, biases: tuple[str, ...] = ()) -> dict[str, tuple[int, ...]]:
    """The tensors of the architecture with their shapes, as torch has them."""
    family, keys = FAMILIES[architecture], keys_of(architecture)
    kv_heads = keys.get("attention.head_count_kv", HEADS)
    sizes = {"C": CONTEXT, "D": HEAD_DIM, "E": EXPERTS, "F": keys["feed_forward_length"], "H": HIDDEN, "S": 40}
    sizes |= {"K": kv_heads * HEAD_DIM, "N": len(TOKENS), "M": 24, "Q": HEADS * HEAD_DIM}
    layer = dict(family.layer)
    for group in biases:
        layer |= family.biases[group]
    named = dict(family.outside) | ({"output.weight": "N H"} if family.untied else {})
    named |= {f"blk.{i}.{name}": shape for i in range(LAYERS) for name, shape in layer.items()}
    return {
        name: tuple(sum(sizes[one] for one in letter.split("+")) for letter in shape.split())
        for name, shape in named.items()
    }


def draw(shapes: dict[str, tuple[int, ...]], *, seed: int = 0) -> dict[str, np.ndarray]:
    """Weights wide enough that attention is far from uniform; those of norms around one."""
    rng = np.random.default_rng(seed)
    return {
        name: (rng.standard_normal(shape) * 0.3 + (1 if "norm.weight" in name else 0)).astype(np.float32)
        for name, shape in shapes.items()
    }


def write(path, architecture, keys, tensors, *, more=None) -> None:
    """One file of these keys (without the architecture's name), ``more`` keys by their full names, and tensors."""
    writer = gguf.GGUFWriter(path, architecture)
    own = {f"{architecture}.{key}": value for key, value in keys.items()}
    for key, value in (own | vocabulary() | (more or {})).items():
        _add(writer, key, value)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
