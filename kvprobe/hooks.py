"""What stands between a model and its attention? The seam: one function, called once per layer per forward.

    def watch(call):
        print(call.layer, call.key.shape)
        return call.attend()

    with attending(model, watch):
        model(input_ids, use_cache=False)

It goes through transformers' two documented extension points, the attention interface and the mask interface of the
same name; without the second, causality would silently be lost.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from kvprobe.attention import AttentionCall, Turn
from kvprobe.attention_layers import attention_layers, family_of
from kvprobe.blocks import Attend, Block, bypassed
from kvprobe.errors import NotIntercepted
from kvprobe.rope import Rope

__all__ = ["Attend", "AttentionCall", "Captured", "attending", "capture", "family_of", "once", "rope_of"]


@contextmanager
def attending(model: nn.Module, attend: Attend) -> Iterator[None]:
    """Let ``attend(call)`` stand in for attention in every layer of ``model`` while the block runs.

    ``attend`` gets an :class:`AttentionCall` and returns ``[batch, n_heads, q_len, v_head_dim]``; ``call.attend()``
    is what the model would have done. Call the model with ``use_cache=False``. Blocks may be nested: the inner one
    acts. A model of text and images is seen where it reads text; its other towers stay as they are. The model leaves
    as it entered, also on an error, and whatever the order in which generators leave their blocks.

    A model belongs to one thread at a time: KvprobeError if another one has a block open on it, or calls it
    meanwhile. Raises NotIntercepted if the family goes round transformers' attention interface (on entering where
    the family says so itself, else at the end of a forward in which a layer with keys and values ran and never
    reached ``attend``, since the result would be the plain model's), and if it hands attention an argument that
    is not honoured. Raises ValueError if the model is in training mode, where dropout makes attention random.
    """
    # what torch.compile gives back stands around the model
    model = getattr(model, "_orig_mod", model)
    if model.training:
        raise ValueError("the model is in training mode, where dropout changes attention: call model.eval() first")
    if not model._can_set_attn_implementation():  # type: ignore[operator]
        raise NotIntercepted(bypassed(family_of(model), "attention"))

    def turn_of(layer: int) -> Turn:
        return lambda x, by: rope_of(model)[layer].turn(x, by)

    block = Block(model, attend, turn_of)
    try:
        block.open()
        yield
    finally:
        block.close()


def once(family: str, attend: Attend) -> Attend:
    """``attend`` for one forward whose layers are told apart by their numbers.

    The result raises NotIntercepted where a layer attends twice (looped models, differential attention), since the
    second time would overwrite what the first gave.
    """
    seen: set[int] = set()

    def first(call: AttentionCall) -> Tensor:
        if call.layer in seen:
            raise NotIntercepted(
                f"family {family}: layer {call.layer} attends more than once in a forward, and kvprobe tells what it "
                "sees by the number of the layer"
            )
        seen.add(call.layer)
        return attend(call)

    return first


@dataclass(frozen=True)
class Captured:
    """What :func:`capture` saw: by layer, the realized keys and values and, where asked for, attention maps.

    ``keys[layer]`` ``[batch, n_kv_heads, length, head_dim]``, ``values[layer]`` the same with the value's own
    head_dim, ``maps[layer]`` float32 ``[batch, n_heads, length, length]``.
    """

    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)
    maps: dict[int, Tensor] = field(default_factory=dict)


@torch.no_grad()
def capture(
    model: nn.Module,
    input_ids: Tensor,
    *,
    layers: Iterable[int] | None = None,
    maps: Iterable[int] | bool = False,
    to_cpu: bool = False,
    **inputs: Any,
) -> Captured:
    """Realized keys and values of one forward over ``input_ids`` ``[batch, length]``, as contiguous copies.

    ``layers`` are those to keep (default: all), ``maps`` those whose attention maps are kept as well (True: all of
    ``layers``); a map holds ``n_heads * length**2`` float32. ``to_cpu`` moves each copy off the device at once.
    ``inputs`` go to the model (``attention_mask=...``). Raises ValueError for a layer that holds no keys and values,
    and NotIntercepted for one that holds them and did not attend.
    """
    holding = attention_layers(model)
    wanted = set(holding if layers is None else layers)
    mapped = set(wanted if maps is True else () if maps is False else maps)
    if strange := sorted((wanted | mapped) - set(holding)):
        raise ValueError(f"layer {strange[0]} holds no keys and values; those that do are {sorted(holding)}")
    captured = Captured()

    def keep(x: Tensor) -> Tensor:
        return x.detach().to("cpu" if to_cpu else x.device).clone(memory_format=torch.contiguous_format)

    def watch(call: AttentionCall) -> Tensor:
        if layers is None or call.layer in wanted:
            captured.keys[call.layer], captured.values[call.layer] = keep(call.key), keep(call.value)
        if call.layer in mapped or (layers is None and maps is True):
            captured.maps[call.layer] = torch.cat([keep(part) for _, part in call.weights()], dim=2)
        return call.attend()

    with attending(model, once(family_of(model), watch)):
        # the body alone: nobody reads the vocabulary's logits
        model.base_model(input_ids=input_ids, use_cache=False, **inputs)  # type: ignore[operator]
    if missed := sorted(
        (wanted - captured.keys.keys() if layers is not None else set()) | (mapped - captured.maps.keys())
    ):
        raise NotIntercepted(bypassed(family_of(model), f"layer {missed[0]} ({holding[missed[0]]})"))
    return captured


def rope_of(model: nn.Module) -> dict[int, Rope]:
    """The rotation of every layer that holds keys: see :func:`kvprobe.rope_finding.rope_of`, which this is."""
    # it looks through this seam itself
    from kvprobe import rope_finding

    return rope_finding.rope_of(model)
