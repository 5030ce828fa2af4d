"""What do keys and values read like that were stored in a few bits, a scale and a zero point for every group?"""

from collections.abc import Callable

import torch
from torch import Tensor

from kvprobe.attention.call import AttentionCall
from kvprobe.errors import KvprobeError, Wording
from kvprobe.shape.cache_bytes import GROUP


def quantising(bits: int) -> Callable[[AttentionCall], Tensor]:
    """Attention that reads every key and value as it comes back from ``bits``, for ``attending(model, ...)``.

    Realized keys, all heads of a token side by side, in groups as :class:`kvprobe.shape.cache_bytes.Bill` counts them.
    Raises ValueError for fewer than 1 or more than 16 bits, KvprobeError, naming the layer, where a scale leaves
    float16.
    """
    check_bits(bits)

    def attend(call: AttentionCall) -> Tensor:
        key, value = (_by_token(part, bits) for part in (call.key, call.value))
        if not bool(key.isfinite().all() and value.isfinite().all()):
            raise KvprobeError(f"keys or values of layer {call.layer} are too large for a 16-bit scale or zero point")
        return call.attend(key=key, value=value)

    return attend


def stored(x: Tensor, bits: int, *, group: int = GROUP) -> Tensor:
    """``x`` ``[..., width]`` after storage: the nearest of 2^bits even steps from the least to the greatest of a group.

    A group is ``group`` neighbours, the last one shorter; its step and its least value are kept as float16.
    """
    return torch.cat([_stored(part, 2**bits - 1) for part in x.split(group, dim=-1)], dim=-1)


def check_bits(bits: int) -> None:
    """Raise ValueError for fewer than 1 or more than 16 bits."""
    if not 1 <= bits <= 16:
        raise ValueError(Wording("{bits} must be between 1 and 16, got {0}", bits))


def _stored(x: Tensor, n_steps: int) -> Tensor:
    low, high = x.float().aminmax(dim=-1, keepdim=True)
    # rounded before the codes are made, so that those answer to what will be read
    zero, scale = low.half().float(), ((high - low) / n_steps).half().float()
    # a group of equal values has no step: its zero point says all. Small steps are float16's subnormals, and are kept
    codes = ((x.float() - zero) / torch.where(scale > 0, scale, 1.0)).round().clamp(0, n_steps)
    return (codes * scale + zero).to(x.dtype)


def _by_token(x: Tensor, bits: int) -> Tensor:
    # [batch, heads, length, head_dim]: a token's heads side by side, as they are kept
    rows = x.transpose(1, 2)
    return stored(rows.flatten(2), bits).view_as(rows).transpose(1, 2)
