"""What does a family's call of transformers' attention interface say, and is all of it honoured?"""

from typing import Any

import torch
from torch import Tensor, nn

from kvprobe.attention.call import AttentionCall, Turn
from kvprobe.attention.masks import causal_keep
from kvprobe.errors import NotIntercepted, UnsupportedModelError

# arguments that are read below
HONOURED = {"scaling", "softcap", "s_aux", "is_causal", "indices", "block_indices", "position_bias", "dropout"}
# arguments that change no number: what is asked of the model around attention, and what stands in the mask already
HARMLESS = {"sliding_window", "position_ids", "cache_position", "cache", "past_key_values", "use_cache", "return_dict"}
HARMLESS |= {"output_attentions", "output_hidden_states", "output_router_logits", "num_items_in_batch"}
HARMLESS |= {"logits_to_keep", "token_type_ids", "mm_token_type_ids"}
# what `generate` hands on with stop_strings
HARMLESS |= {"tokenizer"}
# only flash kernels read these, in place of a mask
FLASH = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}


def read_call(
    family: str,
    module: nn.Module,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    given: dict[str, Any],
    *,
    turn: Turn | None = None,
    flash: bool = False,
) -> AttentionCall:
    """The call as transformers' interface gave it to ``module``, with everything that changes its numbers.

    ``flash``: the model's own implementation is a flash kernel. Raises NotIntercepted, naming it, for an argument
    that is not None and not known, and UnsupportedModelError for a bias on scores.
    """
    if given.get("position_bias") is not None:
        raise UnsupportedModelError(
            f"family {family} adds a position bias to its scores, which kvprobe does not honour"
        )
    known = HONOURED | HARMLESS | (set() if flash else FLASH)
    unknown = sorted(name for name, x in given.items() if x is not None and name not in known)
    unknown += ["dropout"] if given.get("dropout") else []
    if unknown:
        raise NotIntercepted(
            f"family {family}: attention is given {unknown[0]}, which kvprobe does not honour in layer {layer} "
            f"({type(module).__name__}): what was measured would be another model"
        )
    if getattr(module, "reorder_and_upcast_attn", False):
        # GPT-2's option for half precision: scores and their softmax in float32
        query, key, value = query.float(), key.float(), value.float()
    causal = given.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    if mask is None and not causal:
        # an encoder: no mask means that every query sees every key
        mask = torch.ones(1, 1, query.shape[2], key.shape[2], dtype=torch.bool, device=key.device)
    if mask is None and key.shape[2] > query.shape[2] > 1:
        # a static cache being filled: transformers aligns the causal mask top-left and ignores the empty slots
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
    keep = _boolean(family, mask)
    chosen = _chosen(module, query, key.shape[2], given)
    if chosen is not None:
        keep = chosen & (causal_keep(query.shape[2], key.shape[2], device=key.device) if keep is None else keep)
    scale = given.get("scaling")
    if scale is None and hasattr(module, "scale_attn_weights"):
        # GPT-2 before transformers 5 leaves its scale to its own eager code, and its sdpa ignores these two settings
        scale = query.shape[-1] ** -0.5 if module.scale_attn_weights else 1.0
        scale /= layer + 1 if module.scale_attn_by_inverse_layer_idx else 1
    return AttentionCall(
        layer=layer,
        query=query,
        key=key,
        value=value,
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        mask=keep,
        softcap=given.get("softcap"),
        sink_logits=given.get("s_aux"),
        turn=turn,
    )


def _boolean(family: str, mask: Tensor | None) -> Tensor | None:
    if mask is None or mask.dtype == torch.bool:
        return mask
    keep = mask == 0
    if not bool((keep | (mask <= torch.finfo(mask.dtype).min / 2)).all()):
        raise UnsupportedModelError(f"family {family} was given a mask that is neither 0 nor minus infinity")
    return keep


def _chosen(module: nn.Module, query: Tensor, kv_len: int, given: dict[str, Any]) -> Tensor | None:
    """The keys that an indexer chose: bool ``[batch, 1 or n_heads, q_len, kv_len]``, or None without an indexer.

    Families narrow the mask themselves only for implementations called eager or sdpa, and hand over their choice to
    any other: ``indices`` ``[batch, q_len, topk]`` (DeepSeek-V3.2, GLM-5) are keys, ``block_indices``
    ``[batch, index_heads, q_len, topk]`` (MiniMax-M3) are blocks of keys, -1 for none.
    """
    batch, n_heads, q_len, _ = query.shape
    if (indices := given.get("indices")) is not None:
        none = torch.zeros(batch, q_len, kv_len, dtype=torch.bool, device=query.device)
        return none.scatter(-1, indices.long(), True)[:, None]
    if (blocks := given.get("block_indices")) is not None:
        if blocks.dim() == 3:  # transformers 5.12: one choice for all heads
            blocks = blocks[:, None]
        size = int(module.indexer.block_size)  # type: ignore[union-attr,arg-type]
        n_blocks = -(-kv_len // size)
        # one column more, for the blocks that are none
        none = torch.zeros(*blocks.shape[:3], n_blocks + 1, dtype=torch.bool, device=query.device)
        kept = none.scatter(-1, blocks.masked_fill(blocks < 0, n_blocks).long(), True)[..., :n_blocks]
        return kept.repeat_interleave(size, -1)[..., :kv_len].repeat_interleave(n_heads // blocks.shape[1], 1)
    return None
