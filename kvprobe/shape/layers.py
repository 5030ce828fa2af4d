"""What does one layer of a model keep of the tokens that it has read? Its shape, from which the bill is computed."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Layer:
    """What one layer keeps: vectors of tokens, a state of constant size, both or nothing.

    ``kind`` is ``full`` (every token), ``sliding`` (the last ``limit`` tokens), ``chunked`` (those of the chunk of
    ``limit`` tokens), ``compressed`` (the last ``limit`` tokens, and a vector for every n tokens of all), ``linear``
    (linear attention, a state-space model), ``recurrent`` (a gated recurrence, RWKV, or a short convolution alone),
    ``shared`` (it reads the K and V of another layer) or ``none`` (no attention). A layer with attention and a state
    side by side (Falcon-H1) has the kind of its attention.
    """

    kind: str
    n_heads: int = 0
    """Query heads; 0 in a layer without attention."""
    n_kv_heads: int = 0
    head_dim: int = 0
    """Of a realized query or key; under MLA this includes the rotary part."""
    v_head_dim: int = 0
    latent: int = 0
    """MLA: the width of a token's one vector that K and V are made from; 0: K and V themselves are kept."""
    rotary: int = 0
    """MLA: the width of the rotary key beside the latent, shared by all heads."""
    index: int = 0
    """The width of a token's key in the indexer that chooses the tokens to attend to (DeepSeek-V3.2); 0: none."""
    limit: int | None = None
    """How many tokens are kept, the newest included; None: all."""
    compressed: tuple[tuple[int, int], ...] = ()
    """(n, width): one more vector of ``width`` elements for every n tokens, over all tokens (DeepSeek-V4)."""
    state: int = 0
    """Elements of a state of constant size, summed over tokens and so kept in float32."""
    conv: int = 0
    """Elements of the last inputs that a short convolution still needs, in the cache's dtype."""

    @property
    def vectors(self) -> tuple[int, ...]:
        """Widths of one token's vectors: K and V, or the latent and its rotary key; and the indexer's key."""
        if self.kind in ("shared", "none"):
            return ()
        own = (self.latent, self.rotary) if self.latent else (self.kv_width, self.n_kv_heads * self.v_head_dim)
        return tuple(filter(None, (*own, self.index)))

    @property
    def kv_width(self) -> int:
        """Elements of one token's realized K: n_kv_heads · head_dim."""
        return self.n_kv_heads * self.head_dim

    @property
    def joint_width(self) -> int:
        """Elements of one token's realized K and V together."""
        return self.n_kv_heads * (self.head_dim + self.v_head_dim)


def as_runs(layers: Iterable[Layer]) -> dict[str, Any]:
    """The layers as compact JSON: each different one once, and their order as [which, how many in a row]."""
    layers = tuple(layers)
    places = {layer: place for place, layer in enumerate(dict.fromkeys(layers))}
    order = [[place, len([*run])] for place, run in groupby(places[layer] for layer in layers)]
    return {"different": [_named(layer) for layer in places], "order": order}


def from_runs(kept: dict[str, Any]) -> tuple[Layer, ...]:
    """The layers that `as_runs` wrote."""
    different = [
        Layer(**fields | {"compressed": tuple(tuple(pair) for pair in fields.get("compressed", ()))})
        for fields in kept["different"]
    ]
    return tuple(different[place] for place, times in kept["order"] for _ in range(times))


def _named(layer: Layer) -> dict[str, Any]:
    # 0, empty and None are the defaults
    return {name: value for name, value in asdict(layer).items() if value}
