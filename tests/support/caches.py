"""Two kinds of cache that the library does not have, each as a new kind is written: one class, one line of registry."""

import sys
from dataclasses import replace

import torch

from kvprobe.caches import registry
from kvprobe.caches.full import FullCache
from kvprobe.caches.layer import CacheLayer, KVCache

KINDS = {"half": "support.caches:HalfCache", "heavy64": "support.caches:HeavyCache"}


def register(monkeypatch):
    """Make both known to the library for the length of a test."""
    for name, where in KINDS.items():
        monkeypatch.setitem(registry.KINDS, name, where)
    # commands that an earlier test imported have the choices of then
    for command in ("generate", "latency"):
        monkeypatch.delitem(sys.modules, f"kvprobe.cli.commands.{command}", raising=False)


class HalfCache(FullCache):
    """Keys and values stored as float16, whatever the weights are."""

    def __init__(self, shape, *, dtype, **settings):
        super().__init__(shape, dtype=torch.float16, **settings)


class HeavyLayer(CacheLayer):
    """The keys of most accumulated attention, ``most`` a row and KV head; the newest always (H2O, Zhang et al. 2023).

    A KV head's attention is the sum over the query heads that read it.
    """

    def __init__(self, shape, past, *, most, dtype):
        super().__init__(shape, past)
        size = (len(past.lengths), shape.n_kv_heads, most)
        self.keys = torch.zeros(*size, shape.head_dim, dtype=dtype, device=past.device)
        self.values = torch.zeros(*size, shape.v_head_dim, dtype=dtype, device=past.device)
        self.mass = torch.zeros(size, device=past.device)
        # the index of the token in each slot, from 1; 0 where there is none
        self.token = torch.zeros(size, dtype=torch.int64, device=past.device)

    def attend(self, call, then):
        start = self.past.queries(1).expand(len(self.past.lengths), 1)
        outputs = []
        for i in range(call.query.shape[2]):
            self._store(call.key[:, :, i], call.value[:, :, i], start + i)
            keep = (self.token > 0).repeat_interleave(call.n_heads // call.n_kv_heads, 1)[:, :, None]
            now = replace(call, query=call.query[:, :, i : i + 1], key=self.keys, value=self.values, mask=keep)
            outputs.append(then(now))
            keys = self.keys.repeat_interleave(call.n_heads // call.n_kv_heads, 1)
            scores = torch.einsum("bhd,bhkd->bhk", now.query[:, :, 0], keys)
            weights = (scores * call.scale).masked_fill(~keep[:, :, 0], -torch.inf).softmax(-1).nan_to_num()
            self.mass += weights.unflatten(1, (call.n_kv_heads, -1)).sum(2)
        return torch.cat(outputs, dim=2)

    def _store(self, key, value, index):
        # an empty slot first, then the one of least attention
        slot = self.mass.masked_fill(self.token == 0, -1).argmin(-1, keepdim=True)
        # padding takes a slot that counts as empty
        is_token = index >= 0 if self.past.left_pad is None else index >= self.past.left_pad[:, None]
        for buffer, new in ((self.keys, key), (self.values, value)):
            buffer.scatter_(2, slot[..., None].expand(-1, -1, 1, buffer.shape[-1]), new[:, :, None])
        self.token.scatter_(2, slot, torch.where(is_token, index + 1, 0)[:, None].expand_as(slot))
        self.mass.scatter_(2, slot, 0.0)

    def index(self, q_len):
        return self.token - 1

    def tensors(self):
        return {"keys": self.keys, "values": self.values, "mass": self.mass, "token": self.token}

    @property
    def formula_bytes(self):
        slots = len(self.past.lengths) * self.keys.shape[2]
        return slots * (self.shape.joint_width * self.keys.element_size() + self.shape.n_kv_heads * (4 + 8))


class HeavyCache(KVCache):
    """Of each row and KV head the 64 keys of most accumulated attention."""

    def __init__(self, shape, *, capacity, batch, dtype, device):
        def layer(shape_of_layer, past):
            return HeavyLayer(shape_of_layer, past, most=64, dtype=dtype)

        super().__init__(shape, layer, batch=batch, device=device)
