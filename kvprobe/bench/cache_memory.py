"""How much does each kind of cache hold? Ours, Hugging Face's, and one that keeps views on purpose."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvprobe.bench.storages import measure
from kvprobe.caches.kv_cache import CacheShape, FullCache, KVCache, RollingCache
from kvprobe.errors import UnsupportedModelError
from kvprobe.memory import check_memory
from kvprobe.models.loading import Loaded
from kvprobe.progress import Progress, silent
from kvprobe.results.result import Row
from kvprobe.shape.cache_bytes import Bill, bill
from kvprobe.shape.spec import Spec


@dataclass(frozen=True, kw_only=True)
class CacheUnderTest:
    """One kind of cache: the bytes its formula gives, and how to build it and let it read the tokens."""

    cache: str
    formula_bytes: int
    make: Callable[[], Any]


def rows(
    loaded: Loaded,
    contexts: Sequence[int],
    *,
    batch: int = 1,
    window: int = 256,
    n_sink: int = 4,
    seed: int = 0,
    progress: Progress = silent,
) -> list[Row]:
    """Every kind of cache after ``contexts`` tokens have been read in one go: ``formula_bytes`` beside what is held.

    Hugging Face's caches are filled by a forward of the model itself, since what they hold depends on what it hands
    them; ours, preallocated, are given keys and values of those shapes, and left out for models that keep anything else
    (:func:`own_shape`). The formula is the model's bill (:mod:`kvprobe.shape.cache_bytes`) and, of the rolling cache,
    that of its slots. Raises ValueError beyond the model's positions, KvprobeError where a cache would not fit the free
    memory, both before anything is built.
    """
    spec, shape = loaded.spec, bill(loaded.spec, loaded.dtype)
    for context in contexts:
        if context < 1:
            raise ValueError(f"context must be at least 1 token, got {context}")
        if spec.max_positions is not None and context > spec.max_positions:
            raise ValueError(f"{context} tokens are more than the model's {spec.max_positions} positions: use fewer")
        # beside the cache itself the prefill of its tokens, and the fused projection is larger than either
        need = int((2 + spec.n_heads / (2 * max(1, spec.n_kv_heads))) * _unbounded(shape).total(context, batch=batch))
        check_memory(f"a cache of {context:,} tokens, batch {batch}", need, loaded.device)
    if own_shape(spec) is not None:
        slots = rolling_bytes(shape, window=max(1, window), n_sink=max(0, n_sink), batch=batch)
        check_memory(f"a rolling cache of {window + n_sink:,} tokens", slots, loaded.device, hint="a smaller --window")
    table = []
    for context in contexts:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(spec.vocab_size, (batch, context), generator=generator).to(loaded.device)
        caches = [*_own(loaded, shape, batch, context, window, n_sink), *_foreign(loaded, shape, ids)]
        for done, tested in enumerate(caches):
            progress(f"caches at {context:,} tokens", done, len(caches))
            _, held = measure(tested.make, loaded.device)
            table.append(
                {
                    "context": context,
                    "batch": batch,
                    "cache": tested.cache,
                    "formula_bytes": tested.formula_bytes,
                    "measured_bytes": held.measured_bytes,
                    "pinned_bytes": held.pinned_bytes,
                    "excess_bytes": held.measured_bytes - tested.formula_bytes,
                    "ratio": held.measured_bytes / tested.formula_bytes,
                }
            )
        progress(f"caches at {context:,} tokens", len(caches), len(caches))
    return table


def own_shape(spec: Spec) -> CacheShape | None:
    """What kvprobe's caches must know of the model; None unless it keeps one K and one V for each KV head."""
    if not spec.keeps_plain_kv:
        return None
    return CacheShape(n_layers=spec.n_layers, n_kv_heads=spec.n_kv_heads, head_dim=spec.head_dim, windows=spec.windows)


def rolling_bytes(shape: Bill, *, window: int, n_sink: int, batch: int = 1) -> int:
    """Bytes of a rolling cache, allocated at once: n_sink + window slots, in a local layer n_sink + its own window."""
    layers = tuple(replace(layer, limit=n_sink + min(window, layer.limit or window)) for layer in shape.layers)
    return replace(shape, layers=layers).total(n_sink + window, batch=batch)


def fused_views(
    spec: Spec, context: int, *, batch: int = 1, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> list[tuple[Tensor, Tensor]]:
    """K and V of every layer as they come out of a fused projection ``[batch, context, q | k | v]``: views of it.

    They hold (n_heads + 2 · n_kv_heads) / (2 · n_kv_heads) times their own bytes: 1.5 times for multi-head attention,
    more the fewer key/value heads. ``.contiguous()`` on both would be the cure. Zeros: only the bytes matter here.
    """
    widths = [heads * spec.head_dim for heads in (spec.n_heads, spec.n_kv_heads, spec.n_kv_heads)]
    kept = []
    for _ in range(spec.n_layers):
        fused = torch.zeros(batch, context, sum(widths), dtype=dtype, device=device)
        _, key, value = (part.unflatten(-1, (-1, spec.head_dim)).transpose(1, 2) for part in fused.split(widths, -1))
        kept.append((key, value))
    return kept


def _own(loaded: Loaded, shape: Bill, batch: int, context: int, window: int, n_sink: int) -> Iterator[CacheUnderTest]:
    spec = loaded.spec
    own = own_shape(spec)
    if own is None:
        return
    place: dict[str, Any] = {"batch": batch, "dtype": getattr(torch, loaded.dtype), "device": loaded.device}
    full = partial(FullCache, own, capacity=context, bound_local=True, **place)
    rolling = partial(RollingCache, own, window=window, n_sink=n_sink, **place)
    formula = shape.total(context, batch=batch)
    slots = rolling_bytes(shape, window=window, n_sink=n_sink, batch=batch)
    yield CacheUnderTest(cache="full", formula_bytes=formula, make=lambda: _fed(full(), context))
    yield CacheUnderTest(cache="rolling", formula_bytes=slots, make=lambda: _fed(rolling(), context))
    every = _unbounded(shape).total(context, batch=batch)
    yield CacheUnderTest(cache="fused views", formula_bytes=every, make=partial(fused_views, spec, context, **place))


def _foreign(loaded: Loaded, shape: Bill, ids: Tensor) -> Iterator[CacheUnderTest]:
    batch, context = ids.shape
    formula, model = shape.total(context, batch=batch), loaded.model

    def dynamic() -> Any:
        from transformers import DynamicCache

        return _read(model, ids, DynamicCache(config=model.config))

    def static() -> Any:
        from transformers import StaticCache

        return _read(model, ids, StaticCache(config=model.config, max_cache_len=context))

    yield CacheUnderTest(cache="hf dynamic", formula_bytes=formula, make=dynamic)
    yield CacheUnderTest(cache="hf static", formula_bytes=formula, make=static)


def _fed(cache: KVCache, context: int) -> KVCache:
    """``cache`` after it was given keys and values of ``context`` tokens."""
    of = cache.shape
    new = torch.zeros(cache.batch, of.n_kv_heads, context, of.head_dim, device=cache.keys[0].device)
    new = new.to(cache.keys[0].dtype)
    cache.begin(cache.batch, context)
    for layer in range(of.n_layers):
        cache.update(layer, new, new)
    cache.end()
    return cache


def _unbounded(shape: Bill) -> Bill:
    return replace(shape, layers=tuple(replace(layer, limit=None) for layer in shape.layers))


@torch.no_grad()
def _read(model: Any, ids: Tensor, cache: Any) -> Any:
    """``cache`` after the model has read ``ids``."""
    try:
        model.base_model(input_ids=ids, cache=cache, use_cache=True)
    except (TypeError, AttributeError, NotImplementedError) as error:
        raise UnsupportedModelError(
            f"family {model.config.model_type} does not take transformers' {type(cache).__name__}: {error}"
        ) from error
    return cache
