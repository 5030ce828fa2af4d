"""How is a prompt read in 16 bits by a processor that multiplies 16 bits slowly? With its weights widened first.

The decoder stays as it is written: inside :func:`widening` torch's own ``linear`` and attention are computed in
float32, a matrix at a time, and rounded once at the end.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kvprobe.decoder.model import Decoder

# shorter prompts run as they are: there is little to gain
FEWEST_TOKENS = 64


@contextmanager
def widening(decoder: Decoder, n_tokens: int) -> Iterator[bool]:
    """Inside, a forward of ``n_tokens`` tokens a row is widened if that is faster; yields whether it is.

    The rule: bfloat16 on a CPU without instructions for it, from `FEWEST_TOKENS` on.
    """
    weight = decoder.embedding.weight
    slow = weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and not multiplies_16_bits()
    if slow and n_tokens >= FEWEST_TOKENS:
        with _Widened():
            yield True
    else:
        yield False


def multiplies_16_bits() -> bool:
    """Whether this CPU has instructions for bfloat16 products (AVX-512 BF16, AMX)."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


class _Widened(TorchFunctionMode):
    """Computes ``F.linear`` and attention in float32; everything else is torch's."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            return _linear(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        return func(*args, **kwargs)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)


def _attention(query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Tensor:
    if how.get("attn_mask") is not None and how["attn_mask"].is_floating_point():
        how["attn_mask"] = how["attn_mask"].float()
    return F.scaled_dot_product_attention(query.float(), key.float(), value.float(), **how).to(query.dtype)
