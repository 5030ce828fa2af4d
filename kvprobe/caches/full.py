"""What if everything is kept? Every token's keys and values, in buffers of one size."""

from collections.abc import Sequence

import torch

from kvprobe.caches.layer import KVCache, Past
from kvprobe.caches.ring import RingLayer
from kvprobe.shape.layers import Layer


class FullCache(KVCache):
    """Every token's keys and values, up to ``capacity`` tokens.

    With ``bound_local`` the model's own local layers keep only their window (and ``headroom``), which changes no
    result. Raises ValueError where a pass would not fit. Bytes: capacity · n_kv_heads · (head_dim + v_head_dim) · batch
    · item size a layer, with min(capacity, window) for each bounded one.
    """

    def __init__(
        self,
        shape: Sequence[Layer],
        *,
        capacity: int,
        batch: int = 1,
        bound_local: bool = False,
        headroom: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1 token, got {capacity}")
        self.capacity = capacity

        def layer(shape_of_layer: Layer, past: Past) -> RingLayer:
            bound = local + headroom if bound_local and (local := shape_of_layer.limit) else capacity
            return RingLayer(shape_of_layer, past, ring=min(capacity, bound), dtype=dtype)

        super().__init__(shape, layer, batch=batch, headroom=headroom, device=device)

    def check(self, batch: int, q_len: int) -> None:
        """As in :class:`KVCache`, and if the cache would overflow."""
        super().check(batch, q_len)
        if self.length + q_len > self.capacity:
            raise ValueError(f"the cache holds {self.length} of {self.capacity} tokens: {q_len} more do not fit")
