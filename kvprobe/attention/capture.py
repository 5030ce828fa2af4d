"""Which keys and values does attention read, and where does it look? Kept as copies, by layer."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvprobe.attention.blocks import bypassed
from kvprobe.attention.call import AttentionCall
from kvprobe.attention.language_model import language_model, observe
from kvprobe.errors import NotIntercepted


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
    model: Any,
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

    >>> import kvprobe
    >>> subject = kvprobe.prepare("smollm2-135m", tokens=32)
    >>> seen = kvprobe.capture(subject.model, subject.input_ids, layers=[0, 12], maps=[12])
    >>> tuple(seen.keys[0].shape), tuple(seen.maps[12].shape)
    ((1, 3, 32, 64), (1, 9, 32, 32))
    """
    subject = language_model(model)
    holding = subject.layers()
    wanted = set(holding if layers is None else layers)
    mapped = set(wanted if maps is True else () if maps is False else maps)
    if strange := sorted((wanted | mapped) - set(holding)):
        raise ValueError(f"layer {strange[0]} holds no keys and values; those that do are {sorted(holding)}")
    captured = Captured()

    def keep(x: Tensor) -> Tensor:
        return x.detach().to("cpu" if to_cpu else x.device).clone(memory_format=torch.contiguous_format)

    def look(call: AttentionCall) -> None:
        if layers is None or call.layer in wanted:
            captured.keys[call.layer], captured.values[call.layer] = keep(call.key), keep(call.value)
        if call.layer in mapped or (layers is None and maps is True):
            captured.maps[call.layer] = torch.cat([keep(part) for _, part in call.weights()], dim=2)

    # the body alone: nobody reads the vocabulary's logits
    observe(subject, input_ids, look, **inputs)
    if missed := sorted(
        (wanted - captured.keys.keys() if layers is not None else set()) | (mapped - captured.maps.keys())
    ):
        raise NotIntercepted(bypassed(subject.family, f"layer {missed[0]} ({holding[missed[0]]})"))
    return captured
