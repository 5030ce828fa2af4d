"""How many bytes does a KV cache take, given only the model's shape?

A cache is a sum over layers. A layer keeps vectors (K and V, or one latent) of every token, of the last tokens only, or
one for every few tokens; a linear-attention layer keeps a state of constant size.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

from kvprobe.shape.layers import Layer
from kvprobe.shape.spec import Spec

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# a recurrent state sums over all tokens, so implementations keep it in float32 whatever the model's dtype
STATE_BYTES = 4
# neighbouring elements that share a 16-bit scale and a 16-bit zero point, as in transformers' quantised cache
GROUP = 64
GROUP_BYTES = 4


@dataclass(frozen=True)
class LayerCache:
    """What one layer keeps: for each of the last ``limit`` tokens (None: all), ``vectors`` of these widths in elements.

    ``compressed`` are (n, width): one more vector for every n tokens, over all tokens. ``state`` elements in float32
    and ``conv`` elements in the cache's dtype are kept at any context.
    """

    vectors: tuple[int, ...] = ()
    limit: int | None = None
    state: int = 0
    conv: int = 0
    compressed: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Bill:
    """The cache of one model, stored in one way; ``bits`` None stores plain numbers of ``dtype``."""

    layers: tuple[LayerCache, ...]
    dtype: str = "float32"
    bits: int | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPE_BYTES)}, got {self.dtype!r}")

    @cached_property
    def _counts(self) -> dict[LayerCache, int]:
        # thousands of layers have a few shapes, and sums are needed thousands of times
        return Counter(self.layers)

    def total(self, context: int, *, batch: int = 1) -> int:
        """Bytes after ``context`` tokens of each of ``batch`` sequences, the newest token included."""
        if batch < 1:
            raise ValueError(f"batch must be at least 1, got {batch}")
        if context < 0:
            raise ValueError(f"context must be at least 0, got {context}")
        grown = (
            times * (self._last(layer, context) + self._compressed(layer, context))
            for layer, times in self._counts.items()
        )
        return batch * (self.state + sum(grown))

    def next_token(self, context: int) -> int:
        """Bytes of one more token of one sequence at this context: 0 if every layer has stopped growing.

        A vector for every n tokens counts as 1/n of a vector for each of them.
        """
        counts = self._counts.items()
        grown = sum(times * (self._last(layer, context + 1) - self._last(layer, context)) for layer, times in counts)
        parts = (Fraction(times * self._bytes(width), n) for layer, times in counts for n, width in layer.compressed)
        return grown + round(sum(parts, Fraction()))

    def windowed(self, kept: int) -> "Bill":
        """The same with at most the last ``kept`` tokens in each layer that keeps vectors."""
        layers = (
            replace(layer, limit=min(kept, layer.limit or kept), compressed=()) if layer.vectors else layer
            for layer in self.layers
        )
        return replace(self, layers=tuple(layers))

    @cached_property
    def state(self) -> int:
        """Bytes of one sequence that do not grow with the context."""
        return sum(
            times * (layer.state * STATE_BYTES + layer.conv * DTYPE_BYTES[self.dtype])
            for layer, times in self._counts.items()
        )

    @property
    def stops_at(self) -> int | None:
        """The context from which nothing grows any more; None if something always does."""
        if any(layer.compressed for layer in self._counts):
            return None
        limits = [layer.limit for layer in self._counts if layer.vectors]
        return None if None in limits else max((limit for limit in limits if limit is not None), default=0)

    def outgrows(self, n_bytes: int, *, batch: int = 1) -> int | None:
        """The first context at which the cache is larger than ``n_bytes``, such as the weights; None if it never is."""
        last = max(layer.limit or 0 for layer in self._counts)
        if self.stops_at is not None and self.total(last, batch=batch) <= n_bytes:
            return None
        end = max(1, last)
        while self.total(end, batch=batch) <= n_bytes:
            end *= 2
        return bisect_right(range(end), n_bytes, key=lambda context: self.total(context, batch=batch))

    def _last(self, layer: LayerCache, context: int) -> int:
        kept = context if layer.limit is None else min(context, layer.limit)
        return kept * sum(self._bytes(width) for width in layer.vectors)

    def _compressed(self, layer: LayerCache, context: int) -> int:
        return sum(context // n * self._bytes(width) for n, width in layer.compressed)

    def _bytes(self, width: int) -> int:
        if self.bits is None:
            return width * DTYPE_BYTES[self.dtype]
        return -(-width * self.bits // 8) + -(-width // GROUP) * GROUP_BYTES


def bill(spec: Spec, dtype: str = "float32") -> Bill:
    """The cache of the model as it is, the sum of what its layers keep.

    K and V of every KV head. Under MLA, one latent for both and the rotary part of the key, so there is no factor 2
    (DeepSeek-V2, 2024, table 1). A sliding layer keeps its window, the newest token included; a chunked layer keeps a
    whole chunk.
    """
    return Bill(caches(spec.layers), dtype)


def caches(layers: Iterable[Layer]) -> tuple[LayerCache, ...]:
    """What each of ``layers`` keeps, as widths instead of heads."""
    layers = tuple(layers)
    kept = {
        layer: LayerCache(layer.vectors, layer.limit, layer.state, layer.conv, layer.compressed)
        for layer in dict.fromkeys(layers)
    }
    return tuple(kept[layer] for layer in layers)


def describe(spec: Spec) -> str:
    """What each kind of layer keeps, in words: what grows, what stops growing, what is constant."""
    counts = Counter(spec.layers)
    forms: dict[str, int] = {}
    for layer, times in counts.items():
        if layer.vectors:
            forms[_form(layer)] = forms.get(_form(layer), 0) + times
    what = "; ".join(f"{form} in {times} layers" if len(forms) > 1 else form for form, times in forms.items())
    growing, limits, words = 0, Counter[int](), Counter[str]()
    for layer, times in counts.items():
        if layer.compressed:
            words["keep their last tokens and a vector for every few of all"] += times
        elif layer.vectors and layer.limit is None:
            growing += times
        elif layer.vectors:
            limits[layer.limit or 0] += times
        elif layer.kind in ("shared", "none"):
            words["read the K and V of another" if layer.kind == "shared" else "keep nothing"] += times
        if layer.state + layer.conv:
            # such a layer may have attention too
            words[f"keep a state of constant size{' beside it' if layer.vectors else ''}"] += times
    parts = [f"{growing} keep every token"] if growing else []
    parts += [f"{times} stop growing at {limit:,} tokens" for limit, times in sorted(limits.items())]
    parts += [f"{times} {said}" for said, times in words.items()]
    return f"{what or 'no K and V'}; of {spec.n_layers} layers {', '.join(parts)}"


def _form(layer: Layer) -> str:
    index = f", and an indexer's key of {layer.index}" if layer.index else ""
    if layer.latent and not layer.rotary:
        return f"one vector of {layer.latent} for K and V"
    if layer.latent:
        return f"one latent of {layer.latent} and a rotary key of {layer.rotary} a token (MLA){index}"
    form = {layer.n_heads: "MHA", 1: "MQA"}.get(layer.n_kv_heads, "GQA")
    wide = f"{layer.head_dim} wide" + (f" (V {layer.v_head_dim})" if layer.v_head_dim != layer.head_dim else "")
    return f"K and V of {layer.n_kv_heads} of {layer.n_heads} heads ({form}), {wide}{index}"


@dataclass(frozen=True)
class Amount:
    """Bytes for people to read: three digits of the largest binary unit that gives at least 1; KiB = 1024 B."""

    n_bytes: float

    def __str__(self) -> str:
        value, units = float(self.n_bytes), ["TiB", "GiB", "MiB", "KiB", "B"]
        # what would print as 1024 is 1 of the next unit
        while value >= 1023.5 and len(units) > 1:
            value /= 1024
            units.pop()
        decimals = 0 if value == int(value) or value >= 99.95 else 1 if value >= 9.995 else 2
        return f"{value:,.{decimals}f} {units[-1]}"
