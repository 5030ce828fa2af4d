"""What if only the first tokens and the last ones are kept? Sinks and a window, in constant memory and time a token."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, Self

import torch
from torch import Tensor

from kvprobe.attention.call import AttentionCall
from kvprobe.attention.rope import Rope
from kvprobe.caches.layer import Buffers, KVCache, Past, Place
from kvprobe.caches.ring import RingLayer
from kvprobe.errors import Wording
from kvprobe.shape.layers import Layer

Positions = Literal["absolute", "cache"]


class RollingLayer(RingLayer):
    """Sinks that are seen by slot: kept as they were made, and turned for each query by its ``rope``."""

    def __init__(self, shape: Layer, past: Past, *, window: int, rope: Rope, **sizes: int | torch.dtype) -> None:
        super().__init__(shape, past, window=window, **sizes)  # type: ignore[arg-type]
        self.rope, self.last_slot = rope, self.n_sink + window - 1
        self.made = self.keys[:, :, : self.n_sink].clone()

    def append(self, call: AttentionCall) -> AttentionCall:
        """As :class:`RingLayer`; several queries, each with its own distance to the sinks, as one of twice the width.

        The query is read twice, as it is (for window keys) and turned back by its lag (for sinks); a key stands in
        the half that is meant for it and is zero in the other, so that one product gives either score.
        """
        q_len = call.query.shape[2]
        lag = self.lag(q_len) if q_len > 1 else [[0]]
        call = super().append(call)
        if not any(map(any, lag)):
            return call
        # a sink that is itself new counts as a sink
        index = self.index(q_len)
        sink = index < self.n_sink
        if index.ndim > 1:
            sink = index < torch.tensor(self._origins(), device=index.device)[:, None, None] + self.n_sink
        query, key, sink = call.query, call.key, sink[..., None]
        turned = self.rope.turn(query, -torch.tensor(lag if self._by_row else lag[0]))
        return replace(
            call,
            query=torch.cat([query, turned], dim=-1),
            key=torch.cat([key.masked_fill(sink, 0), key.masked_fill(~sink, 0)], dim=-1),
        )

    def tensors(self) -> dict[str, Tensor]:
        """As :class:`RingLayer`, and the sinks as they were made."""
        return super().tensors() | {"made": self.made}

    @property
    def formula_bytes(self) -> int:
        """As :class:`RingLayer`; the sinks' keys stand there twice."""
        made = len(self.past.lengths) * self.n_sink * self.shape.kv_width * self.keys.element_size()
        return super().formula_bytes + made

    def rolled_back(self) -> None:
        """As :class:`CacheLayer`: the sinks as they were before any query turned them."""
        self.keys[:, :, : self.n_sink] = self.made

    def buffers(self) -> Buffers:
        """As :class:`CacheLayer`."""
        return Buffers(self.keys, self.values, self.made)

    def lag(self, q_len: int) -> list[list[int]]:
        """How much farther each new query is from the sinks than it should see them: its position minus its slot.

        ``[batch][q_len]``, or one row for all.
        """
        starts, base = self._starts(), self.past.base
        starts = starts if self._by_row else starts[:1]
        return [[i - base - min(i, self.last_slot) for i in range(start, start + q_len)] for start in starts]

    def _store(self, key: Tensor, value: Tensor) -> None:
        super()._store(key, value)
        q_len, starts = key.shape[2], self._starts()
        rows = [(slice(row, row + 1), start) for row, start in enumerate(starts)]
        for row, start in rows if self._by_row else [(slice(None), starts[0])]:
            if start < self.n_sink and start + q_len > 0:
                made = self.made[row, :, max(0, start) : start + q_len]
                made.copy_(key[row, :, max(0, -start) :][:, :, : made.shape[2]])
        # for a single query, which reads the buffer as it stands: the sinks are turned to where it sees them from
        if q_len == 1 and any(map(any, lag := self.lag(1))):
            by = torch.tensor(lag).expand(-1, self.n_sink) if self._by_row else torch.tensor(lag[0])
            self.keys[:, :, : self.n_sink] = self.rope.turn(self.made, by)

    def _as_made(self) -> Tensor:
        if max(self._starts()) <= self.last_slot + 1:
            return self.keys
        return torch.cat([self.made, self.keys[:, :, self.n_sink :]], dim=2)


class RollingCache(KVCache):
    """The first ``n_sink`` tokens of each row and, besides them, the last ``window``, the query itself included.

    Constant memory and time a token (StreamingLLM: Xiao et al., 2024, section 3.2; their budget counts the sinks
    inside the window). ``positions`` says from where sinks are seen once older keys have gone:

    - ``"absolute"``: from where they were made. Equal to the mask of ``window_keep``.
    - ``"cache"``: by slot in the cache. A query at i sees sink s from the distance
      ``min(i, n_sink + window - 1) - s``; distances inside the window are unchanged. Needs ``ropes``, the rotation of
      each layer, and then has no last position.

    A model's own local layers keep no more than their own window, applied by absolute distance. Bytes: as of a full
    cache of n_sink + window + headroom tokens; ``"cache"`` keeps the n_sink keys a second time, as they were made.

    Raises ValueError if ``window < 1``, ``n_sink < 0``, or for ``"cache"`` without ropes: learned positions are added
    to the hidden state and cannot be turned afterwards.
    """

    window: int

    def __init__(
        self,
        shape: Sequence[Layer],
        *,
        window: int,
        n_sink: int = 0,
        positions: Positions = "absolute",
        ropes: Sequence[Rope] | None = None,
        batch: int = 1,
        headroom: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if window < 1:
            raise ValueError(Wording("{window} must be at least 1 (the query itself), got {0}", window))
        if n_sink < 0:
            raise ValueError(Wording("{n_sink} must be at least 0, got {0}", n_sink))
        if positions not in ("absolute", "cache"):
            raise ValueError(Wording("{positions} must be absolute or cache, got {0!r}", positions))
        if positions == "cache" and ropes is None:
            raise ValueError(
                Wording(
                    "{positions} cache needs rotary positions: learned ones are added to the hidden state and cannot "
                    "be moved afterwards; use {positions} absolute, which ends at the model's last position"
                )
            )
        self.window, self.n_sink = window, n_sink
        self.unbounded = positions == "cache"
        self._ropes = tuple(ropes or ()) if self.unbounded else ()
        ropes_left = iter(self._ropes)

        def layer(shape_of_layer: Layer, past: Past) -> RingLayer:
            rope, sizes = (
                next(ropes_left, None),
                {"n_sink": n_sink, "ring": min(window, shape_of_layer.limit or window) + headroom},
            )
            if rope is None or not n_sink:
                return RingLayer(shape_of_layer, past, window=window, dtype=dtype, **sizes)
            return RollingLayer(shape_of_layer, past, window=window, rope=rope, dtype=dtype, **sizes)

        super().__init__(shape, layer, batch=batch, headroom=headroom, device=device)

    @classmethod
    def fit(cls, place: Place, *, window: int | None = None, n_sink: int = 4, **settings: Any) -> Self:
        """As in :class:`KVCache`. No more slots than tokens: a window of all of them (the default) evicts nothing."""
        window = place.capacity if window is None else min(window, place.capacity)
        where: dict[str, Any] = {"batch": place.batch, "dtype": place.dtype, "device": place.device}
        n_sink = min(n_sink, place.capacity)
        return cls(place.shape, window=window, n_sink=n_sink, ropes=place.ropes, **where, **settings)

    def begin(self, batch: int, q_len: int) -> None:
        """As in :class:`KVCache`; for ``"cache"``, from time to time, the ring is counted from a later base."""
        super().begin(batch, q_len)
        past, slots = self.past, self.n_sink + self.window
        left_pad = [0] * self.batch if self.left_pad is None else self.left_pad.tolist()
        sure = min(length - pad for length, pad in zip(past.sure, left_pad, strict=True))
        if self._ropes and sure - past.base >= 2 * slots:
            # Only distances matter: turn the ring back, once in `slots` tokens, so that positions stay small. At a
            # million radians a float32 angle is off by 0.03.
            back = sure - slots - past.base
            past.base += back
            for layer, rope in zip(self.layers, self._ropes, strict=True):
                ring = layer.tensors()["keys"][:, :, self.n_sink :]
                ring.copy_(rope.turn(ring, torch.tensor(-back)))

    def sink_lag(self) -> int:
        """As in :class:`KVCache`."""
        layer = self.layers[0]
        return layer.lag(1)[0][0] if isinstance(layer, RollingLayer) else 0
