"""Which matrix product reads a prompt the fastest here, and the same? Measured once, and put in for one forward.

    with fastest(decoder, n_tokens):
        decoder.body(ids, cache=cache)

The decoder stays as it is written: inside the block torch's own ``linear`` is answered by what is faster on this
machine. A prompt is bound by arithmetic, and libraries differ in it by a factor on one processor and
by nothing on another; 16-bit products without the instructions for them are slower than widening the weights first.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kvprobe.decoder.model import Decoder

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]

# Shorter prompts take torch's own: there is little to gain, and a result should not depend on a measurement.
FEWEST_TOKENS = 64
# how much faster than torch's own another product must be
GAIN = 1.05


def _torch(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, weight, bias)


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    # reordered for each call: a small part of a long prompt's product, and no second copy of the weights stays
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), x.numel() // x.shape[-1])
    output: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return output


def _widened(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Weights in 16 bits, products in float32, a matrix at a time."""
    wide = float32_linear(torch.get_num_threads())
    return LINEARS[wide](x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)


LINEARS: dict[str, Linear] = {"torch": _torch, "onednn": _onednn, "widened": _widened}


@contextmanager
def fastest(decoder: Decoder, n_tokens: int) -> Iterator[str]:
    """Inside, a forward of ``n_tokens`` tokens a row takes the fastest product; yields its name, of `LINEARS`.

    "torch" on other devices than a CPU and for short prompts. Results are the same to rounding.
    """
    weight = decoder.embedding.weight
    if weight.device.type != "cpu" or n_tokens < FEWEST_TOKENS or weight.dtype not in (torch.float32, torch.bfloat16):
        yield "torch"
        return
    threads = torch.get_num_threads()
    name = float32_linear(threads) if weight.dtype == torch.float32 else bfloat16_linear(threads)
    with _Instead(LINEARS[name], widen=name == "widened"):
        yield name


@lru_cache(maxsize=8)
def float32_linear(n_threads: int) -> str:
    """The fastest float32 product on this machine with so many threads: "torch" or "onednn"."""
    del n_threads  # what the answer depends on, beside the machine
    return _quickest(("torch", "onednn"), torch.randn(256, 512), torch.randn(1024, 512))


@lru_cache(maxsize=8)
def bfloat16_linear(n_threads: int) -> str:
    """The same of bfloat16: "torch" or "widened"."""
    del n_threads
    return _quickest(("torch", "widened"), torch.randn(128, 512).bfloat16(), torch.randn(512, 512).bfloat16())


@torch.no_grad()
def _quickest(names: tuple[str, ...], x: Tensor, weight: Tensor) -> str:
    seconds: dict[str, float] = {}
    for turn in range(4):
        for name in names:
            started = time.perf_counter()
            try:
                LINEARS[name](x, weight, None)
            except (RuntimeError, AttributeError, NotImplementedError):
                # a torch built without it
                seconds[name] = float("inf")
                continue
            if turn:
                # the first call sets up; of the others the best, since a busy machine only ever adds
                seconds[name] = min(seconds.get(name, float("inf")), time.perf_counter() - started)
    best = min(seconds, key=seconds.__getitem__)
    return best if seconds[best] * GAIN < seconds[names[0]] else names[0]


class _Instead(TorchFunctionMode):
    """Answers ``F.linear`` and, where 16 bits are widened, attention; everything else is torch's."""

    def __init__(self, linear: Linear, *, widen: bool) -> None:
        super().__init__()
        self.linear, self.widen = linear, widen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            return self.linear(*args, **kwargs)
        if func is F.scaled_dot_product_attention and self.widen:
            return self._widened_attention(*args, **kwargs)
        return func(*args, **kwargs)

    def _widened_attention(self, query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Tensor:
        if how.get("attn_mask") is not None and how["attn_mask"].is_floating_point():
            how["attn_mask"] = how["attn_mask"].float()
        return F.scaled_dot_product_attention(query.float(), key.float(), value.float(), **how).to(query.dtype)
