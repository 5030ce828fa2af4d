"""What is one decode step in machine code? A program of small pieces, which any number of threads work through.

A step streams every weight once and computes little with it, so what counts is that all threads read memory all the
time. The program, written by :mod:`kvprobe.native.decode_program`, is one list of pieces in order: some rows of a
matrix, attention to a part of one head. A thread takes the next piece by an atomic ticket, waits until the pieces it
depends on are done, computes it, and counts it as done. There are no barriers and no thread owns a part: one that comes
late, or never (in a forked child), costs time and nothing else; and each piece is computed in one way, so results do
not depend on the threads.

Memory is passed as addresses: views of the very weights and cache buffers, float32 or bfloat16 (as its 16 bits), with
float32 in between. Nothing here checks an index; the program is right or wrong.
"""

from typing import Any

import numpy as np

from kvprobe.native.intrinsics import add, at, compiled, narrow, prefetch, read, wide
from kvprobe.native.math import exp, gelu, silu, tanh
from kvprobe.native.products import dots_of_all, mix
from kvprobe.native.queue import DONE, LIMIT, TAKEN, TOTAL, take, wait
from kvprobe.native.vectors import highest_of, norm_of, turn

# One piece: int64 [ROW]. `NEED` counts the pieces that must be done before it. It is of all sequences of the batch,
# whose vectors are `SOURCE_STRIDE` and `TARGET_STRIDE` bytes apart; one head's piece is of `SEQUENCE` alone. `PART` is
# the number of a part of the slots and, for SUM, how many parts there are.
(
    NEED, OP, FIRST, LAST, MATRIX, SECOND, WIDTH, STRIDE, SOURCE, TARGET, NORM, BIAS, MODE, LAYER, SOURCE_STRIDE,
    TARGET_STRIDE, SEQUENCE, PART, ROW,
) = range(19)  # fmt: skip
# what OP may be, in an order that _wait_reading uses
(
    ROWS,  # some rows of a matrix
    GATED,  # the same rows of two matrices, the first the gate of the second
    INPUTS,  # some inputs of a matrix that is stored by inputs
    SUM,  # the sum over all inputs
    PLACE,  # a key/value head's new key and value into the cache
    ATTEND,  # the query heads that share a key/value head, over a part of its slots
    MERGE,  # their outputs, of all parts
    ADD_NORMED,  # the norm of what is added
) = range(8)
# what MODE may be: how ROWS and SUM end (or, for GATED, which activation)
STORE, ADD, GELU, SILU, CAP = range(5)
# What all pieces share: int64 [TABLE], addresses and numbers.
(
    PLAN, SCRATCH, SCRATCH_BYTES, WEIGHT_BYTES, CACHE_BYTES, IS_LAYER_NORM, HIDDEN, N_HEADS,
    N_KV_HEADS, HEAD_DIM, N_SINK, LAYERS, NUMBERS, LENGTH, LAG, QKV, MAX_ROWS, BATCH, LEFT_PAD, PARTS, PART_SLOTS,
    PARTIAL, TABLE,
) = range(4, 27)  # fmt: skip
# One layer: int64 [LAYER_ROW]. `ANGLES`: float32 [batch, 2, head_dim / 2], cosines and sines; `LAG_ANGLES`: of one.
KEYS, VALUES, MADE, SLOTS, LOCAL, ROTARY, ANGLES, LAG_ANGLES, QUERY_NORM, KEY_NORM, SCALE, LAYER_ROW = range(12)
# float32 [2]: the norms' epsilon and the bound of the logits
EPS, SOFTCAP = range(2)
# what a waiting thread asks for in advance: a part of the second cache of a core
EARLY_BYTES = 128 * 1024

_F = np.float32
_ZERO, _ONE = _F(0), _F(1)
_HIDDEN = _F(-np.inf)
_WORD = np.int64(0)


@compiled
def _wait_reading(counter: int, wanted: int, piece: Any, size: int) -> None:
    """Wait, and ask for the matrix that is needed then, so that memory does not wait as well."""
    if piece[OP] <= INPUTS:
        row = (piece[STRIDE] if piece[OP] == INPUTS else piece[WIDTH]) * size
        line = piece[MATRIX] + piece[FIRST] * row
        end = line + min(EARLY_BYTES, (piece[LAST] - piece[FIRST]) * row)
        while line < end and read(counter) < wanted:
            for ahead in range(line, min(line + 512, end), 64):
                prefetch(ahead)
            line += 512
    wait(counter, wanted)


@compiled
def _finish(piece: Any, table: Any, sequence: int, out: Any) -> None:
    """What follows a product: the bias, then the activation, the sum with the residual stream, or the bound."""
    first, n_rows, mode = piece[FIRST], piece[LAST] - piece[FIRST], piece[MODE]
    target = at(piece[TARGET] + sequence * piece[TARGET_STRIDE] + 4 * first, _ZERO)
    if piece[BIAS]:
        bias = at(piece[BIAS] + 4 * first, _ZERO)
        for r in range(n_rows):
            out[r] += bias[r]
    if mode == STORE:
        for r in range(n_rows):
            target[r] = out[r]
    elif mode == ADD:
        for r in range(n_rows):
            target[r] += out[r]
    elif mode == GELU:
        for r in range(n_rows):
            target[r] = gelu(out[r])
    elif mode == CAP:
        cap = at(table[NUMBERS], _ZERO)[SOFTCAP]
        for r in range(n_rows):
            target[r] = tanh(out[r] / cap) * cap


@compiled
def _gated(piece: Any, table: Any, vectors: int, vector_stride: int, outs: int, zero: Any) -> None:
    """The same rows of gate and up; activation(gate) · up."""
    first, width, size, batch = piece[FIRST], piece[WIDTH], table[WEIGHT_BYTES], table[BATCH]
    n_rows, offset = piece[LAST] - first, first * width * size
    targets, target_stride, out_stride = piece[TARGET] + 4 * first, piece[TARGET_STRIDE], 4 * table[MAX_ROWS]
    dots_of_all(
        piece[MATRIX] + offset, size, n_rows, width, batch, vectors, vector_stride, targets, target_stride, zero
    )
    dots_of_all(piece[SECOND] + offset, size, n_rows, width, batch, vectors, vector_stride, outs, out_stride, zero)
    for sequence in range(batch):
        target, out = at(targets + sequence * target_stride, _ZERO), at(outs + sequence * out_stride, _ZERO)
        if piece[BIAS]:
            # the gate's, and after all of them the up's
            gate_bias = at(piece[BIAS] + 4 * first, _ZERO)
            up_bias = at(piece[BIAS] + 4 * (piece[STRIDE] + first), _ZERO)
            for r in range(n_rows):
                target[r] += gate_bias[r]
                out[r] += up_bias[r]
        if piece[MODE] == SILU:
            for r in range(n_rows):
                target[r] = silu(target[r]) * out[r]
        else:
            for r in range(n_rows):
                target[r] = gelu(target[r]) * out[r]


@compiled
def _slot(length: int, n_sink: int, slots: int) -> int:
    """Where the cache keeps the token of this index (kvprobe.caches.ring: sinks, then a ring)."""
    return length if length < n_sink else n_sink + (length - n_sink) % (slots - n_sink)


@compiled
def _place(piece: Any, table: Any, head: Any, zero: Any) -> None:
    """One head's new key, normed and turned, and its value into their slot; the sinks turned to where they are seen.

    The queries that read it are normed, turned and scaled too, for the pieces that follow.
    """
    layer = at(table[LAYERS] + 8 * LAYER_ROW * piece[LAYER], _WORD)
    head_dim, size, n_sink, length = table[HEAD_DIM], table[CACHE_BYTES], table[N_SINK], table[LENGTH]
    eps = at(table[NUMBERS], _ZERO)[EPS]
    kv_head, slots = piece[FIRST], layer[SLOTS]
    qkv = table[QKV] + piece[SEQUENCE] * piece[SOURCE_STRIDE]
    key = at(qkv + 4 * head_dim * (table[N_HEADS] + kv_head), _ZERO)
    value = at(qkv + 4 * head_dim * (table[N_HEADS] + table[N_KV_HEADS] + kv_head), _ZERO)
    # the head's place in buffers of [batch, n_kv_heads, ...]
    place, angles = piece[SEQUENCE] * table[N_KV_HEADS] + kv_head, layer[ANGLES] + 4 * head_dim * piece[SEQUENCE]
    if layer[KEY_NORM]:
        norm_of(key, head_dim, layer[KEY_NORM], table[IS_LAYER_NORM], eps, key)
    if layer[ROTARY]:
        turn(key, head_dim, layer[ROTARY], angles)
    group = table[N_HEADS] // table[N_KV_HEADS]
    scale = at(table[LAYERS] + 8 * (LAYER_ROW * piece[LAYER] + SCALE), _ZERO)[0]
    for member in range(group):
        query = at(qkv + 4 * head_dim * (kv_head * group + member), _ZERO)
        if layer[QUERY_NORM]:
            norm_of(query, head_dim, layer[QUERY_NORM], table[IS_LAYER_NORM], eps, query)
        if layer[ROTARY]:
            turn(query, head_dim, layer[ROTARY], angles)
        for d in range(head_dim):
            query[d] *= scale
    slot = _slot(length, n_sink, slots)
    offset = (place * slots + slot) * head_dim * size
    keys, values = at(layer[KEYS] + offset, zero), at(layer[VALUES] + offset, zero)
    for d in range(head_dim):
        keys[d], values[d] = narrow(key[d], zero), narrow(value[d], zero)
    if layer[MADE]:
        if length < n_sink:
            made = at(layer[MADE] + (place * n_sink + length) * head_dim * size, zero)
            for d in range(head_dim):
                made[d] = keys[d]
        if table[LAG]:
            for sink in range(n_sink):
                made = at(layer[MADE] + (place * n_sink + sink) * head_dim * size, zero)
                seen = at(layer[KEYS] + (place * slots + sink) * head_dim * size, zero)
                for d in range(head_dim):
                    head[d] = wide(made[d])
                turn(head, head_dim, layer[ROTARY], layer[LAG_ANGLES])
                for d in range(head_dim):
                    seen[d] = narrow(head[d], zero)


@compiled
def _attend(piece: Any, table: Any, scores: int, zero: Any) -> None:
    """The query heads of one key/value head over a part of its slots: keys, then values, each read once.

    Left for :func:`_merge`, of each head: the values mixed by exp(score - highest), the highest, and the sum of these
    weights (as in Dao et al., 2023, "Flash-Decoding for long-context inference").
    """
    layer = at(table[LAYERS] + 8 * LAYER_ROW * piece[LAYER], _WORD)
    head_dim, size, n_sink, length = table[HEAD_DIM], table[CACHE_BYTES], table[N_SINK], table[LENGTH]
    slots, n_local, kv_head, parts = layer[SLOTS], layer[LOCAL], piece[FIRST], table[PARTS]
    used, first = min(length + 1, slots), 0
    if n_local > 0:
        # a ring no longer than the local window holds nothing too old; then only sinks can be
        first = max(0, min(length + 1 - n_local, n_sink if slots - n_sink <= n_local else length))
    # left padding is never seen: the first slots, as long as the cache holds every token
    pad = at(table[LEFT_PAD], _WORD)[piece[SEQUENCE]]
    if length < slots:
        first = max(first, pad)
    start = first + (used - first) * piece[PART] // parts
    count = first + (used - first) * (piece[PART] + 1) // parts - start
    offset = ((piece[SEQUENCE] * table[N_KV_HEADS] + kv_head) * slots + start) * head_dim * size
    group, vector_stride = table[N_HEADS] // table[N_KV_HEADS], 4 * table[PART_SLOTS]
    queries = table[QKV] + piece[SEQUENCE] * piece[SOURCE_STRIDE] + 4 * head_dim * kv_head * group
    dots_of_all(layer[KEYS] + offset, size, count, head_dim, group, queries, 4 * head_dim, scores, vector_stride, zero)
    if length >= slots:
        # later the padding is somewhere in the ring, until it is overwritten
        for index in range(length + 1 - slots, pad):
            if start <= index % slots < start + count:
                for member in range(group):
                    at(scores + member * vector_stride, _ZERO)[index % slots - start] = _HIDDEN
    partial, next_head = _partial(table, piece[SEQUENCE], kv_head * group, piece[PART]), 4 * (head_dim + 2) * parts
    for member in range(group):
        weights = at(scores + member * vector_stride, _ZERO)
        left = at(partial + member * next_head + 4 * head_dim, _ZERO)
        highest, total = highest_of(weights, count) if count else _HIDDEN, _ZERO
        for k in range(count):
            # if all is hidden there is no highest
            weights[k] = exp(weights[k] - highest) if highest != _HIDDEN else _ZERO
            total += weights[k]
        left[0], left[1] = highest, total
    mix(layer[VALUES] + offset, size, count, head_dim, head_dim, group, scores, vector_stride, partial, next_head, zero)


@compiled
def _partial(table: Any, sequence: int, head: int, part: int) -> int:
    """Where a head's part is kept: float32 [batch, n_heads, parts, head_dim + 2]."""
    place = (sequence * table[N_HEADS] + head) * table[PARTS] + part
    return table[PARTIAL] + 4 * (table[HEAD_DIM] + 2) * place


@compiled
def _merge(piece: Any, table: Any) -> None:
    """The attention of the query heads of one key/value head, from all parts of the softmax."""
    head_dim, parts, group = table[HEAD_DIM], table[PARTS], table[N_HEADS] // table[N_KV_HEADS]
    for head in range(piece[FIRST] * group, (piece[FIRST] + 1) * group):
        output = at(piece[TARGET] + piece[SEQUENCE] * piece[TARGET_STRIDE] + 4 * head_dim * head, _ZERO)
        highest, total = _HIDDEN, _ZERO
        for part in range(parts):
            peak = at(_partial(table, piece[SEQUENCE], head, part), _ZERO)[head_dim]
            highest = peak if peak > highest else highest
        for d in range(head_dim):
            output[d] = _ZERO
        for part in range(parts):
            left = at(_partial(table, piece[SEQUENCE], head, part), _ZERO)
            weight = exp(left[head_dim] - highest)
            total += weight * left[head_dim + 1]
            for d in range(head_dim):
                output[d] += weight * left[d]
        for d in range(head_dim):
            output[d] /= total


@compiled
def _rows(piece: Any, table: Any, vectors: int, vector_stride: int, outs: int, zero: Any) -> None:
    first, width, size = piece[FIRST], piece[WIDTH], table[WEIGHT_BYTES]
    n_rows, batch, out_stride = piece[LAST] - first, table[BATCH], 4 * table[MAX_ROWS]
    dots_of_all(
        piece[MATRIX] + first * width * size, size, n_rows, width, batch, vectors, vector_stride, outs, out_stride, zero
    )
    for sequence in range(batch):
        _finish(piece, table, sequence, at(outs + sequence * out_stride, _ZERO))


@compiled
def _inputs(piece: Any, table: Any, vectors: int, vector_stride: int, zero: Any) -> None:
    """What some inputs add to all outputs, of a matrix stored ``[in, out]`` (GPT-2's): read from front to back.

    (GPT-2 124M's shapes on a Zen 3, two threads: 24 to 28 GB/s so, 16 to 21 with some columns for each thread.)
    """
    first, stride, size, width = piece[FIRST], piece[STRIDE], table[WEIGHT_BYTES], piece[WIDTH]
    matrix, n_rows, target = piece[MATRIX] + first * stride * size, piece[LAST] - first, piece[TARGET]
    vectors += 4 * first
    mix(matrix, size, n_rows, stride, width, table[BATCH], vectors, vector_stride, target, piece[TARGET_STRIDE], zero)


@compiled
def _sum(piece: Any, table: Any, outs: int) -> None:
    """Some outputs, from what the parts of the inputs added: float32 ``[parts, batch, width]``."""
    first, width, n_parts, batch = piece[FIRST], piece[WIDTH], piece[PART], table[BATCH]
    n_rows, out = piece[LAST] - first, at(outs, _ZERO)
    for sequence in range(batch):
        for r in range(n_rows):
            out[r] = _ZERO
        for part in range(n_parts):
            added = at(piece[SOURCE] + 4 * ((part * batch + sequence) * width + first), _ZERO)
            for r in range(n_rows):
                out[r] += added[r]
        _finish(piece, table, sequence, out)


@compiled
def work(shared: Any, thread: int, weight_zero: Any, cache_zero: Any) -> None:
    """Take pieces of the open step until none is left; thread 0 returns when all are done.

    ``shared`` is the table, int64 [TABLE]; ``weight_zero`` and ``cache_zero`` are a zero of the type in which weights
    and cache are stored (float32, or uint16 for bfloat16).
    """
    table = at(shared.ctypes.data, _WORD)
    limit = read(table[LIMIT])
    start = limit - table[TOTAL]
    hidden, batch = table[HIDDEN], table[BATCH]
    normed = table[SCRATCH] + thread * table[SCRATCH_BYTES]
    outs = normed + 4 * batch * hidden
    spare = outs + 4 * batch * table[MAX_ROWS]
    eps, normed_for = at(table[NUMBERS], _ZERO)[EPS], -1
    while True:
        ticket = take(table[TAKEN], limit)
        if ticket < 0:
            break
        piece = at(table[PLAN] + 8 * ROW * (ticket - start), _WORD)
        _wait_reading(table[DONE], start + piece[NEED], piece, table[WEIGHT_BYTES])
        op, vectors, vector_stride = piece[OP], piece[SOURCE], piece[SOURCE_STRIDE]
        if piece[NORM]:
            # once per thread: faster than waiting for another to do it
            if normed_for != piece[NEED]:
                for sequence in range(batch):
                    source = at(vectors + sequence * vector_stride, _ZERO)
                    target = at(normed + 4 * sequence * hidden, _ZERO)
                    norm_of(source, hidden, piece[NORM], table[IS_LAYER_NORM], eps, target)
                normed_for = piece[NEED]
            vectors, vector_stride = normed, 4 * hidden
        if op == ROWS:
            _rows(piece, table, vectors, vector_stride, outs, weight_zero)
        elif op == GATED:
            _gated(piece, table, vectors, vector_stride, outs, weight_zero)
        elif op == INPUTS:
            _inputs(piece, table, vectors, vector_stride, weight_zero)
        elif op == SUM:
            _sum(piece, table, outs)
        elif op == PLACE:
            _place(piece, table, at(spare, _ZERO), cache_zero)
        elif op == ATTEND:
            _attend(piece, table, spare, cache_zero)
        elif op == MERGE:
            _merge(piece, table)
        else:
            for sequence in range(batch):
                vector, target = (
                    at(vectors + sequence * vector_stride, _ZERO),
                    at(piece[TARGET] + sequence * piece[TARGET_STRIDE], _ZERO),
                )
                for k in range(hidden):
                    target[k] += vector[k]
        add(table[DONE], 1)
    if thread == 0:
        wait(table[DONE], limit)
