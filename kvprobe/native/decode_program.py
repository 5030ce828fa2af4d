"""How is a decoder's step laid out for the kernels? A program of pieces, one table of addresses, and threads.

Matrices are the decoder's own storage, so that a change in place is followed; vectors (norms, biases: thousandths of
the weights) are copied to float32 once, with the norms' offset added. After changing weights, make a new step.
"""

from collections.abc import Sequence
from itertools import pairwise, product
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kvprobe.caches.layer import KVCache
from kvprobe.decoder.config import Rotary
from kvprobe.decoder.model import Block, Decoder
from kvprobe.decoder.torch_engine import one_thread
from kvprobe.native import decode_kernels as k
from kvprobe.native.layout import edges_of, side_by_side, stride
from kvprobe.native.program import Program
from kvprobe.native.queue import TOTAL
from kvprobe.native.workers import Arena, WorkerPool, vector_of

# What one piece reads from memory. Smaller pieces cost tickets, larger ones leave threads idle at a phase's end.
PIECE_BYTES = 384 * 1024
# Into how many parts a matrix is cut that is stored by inputs: enough for some threads, and what they all add is small
# beside the matrix. Not by the number of threads either.
INPUT_PARTS = 16
# Into how many pieces attention is cut at least, by parts of the slots where there are fewer key/value heads: not by
# the number of threads, since results do not depend on it.
ATTENTION_PIECES = 24


class NumbaStep:
    """The whole decode step compiled, float32 between weights and cache of float32 or bfloat16. On a CPU.

    As many threads as torch has, and the batch of the cache. The logits are float32. Beyond the decoder and the cache
    it holds the program, a row's logits and inner vectors and, a thread, scratch for a piece of each row. See
    :class:`kvprobe.native.numba_engine.NumbaEngine`.
    """

    def __init__(self, decoder: Decoder, cache: KVCache, *, n_threads: int | None = None) -> None:
        self._decoder, self._cache = decoder, cache
        self._arena = Arena()
        n_threads = n_threads or torch.get_num_threads()
        self._program = DecodeProgram(decoder, cache, self._arena, n_threads)
        self._table = self._program.table
        stored = decoder.embedding.weight.dtype, cache.buffers()[0].keys.dtype
        self._pool = WorkerPool(k.work, n_threads, self._table, stored, self._arena)

    @torch.no_grad()
    def step(self, token: Tensor) -> Tensor:
        """Feed one token a row, ``[batch]``, after what the cache holds; the next logits, float32 ``[batch, vocab]``.

        Raises ValueError, before anything is written, if the cache or the model's positions do not suffice.
        """
        decoder, cache, table = self._decoder, self._cache, self._table
        vocab, integers = decoder.config.vocab, token.dtype in (torch.int32, torch.int64)
        if not integers or token.shape != (cache.batch,) or not 0 <= int(token.min()) <= int(token.max()) < vocab:
            count = "one token id" if cache.batch == 1 else f"{cache.batch} token ids"
            raise ValueError(f"{count} below {vocab} expected, got {token.tolist()}")
        length = cache.length
        cache.check(cache.batch, 1)
        if cache.left_pad is not None and int(cache.left_pad.max()) > length:
            raise ValueError(
                f"a row is still in its padding ({cache.left_pad.tolist()} at {length} tokens): prefill it"
            )
        decoder.check_length(length + 1, cache)
        cache.begin(cache.batch, 1)
        self._pool.finish()
        # torch's threads, woken for a large copy, wait for more work on the cores that the next step needs: 5 ms of
        # 16 to 28 a token.
        with one_thread():
            self._program.enter(token, cache)
            table[k.LENGTH] = length
            table[k.LAG] = self._program.turn_sinks(cache)
            self._pool.run()
            logits = self._program.logits.clone()
        cache.end()
        return logits


class DecodeProgram(Program):
    """The pieces of one step in order, and the table that the kernels read."""

    def __init__(self, decoder: Decoder, cache: KVCache, arena: Arena, n_threads: int) -> None:
        super().__init__(k, decoder, arena, n_threads)
        config, batch = decoder.config, cache.batch
        self.batch = batch
        self.pieces: list[list[int]] = []
        width = (config.n_heads + 2 * config.n_kv_heads) * config.head_dim
        # each [batch, width]
        self.x, self.qkv, self.added = (self._rows(n) for n in (config.hidden, width, config.hidden))
        self.mixed, self.gated = self._rows(config.n_heads * config.head_dim), self._rows(config.mlp_width)
        self.logits = self._rows(config.vocab)
        # of the matrices that read one vector, where they are stored by inputs: [parts, batch, outputs] of each
        self.parts_of_inputs = arena.floats(0)
        self.left_pad = arena.words(batch)
        slots = max(held.keys.shape[2] for held in cache.buffers())
        self.parts = -(-ATTENTION_PIECES // (batch * config.n_kv_heads))
        partial = arena.floats(batch * config.n_heads * self.parts * (config.head_dim + 2))
        # one more: parts of a number of slots that they do not divide are not alike
        part_slots = slots // self.parts + 1
        # cosines and sines of each row's position, and of the sinks' lag
        for rotary in self.frequencies:
            rows = {"ANGLES": self._rows(config.head_dim), "LAG_ANGLES": arena.floats(config.head_dim)}
            self.angles[rotary] = {name: part.reshape(-1, 2, config.head_dim // 2) for name, part in rows.items()}
        for layer, block in enumerate(decoder.blocks):
            self._block(layer, block)
        self._phase(
            [(decoder.embedding if config.tied_head else decoder.head, self.logits)],
            source=self.x,
            norm=decoder.norm,
            mode=k.STORE if config.final_softcap is None else k.CAP,
        )
        pieces = np.array(self.pieces, dtype=np.int64)
        max_rows = int((pieces[:, k.LAST] - pieces[:, k.FIRST]).max())
        scores = config.n_heads // config.n_kv_heads * part_slots
        # each thread's own cache lines
        scratch = 64 * -(-4 * (batch * (config.hidden + max_rows) + max(scores, config.head_dim) + 16) // 64)
        given = {
            k.PLAN: pieces.ctypes.data,
            TOTAL: len(pieces),
            k.HIDDEN: config.hidden,
            k.N_SINK: cache.n_sink,
            k.QKV: self.qkv.data_ptr(),
            k.MAX_ROWS: max_rows,
            k.BATCH: batch,
            k.LEFT_PAD: self.left_pad.ctypes.data,
            k.PARTS: self.parts,
            k.PART_SLOTS: part_slots,
            k.PARTIAL: partial.data_ptr(),
        }
        numbers = config.norm_eps, config.final_softcap or 0.0
        self.table = self.table_of(cache, given, scratch=scratch, numbers=numbers, kept=pieces)

    def enter(self, token: Tensor, cache: KVCache) -> None:
        """The embeddings of ``token`` ``[batch]``, and the angles of their positions: as the decoder makes them."""
        positions = cache.positions(1).expand(self.batch, 1)[:, 0]
        self.left_pad[:] = 0 if cache.left_pad is None else cache.left_pad.numpy()
        self.x.copy_(self.embedded(token, positions))
        for rotary, angles in self.angles.items():
            self._angles(angles["ANGLES"], rotary, positions, rotary.scale)

    def turn_sinks(self, cache: KVCache) -> int:
        """How far a rolling cache with cache positions must turn its sinks before they are read; 0 for the others."""
        lag = cache.sink_lag()
        if lag:
            for rotary, angles in self.angles.items():
                self._angles(angles["LAG_ANGLES"], rotary, torch.tensor([lag]), 1.0)
        return lag

    def _angles(self, into: Tensor, rotary: Rotary, positions: Tensor, scale: float) -> None:
        angle = positions[:, None].float() * self.frequencies[rotary]
        torch.cos(angle, out=into[:, 0])
        torch.sin(angle, out=into[:, 1])
        if scale != 1:
            into *= scale

    def _block(self, layer: int, block: nn.Module) -> None:
        assert isinstance(block, Block)
        config, attention, mlp = self.config, block.attention, block.mlp
        heads, parts = [attention.query, attention.key, attention.value], []
        for module, start in zip(heads, self._starts(), strict=True):
            parts.append((module, self.qkv[:, start:]))
        self._phase(parts, source=self.x, norm=block.attention_norm)
        self._heads(k.PLACE, layer)
        self._heads(k.ATTEND, layer, parts=self.parts)
        self._heads(k.MERGE, layer, target=self.mixed)
        self._add(attention.out, self.mixed, block.attention_post_norm)
        if config.activation == "gelu_tanh":
            self._phase([(mlp.up, self.gated)], source=self.x, norm=block.mlp_norm, mode=k.GELU)
        else:
            mode = k.SILU if config.activation == "swiglu" else k.GELU
            self._phase([(mlp.gate, self.gated)], source=self.x, norm=block.mlp_norm, mode=mode, second=mlp.up)
        self._add(mlp.down, self.gated, block.mlp_post_norm)

    def _rows(self, width: int) -> Tensor:
        return self.arena.floats(self.batch * width).reshape(self.batch, width)

    def _starts(self) -> tuple[int, int, int]:
        config = self.config
        return 0, config.n_heads * config.head_dim, (config.n_heads + config.n_kv_heads) * config.head_dim

    def _add(self, module: nn.Module, source: Tensor, post_norm: nn.Module) -> None:
        """A product added to the residual stream, normed first if the model does."""
        if isinstance(post_norm, nn.Identity):
            self._phase([(module, self.x)], source=source, mode=k.ADD)
            return
        self._phase([(module, self.added)], source=source)
        need, norm = len(self.pieces), vector_of(post_norm, self.arena)
        self._piece(need, k.ADD_NORMED, 0, 1, source=self.added, target=self.x, norm=norm)

    def _heads(self, op: int, layer: int, *, parts: int = 1, target: Tensor | None = None) -> None:
        """A piece for each row, key/value head and part of its slots."""
        need = len(self.pieces)
        for sequence, head, part in product(range(self.batch), range(self.config.n_kv_heads), range(parts)):
            others = {"layer": layer, "sequence": sequence, "part": part}
            self._piece(need, op, head, head + 1, source=self.qkv, target=target, **others)

    def _phase(
        self,
        products: Sequence[tuple[Any, Tensor]],
        *,
        source: Tensor,
        norm: nn.Module | None = None,
        mode: int = k.STORE,
        second: Any = None,
    ) -> None:
        """Matrices that read the same vector, cut into pieces of about `PIECE_BYTES`, as many for each thread."""
        need, starts = len(self.pieces), 0 if norm is None else vector_of(norm, self.arena)
        if second is None and all(self.arena.matrix(module.weight)[1] for module, _ in products):
            self._by_inputs(products, source=source, norm=starts, mode=mode)
            return
        for module, target in products:
            # only GPT-2 stores [in, out], and it has no gate
            weights = [part.weight.contiguous() for part in (module, second) if part is not None]
            n_out, n_in = weights[0].shape
            per_thread = max(1, round(sum(map(torch.numel, weights)) * self.item / PIECE_BYTES / self.n_threads))
            # rows come in fours
            edges = edges_of(n_out, min(self.n_threads * per_thread, n_out // 4), 4)
            shared = {
                "matrix": self.arena.matrix(weights[0])[0],
                "second": self.arena.matrix(weights[-1])[0],
                "width": n_in,
                # where the second's biases begin
                "stride": n_out,
                "norm": starts,
                "bias": self.arena.biases(module, second),
                "mode": mode,
            }
            for first, last in pairwise(edges):
                op = k.ROWS if second is None else k.GATED
                self._piece(need, op, first, last, source=source, target=target, **shared)

    def _by_inputs(self, products: Sequence[tuple[Any, Tensor]], *, source: Tensor, norm: int, mode: int) -> None:
        """The same of matrices stored ``[in, out]``: what parts of the inputs add, then the sums of that."""
        need, n_in, sums = len(self.pieces), source.shape[1], []
        edges = edges_of(n_in, min(INPUT_PARTS, n_in // 8), 8)
        n_parts, begin = len(edges) - 1, 0
        needed = n_parts * self.batch * sum(module.weight.shape[0] for module, _ in products)
        if self.parts_of_inputs.numel() < needed:
            # one for all phases, since each needs the one before to be done
            self.parts_of_inputs = self.arena.floats(needed)
        for modules, target in side_by_side(products):
            weight, n_out = modules[0].weight, sum(module.weight.shape[0] for module in modules)
            parts = self.parts_of_inputs[begin : begin + n_parts * self.batch * n_out].view(n_parts, self.batch, n_out)
            begin += parts.numel()
            shared = {"matrix": self.arena.matrix(weight)[0], "stride": weight.stride(1), "width": n_out, "norm": norm}
            for part, (first, last) in zip(parts, pairwise(edges), strict=True):
                self._piece(need, k.INPUTS, first, last, source=source, target=part, **shared)
            sums.append((parts, target, {"width": n_out, "part": n_parts, "bias": self.arena.biases(*modules)}))
        need = len(self.pieces)
        for parts, target, others in sums:
            n_out = parts.shape[-1]
            for first, last in pairwise(edges_of(n_out, min(self.n_threads, n_out // 64), 4)):
                self._piece(need, k.SUM, first, last, source=parts[0], target=target, mode=mode, **others)

    def _piece(
        self,
        need: int,
        op: int,
        first: int,
        last: int,
        *,
        source: Tensor,
        target: Tensor | None = None,
        **others: int,
    ) -> None:
        """One row of the program; ``others`` by the names of its columns in small letters."""
        if target is not None:
            others |= {"target": target.data_ptr(), "target_stride": stride(target)}
        places = {"source": source.data_ptr(), "source_stride": stride(source)}
        self.pieces.append(self.row(need=need, op=op, first=first, last=last, **places, **others))
