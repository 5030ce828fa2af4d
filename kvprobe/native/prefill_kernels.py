"""What is the reading of a prompt in machine code? A list of phases, each cut into pieces, for any number of threads.

A prompt is bound by arithmetic: every weight meets all of its tokens. Tokens go by blocks of `BLOCK`, and whatever has
one vector a token lies as ``[blocks, width, BLOCK]``: a product of :func:`kvprobe.native.tiles.tile` reads such a block
and leaves another, of scores and of values too, so that nothing is ever turned around but keys and values on their way
into the cache. Threads share the pieces as :mod:`kvprobe.native.decode_kernels` says; what is here is exact in the same
sense.
"""

from typing import Any

import numpy as np

from kvprobe.native.intrinsics import add, at, compiled, narrow, read, wide
from kvprobe.native.math import exp, gelu, silu
from kvprobe.native.products import packed_rows, product_of
from kvprobe.native.queue import DONE, LIMIT, TAKEN, TOTAL, take, wait
from kvprobe.native.tiles import BLOCK, NARROW_ROWS, TILE_ROWS, highest, lower, rescale, squares, total
from kvprobe.native.vectors import INTERLEAVED

# One phase: int64 [ROW]. Its pieces begin at `START` and need all before `NEED`; a piece is `PER` rows of a matrix and
# of all blocks, or one block, or one block of one key/value head. Row r's number k stands at `MATRIX`
# + r * `ROW_STRIDE` + k * `STRIDE`. The source is of `WIDTH` numbers a token; the target of `TARGET_WIDTH`, of which
# row 0 is `AT`.
(
    START, NEED, OP, PER, MATRIX, SECOND, N_ROWS, WIDTH, ROW_STRIDE, STRIDE, SOURCE, TARGET, TARGET_WIDTH, AT, NORM,
    BIAS, MODE, LAYER, ROW,
) = range(19)  # fmt: skip
# what OP may be: the norm of a block, or that of what is added; a product, or a gated pair of them; one head's keys and
# values into the cache; attention of the queries that share it
NORMED, ADD_NORMED, PRODUCT, GATED, PLACE, ATTEND = range(6)
# what MODE may be: how a product ends, or which activation a gate has
STORE, ADD, GELU, SILU = range(4)
# What all pieces share: int64 [TABLE], addresses and numbers; the first are those of kvprobe.native.queue.
# `SCRATCH_BYTES` are of one thread: a piece of a matrix in `PACKED_BYTES`, then products, or all that attention needs.
(
    PHASES, SCRATCH, SCRATCH_BYTES, PACKED_BYTES, WEIGHT_BYTES, CACHE_BYTES, IS_LAYER_NORM, N_HEADS, N_KV_HEADS,
    HEAD_DIM, LAYERS, NUMBERS, PAST, COUNT, SEQUENCE, TABLE,
) = range(4, 20)  # fmt: skip
# One layer: int64 [LAYER_ROW]. `ANGLES`: float32 [blocks, 2, head_dim / 2, BLOCK], cosines and sines.
KEYS, VALUES, SLOTS, LOCAL, ROTARY, ANGLES, QUERY_NORM, KEY_NORM, SCALE, LAYER_ROW = range(10)

_ZERO, _ONE = np.float32(0), np.float32(1)
_HIDDEN = np.float32(-np.inf)
_WORD = np.int64(0)
_LINE = 4 * BLOCK


@compiled
def _rows_of(
    row: Any, table: Any, matrix: int, first: int, n_rows: int, into: int, zero: Any
) -> Any:  # fmt: skip
    """Some rows of a weight as :func:`product_of` takes them: its matrix, row_stride, tile_stride and stride.

    They are read where they are if they are float32 and one after the other; else once, into float32, for all blocks.
    """
    size = table[WEIGHT_BYTES]
    matrix += first * row[ROW_STRIDE]
    if size == 4 and row[STRIDE] == 4:
        return matrix, row[ROW_STRIDE], TILE_ROWS * row[ROW_STRIDE], row[STRIDE]
    packed_rows(matrix, row[ROW_STRIDE], row[STRIDE], size, n_rows, row[WIDTH], into, zero)
    return into, 4, 4 * TILE_ROWS * row[WIDTH], 4 * TILE_ROWS


@compiled
def _add_bias(bias: int, n_rows: int, out: Any) -> None:
    biases = at(bias, _ZERO)
    for r in range(n_rows):
        for token in range(BLOCK):
            out[BLOCK * r + token] += biases[r]


@compiled
def _product(row: Any, table: Any, piece: int, packed: int, outs: int, zero: Any) -> None:
    """Some rows of a matrix times all tokens, then bias, activation or the sum with the residual stream."""
    first = piece * row[PER]
    n_rows, width, mode = min(row[PER], row[N_ROWS] - first), row[WIDTH], row[MODE]
    matrix, row_stride, tile_stride, stride = _rows_of(row, table, row[MATRIX], first, n_rows, packed, zero)
    out = at(outs, _ZERO)
    for block in range(-(-table[COUNT] // BLOCK)):
        source, n_tokens = row[SOURCE] + block * width * _LINE, table[COUNT] - block * BLOCK
        target = at(row[TARGET] + (block * row[TARGET_WIDTH] + row[AT] + first) * _LINE, _ZERO)
        product_of(matrix, row_stride, tile_stride, stride, n_rows, source, width, n_tokens, outs)
        if row[BIAS]:
            _add_bias(row[BIAS] + 4 * first, n_rows, out)
        if mode == STORE:
            for i in range(n_rows * BLOCK):
                target[i] = out[i]
        elif mode == ADD:
            for i in range(n_rows * BLOCK):
                target[i] += out[i]
        else:
            for i in range(n_rows * BLOCK):
                target[i] = gelu(out[i])


@compiled
def _gated(row: Any, table: Any, piece: int, packed: int, outs: int, zero: Any) -> None:
    """The same rows of gate and up; activation(gate) · up."""
    first = piece * row[PER]
    n_rows, width = min(row[PER], row[N_ROWS] - first), row[WIDTH]
    half = packed + table[PACKED_BYTES] // 2
    gates, row_stride, tile_stride, stride = _rows_of(row, table, row[MATRIX], first, n_rows, packed, zero)
    ups, _, _, _ = _rows_of(row, table, row[SECOND], first, n_rows, half, zero)
    others = outs + -(-n_rows // NARROW_ROWS) * NARROW_ROWS * _LINE
    gate, up = at(outs, _ZERO), at(others, _ZERO)
    for block in range(-(-table[COUNT] // BLOCK)):
        source, n_tokens = row[SOURCE] + block * width * _LINE, table[COUNT] - block * BLOCK
        target = at(row[TARGET] + (block * row[TARGET_WIDTH] + first) * _LINE, _ZERO)
        product_of(gates, row_stride, tile_stride, stride, n_rows, source, width, n_tokens, outs)
        product_of(ups, row_stride, tile_stride, stride, n_rows, source, width, n_tokens, others)
        if row[BIAS]:
            # the gate's, and after all of them the up's
            _add_bias(row[BIAS] + 4 * first, n_rows, gate)
            _add_bias(row[BIAS] + 4 * (row[N_ROWS] + first), n_rows, up)
        if row[MODE] == SILU:
            for i in range(n_rows * BLOCK):
                target[i] = silu(gate[i]) * up[i]
        else:
            for i in range(n_rows * BLOCK):
                target[i] = gelu(gate[i]) * up[i]


@compiled
def _norm(source: int, width: int, norm: int, is_layer_norm: int, eps: Any, spare: int, target: int) -> None:
    """RMSNorm, or LayerNorm, of each token of a block, which may be its own target; ``spare`` is of one row."""
    factors, count, before, after = at(spare, _ZERO), np.float32(width), at(source, _ZERO), at(target, _ZERO)
    if is_layer_norm:
        # first without the mean
        total(source, width, spare)
        for token in range(BLOCK):
            factors[token] /= count
        for i in range(width * BLOCK):
            after[i] = before[i]
        lower(target, width, spare)
        source = target
    squares(source, width, spare)
    for token in range(BLOCK):
        factors[token] = _ONE / np.sqrt(factors[token] / count + eps)
    rescale(source, width, spare, norm, target)
    if is_layer_norm:
        _add_bias(norm + 4 * width, width, after)


@compiled
def _turn(head: Any, head_dim: int, rotary: int, angles: int) -> None:
    half = head_dim // 2
    cos, sin = at(angles, _ZERO), at(angles + half * _LINE, _ZERO)
    for j in range(half):
        first, second = (2 * j, 2 * j + 1) if rotary == INTERLEAVED else (j, j + half)
        for token in range(BLOCK):
            x, y = head[BLOCK * first + token], head[BLOCK * second + token]
            c, s = cos[BLOCK * j + token], sin[BLOCK * j + token]
            head[BLOCK * first + token], head[BLOCK * second + token] = x * c - y * s, y * c + x * s


@compiled
def _place(row: Any, table: Any, piece: int, spare: int, zero: Any) -> None:
    """One block of one head: the new keys, normed and turned, and the values into their slots; its queries made ready.

    Queries are normed, turned and scaled where they stand.
    """
    layer = at(table[LAYERS] + 8 * LAYER_ROW * row[LAYER], _WORD)
    n_heads, n_kv_heads, head_dim, size = table[N_HEADS], table[N_KV_HEADS], table[HEAD_DIM], table[CACHE_BYTES]
    kv_head, block = piece % n_kv_heads, piece // n_kv_heads
    eps, is_layer_norm = at(table[NUMBERS], _ZERO)[0], table[IS_LAYER_NORM]
    heads, head_bytes = row[SOURCE] + block * row[WIDTH] * _LINE, head_dim * _LINE
    angles = layer[ANGLES] + block * head_bytes
    scale = at(table[LAYERS] + 8 * (LAYER_ROW * row[LAYER] + SCALE), _ZERO)[0]
    group = n_heads // n_kv_heads
    for head in range(kv_head * group, (kv_head + 1) * group):
        place = heads + head * head_bytes
        query = at(place, _ZERO)
        if layer[QUERY_NORM]:
            _norm(place, head_dim, layer[QUERY_NORM], is_layer_norm, eps, spare, place)
        if layer[ROTARY]:
            _turn(query, head_dim, layer[ROTARY], angles)
        for i in range(head_dim * BLOCK):
            query[i] *= scale
    place = heads + (n_heads + kv_head) * head_bytes
    key = at(place, _ZERO)
    value = at(heads + (n_heads + n_kv_heads + kv_head) * head_bytes, _ZERO)
    if layer[KEY_NORM]:
        _norm(place, head_dim, layer[KEY_NORM], is_layer_norm, eps, spare, place)
    if layer[ROTARY]:
        _turn(key, head_dim, layer[ROTARY], angles)
    slot = (table[SEQUENCE] * n_kv_heads + kv_head) * layer[SLOTS] + table[PAST] + block * BLOCK
    for token in range(min(BLOCK, table[COUNT] - block * BLOCK)):
        offset = (slot + token) * head_dim * size
        keys, values = at(layer[KEYS] + offset, zero), at(layer[VALUES] + offset, zero)
        for d in range(head_dim):
            keys[d] = narrow(key[BLOCK * d + token], zero)
            values[d] = narrow(value[BLOCK * d + token], zero)


@compiled
def _attend(row: Any, table: Any, piece: int, packed: int, zero: Any) -> None:
    """The query heads of one key/value head, of one block, over all that they may see."""
    layer = at(table[LAYERS] + 8 * LAYER_ROW * row[LAYER], _WORD)
    n_heads, n_kv_heads, head_dim, size = table[N_HEADS], table[N_KV_HEADS], table[HEAD_DIM], table[CACHE_BYTES]
    past, count = table[PAST], table[COUNT]
    # the last blocks see the most: they begin first, so that no thread is left with one at the end
    kv_head, block = piece % n_kv_heads, -(-count // BLOCK) - 1 - piece // n_kv_heads
    query = past + block * BLOCK
    end, n_local = min(query + BLOCK, past + count), layer[LOCAL]
    start = max(0, query - n_local + 1) if n_local else 0
    n_keys, line = end - start, head_dim * size
    offset = ((table[SEQUENCE] * n_kv_heads + kv_head) * layer[SLOTS] + start) * line
    keys, values = layer[KEYS] + offset, layer[VALUES] + offset
    if size != 4:
        wide_keys, wide_values = at(packed, _ZERO), at(packed + 4 * n_keys * head_dim, _ZERO)
        narrow_keys, narrow_values = at(keys, zero), at(values, zero)
        for i in range(n_keys * head_dim):
            wide_keys[i], wide_values[i] = wide(narrow_keys[i]), wide(narrow_values[i])
        keys, values, line = packed, packed + 4 * n_keys * head_dim, 4 * head_dim
        packed += 8 * n_keys * head_dim
    # each [.., BLOCK]: what comes of one head, each token's highest score and the sum of its weights, all scores
    outs, tops = packed, packed + (head_dim + NARROW_ROWS) * _LINE
    sums, scores = tops + _LINE, tops + 2 * _LINE
    score = at(scores, _ZERO)
    group = n_heads // n_kv_heads
    for head in range(kv_head * group, (kv_head + 1) * group):
        queries = row[SOURCE] + (block * row[WIDTH] + head * head_dim) * _LINE
        product_of(keys, line, TILE_ROWS * line, 4, n_keys, queries, head_dim, end - query, scores)
        # What a query may not see: the tokens after it, and those before a layer's own window. Each weighs e to the
        # -87.3, which is nothing beside the one that it sees best.
        for key in range(max(0, query - start), n_keys):
            for token in range(key + start - query):
                score[BLOCK * key + token] = _HIDDEN
        if n_local:
            for key in range(min(n_keys, query + BLOCK - n_local - start)):
                for token in range(max(0, key + start + n_local - query), BLOCK):
                    score[BLOCK * key + token] = _HIDDEN
        highest(scores, n_keys, tops)
        lower(scores, n_keys, tops)
        for i in range(n_keys * BLOCK):
            score[i] = exp(score[i])
        total(scores, n_keys, sums)
        product_of(values, 4, 4 * TILE_ROWS, line, head_dim, scores, n_keys, end - query, outs)
        out, weight_sum = at(outs, _ZERO), at(sums, _ZERO)
        target = at(row[TARGET] + (block * row[TARGET_WIDTH] + head * head_dim) * _LINE, _ZERO)
        for token in range(BLOCK):
            weight_sum[token] = _ONE / weight_sum[token]
        for d in range(head_dim):
            for token in range(BLOCK):
                target[BLOCK * d + token] = out[BLOCK * d + token] * weight_sum[token]


@compiled
def _normed(row: Any, table: Any, block: int, spare: int) -> None:
    """The norm of one block; or what is added, normed, and added."""
    width, eps = row[WIDTH], at(table[NUMBERS], _ZERO)[0]
    source, target = row[SOURCE] + block * width * _LINE, row[TARGET] + block * width * _LINE
    into = source if row[OP] == ADD_NORMED else target
    _norm(source, width, row[NORM], table[IS_LAYER_NORM], eps, spare, into)
    if row[OP] == ADD_NORMED:
        added, passing = at(source, _ZERO), at(target, _ZERO)
        for i in range(width * BLOCK):
            passing[i] += added[i]


@compiled
def work(shared: Any, thread: int, weight_zero: Any, cache_zero: Any) -> None:
    """Take pieces of the open tokens until none is left; thread 0 returns when all are done.

    As :func:`kvprobe.native.decode_kernels.work`: ``shared`` is the table, the zeros are of the types of weights and
    cache.
    """
    table = at(shared.ctypes.data, _WORD)
    limit = read(table[LIMIT])
    start = limit - table[TOTAL]
    packed = table[SCRATCH] + thread * table[SCRATCH_BYTES]
    outs = packed + table[PACKED_BYTES]
    phase = table[PHASES]
    while True:
        ticket = take(table[TAKEN], limit)
        if ticket < 0:
            break
        # tickets only rise, and a phase of one more piece than there are ends the list
        while at(phase + 8 * ROW, _WORD)[START] <= ticket - start:
            phase += 8 * ROW
        row = at(phase, _WORD)
        wait(table[DONE], start + row[NEED])
        piece, op = ticket - start - row[START], row[OP]
        if op == PRODUCT:
            _product(row, table, piece, packed, outs, weight_zero)
        elif op == GATED:
            _gated(row, table, piece, packed, outs, weight_zero)
        elif op == PLACE:
            _place(row, table, piece, packed, cache_zero)
        elif op == ATTEND:
            _attend(row, table, piece, packed, cache_zero)
        else:
            _normed(row, table, piece, packed)
        add(table[DONE], 1)
    if thread == 0:
        wait(table[DONE], limit)
