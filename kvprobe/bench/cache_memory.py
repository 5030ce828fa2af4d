"""How much does each kind of cache hold? Ours, Hugging Face's, and one that keeps views on purpose."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvprobe.attention.call import AttentionCall
from kvprobe.attention.layers import body_of
from kvprobe.bench.storages import measure
from kvprobe.caches.layer import KVCache, Place
from kvprobe.caches.registry import build
from kvprobe.errors import UnsupportedModelError, Wording
from kvprobe.memory import HINT, check_memory
from kvprobe.models.loading import Loaded
from kvprobe.progress import Progress, silent
from kvprobe.results.result import Row
from kvprobe.shape.cache_bytes import Bill, bill
from kvprobe.shape.spec import Spec

# tokens that our own caches are given at once
FED_AT_ONCE = 512


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
    kinds: Sequence[str] = ("full", "rolling"),
    window: int = 256,
    n_sink: int = 4,
    seed: int = 0,
    progress: Progress = silent,
) -> list[Row]:
    """Every kind of cache after ``contexts`` tokens have been read in one go: ``formula_bytes`` beside what is held.

    Hugging Face's caches are filled by a forward of the model itself, since what they hold depends on what it hands
    them; ours, those of ``kinds`` (:mod:`kvprobe.caches.registry`), are given keys and values of those shapes, and left
    out for models that keep anything but one K and one V for each KV head. The formula is the model's bill
    (:mod:`kvprobe.shape.cache_bytes`) and, of ours, that of their layers. Raises ValueError beyond the model's
    positions, KvprobeError where a cache would not fit the free memory, both before anything is built.
    """
    spec, shape = loaded.spec, bill(loaded.spec, loaded.dtype)
    for context in contexts:
        if context < 1:
            raise ValueError(Wording("{context} must be at least 1 token, got {0}", context))
        if spec.max_positions is not None and context > spec.max_positions:
            said = "{context} must be at most {0}, the model's positions, got {1}"
            raise ValueError(Wording(said, spec.max_positions, context))
        # beside the cache itself the prefill of its tokens, and the fused projection is larger than either
        need = int((2 + spec.n_heads / (2 * max(1, spec.n_kv_heads))) * _unbounded(shape).total(context, batch=batch))
        check_memory(f"a cache of {context:,} tokens, batch {batch}", need, loaded.device)
        for kind in kinds if spec.keeps_plain_kv else ():
            own = batch * _build(loaded, kind, context, min(1, batch), window, n_sink, device="meta").formula_bytes
            slots = window + n_sink if kind == "rolling" else context
            hint = "a smaller {window} or fewer {sinks}" if kind == "rolling" else HINT
            check_memory(f"a {kind} cache of {slots:,} tokens", own, loaded.device, hint=hint)
    table = []
    for context in contexts:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(spec.vocab_size, (batch, context), generator=generator).to(loaded.device)
        caches = [*_own(loaded, shape, kinds, batch, context, window, n_sink), *_foreign(loaded, shape, ids)]
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


def cache_argument(model: Any) -> str:
    """The name under which a Hugging Face model takes a cache: it was renamed within transformers 5."""
    return "cache" if "cache" in inspect.signature(body_of(model).forward).parameters else "past_key_values"


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


def _own(
    loaded: Loaded, shape: Bill, kinds: Sequence[str], batch: int, context: int, window: int, n_sink: int
) -> Iterator[CacheUnderTest]:
    spec = loaded.spec
    if not spec.keeps_plain_kv:
        return
    for kind in kinds:
        build_one = partial(_build, loaded, kind, context, batch, window, n_sink)
        formula = build_one(device="meta").formula_bytes

        def make(build_one: Callable[[], KVCache] = build_one) -> KVCache:
            return _fed(build_one(), context, loaded.device)

        yield CacheUnderTest(cache=kind, formula_bytes=formula, make=make)
    every = _unbounded(shape).total(context, batch=batch)
    place: dict[str, Any] = {"batch": batch, "dtype": getattr(torch, loaded.dtype), "device": loaded.device}
    yield CacheUnderTest(cache="fused views", formula_bytes=every, make=partial(fused_views, spec, context, **place))


def _build(
    loaded: Loaded, kind: str, context: int, batch: int, window: int, n_sink: int, *, device: str | None = None
) -> KVCache:
    own: dict[str, dict[str, Any]] = {"full": {"bound_local": True}, "rolling": {"window": window, "n_sink": n_sink}}
    place = Place(
        shape=loaded.spec.layers,
        capacity=window + max(0, n_sink) if kind == "rolling" else context,
        batch=batch,
        dtype=getattr(torch, loaded.dtype),
        device=device or loaded.device,
    )
    return build(kind, place, **own.get(kind, {}))


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


def _fed(cache: KVCache, context: int, device: str) -> KVCache:
    """``cache`` after it was given keys and values of ``context`` tokens."""
    # in parts, so that no mask of all queries and all keys is made
    for done in range(0, context, FED_AT_ONCE):
        q_len = min(FED_AT_ONCE, context - done)
        cache.begin(cache.batch, q_len)
        for i, (layer, shape) in enumerate(zip(cache.layers, cache.shape, strict=True)):
            size = (cache.batch, shape.n_kv_heads, q_len)
            key, value = (torch.zeros(*size, width, device=device) for width in (shape.head_dim, shape.v_head_dim))
            # what attention would give is not asked for
            layer.attend(AttentionCall(layer=i, query=key, key=key, value=value, scale=1.0), lambda call: call.query)
        cache.end()
    return cache


def _unbounded(shape: Bill) -> Bill:
    return replace(shape, layers=tuple(replace(layer, limit=None) for layer in shape.layers))


@torch.no_grad()
def _read(model: Any, ids: Tensor, cache: Any) -> Any:
    """``cache`` after the model has read ``ids``."""
    try:
        body_of(model)(input_ids=ids, **{cache_argument(model): cache}, use_cache=True)
    except (TypeError, AttributeError, NotImplementedError) as error:
        raise UnsupportedModelError(
            f"family {model.config.model_type} does not take transformers' {type(cache).__name__}: {error}"
        ) from error
    return cache
