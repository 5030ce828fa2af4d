"""What do the programs of a decode step and of a prompt have in common? Rows of words, a row a layer, and one table."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvprobe.caches.layer import KVCache
from kvprobe.decoder.config import Rotary
from kvprobe.decoder.model import Decoder
from kvprobe.native import queue
from kvprobe.native.vectors import HALVES, INTERLEAVED
from kvprobe.native.workers import Arena, vector_of


class Program:
    """A decoder and a cache as addresses and numbers; ``words`` is the module of kernels that names its columns."""

    def __init__(self, words: Any, decoder: Decoder, arena: Arena, n_threads: int) -> None:
        config = decoder.config
        self.words, self.config, self.decoder, self.arena, self.n_threads = words, config, decoder, arena, n_threads
        self.item = decoder.embedding.weight.element_size()
        # of each kind of layer that turns its heads: the frequencies, and cosines and sines by the words of its row
        self.frequencies: dict[Rotary, Tensor] = {}
        self.angles: dict[Rotary, dict[str, Tensor]] = {}
        for layer in range(config.n_layers):
            rotary, rope = config.rotary_of(layer), config.rope_of(layer, decoder.embedding.weight.device)
            if rotary is not None and rope is not None:
                self.frequencies[rotary] = rope.inv_freq

    def row(self, **values: int) -> list[int]:
        """One row of the program; ``values`` by the names of its columns in small letters."""
        row = [0] * self.words.ROW
        for name, value in values.items():
            row[getattr(self.words, name.upper())] = value
        return row

    def embedded(self, ids: Tensor, positions: Tensor) -> Tensor:
        """What the blocks begin with for ``ids`` ``[n]`` at ``positions`` ``[n]``: float32 ``[n, hidden]``."""
        weight = self.decoder.embedding.weight
        x = weight[ids].float()
        if self.config.embedding_scale != 1:
            x = x * torch.tensor(self.config.embedding_scale, dtype=weight.dtype).item()
        return x + self.decoder.position.weight[positions] if self.config.rotary is None else x

    def table_of(
        self, cache: KVCache, given: Mapping[int, int], *, scratch: int, numbers: Sequence[float], kept: Any
    ) -> Any:
        """The table, int64 ``[TABLE]``, with counters on cache lines of their own (:mod:`kvprobe.native.queue`).

        ``scratch`` are a thread's bytes, ``numbers`` float32; ``kept`` is whatever else ``given`` points into.
        """
        arena, config, k, layers = self.arena, self.config, self.words, self._layers(cache)
        counters, table = arena.words(24), arena.words(k.TABLE)
        arena.kept += [layers, kept]
        for i, place in enumerate((queue.TAKEN, queue.DONE, queue.LIMIT)):
            table[place] = counters.ctypes.data + 64 * i
        table[k.SCRATCH] = arena.room(self.n_threads * scratch // 4).data_ptr()
        table[k.SCRATCH_BYTES], table[k.WEIGHT_BYTES] = scratch, self.item
        table[k.CACHE_BYTES] = cache.buffers()[0].keys.element_size()
        table[k.IS_LAYER_NORM] = config.norm == "layer"
        table[k.N_HEADS], table[k.N_KV_HEADS] = config.n_heads, config.n_kv_heads
        table[k.HEAD_DIM], table[k.LAYERS] = config.head_dim, layers.ctypes.data
        table[k.NUMBERS] = arena.vector(torch.tensor(numbers, dtype=torch.float32, device="cpu"))
        for place, value in given.items():
            table[place] = value
        return table

    def _layers(self, cache: KVCache) -> Any:
        """What the kernels read of each layer: int64 ``[n_layers, LAYER_ROW]``."""
        arena, config, k = self.arena, self.config, self.words
        rows = arena.words(config.n_layers * k.LAYER_ROW).reshape(config.n_layers, k.LAYER_ROW)
        for layer, (row, held) in enumerate(zip(rows, cache.buffers(), strict=True)):
            attention: Any = self.decoder.blocks[layer].attention
            arena.hold(held.keys, held.values)
            row[k.KEYS], row[k.VALUES] = held.keys.data_ptr(), held.values.data_ptr()
            row[k.SLOTS] = held.keys.shape[2]
            row[k.LOCAL] = (config.windows[layer] if config.windows else None) or 0
            if held.made is not None:
                arena.hold(held.made)
                row[k.MADE] = held.made.data_ptr()
            rotary = config.rotary_of(layer)
            if rotary is not None:
                row[k.ROTARY] = INTERLEAVED if rotary.interleaved else HALVES
                for name, angles in self.angles[rotary].items():
                    row[getattr(k, name)] = angles.data_ptr()
            if config.qk_norm:
                row[k.QUERY_NORM] = vector_of(attention.query_norm, arena)
                row[k.KEY_NORM] = vector_of(attention.key_norm, arena)
            row[k.SCALE] = int(np.float32(attention.scale).view(np.int32))
        return rows
