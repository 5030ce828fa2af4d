"""Which lever would make a model's cache how much smaller? The relief map: one model under each of them, in bytes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvprobe.bill import GROUP, Bill, LayerCache, bill, describe
from kvprobe.spec import Spec


@dataclass(frozen=True)
class Lever:
    """One way to hold the same model's past.

    ``kind`` is the factor that it attacks: heads, latent, window, bits or linear; ``model`` the model as it is;
    ``undone`` the model without what its makers have done already.
    """

    name: str
    kind: str
    bill: Bill
    note: str


def levers(
    spec: Spec, dtype: str = "float32", *, window: int = 1024, n_sink: int = 4, rank: int | None = None
) -> list[Lever]:
    """The relief map: the model as it is first, then the same model under each lever that changes its cache.

    ``rank`` is that of the latent: by default a quarter of the width of K and V together, or half the latent that the
    model has. The arithmetic of memory only: what a lever costs in loss is another question. Raises ValueError for a
    window < 1, negative sinks and a rank outside 1 … the width.
    """
    if window < 1:
        raise ValueError(f"window must be at least 1, got {window}")
    if n_sink < 0:
        raise ValueError(f"sinks must be at least 0, got {n_sink}")
    found = [Lever("as it is", "model", bill(spec, dtype), describe(spec))]
    for lever in (
        *_undone(spec, dtype),
        *_fewer_heads(spec, dtype),
        _latent(spec, dtype, rank),
        _windowed(found[0].bill, window, n_sink),
        *(_quantised(found[0].bill, bits) for bits in (8, 4)),
        *_linear(spec, found[0].bill),
    ):
        if lever.bill not in [other.bill for other in found]:
            found.append(lever)
    return found


def rows(
    spec: Spec,
    *,
    contexts: Sequence[int],
    batch: int = 1,
    dtype: str = "float32",
    weights_bytes: int | None = None,
    window: int = 1024,
    n_sink: int = 4,
    rank: int | None = None,
) -> list[dict[str, Any]]:
    """One row a context and lever, the model as it is first of each context; `levers` says which.

    bytes: of the whole batch; bytes_per_token: of one more token of one sequence at this context; state_bytes: the part
    of one sequence that no token makes larger; stops_at: the context from which on nothing grows (None: never);
    relief: the bytes of the model as it is over those of the row; outweighs_at: the first context at which the batch's
    cache is larger than the weights (None: never, or weights not known). Raises ValueError for a context or batch < 1.
    """
    for context in contexts:
        if context < 1:
            raise ValueError(f"context must be at least 1, got {context}")
    if batch < 1:
        raise ValueError(f"batch must be at least 1, got {batch}")
    found = levers(spec, dtype, window=window, n_sink=n_sink, rank=rank)
    return [
        {
            "lever": lever.name,
            "kind": lever.kind,
            "context": context,
            "batch": batch,
            "dtype": dtype,
            "bytes": lever.bill.total(context, batch=batch),
            "bytes_per_token": lever.bill.next_token(context),
            "state_bytes": lever.bill.state,
            "stops_at": lever.bill.stops_at,
            "relief": found[0].bill.total(context) / lever.bill.total(context),
            "weights_bytes": weights_bytes,
            "outweighs_at": None if weights_bytes is None else lever.bill.outgrows(weights_bytes, batch=batch),
            "note": lever.note,
        }
        for context in contexts
        for lever in found
    ]


def _undone(spec: Spec, dtype: str) -> Iterator[Lever]:
    """The model without what its makers have done already."""
    if spec.kv_lora_rank:
        plain = replace(spec, kv_lora_rank=None, qk_rope_head_dim=None)
        yield Lever("without its latent", "undone", bill(plain, dtype), f"K and V of all {spec.n_heads} heads")
    elif spec.n_kv_heads < spec.n_heads:
        yield Lever(
            f"as MHA, {spec.n_heads} KV heads",
            "undone",
            bill(replace(spec, n_kv_heads=spec.n_heads), dtype),
            "every query head with its own K and V",
        )
    if set(spec.kinds) != {"full"}:
        plain = replace(spec, kinds=("full",) * spec.n_layers, windows=(None,) * spec.n_layers)
        yield Lever("all layers full", "undone", bill(plain, dtype), "every layer keeps every token")


def _fewer_heads(spec: Spec, dtype: str) -> Iterator[Lever]:
    if spec.kv_lora_rank:
        return
    for divisor in (2, 4, spec.n_kv_heads):
        n_kv_heads, rest = divmod(spec.n_kv_heads, divisor)
        if rest:
            continue
        name = "MQA, 1 KV head" if n_kv_heads == 1 else f"GQA, {n_kv_heads} KV heads"
        shared = f"{spec.n_heads // n_kv_heads} query heads share one K and V (kvprobe gqa)"
        yield Lever(name, "heads", bill(replace(spec, n_kv_heads=n_kv_heads), dtype), shared)


def _latent(spec: Spec, dtype: str, rank: int | None) -> Lever:
    width = spec.joint_width
    limit = spec.kv_lora_rank or width
    chosen = max(1, limit // (2 if spec.kv_lora_rank else 4)) if rank is None else rank
    if not 1 <= chosen <= limit:
        raise ValueError(f"rank must be between 1 and {limit}, got {chosen}")
    rotary: int | None = spec.qk_rope_head_dim
    if not spec.kv_lora_rank:
        # a turned key cannot be made from the latent: half a head beside it, as DeepSeek-V2 chose (section 2.1.3)
        rotary = spec.head_dim // 2 if spec.position == "rope" else None
    shorter = bill(replace(spec, kv_lora_rank=chosen, qk_rope_head_dim=rotary), dtype)
    note = f"K and V, {width:,} elements a token and layer, are made again from {chosen:,}"
    note += f" and a rotary key of {rotary}" if rotary else ""
    note += f"; that takes work, and {chosen * width:,} elements a layer once (kvprobe lowrank)"
    return Lever(f"latent of rank {chosen}", "latent", shorter, note)


def _windowed(now: Bill, window: int, n_sink: int) -> Lever:
    kept = window + n_sink
    layers = tuple(
        replace(layer, limit=kept if layer.limit is None else min(kept, layer.limit)) if layer.vectors else layer
        for layer in now.layers
    )
    note = "every layer keeps the last tokens and the first few (kvprobe window)"
    return Lever(f"window {window:,} + {n_sink} sinks", "window", replace(now, layers=layers), note)


def _quantised(now: Bill, bits: int) -> Lever:
    note = f"with a 16-bit scale and a 16-bit zero point for every {GROUP} elements"
    return Lever(f"{bits}-bit storage", "bits", replace(now, bits=bits), note)


def _linear(spec: Spec, now: Bill) -> Iterator[Lever]:
    if spec.linear_state is not None:
        linear, note = LayerCache(state=spec.linear_state, conv=spec.linear_conv), "the model's own linear layer"
    else:
        linear = LayerCache(state=spec.n_kv_heads * spec.head_dim * spec.v_head_dim)
        note = f"each KV head sums K outer V: {spec.head_dim} × {spec.v_head_dim} in float32"
    # of fewer than four layers three of four are all
    some = ((4, "linear, 3 layers of 4"),) if len(now.layers) >= 4 else ()
    for every, name in (*some, (None, "linear, all layers")):
        layers = tuple(
            layer if every and (index + 1) % every == 0 else linear for index, layer in enumerate(now.layers)
        )
        yield Lever(name, "linear", replace(now, layers=layers), note)
