"""What stands between a model and its attention? The seam: one function, called once per layer per forward.

    def watch(call):
        print(call.layer, call.key.shape)
        return call.attend()

    with attending(model, watch):
        model(input_ids, use_cache=False)

It goes through transformers' two documented extension points, the attention interface and the mask interface of the
same name; without the second, causality would silently be lost.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvprobe.attention import AttentionCall
from kvprobe.errors import NotIntercepted, UnsupportedModelError
from kvprobe.rope import Rope

__all__ = ["AttentionCall", "Captured", "attending", "capture", "family_of", "rope_of"]

Attend = Callable[[AttentionCall], Tensor]

# layer types of transformers' configs whose layers hold keys and values; others (linear, recurrent, convolution) do not
KV_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention", "attention", "hybrid")

_names = count()
_ropes: "WeakKeyDictionary[nn.Module, dict[int, Rope]]" = WeakKeyDictionary()


def family_of(model: nn.Module) -> str:
    """The model's family as its config names it (``model_type``)."""
    config: Any = model.config
    return str(config.model_type)


@contextmanager
def attending(model: nn.Module, attend: Attend) -> Iterator[None]:
    """Let ``attend(call)`` stand in for attention in every layer of ``model`` while the block runs.

    ``attend`` gets an :class:`AttentionCall` and returns ``[batch, n_heads, q_len, v_head_dim]``; ``call.attend()``
    is what the model would have done. Call the model with ``use_cache=False``. Blocks may be nested: the inner one
    acts. The model leaves as it entered, also on an error.

    Raises NotIntercepted if the family goes round transformers' attention interface: on entering where the family
    says so itself, and on leaving after a forward if a layer with keys and values never reached ``attend``, since
    the result would be the plain model's. Raises ValueError if the model is in training mode, where dropout makes
    attention random.
    """
    if model.training:
        raise ValueError("the model is in training mode, where dropout changes attention: call model.eval() first")
    if not model._can_set_attn_implementation():  # type: ignore[operator]
        raise NotIntercepted(_bypassed(model, "attention"))
    name = f"kvprobe-{next(_names)}"
    expected = _attention_layers(model)
    calls: Counter[int] = Counter()
    forwards: Counter[str] = Counter()

    def interface(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
    ) -> tuple[Tensor, None]:
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        call = _call_of(model, module, layer, query, key, value, attention_mask, given)
        calls[layer] += 1
        output = attend(call)
        wanted = (*query.shape[:3], value.shape[-1])
        if not isinstance(output, Tensor) or output.shape != wanted:
            got = [*output.shape] if isinstance(output, Tensor) else type(output).__name__
            raise ValueError(f"attend must return [batch, n_heads, q_len, v_head_dim] = {[*wanted]}, got {got}")
        return output.to(query.dtype).transpose(1, 2).contiguous(), None

    configs = _configs(model)

    def finished(*_: object) -> None:
        # a forward inside an inner block is that block's to prove
        forwards["done"] += configs[0]._attn_implementation_internal == name

    # the whole, its body, and the decoder: OPT's forward goes round its own body, and a body may be called alone
    entrances = {id(part): part for part in (model, model.base_model, model.get_decoder())}  # type: ignore[operator]
    handles = [part.register_forward_hook(finished) for part in entrances.values()]  # type: ignore[union-attr]
    before = [config._attn_implementation_internal for config in configs]
    ALL_ATTENTION_FUNCTIONS.register(name, interface)
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, sdpa_mask)
    try:
        for config in configs:
            config._attn_implementation_internal = name
        yield
    finally:
        for config, implementation in zip(configs, before, strict=True):
            config._attn_implementation_internal = implementation
        for registry in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
            registry._global_mapping.pop(name)
        for handle in handles:
            handle.remove()
    _prove(model, expected, calls, forwards["done"])


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
    ``inputs`` go to the model (``attention_mask=...``). Raises ValueError for a layer that holds no keys and values.
    """
    holding = _attention_layers(model)
    wanted = set(holding if layers is None else layers)
    mapped = set(wanted if maps is True else () if maps is False else maps)
    if strange := sorted((wanted | mapped) - set(holding)):
        raise ValueError(f"layer {strange[0]} holds no keys and values; those that do are {sorted(holding)}")
    captured = Captured()

    def keep(x: Tensor) -> Tensor:
        return x.detach().to("cpu" if to_cpu else x.device).clone(memory_format=torch.contiguous_format)

    def watch(call: AttentionCall) -> Tensor:
        if call.layer in wanted:
            captured.keys[call.layer], captured.values[call.layer] = keep(call.key), keep(call.value)
        if call.layer in mapped:
            captured.maps[call.layer] = torch.cat([keep(part) for _, part in call.weights()], dim=2)
        return call.attend()

    with attending(model, watch):
        # the body alone: nobody reads the vocabulary's logits
        model.base_model(input_ids=input_ids, use_cache=False, **inputs)  # type: ignore[operator]
    return captured


def rope_of(model: nn.Module) -> dict[int, Rope]:
    """The rotation of every layer that holds keys, found by experiment and so without knowledge of the family.

    One short forward sees the same tokens at two places; in each layer exactly one way of turning (which of the
    model's frequencies, which components, which pairing) takes the keys of the first to those of the second. Raises
    UnsupportedModelError, naming the family, where the model has no rotary embedding (learned or no positions),
    one whose frequencies depend on the length, or one that is no such rotation.
    """
    if model not in _ropes:
        _ropes[model] = _find_ropes(model)
    return _ropes[model]


def _call_of(
    model: nn.Module,
    module: nn.Module,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    given: dict[str, Any],
) -> AttentionCall:
    if given.get("position_bias") is not None:
        raise UnsupportedModelError(
            f"family {family_of(model)} adds a position bias to its scores, which kvprobe does not honour"
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
    scale = given.get("scaling")
    return AttentionCall(
        layer=layer,
        query=query,
        key=key,
        value=value,
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        mask=_boolean(model, mask),
        softcap=given.get("softcap"),
        sink_logits=given.get("s_aux"),
        turn=lambda x, by: rope_of(model)[layer].turn(x, by),
    )


def _boolean(model: nn.Module, mask: Tensor | None) -> Tensor | None:
    if mask is None or mask.dtype == torch.bool:
        return mask
    keep = mask == 0
    if not bool((keep | (mask <= torch.finfo(mask.dtype).min / 2)).all()):
        raise UnsupportedModelError(f"family {family_of(model)} was given a mask that is neither 0 nor minus infinity")
    return keep


def _configs(model: nn.Module) -> list[Any]:
    found = {id(config): config for part in model.modules() if (config := getattr(part, "config", None)) is not None}
    return [config for config in found.values() if hasattr(config, "_attn_implementation_internal")]


def _attention_layers(model: nn.Module) -> dict[int, str]:
    """Layer index → class name of the modules that hold keys and values, read off the module tree and the config."""
    types = getattr(model.config, "layer_types", None)
    found: dict[int, str] = {}
    for path, part in model.named_modules():
        index = re.search(r"\.(\d+)\.", f".{path}.")
        if index is None or "Attention" not in type(part).__name__:
            continue
        layer = int(index[1])
        if types is None or types[layer] in KV_LAYER_TYPES:
            found.setdefault(layer, type(part).__name__)
    return found


def _prove(model: nn.Module, expected: dict[int, str], calls: Counter[int], forwards: int) -> None:
    if not forwards:
        return
    missed = sorted(layer for layer in expected if not calls[layer])
    if missed or not calls:
        where = f"layer {missed[0]} ({expected[missed[0]]})" if missed else "every layer"
        raise NotIntercepted(_bypassed(model, where))


def _bypassed(model: nn.Module, where: str) -> str:
    return (
        f"family {family_of(model)}: {where} does not go through transformers' attention interface, so kvprobe "
        "cannot see or change it; nothing measured would be of the changed model"
    )


def _find_ropes(model: nn.Module) -> dict[int, Rope]:
    family = family_of(model)
    frequencies = _frequencies(model)
    # the same tokens at positions 0 to 5 and 37 to 42: relative positions are the same, so hidden states are too
    shift, length = 37, 6
    positions = torch.arange(length) + torch.tensor([[0], [shift]])
    embedding: nn.Module = model.get_input_embeddings()  # type: ignore[operator]
    weight: Tensor = embedding.weight  # type: ignore[assignment]
    device = torch.device("cpu") if weight.is_meta else weight.device
    tokens = (torch.arange(length) % weight.shape[0]).expand(2, -1)
    with torch.no_grad():
        # a mask of ones: without one, two rows with other positions could be taken for packed sequences
        seen = capture(
            model,
            tokens.to(device),
            position_ids=positions.to(device),
            attention_mask=torch.ones_like(tokens).to(device),
        )
    ropes = {}
    for layer, key in seen.keys.items():
        here, there = key.float()
        tolerance = 1e-3 if key.dtype == torch.float32 else 0.1
        by = torch.tensor(shift, device=key.device)

        def misfit(rope: Rope, here: Tensor = here, there: Tensor = there, by: Tensor = by) -> float:
            return float((rope.turn(here[None], by)[0] - there).norm() / (here - there).norm())

        candidates = _candidates(frequencies, here.shape[-1])
        best = min(candidates, key=misfit, default=None)
        # nan where nothing moved at all, which no rotation by 37 positions does
        if best is None or not misfit(best) < tolerance:
            raise UnsupportedModelError(
                f"family {family}: the keys of layer {layer} are not turned by a rotation that kvprobe knows "
                "(whole or partial, halves or interleaved), so they cannot be turned back"
            )
        ropes[layer] = best
    return ropes


def _frequencies(model: nn.Module) -> list[Tensor]:
    family = family_of(model)
    found = [b for name, b in model.named_buffers() if name.endswith("inv_freq") and "original" not in name]
    if not found:
        raise UnsupportedModelError(
            f"family {family} has no rotary position embedding (RoPE), so its keys cannot be turned by positions"
        )
    kinds: set[str] = set()
    for part in model.modules():
        kind = getattr(part, "rope_type", ())
        kinds |= {kind} if isinstance(kind, str) else set(kind.values()) if isinstance(kind, dict) else set()
    if lengthy := sorted(kinds & {"dynamic", "longrope"}):
        raise UnsupportedModelError(
            f"family {family} uses {lengthy[0]} RoPE, whose frequencies depend on the length of the sequence: "
            "turning a key by a distance is not defined there"
        )
    return found


def _candidates(frequencies: list[Tensor], head_dim: int) -> list[Rope]:
    fitting = [inv_freq for inv_freq in frequencies if 2 * inv_freq.shape[0] <= head_dim]
    return [
        Rope(inv_freq, start, interleaved)
        for inv_freq in fitting
        for start in sorted({0, head_dim - 2 * inv_freq.shape[0]})
        for interleaved in (False, True)
    ]
