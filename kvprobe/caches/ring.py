"""How are the first tokens and the last ones kept in place? Slots for sinks, and a ring for the others.

Both kinds are made of it: a full cache is a ring that never gets round.
"""

from dataclasses import replace

import torch
from torch import Tensor

from kvprobe.attention.call import AttentionCall
from kvprobe.attention.masks import keep_by_index
from kvprobe.caches.layer import Buffers, CacheLayer, Past
from kvprobe.shape.layers import Layer


class RingLayer(CacheLayer):
    """Slots for a row's first ``n_sink`` tokens and a ring of ``ring`` for the last others, in one buffer each of K, V.

    A query sees the last ``window`` (None: all) and the sinks, and of these no more than the layer's own window. Rows
    of one length share a path without masks or copies wherever nothing needs them; where rows differ in length, or
    each has sinks of its own behind its left padding, they are stored row by row.
    """

    def __init__(
        self,
        shape: Layer,
        past: Past,
        *,
        ring: int,
        n_sink: int = 0,
        window: int | None = None,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(shape, past)
        self.n_sink, self.ring, self.window, self.slots = n_sink, ring, window, n_sink + ring

        def buffer(width: int) -> Tensor:
            # zeros, not empty: whatever reads a slot too many must find no NaN there
            size = (len(past.lengths), shape.n_kv_heads, self.slots, width)
            return torch.zeros(size, dtype=dtype, device=past.device)

        self.keys, self.values = buffer(shape.head_dim), buffer(shape.v_head_dim)

    def append(self, call: AttentionCall) -> AttentionCall:
        """As :class:`CacheLayer`. Views of the buffers, unless several new tokens overwrite old ones."""
        key, value, q_len = call.key, call.value, call.key.shape[2]
        ends = [start + q_len for start in self._starts()]
        if q_len == 1 or max(ends) <= self.slots:
            # a single query reads the buffer as it stands; several, each at another distance from the sinks, as made
            keys = self._as_made() if q_len > 1 else self.keys
            self._store(key, value)
            used = max(1, min(max(ends), self.slots))
            key, value = keys[:, :, :used].to(key.dtype), self.values[:, :, :used].to(value.dtype)
        else:
            # the first of these queries still see keys that the last of them push out: read before writing
            used = max(0, min(max(self._starts()), self.slots))
            new = key, value
            key = torch.cat([self._as_made()[:, :, :used].to(key.dtype), key], dim=2)
            value = torch.cat([self.values[:, :, :used].to(value.dtype), value], dim=2)
            self._store(*new)
        return replace(call, key=key, value=value, mask=self._mask(q_len))

    def index(self, q_len: int) -> Tensor:
        """As :class:`CacheLayer`."""
        starts, device = self._starts(), self.past.device
        if self._by_row:
            ends = [start + q_len for start in starts]
            if q_len == 1 or max(ends) <= self.slots:
                return self._held_by_row(ends)
            return torch.cat(
                [self._held_by_row(starts), self.past.queries(q_len).expand(len(starts), -1)[:, None]], dim=-1
            )
        start, end = starts[0], starts[0] + q_len
        if end <= self.slots:
            return torch.arange(end, device=device)
        if q_len == 1:
            return self._held(end)
        return torch.cat([self._held(start), torch.arange(start, end, device=device)])

    def tensors(self) -> dict[str, Tensor]:
        """As :class:`CacheLayer`."""
        return {"keys": self.keys, "values": self.values}

    @property
    def formula_bytes(self) -> int:
        """Slots times the widths of K and V, of every row."""
        return len(self.past.lengths) * self.slots * self.shape.joint_width * self.keys.element_size()

    def floor(self, row: int) -> int:
        """Anything until the ring gets round; then what the windows of later queries still find in it.

        One token can always be taken back: the next one takes its slot, and sees what it saw.
        """
        peak, reach = self.past.peaks[row], min(filter(None, (self.window, self.shape.limit)), default=self.ring)
        if peak - self._origins()[row] <= self.slots:
            return 0
        return peak - 1 - max(0, self.ring - reach)

    def buffers(self) -> Buffers:
        """As :class:`CacheLayer`."""
        return Buffers(self.keys, self.values)

    @property
    def _by_row(self) -> bool:
        return not self.past.alike or (self.n_sink > 0 and self.past.left_pad is not None)

    def _origins(self) -> list[int]:
        """The index of each row's first token to be stored: with sinks, its padding is left out."""
        if self.n_sink == 0 or self.past.left_pad is None:
            return [0] * len(self.past.lengths)
        return self.past.left_pad.tolist()

    def _starts(self) -> list[int]:
        """How many tokens each row has stored; below 0 within its padding."""
        return [length - origin for length, origin in zip(self.past.lengths, self._origins(), strict=True)]

    def _mask(self, q_len: int) -> Tensor | None:
        alike = (self.ring, self.shape.limit)
        if alike not in self.past.keeps:
            self.past.keeps[alike] = self._keep(q_len)
        return self.past.keeps[alike]

    def _keep(self, q_len: int) -> Tensor | None:
        """Which keys each query sees, bool ``[batch or 1, 1, q_len, kv_len]``; None if no mask is needed."""
        past, local, window = self.past, self.shape.limit, self.window
        end = past.length + q_len
        in_reach = all(end <= reach for reach in (window, local) if reach is not None)
        only_seen = q_len == 1 and (window is None or self.ring <= window)
        only_seen = only_seen and (local is None or (self.n_sink == 0 and self.ring <= local))
        if (
            not self._by_row
            and past.left_pad is None
            and (only_seen or (in_reach and (past.length == 0 or q_len == 1)))
        ):
            return None
        first = past.left_pad
        if first is None and self._by_row:
            first = torch.zeros(len(past.lengths), dtype=torch.int64, device=past.device)
        return keep_by_index(
            past.queries(q_len), self.index(q_len), window=window, n_sink=self.n_sink, local=local, first=first
        )

    def _as_made(self) -> Tensor:
        return self.keys

    def _held(self, length: int) -> Tensor:
        """The index of the key in every used slot once ``length`` tokens have been stored."""
        slot = torch.arange(min(length, self.slots), device=self.past.device)
        last = length - 1 - (length - 1 - slot) % self.ring
        return torch.where(slot < self.n_sink, slot, last)

    def _held_by_row(self, stored: list[int]) -> Tensor:
        """The same of rows that have stored ``stored`` each, -1 where a slot is unused: ``[batch, 1, slots]``."""
        device = self.past.device
        length, origin = (torch.tensor(rows, device=device)[:, None, None] for rows in (stored, self._origins()))
        slot = torch.arange(max(0, min(max(stored), self.slots)), device=device)
        last = length - 1 - (length - 1 - slot) % self.ring
        return torch.where(slot < length, torch.where(slot < self.n_sink, slot, last) + origin, -1)

    def _store(self, key: Tensor, value: Tensor) -> None:
        starts = self._starts()
        for buffer, new in ((self.keys, key), (self.values, value)):
            if not self._by_row:
                self._store_rows(buffer, new, starts[0])
                continue
            for row, start in enumerate(starts):
                self._store_rows(buffer[row : row + 1], new[row : row + 1, :, max(0, -start) :], max(0, start))

    def _store_rows(self, buffer: Tensor, new: Tensor, start: int) -> None:
        end = start + new.shape[2]
        if start < self.n_sink:
            buffer[:, :, start : min(end, self.n_sink)] = new[:, :, : self.n_sink - start]
        # of the others, the last `ring` stay: at most two stretches, before and after the ring's end
        first = max(start, self.n_sink, end - self.ring)
        while first < end:
            slot = self.n_sink + (first - self.n_sink) % self.ring
            count = min(end - first, self.slots - slot)
            buffer[:, :, slot : slot + count] = new[:, :, first - start : first - start + count]
            first += count
