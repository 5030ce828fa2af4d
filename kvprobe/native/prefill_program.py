"""How is the reading of a prompt laid out for the kernels? Phases of a table of addresses, and blocks of tokens.

The decoder's own matrices and the cache's own buffers, as in :mod:`kvprobe.native.decode_program`; vectors lie in
blocks of tokens (:mod:`kvprobe.native.prefill_kernels`), as many tokens at once as `TOKENS_AT_ONCE`, so that they do
not grow with the prompt. Weights may change in place; if they are given other memory, make a new reader.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kvprobe.caches.layer import KVCache
from kvprobe.decoder.model import Block, Decoder
from kvprobe.decoder.torch_engine import one_thread
from kvprobe.native import prefill_kernels as k
from kvprobe.native.eligible import unreadable
from kvprobe.native.program import Program
from kvprobe.native.queue import TOTAL
from kvprobe.native.tiles import BLOCK, NARROW_ROWS, TILE_ROWS
from kvprobe.native.workers import Arena, WorkerPool, vector_of

# 22 blocks: prompts of 512 tokens in one go
TOKENS_AT_ONCE = 22 * BLOCK
# About the most that a piece reads of a matrix: it stays in a core's second cache while all blocks pass.
PIECE_BYTES = 256 * 1024
# into how many pieces each thread's share of a matrix is cut, so that no thread waits long for the others
PIECES_A_THREAD = 8


class NumbaReader:
    """The reading of a prompt compiled, float32 between weights and cache of float32 or bfloat16. On a CPU.

    As many threads as torch has. Beyond the decoder and the cache it holds the vectors of `TOKENS_AT_ONCE` tokens and,
    a thread, a piece of a matrix and a block's scores of a whole cache; of one in 16 bits also a head's keys and values
    in float32. See :class:`kvprobe.native.numba_engine.NumbaEngine`. Raises ValueError for a cache that is not a
    :class:`FullCache`.
    """

    def __init__(self, decoder: Decoder, cache: KVCache, *, n_threads: int | None = None) -> None:
        if why_not := unreadable(cache, 0):
            raise ValueError(f"the compiled reader cannot be used: {why_not}")
        n_threads = n_threads or torch.get_num_threads()
        self._decoder, self._cache, self._arena = decoder, cache, Arena()
        self._weights = _addresses(decoder)
        self._program = PrefillProgram(decoder, cache, self._arena, n_threads)
        stored = decoder.embedding.weight.dtype, cache.buffers()[0].keys.dtype
        self._pool = WorkerPool(k.work, n_threads, self._program.table, stored, self._arena)

    @torch.no_grad()
    def read(self, ids: Tensor) -> Tensor:
        """Feed ``ids`` ``[batch, n_tokens]`` after what the cache holds; the last token's ``[batch, hidden]``.

        Raises ValueError, before anything is written, if the cache or the model's positions do not suffice, for ids
        outside the vocabulary, padding, a ring that would roll, and a decoder whose weights have other memory now.
        """
        cache, program = self._cache, self._program
        batch, n_tokens = ids.shape
        vocab, integers = self._decoder.config.vocab, ids.dtype in (torch.int32, torch.int64)
        if not n_tokens or not integers or not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
            raise ValueError(f"token ids below {vocab} expected, at least one a row")
        cache.check(batch, n_tokens)
        self._decoder.check_length(cache.length + n_tokens, cache)
        if why_not := unreadable(cache, n_tokens):
            raise ValueError(f"the compiled reader cannot be used: {why_not}")
        if self._weights != _addresses(self._decoder):
            raise ValueError("the decoder's weights are not where they were: make a new reader")
        last: list[Tensor] = []
        # torch's threads, woken for a large copy, wait for more work on the cores that the pieces need.
        with one_thread():
            for part in ids.split(TOKENS_AT_ONCE, dim=1):
                cache.begin(batch, part.shape[1])
                self._pool.finish()
                positions, last = cache.positions(part.shape[1]), []
                for row in range(batch):
                    program.enter(row, part[row], positions, past=cache.length)
                    self._pool.run()
                    last.append(program.last(part.shape[1]))
                cache.end()
            return self._decoder.norm(torch.stack(last).to(self._decoder.embedding.weight.dtype))


class PrefillProgram(Program):
    """The phases of one reading in order, and the table that the kernels read."""

    def __init__(self, decoder: Decoder, cache: KVCache, arena: Arena, n_threads: int) -> None:
        super().__init__(k, decoder, arena, n_threads)
        config = decoder.config
        self.phases: list[list[int]] = []
        # of each phase: its pieces, its pieces a block, and whether it needs no more than the phase before it
        self.counts: list[tuple[int, int, bool]] = []
        head_dim, slots = config.head_dim, max(held.keys.shape[2] for held in cache.buffers())
        self.n_blocks = -(-min(TOKENS_AT_ONCE, slots) // BLOCK)
        width = (config.n_heads + 2 * config.n_kv_heads) * head_dim
        # each [blocks, width, BLOCK]
        self.x, self.normed, self.qkv, self.added = map(
            self._blocks, (config.hidden, config.hidden, width, config.hidden)
        )
        self.mixed, self.gated = self._blocks(config.n_heads * head_dim), self._blocks(config.mlp_width)
        # cosines and sines of the positions: [blocks, 2, head_dim / 2, BLOCK]
        for rotary in self.frequencies:
            self.angles[rotary] = {"ANGLES": self._blocks(head_dim).reshape(-1, 2, head_dim // 2, BLOCK)}
        for layer, block in enumerate(decoder.blocks):
            self._block(layer, block)
        end = [0] * k.ROW
        self.rows = np.array([*self.phases, end], dtype=np.int64)
        # a piece of a matrix, or of two, in float32
        packed = -(-max(2 * 4 * row[k.PER] * row[k.WIDTH] for row in self.phases) // 128) * 128
        tall = max(row[k.PER] for row in self.phases)
        # of each a whole tile at its end
        outs = 2 * 4 * BLOCK * (tall + NARROW_ROWS)
        narrow = cache.buffers()[0].keys.element_size() < 4
        attended = 8 * slots * head_dim * narrow + 4 * BLOCK * (slots + head_dim + 2 + 2 * NARROW_ROWS)
        scratch = 64 * -(-max(packed + outs, attended, 8 * BLOCK) // 64)
        given = {k.PHASES: self.rows.ctypes.data, k.PACKED_BYTES: packed}
        self.table = self.table_of(cache, given, scratch=scratch, numbers=[config.norm_eps], kept=self.rows)

    def enter(self, row: int, ids: Tensor, positions: Tensor, *, past: int) -> None:
        """The embeddings of one row's ``ids`` ``[n_tokens]``, and the angles of their positions: as the decoder."""
        n_tokens = len(ids)
        n_blocks = -(-n_tokens // BLOCK)
        self.x[:n_blocks] = _in_blocks(self.embedded(ids, positions))
        for rotary, named in self.angles.items():
            angles = named["ANGLES"]
            angle = _in_blocks(positions[:, None].float() * self.frequencies[rotary])
            angles[:n_blocks, 0], angles[:n_blocks, 1] = angle.cos() * rotary.scale, angle.sin() * rotary.scale
        self.table[k.PAST], self.table[k.COUNT], self.table[k.SEQUENCE] = past, n_tokens, row
        starts: list[int] = [0]
        needs: list[int] = []
        for count, each_block, together in self.counts:
            needs.append(needs[-1] if together else starts[-1])
            starts.append(starts[-1] + count + each_block * n_blocks)
        self.rows[:-1, k.NEED], self.rows[:, k.START] = needs, starts
        self.table[TOTAL] = starts[-1]

    def last(self, n_tokens: int) -> Tensor:
        """The residual stream of the last token, ``[hidden]``."""
        block, token = divmod(n_tokens - 1, BLOCK)
        return self.x[block, :, token].clone()

    def _blocks(self, width: int) -> Tensor:
        return self.arena.floats(self.n_blocks * width * BLOCK).reshape(self.n_blocks, width, BLOCK)

    def _block(self, layer: int, block: nn.Module) -> None:
        assert isinstance(block, Block)
        config, attention, mlp = self.config, block.attention, block.mlp
        self._norm_phase(block.attention_norm, self.x, self.normed)
        start = 0
        for module in (attention.query, attention.key, attention.value):
            self._product(module, self.normed, self.qkv, at=start, together=start > 0)
            start += module.weight.shape[0]
        for op, target in ((k.PLACE, None), (k.ATTEND, self.mixed)):
            self._phase(op, self.qkv, target, each_block=config.n_kv_heads, layer=layer)
        self._add(attention.out, self.mixed, block.attention_post_norm)
        self._norm_phase(block.mlp_norm, self.x, self.normed)
        if config.activation == "gelu_tanh":
            self._product(mlp.up, self.normed, self.gated, mode=k.GELU)
        else:
            mode = k.SILU if config.activation == "swiglu" else k.GELU
            self._product(mlp.gate, self.normed, self.gated, mode=mode, second=mlp.up)
        self._add(mlp.down, self.gated, block.mlp_post_norm)

    def _add(self, module: nn.Module, source: Tensor, post_norm: nn.Module) -> None:
        """A product added to the residual stream, normed first if the model does."""
        if isinstance(post_norm, nn.Identity):
            self._product(module, source, self.x, mode=k.ADD)
            return
        self._product(module, source, self.added)
        self._norm_phase(post_norm, self.added, self.x, op=k.ADD_NORMED)

    def _norm_phase(self, norm: nn.Module, source: Tensor, target: Tensor, *, op: int = k.NORMED) -> None:
        self._phase(op, source, target, each_block=1, norm=vector_of(norm, self.arena))

    def _product(
        self,
        module: Any,
        source: Tensor,
        target: Tensor,
        *,
        mode: int = k.STORE,
        at: int = 0,
        second: Any = None,
        together: bool = False,
    ) -> None:
        """A matrix, or the gated pair of two, by as many rows as stay in a core's cache."""
        weights = [part.weight for part in (module, second) if part is not None]
        n_out, n_in = weights[0].shape
        if len({weight.stride() for weight in weights}) > 1:
            # a pair is read alike
            weights = [weight.contiguous() for weight in weights]
        matrices = [self.arena.matrix(weight) for weight in weights]
        turned = matrices[0][1]
        row_stride, stride = (self.item, self.item * weights[0].stride(1)) if turned else (self.item * n_in, self.item)
        fitting = PIECE_BYTES // (4 * n_in * len(weights))
        fair = -(-n_out // (PIECES_A_THREAD * self.n_threads))
        rows = max(1, min(fitting, fair) // TILE_ROWS) * TILE_ROWS
        self._phase(
            k.PRODUCT if second is None else k.GATED,
            source,
            target,
            count=-(-n_out // rows),
            together=together,
            per=rows,
            matrix=matrices[0][0],
            second=matrices[-1][0],
            n_rows=n_out,
            row_stride=row_stride,
            stride=stride,
            at=at,
            bias=self.arena.biases(module, second),
            mode=mode,
        )

    def _phase(
        self,
        op: int,
        source: Tensor,
        target: Tensor | None,
        *,
        count: int = 0,
        each_block: int = 0,
        together: bool = False,
        **others: int,
    ) -> None:
        """One row of the table; ``others`` by the names of its columns in small letters."""
        if target is not None:
            others |= {"target": target.data_ptr(), "target_width": target.shape[1]}
        self.phases.append(self.row(op=op, source=source.data_ptr(), width=source.shape[1], **others))
        self.counts.append((count, each_block, together))


def _addresses(decoder: Decoder) -> list[int]:
    return [parameter.data_ptr() for parameter in decoder.parameters()]


def _in_blocks(vectors: Tensor) -> Tensor:
    """``[n_tokens, width]`` as ``[blocks, width, BLOCK]``, the last block filled with zeros."""
    n_blocks = -(-len(vectors) // BLOCK)
    padded = torch.nn.functional.pad(vectors, (0, 0, 0, n_blocks * BLOCK - len(vectors)))
    return padded.reshape(n_blocks, BLOCK, -1).transpose(1, 2)
