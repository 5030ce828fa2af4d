"""Which lever would make a model's cache smaller, and by how much? The relief map: one model under each, in bytes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvprobe.errors import Wording
from kvprobe.shape.cache_bytes import GROUP, Bill, LayerCache, bill, caches, describe
from kvprobe.shape.layers import Layer
from kvprobe.shape.spec import Spec, from_json


@dataclass(frozen=True)
class Lever:
    """One way to keep the same model's past.

    ``kind`` is the factor that it attacks: heads, latent, window, bits or linear; ``model`` is the model as it is, and
    ``undone`` the model without a lever that its makers pulled already.
    """

    name: str
    kind: str
    bill: Bill
    note: str


def levers(
    spec: Spec, dtype: str = "float32", *, window: int = 1024, n_sink: int = 4, rank: int | None = None
) -> list[Lever]:
    """The relief map: the model as it is first, then the same model under each lever that changes its cache.

    ``rank`` is the latent's: by default a quarter of the width of K and V together, or half of the model's own latent.
    This is arithmetic of memory only: what a lever costs in loss is another question. Raises ValueError for a window
    < 1, negative sinks, and a rank outside 1 … the width.
    """
    if window < 1:
        raise ValueError(Wording("{window} must be at least 1, got {0}", window))
    if n_sink < 0:
        raise ValueError(Wording("{n_sink} must be at least 0, got {0}", n_sink))
    result = [Lever("as it is", "model", bill(spec, dtype), describe(spec))]
    for lever in (
        *_undone(spec, dtype),
        *_fewer_heads(spec, dtype),
        *_latent(spec, dtype, rank),
        *_of_bill(spec, result[0].bill, window, n_sink),
    ):
        if lever.bill not in [other.bill for other in result]:
            result.append(lever)
    return result


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
    """One row a context and lever (`levers`), for each context the model as it is first.

    support: how the configuration was read (`kvprobe.shape.spec.Spec.support`); bytes: of the whole batch;
    bytes_per_token: of one more token of one sequence at this context; state_bytes: the part of one sequence that does
    not grow with the context; stops_at: the context from which nothing grows (None: never);
    relief: the bytes of the model as it is over those of the row; outweighs_at: the first context at which the batch's
    cache is larger than the weights (None: never, or weights not known). Raises ValueError for a context or batch < 1.
    """
    for context in contexts:
        if context < 1:
            raise ValueError(Wording("{context} must be at least 1, got {0}", context))
    if batch < 1:
        raise ValueError(Wording("{batch} must be at least 1, got {0}", batch))
    chosen = levers(spec, dtype, window=window, n_sink=n_sink, rank=rank)
    return [
        {
            "lever": lever.name,
            "kind": lever.kind,
            "context": context,
            "support": spec.support,
            "batch": batch,
            "dtype": dtype,
            "bytes": lever.bill.total(context, batch=batch),
            "bytes_per_token": lever.bill.next_token(context),
            "state_bytes": lever.bill.state,
            "stops_at": lever.bill.stops_at,
            "relief": _relief(chosen[0].bill.total(context), lever.bill.total(context)),
            "weights_bytes": weights_bytes,
            "outweighs_at": None if weights_bytes is None else lever.bill.outgrows(weights_bytes, batch=batch),
            "note": lever.note,
        }
        for context in contexts
        for lever in chosen
    ]


def _relief(now: int, left: int) -> float:
    # a model whose layers keep nothing has nothing to relieve
    return now / left if left else 1.0


def _undone(spec: Spec, dtype: str) -> Iterator[Lever]:
    """The model without the levers that its makers pulled already, layer by layer."""

    def changed(change: Callable[[Layer], Layer]) -> Bill:
        return Bill(caches(_changed(spec, change)), dtype)

    attending = [layer for layer in dict.fromkeys(spec.layers) if layer.n_heads]
    # where K and V are one vector, as in DeepSeek-V4, what two would be is not known
    if any(layer.compressed for layer in attending):
        pass
    elif any(layer.latent for layer in attending):
        yield Lever("without its latent", "undone", changed(_expanded), f"K and V of all {spec.n_heads} heads")
    elif any(layer.n_kv_heads < layer.n_heads for layer in attending):
        heads = f"{spec.n_heads} KV heads"
        yield Lever(
            f"as MHA, {heads}",
            "undone",
            changed(lambda layer: replace(_expanded(layer), n_kv_heads=layer.n_heads)),
            "every query head with its own K and V",
        )
    if any(layer.kind == "shared" for layer in attending):
        yield Lever("no layer shares", "undone", changed(_alone), "every layer with its own K and V")
    if attending and any(layer.limit is not None or layer.kind in ("linear", "recurrent") for layer in spec.layers):
        usual = next((layer for layer in attending if layer.kind == "full"), attending[0])
        plain = _full(replace(usual, state=0, conv=0))
        yield Lever(
            "all layers full",
            "undone",
            changed(lambda layer: plain if layer.kind in ("linear", "recurrent") else _full(layer)),
            "every layer keeps every token",
        )


def _changed(spec: Spec, change: Callable[[Layer], Layer]) -> tuple[Layer, ...]:
    by_layer = {layer: change(layer) for layer in dict.fromkeys(spec.layers)}
    return tuple(by_layer[layer] for layer in spec.layers)


def _expanded(layer: Layer) -> Layer:
    return replace(layer, latent=0, rotary=0, index=0)


def _full(layer: Layer) -> Layer:
    return replace(layer, kind="full", limit=None, compressed=()) if layer.limit is not None else layer


def _alone(layer: Layer) -> Layer:
    return replace(layer, kind="full") if layer.kind == "shared" else layer


def _fewer_heads(spec: Spec, dtype: str) -> Iterator[Lever]:
    """The same layers with fewer KV heads, offered if the same factor divides those of every layer."""
    counts = {layer.n_kv_heads for layer in spec.layers if layer.vectors}
    if not counts or any(layer.latent for layer in spec.layers):
        return
    alike = len(counts) == 1
    for divisor in (2, 4, max(counts)):
        if divisor > 1 and divisor == max(counts):
            cut = dict.fromkeys(counts, 1)
        elif all(heads % divisor == 0 for heads in counts):
            cut = {heads: heads // divisor for heads in counts}
        else:
            continue
        left = "/".join(str(heads) for heads in sorted(set(cut.values()), reverse=True))
        name = "MQA, 1 KV head" if left == "1" else f"GQA, {left} KV heads"
        shared = f"{spec.n_heads // min(cut.values())} query heads share one K and V (kvprobe gqa)"
        layers = tuple(replace(layer, n_kv_heads=cut.get(layer.n_kv_heads, layer.n_kv_heads)) for layer in spec.layers)
        yield Lever(name, "heads", Bill(caches(layers), dtype), shared if alike else "fewer KV heads in every layer")


def _latent(spec: Spec, dtype: str, rank: int | None) -> Iterator[Lever]:
    """One latent of the same rank for each layer's K and V; nothing if no layer has K and V."""
    kept = [layer for layer in dict.fromkeys(spec.layers) if layer.vectors]
    if not kept or any(layer.compressed for layer in kept):
        if rank is not None:
            said = "{rank} {0} is impossible: this {1} model keeps no K and V for a latent; leave {rank} out"
            raise ValueError(Wording(said, rank, spec.family))
        return
    width = max(layer.joint_width for layer in kept)
    limit = min(layer.latent or layer.joint_width for layer in kept)
    chosen = max(1, limit // (2 if spec.kv_lora_rank else 4)) if rank is None else rank
    if not 1 <= chosen <= limit:
        raise ValueError(Wording("{rank} must be between 1 and {0}, got {1}", limit, chosen))
    rotary = spec.qk_rope_head_dim or 0
    if not spec.kv_lora_rank:
        # a rotated key cannot be made from the latent: half a head beside it, as DeepSeek-V2 chose (section 2.1.3)
        rotary = spec.head_dim // 2 if spec.position == "rope" else 0
    layers = _changed(spec, lambda layer: replace(layer, latent=chosen, rotary=rotary) if layer.vectors else layer)
    note = f"K and V, {width:,} elements a token and layer, are made again from {chosen:,}"
    note += f" and a rotary key of {rotary}" if rotary else ""
    note += f"; that takes work, and {chosen * width:,} elements a layer once (kvprobe lowrank)"
    yield Lever(f"latent of rank {chosen}", "latent", Bill(caches(layers), dtype), note)


def _of_bill(spec: Spec, now: Bill, window: int, n_sink: int) -> Iterator[Lever]:
    """Levers on the vectors that are kept, whatever they are; nothing if none are."""
    if any(layer.vectors for layer in spec.layers):
        note = "every layer keeps the last tokens and the first few (kvprobe window)"
        yield Lever(f"window {window:,} + {n_sink} sinks", "window", now.windowed(window + n_sink), note)
        note = f"with a 16-bit scale and a 16-bit zero point for every {GROUP} elements"
        yield from (Lever(f"{bits}-bit storage", "bits", replace(now, bits=bits), note) for bits in (8, 4))
        yield from _linear(spec, now)


def _linear(spec: Spec, now: Bill) -> Iterator[Lever]:
    """Linear attention in place of K and V; layers without them stay as they are."""
    own = next((layer for layer in spec.layers if layer.kind == "linear"), None)
    if own is not None:
        linear, note = LayerCache(state=own.state, conv=own.conv), "the model's own linear layer"
    else:
        linear = LayerCache(state=spec.n_kv_heads * spec.head_dim * spec.v_head_dim)
        note = f"each KV head sums K outer V: {spec.head_dim} × {spec.v_head_dim} in float32"
    # with fewer than four layers, three of four would be all
    some = ((4, "linear, 3 layers of 4"),) if len(now.layers) >= 4 else ()
    for every, name in (*some, (None, "linear, all layers")):
        layers = tuple(
            linear if layer.vectors and not (every and (index + 1) % every == 0) else layer
            for index, layer in enumerate(now.layers)
        )
        yield Lever(name, "linear", replace(now, layers=layers), note)


def growth(bills: Sequence[Mapping[str, Any]], run: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows ``bills`` at every power of two, for a picture: as far as the run's contexts or the crossing reach."""
    spec = from_json(run["spec"])
    # the picture shows where the cache outweighs the weights, if that is within reach
    reach = max(*run["contexts"], min(2 * (bills[0]["outweighs_at"] or 0), 2**24), 2048)
    settings = {name: run[name] for name in ("batch", "dtype", "weights_bytes", "window", "n_sink", "rank")}
    return rows(spec, contexts=[2**power for power in range(7, reach.bit_length() + 1)], **settings)
