"""How many bytes does a KV cache take, by the model's shape alone?

A cache is a sum over layers. A layer keeps vectors of every token (K and V, or one latent), of all tokens or of the
last ones only; a linear-attention layer keeps a state that no token makes larger.
"""

from bisect import bisect_right
from dataclasses import dataclass

from kvprobe.errors import UnsupportedModelError
from kvprobe.spec import Spec

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# a recurrent state sums over all tokens: implementations keep it in float32 whatever the model's dtype
STATE_BYTES = 4
# one 16-bit scale and one 16-bit zero point for so many neighbouring elements; transformers' quantised cache groups so
GROUP = 64
GROUP_BYTES = 4


@dataclass(frozen=True)
class LayerCache:
    """What one layer keeps: ``vectors`` of each token, by their widths in elements, of ``limit`` tokens (None: of all).

    ``state`` elements, in float32, and ``conv`` elements, in the cache's dtype, are kept whatever the context.
    """

    vectors: tuple[int, ...] = ()
    limit: int | None = None
    state: int = 0
    conv: int = 0


@dataclass(frozen=True)
class Bill:
    """The cache of one model, stored in one way; ``bits`` None stores plain numbers of ``dtype``."""

    layers: tuple[LayerCache, ...]
    dtype: str = "float32"
    bits: int | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPE_BYTES)}, got {self.dtype!r}")

    def total(self, context: int, *, batch: int = 1) -> int:
        """Bytes after ``context`` tokens of each of ``batch`` sequences, the newest token included."""
        if batch < 1:
            raise ValueError(f"batch must be at least 1, got {batch}")
        if context < 0:
            raise ValueError(f"context must be at least 0, got {context}")
        kept = (context if layer.limit is None else min(context, layer.limit) for layer in self.layers)
        per_token = (self._token_bytes(layer) for layer in self.layers)
        return batch * (self.state + sum(n * size for n, size in zip(kept, per_token, strict=True)))

    def next_token(self, context: int) -> int:
        """Bytes of one more token of one sequence at this context: 0 where every layer has stopped growing."""
        return self.total(context + 1) - self.total(context)

    @property
    def state(self) -> int:
        """Bytes of one sequence that no token makes larger."""
        return sum(layer.state * STATE_BYTES + layer.conv * DTYPE_BYTES[self.dtype] for layer in self.layers)

    @property
    def stops_at(self) -> int | None:
        """The context from which on nothing grows any more; None if something always does."""
        limits = [layer.limit for layer in self.layers if layer.vectors]
        return None if None in limits else max((limit for limit in limits if limit is not None), default=0)

    def outgrows(self, n_bytes: int, *, batch: int = 1) -> int | None:
        """The first context at which the cache is larger than ``n_bytes``, such as the weights; None if it never is."""
        last = max(layer.limit or 0 for layer in self.layers)
        growth = self.next_token(last)
        if not growth and self.total(last, batch=batch) <= n_bytes:
            return None
        end = last + (n_bytes // (batch * growth) + 1 if growth else 0)
        return bisect_right(range(end), n_bytes, key=lambda context: self.total(context, batch=batch))

    def _token_bytes(self, layer: LayerCache) -> int:
        if self.bits is None:
            return sum(layer.vectors) * DTYPE_BYTES[self.dtype]
        return sum(-(-width * self.bits // 8) + -(-width // GROUP) * GROUP_BYTES for width in layer.vectors)


def bill(spec: Spec, dtype: str = "float32") -> Bill:
    """The cache of the model as it is.

    K and V of every KV head; under MLA one latent and the rotary part of the key, which K and V share, so without the
    factor 2 (DeepSeek-V2, 2024, table 1). A sliding layer keeps its window, the newest token included. Raises
    UnsupportedModelError for linear layers whose state the configuration does not give.
    """
    if spec.kv_lora_rank:
        vectors: tuple[int, ...] = tuple(filter(None, (spec.kv_lora_rank, spec.qk_rope_head_dim)))
    else:
        vectors = (spec.n_kv_heads * spec.head_dim, spec.n_kv_heads * spec.v_head_dim)
    if "linear" in spec.kinds and spec.linear_state is None:
        raise UnsupportedModelError(
            f"the state of the linear-attention layers of the family {spec.family} is not known to kvprobe"
        )
    linear = LayerCache(state=spec.linear_state or 0, conv=spec.linear_conv)
    layers = (
        linear if kind == "linear" else LayerCache(vectors, window)
        for kind, window in zip(spec.kinds, spec.windows, strict=True)
    )
    return Bill(tuple(layers), dtype)


def describe(spec: Spec) -> str:
    """What each kind of layer keeps, in words: what grows, what stops, what is constant."""
    if spec.kv_lora_rank:
        what = f"one latent of {spec.kv_lora_rank} and a rotary key of {spec.qk_rope_head_dim or 0} a token (MLA)"
    else:
        form = {spec.n_heads: "MHA", 1: "MQA"}.get(spec.n_kv_heads, "GQA")
        what = f"K and V of {spec.n_kv_heads} of {spec.n_heads} heads ({form}), {spec.head_dim} wide"
    n_linear, limits = spec.kinds.count("linear"), [window for window in spec.windows if window is not None]
    parts = [f"{n} keep every token" for n in [spec.n_layers - n_linear - len(limits)] if n]
    parts += [f"{limits.count(limit)} stop growing at {limit:,} tokens" for limit in sorted(set(limits))]
    parts += [f"{n_linear} keep a state of constant size"] if n_linear else []
    return f"{what}; of {spec.n_layers} layers {', '.join(parts)}"


@dataclass(frozen=True)
class Amount:
    """Bytes as people read them: three digits of the largest binary unit of which there is one, KiB = 1024 B."""

    n_bytes: int

    def __str__(self) -> str:
        value, units = float(self.n_bytes), ["TiB", "GiB", "MiB", "KiB", "B"]
        # what would be printed as 1024 is one of the next unit
        while value >= 1023.5 and len(units) > 1:
            value /= 1024
            units.pop()
        decimals = 0 if value == int(value) or value >= 99.95 else 1 if value >= 9.995 else 2
        return f"{value:,.{decimals}f} {units[-1]}"
