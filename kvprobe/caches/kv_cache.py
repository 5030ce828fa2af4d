"""What does a decoder keep of the tokens it has seen? Preallocated key/value caches: everything, or sinks and a window.

One pass over ``q_len`` new tokens is ``begin``, ``update`` once a layer, ``end``:

    cache.begin(batch, q_len)                       # refuses what does not fit; nothing has been written yet
    keys, values = cache.update(layer, key, value)  # everything these queries may need, the new tokens included
    cache.end()

A key's *index* counts the tokens fed so far, from 0, left padding included. Shapes: ``[batch, n_kv_heads, length,
head_dim]``; the cache holds key/value heads only, however many query heads read them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvprobe.attention.rope import Rope

Positions = Literal["absolute", "cache"]


@dataclass(frozen=True, kw_only=True)
class CacheShape:
    """What a cache must know of a model. ``windows`` are the model's own local windows, one a layer; None = global."""

    n_layers: int
    n_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...] = ()

    def window_of(self, layer: int) -> int | None:
        """The model's own window of a layer, the query included; None where it sees everything."""
        return self.windows[layer] if self.windows else None


class KVCache:
    """Slots for the first ``n_sink`` tokens and a ring for the last ones, in one key and one value buffer a layer.

    Use :class:`FullCache` or :class:`RollingCache`. ``length`` is the number of tokens seen since the last
    :meth:`reset`; ``pads`` ``[batch]`` the left padding of each row, if any; ``nbytes`` what the buffers occupy.
    """

    window: int | None = None
    unbounded = False

    def __init__(
        self,
        shape: CacheShape,
        *,
        n_sink: int,
        rings: Sequence[int],
        batch: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        if batch < 1:
            raise ValueError(f"batch must be at least 1, got {batch}")
        self.shape, self.batch, self.n_sink, self.rings = shape, batch, n_sink, tuple(rings)

        def buffer(slots: int) -> Tensor:
            # zeros, not empty: whatever reads a slot too many must find no NaN there
            return torch.zeros(batch, shape.n_kv_heads, slots, shape.head_dim, dtype=dtype, device=device)

        self.keys = [buffer(n_sink + ring) for ring in rings]
        self.values = [buffer(n_sink + ring) for ring in rings]
        self.length = 0
        self.pads: Tensor | None = None
        self._q_len = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, written or not."""
        return sum(buffer.untyped_storage().nbytes() for buffer in self._buffers())

    def reset(self) -> None:
        """Forget the sequence: the next token is the first of a new one."""
        for buffer in self._buffers():
            buffer.zero_()
        self.length, self.pads, self._q_len = 0, None, 0

    def begin(self, batch: int, q_len: int) -> None:
        """Announce ``q_len`` tokens for each of ``batch`` rows. Raises ValueError before anything is written."""
        self.check(batch, q_len)
        if self._q_len:
            raise ValueError(
                "the last pass broke off and left the cache half written: reset() it, unless another thread is in the "
                "middle of one"
            )
        self._q_len = q_len

    def check(self, batch: int, q_len: int) -> None:
        """Raise ValueError if ``q_len`` more tokens for each of ``batch`` rows cannot be taken."""
        if batch != self.batch:
            raise ValueError(f"the cache was made for a batch of {self.batch}, got {batch}")
        if self.pads is not None:
            whole = isinstance(self.pads, Tensor) and self.pads.dtype in (torch.int64, torch.int32)
            if not whole or self.pads.shape != (batch,) or int(self.pads.min()) < 0:
                raise ValueError(f"pads must be {batch} whole numbers, the left padding of each row, got {self.pads}")

    def end(self) -> None:
        """Count the announced tokens as seen."""
        self.length, self._q_len = self.length + self._q_len, 0

    def positions(self, q_len: int) -> Tensor:
        """The position of each new token, for position encoding: ``[q_len]``, or ``[batch, q_len]`` under padding.

        Under left padding it is cumsum(mask) − 1; padding itself gets 0.
        """
        places = torch.arange(self.length, self.length + q_len, device=self.keys[0].device)
        return places if self.pads is None else (places - self.pads[:, None]).clamp(min=0)

    def index(self, layer: int, q_len: int) -> Tensor:
        """The index of every key that :meth:`update` returns for ``q_len`` new tokens: ``[kv_len]``."""
        end, slots, device = self.length + q_len, self.keys[layer].shape[2], self.keys[layer].device
        if end <= slots:
            return torch.arange(end, device=device)
        if q_len == 1:
            return self._held(layer, end)
        new = torch.arange(self.length, end, device=device)
        return torch.cat([self._held(layer, self.length), new])

    def update(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new tokens' realized ``key`` and ``value``; return all that their queries may need.

        Both are views of the buffers wherever nothing had to make room, or one token replaced one.
        """
        buffers, slots = (self.keys[layer], self.values[layer]), self.keys[layer].shape[2]
        end = self.length + key.shape[2]
        if end <= slots or key.shape[2] == 1:
            self._store(layer, key, value)
            used = min(end, slots)
            return buffers[0][:, :, :used].to(key.dtype), buffers[1][:, :, :used].to(value.dtype)
        # the first of these queries still see keys that the last of them push out: read before writing
        used = min(self.length, slots)
        keys = torch.cat([self._realized(layer)[:, :, :used].to(key.dtype), key], dim=2)
        values = torch.cat([buffers[1][:, :, :used].to(value.dtype), value], dim=2)
        self._store(layer, key, value)
        return keys, values

    def fold(self, layer: int, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """What attention should read for ``query`` ``[batch, n_heads, q_len, head_dim]`` and the keys of ``update``."""
        return query, key

    def _buffers(self) -> list[Tensor]:
        return [*self.keys, *self.values]

    def _realized(self, layer: int) -> Tensor:
        return self.keys[layer]

    def _held(self, layer: int, length: int) -> Tensor:
        """The index of the key in every used slot once ``length`` tokens have been stored."""
        ring, slots = self.rings[layer], self.keys[layer].shape[2]
        slot = torch.arange(min(length, slots), device=self.keys[layer].device)
        last = length - 1 - (length - 1 - slot) % ring
        return torch.where(slot < self.n_sink, slot, last)

    def _store(self, layer: int, key: Tensor, value: Tensor) -> None:
        start, end = self.length, self.length + key.shape[2]
        for buffer, new in ((self.keys[layer], key), (self.values[layer], value)):
            if start < self.n_sink:
                buffer[:, :, start : min(end, self.n_sink)] = new[:, :, : self.n_sink - start]
            # of the others, the last `ring` stay: at most two stretches, before and after the ring's end
            first = max(start, self.n_sink, end - self.rings[layer])
            while first < end:
                slot = self.n_sink + (first - self.n_sink) % self.rings[layer]
                count = min(end - first, buffer.shape[2] - slot)
                buffer[:, :, slot : slot + count] = new[:, :, first - start : first - start + count]
                first += count


class FullCache(KVCache):
    """Every token's keys and values, up to ``capacity`` tokens.

    With ``bound_local`` the model's own local layers keep only their window, which changes no result. Raises
    ValueError where a pass would not fit. Bytes: 2 · n_layers · n_kv_heads · head_dim · capacity · batch · item size,
    with min(capacity, window) for each bounded layer.
    """

    def __init__(
        self,
        shape: CacheShape,
        *,
        capacity: int,
        batch: int = 1,
        bound_local: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1 token, got {capacity}")
        self.capacity = capacity
        local = [shape.window_of(layer) if bound_local else None for layer in range(shape.n_layers)]
        rings = [min(capacity, window or capacity) for window in local]
        super().__init__(shape, n_sink=0, rings=rings, batch=batch, dtype=dtype, device=device)

    def check(self, batch: int, q_len: int) -> None:
        """As in :class:`KVCache`, and if the cache would overflow."""
        super().check(batch, q_len)
        if self.length + q_len > self.capacity:
            raise ValueError(f"the cache holds {self.length} of {self.capacity} tokens: {q_len} more do not fit")


class RollingCache(KVCache):
    """The first ``n_sink`` tokens and, besides them, the last ``window``, the query itself included.

    Constant memory and time a token (StreamingLLM: Xiao et al., 2024, section 3.2; their budget counts the sinks
    inside the window). ``positions`` says from where sinks are seen once older keys have gone:

    - ``"absolute"``: from where they were made. Equal to the mask of ``window_keep``.
    - ``"cache"``: by slot in the cache. A query at i sees sink s from the distance
      ``min(i, n_sink + window - 1) - s``; distances inside the window are unchanged. Needs ``ropes``, the rotation of
      each layer, and then has no last position.

    A model's own local layers keep no more than their own window, applied by absolute distance. Bytes: as of a full
    cache of n_sink + window tokens; ``"cache"`` keeps the n_sink keys a second time, as they were made.

    Raises ValueError if ``window < 1``, ``n_sink < 0``, or for ``"cache"`` without ropes: learned positions are added
    to the hidden state and cannot be turned afterwards.
    """

    window: int

    def __init__(
        self,
        shape: CacheShape,
        *,
        window: int,
        n_sink: int = 0,
        positions: Positions = "absolute",
        ropes: Sequence[Rope] | None = None,
        batch: int = 1,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if window < 1:
            raise ValueError(f"window must be at least 1 (the query itself), got {window}")
        if n_sink < 0:
            raise ValueError(f"n_sink must be at least 0, got {n_sink}")
        if positions not in ("absolute", "cache"):
            raise ValueError(f"positions must be 'absolute' or 'cache', got {positions!r}")
        if positions == "cache" and ropes is None:
            raise ValueError(
                "positions='cache' needs rotary positions: learned ones are added to the hidden state and cannot be "
                "moved afterwards; use positions='absolute', which ends at the model's last position"
            )
        rings = [min(window, shape.window_of(layer) or window) for layer in range(shape.n_layers)]
        super().__init__(shape, n_sink=n_sink, rings=rings, batch=batch, dtype=dtype, device=device)
        self.window = window
        self.unbounded = positions == "cache"
        self._ropes = tuple(ropes or ()) if self.unbounded else ()
        self._made = [keys[:, :, :n_sink].clone() for keys in self.keys] if self._ropes and n_sink else []
        self._base = 0

    def reset(self) -> None:
        """As in :class:`KVCache`."""
        super().reset()
        self._base = 0

    def check(self, batch: int, q_len: int) -> None:
        """As in :class:`KVCache`, and under padding, where the rows' first tokens would be at different places."""
        super().check(batch, q_len)
        if self.pads is not None:
            raise ValueError("a rolling cache takes rows of equal length: under left padding each has its own sinks")

    def begin(self, batch: int, q_len: int) -> None:
        """As in :class:`KVCache`; for ``"cache"``, from time to time, the ring is counted from a later base."""
        super().begin(batch, q_len)
        slots = self.n_sink + self.window
        if self._ropes and self.length - self._base >= 2 * slots:
            # Only distances matter: turn the ring back, once in `slots` tokens, so that positions stay small. At a
            # million radians a float32 angle is off by 0.03.
            back = self.length - slots - self._base
            self._base += back
            for keys, rope in zip(self.keys, self._ropes, strict=True):
                ring = keys[:, :, self.n_sink :]
                ring.copy_(rope.turn(ring, torch.tensor(-back)))

    def positions(self, q_len: int) -> Tensor:
        """As in :class:`KVCache`; for ``"cache"`` counted from a base that moves along, since only distances matter."""
        return super().positions(q_len) - self._base

    def fold(self, layer: int, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """For ``"cache"`` and several queries, each with its own distance to the sinks: one call of twice the head_dim.

        The query is read twice, as it is (for window keys) and turned back by its lag (for sinks); a key stands in
        the half that is meant for it and is zero in the other, so that one product gives either score.
        """
        q_len = query.shape[2]
        lag = self._lag(q_len) if self._made and q_len > 1 else [0]
        if not any(lag):
            return query, key
        # indices as update() saw them; a sink that is itself new counts as a sink
        sink = (self.index(layer, q_len) < self.n_sink)[:, None]
        turned = self._ropes[layer].turn(query, -torch.tensor(lag))
        return torch.cat([query, turned], dim=-1), torch.cat([key.masked_fill(sink, 0), key.masked_fill(~sink, 0)], -1)

    def _lag(self, q_len: int) -> list[int]:
        """How much farther each new query is from the sinks than it should see them: its position minus its slot."""
        last_slot = self.n_sink + self.window - 1
        return [i - self._base - min(i, last_slot) for i in range(self.length, self.length + q_len)]

    def _buffers(self) -> list[Tensor]:
        return [*super()._buffers(), *self._made]

    def _store(self, layer: int, key: Tensor, value: Tensor) -> None:
        super()._store(layer, key, value)
        if not self._made:
            return
        q_len = key.shape[2]
        if self.length < self.n_sink:
            made = self._made[layer][:, :, self.length : self.length + q_len]
            made.copy_(key[:, :, : made.shape[2]])
        # a single query reads the buffer as it stands, so its sinks are turned there to where it sees them from
        if q_len == 1 and (lag := self._lag(1)[0]):
            self.keys[layer][:, :, : self.n_sink] = self._ropes[layer].turn(self._made[layer], torch.tensor(lag))

    def _realized(self, layer: int) -> Tensor:
        if not self._made:
            return self.keys[layer]
        return torch.cat([self._made[layer], self.keys[layer][:, :, self.n_sink :]], dim=2)
