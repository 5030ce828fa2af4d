"""How many parameters does a model have, by its configuration alone? The closed form of each known family."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvprobe.shape.spec import Spec


@dataclass(frozen=True, kw_only=True)
class _Block:
    """How a family builds a layer, and the few vectors it adds outside of them."""

    norms: int = 2
    norm_vectors: int = 1
    """1: RMSNorm, or a LayerNorm without bias; 2: LayerNorm."""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    gated: bool = True
    """Three matrices in the MLP (gate, up, down) instead of two."""
    qk_norm: bool = False
    head_bias: bool = False
    spare_positions: int = 0
    """Rows of a learned position table beyond the positions."""


_GPT = _Block(norm_vectors=2, qkv_bias=True, out_bias=True, mlp_bias=True, gated=False)
# `_block` adds what the configuration states (attention_bias and the like)
_BLOCKS: dict[str, _Block] = {
    "gpt2": _GPT,
    "gpt_bigcode": _GPT,
    "gpt_neo": _Block(norm_vectors=2, out_bias=True, mlp_bias=True, gated=False),
    "gptj": _Block(norms=1, norm_vectors=2, mlp_bias=True, gated=False, head_bias=True),
    "gpt_neox": _Block(norm_vectors=2, mlp_bias=True, gated=False),
    "opt": _Block(norm_vectors=2, gated=False, spare_positions=2),
    "phi": _Block(norms=1, norm_vectors=2, qkv_bias=True, out_bias=True, mlp_bias=True, gated=False, head_bias=True),
    "bloom": _GPT,
    "mpt": _Block(gated=False),
    "falcon": _Block(norm_vectors=2, gated=False),
    "llama": _Block(),
    "mistral": _Block(),
    "mixtral": _Block(),
    "phi3": _Block(),
    "qwen2": _Block(qkv_bias=True),
    "qwen3": _Block(qk_norm=True),
    "qwen3_next": _Block(qk_norm=True),
    "gemma": _Block(),
    "gemma2": _Block(norms=4),
    "gemma3_text": _Block(norms=4, qk_norm=True),
    "gpt_oss": _Block(),
    "deepseek_v2": _Block(),
    "deepseek_v3": _Block(),
}
# families that read attention_bias, and its default
_ATTENTION_BIAS = {"gpt_neox": True, "gpt_oss": True}
_ATTENTION_BIAS |= dict.fromkeys(
    ("llama", "qwen3", "qwen3_next", "gemma", "gemma2", "gemma3_text", "deepseek_v2", "deepseek_v3"), False
)


def attention_parameters(
    *, hidden_size: int, n_heads: int, n_kv_heads: int, head_dim: int, v_head_dim: int | None = None
) -> int:
    """The four matrices of one attention layer, without biases: W_Q and W_O by n_heads, W_K and W_V by n_kv_heads."""
    v_head_dim = head_dim if v_head_dim is None else v_head_dim
    return hidden_size * (n_heads + n_kv_heads) * (head_dim + v_head_dim)


def knows(family: str) -> bool:
    """Whether this module has the closed form of a family, at least for some of its variants."""
    return family in _BLOCKS


def count(spec: "Spec", config: Mapping[str, Any]) -> int | None:
    """All parameters, tied matrices once; None for a family or variant whose closed form is not known.

    Counts what checkpoints hold: DeepSeek-V3's routing bias is in, its extra layer for multi-token prediction is not.
    """
    # a null is the same as an absent key, except for these
    nulls = ("q_lora_rank", "n_shared_experts", "num_experts")
    config = {key: value for key, value in config.items() if value is not None or key in nulls}
    if not knows(spec.family) or _is_unknown_variant(spec, config):
        return None
    block = _block(spec, config)
    hidden = spec.hidden_size
    total = spec.vocab_size * hidden * (1 if spec.tied else 2) + block.norm_vectors * hidden
    total += spec.vocab_size if block.head_bias else 0
    if spec.position == "learned" and spec.family != "mpt":
        total += ((spec.max_positions or 0) + block.spare_positions) * hidden
    if spec.family == "bloom":
        total += 2 * hidden  # the embeddings have a norm of their own
    for layer, kind in enumerate(spec.kinds):
        total += block.norms * block.norm_vectors * hidden
        total += _linear_attention(spec, config) if kind == "linear" else _attention(spec, config, block)
        total += _mlp(spec, config, block, layer)
    return total


def _is_unknown_variant(spec: "Spec", config: Mapping[str, Any]) -> bool:
    if isinstance(spec.intermediate_size, tuple):
        return True
    narrow_embeddings = config.get("word_embed_proj_dim", spec.hidden_size) != spec.hidden_size
    return narrow_embeddings or not config.get("do_layer_norm_before", True) or config.get("moe_layer_freq", 1) != 1


def _block(spec: "Spec", config: Mapping[str, Any]) -> _Block:
    family, block = spec.family, vars(_BLOCKS[spec.family]).copy()
    if family in _ATTENTION_BIAS and config.get("attention_bias", _ATTENTION_BIAS[family]):
        block |= {"qkv_bias": True, "out_bias": True}
    if (family == "opt" and config.get("enable_bias", True)) or (family == "falcon" and config.get("bias", False)):
        block |= {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
    if family == "llama":
        block["mlp_bias"] = config.get("mlp_bias", False)
    if family == "phi":
        block["qk_norm"] = config.get("qk_layernorm", False)
    if family == "falcon":
        two = config.get("num_ln_in_parallel_attn") or (2 if config.get("new_decoder_architecture") else 1)
        block["norms"] = two if config.get("new_decoder_architecture") or config.get("parallel_attn", True) else 2
    return _Block(**block)


def _attention(spec: "Spec", config: Mapping[str, Any], block: _Block) -> int:
    hidden, q_width = spec.hidden_size, spec.n_heads * spec.head_dim
    if spec.kv_lora_rank:
        return _latent_attention(spec, config, block)
    total = attention_parameters(
        hidden_size=hidden,
        n_heads=spec.n_heads,
        n_kv_heads=spec.n_kv_heads,
        head_dim=spec.head_dim,
        v_head_dim=spec.v_head_dim,
    )
    total += q_width + 2 * spec.kv_width if block.qkv_bias else 0
    total += hidden if block.out_bias else 0
    total += 2 * block.norm_vectors * spec.head_dim if block.qk_norm else 0
    if spec.family == "gpt_oss":
        total += spec.n_heads  # the learned sink logits
    if spec.family == "qwen3_next":
        total += hidden * q_width  # the output gate, made beside the query
    return total


def _latent_attention(spec: "Spec", config: Mapping[str, Any], block: _Block) -> int:
    """MLA (DeepSeek-V2, section 2.1): down to the latent and its norm, up to every head, and the rotary part."""
    rank, rotary = spec.kv_lora_rank or 0, spec.qk_rope_head_dim or 0
    q_rank = config.get("q_lora_rank", 1536)
    hidden, q_width, v_width = spec.hidden_size, spec.n_heads * spec.head_dim, spec.n_heads * spec.v_head_dim
    total = q_rank * (hidden + 1 + q_width) if q_rank else hidden * q_width
    total += hidden * (rank + rotary) + rank + rank * (q_width - spec.n_heads * rotary + v_width) + v_width * hidden
    return total + ((q_rank or 0) + rank + rotary + hidden if block.qkv_bias else 0)


def _linear_attention(spec: "Spec", config: Mapping[str, Any]) -> int:
    """The gated delta rule of Qwen3-Next: q, k, v and gate in one matrix, two gates a head, convolution, norm, out."""
    keys, values, heads, value_dim, kernel = linear_widths(config)
    hidden, mixed = spec.hidden_size, 2 * keys + values
    return hidden * (mixed + values + 2 * heads) + mixed * kernel + 2 * heads + value_dim + values * hidden


def linear_widths(config: Mapping[str, Any]) -> tuple[int, int, int, int, int]:
    """Width of a linear layer's keys and of its values, its value heads and their width, and the convolution's reach.

    The defaults are those of Qwen3-Next.
    """
    heads, value_dim = config.get("linear_num_value_heads", 32), config.get("linear_value_head_dim", 128)
    keys = config.get("linear_num_key_heads", 16) * config.get("linear_key_head_dim", 128)
    return keys, heads * value_dim, heads, value_dim, config.get("linear_conv_kernel_dim", 4)


def _mlp(spec: "Spec", config: Mapping[str, Any], block: _Block, layer: int) -> int:
    assert isinstance(spec.intermediate_size, int)  # `count` refused lists
    hidden, inner = spec.hidden_size, spec.intermediate_size
    dense = (3 if block.gated else 2) * hidden * inner
    dense += ((2 if block.gated else 1) * inner + hidden) if block.mlp_bias else 0
    if spec.family == "mixtral":
        experts = config.get("num_local_experts", 8)
        return experts * (dense + hidden)
    if spec.family == "gpt_oss":
        experts = config.get("num_local_experts", 128)
        return experts * (dense + 2 * inner + hidden + hidden + 1)  # biased experts and a biased router
    if spec.family == "qwen3_next":
        step, experts = config.get("decoder_sparse_step", 1), config.get("num_experts", 512)
        if layer in (config.get("mlp_only_layers") or ()) or not experts or (layer + 1) % step:
            return dense
        width, shared = config.get("moe_intermediate_size", 512), config.get("shared_expert_intermediate_size", 512)
        return hidden * (experts * (1 + 3 * width) + 3 * shared + 1)
    if spec.family in ("deepseek_v2", "deepseek_v3"):
        third = spec.family == "deepseek_v3"
        if layer < config.get("first_k_dense_replace", 3 if third else 0):
            return dense
        experts = config.get("n_routed_experts", 256 if third else 64)
        width = config.get("moe_intermediate_size", 2048 if third else 1407)
        shared = config.get("n_shared_experts", 1 if third else 2)
        return hidden * (experts * (1 + 3 * width) + 3 * (shared or 0) * width) + (experts if third else 0)
    return dense
