"""How do the kernels multiply? A matrix by one vector or some in decode, by blocks of tokens in prefill.

Memory is passed as addresses, matrices as they are stored: float32, or bfloat16 as its 16 bits, with float32 sums.
"""

from typing import Any

import numpy as np

from kvprobe.native.intrinsics import at, compiled, wide
from kvprobe.native.tiles import BLOCK, NARROW, NARROW_ROWS, TILE_ROWS, narrow_tile, tile

# Rows of either half of a piece that all sequences are multiplied with before the next: they stay in the first cache.
ROWS_AT_ONCE = 4

_ZERO = np.float32(0)
_LINE = 4 * BLOCK


@compiled
def dots(matrix: int, size: int, n_rows: int, width: int, vector: Any, out: Any, zero: Any) -> None:
    """``out[r] = sum over k of matrix[r, k] * vector[k]``.

    Rows by fours, one from each quarter: four streams that the processor itself reads ahead. (Measured on a Zen 3, two
    threads, medians of one run: float32 30 GB/s so, 26 a row at a time, 24 by four neighbours; bfloat16 22 and 11.)
    """
    quarter, stride = n_rows // 4, width * size
    for r in range(quarter):
        w0 = at(matrix + r * stride, zero)
        w1 = at(matrix + (quarter + r) * stride, zero)
        w2 = at(matrix + (2 * quarter + r) * stride, zero)
        w3 = at(matrix + (3 * quarter + r) * stride, zero)
        a0, a1, a2, a3 = _ZERO, _ZERO, _ZERO, _ZERO
        for k in range(width):
            x = vector[k]
            a0 += wide(w0[k]) * x
            a1 += wide(w1[k]) * x
            a2 += wide(w2[k]) * x
            a3 += wide(w3[k]) * x
        out[r], out[quarter + r], out[2 * quarter + r], out[3 * quarter + r] = a0, a1, a2, a3
    for r in range(4 * quarter, n_rows):
        w0, a0 = at(matrix + r * stride, zero), _ZERO
        for k in range(width):
            a0 += wide(w0[k]) * vector[k]
        out[r] = a0


@compiled
def _dots_of_four(
    upper: int, lower: int, size: int, n_rows: int, width: int, n_vectors: int, vectors: int, vector_stride: int,
    outs: int, below: int, out_stride: int, zero: Any,
) -> None:  # fmt: skip
    """As :func:`dots` of rows at ``upper`` and at ``lower``, whose sums go ``below`` rows further, for four vectors.

    Two rows by four vectors is what the registers hold; of fewer vectors the last is taken again, as fast as four.
    """
    second, third, fourth = min(1, n_vectors - 1), min(2, n_vectors - 1), min(3, n_vectors - 1)
    x0, x1 = at(vectors, _ZERO), at(vectors + second * vector_stride, _ZERO)
    x2, x3 = at(vectors + third * vector_stride, _ZERO), at(vectors + fourth * vector_stride, _ZERO)
    out0, out1 = at(outs, _ZERO), at(outs + second * out_stride, _ZERO)
    out2, out3 = at(outs + third * out_stride, _ZERO), at(outs + fourth * out_stride, _ZERO)
    for r in range(n_rows):
        v, w = at(upper + r * width * size, zero), at(lower + r * width * size, zero)
        v0, v1, v2, v3 = _ZERO, _ZERO, _ZERO, _ZERO
        w0, w1, w2, w3 = _ZERO, _ZERO, _ZERO, _ZERO
        for k in range(width):
            a, b = wide(v[k]), wide(w[k])
            v0 += a * x0[k]
            v1 += a * x1[k]
            v2 += a * x2[k]
            v3 += a * x3[k]
            w0 += b * x0[k]
            w1 += b * x1[k]
            w2 += b * x2[k]
            w3 += b * x3[k]
        out0[r], out1[r], out2[r], out3[r] = v0, v1, v2, v3
        out0[below + r], out1[below + r], out2[below + r], out3[below + r] = w0, w1, w2, w3


@compiled
def dots_of_all(
    matrix: int, size: int, n_rows: int, width: int, batch: int, vectors: int, vector_stride: int, outs: int,
    out_stride: int, zero: Any,
) -> None:  # fmt: skip
    """:func:`dots` of ``batch`` vectors, each row read from memory once: some of either half, for all vectors."""
    if batch == 1:
        dots(matrix, size, n_rows, width, at(vectors, _ZERO), at(outs, _ZERO), zero)
        return
    half, line = n_rows // 2, width * size
    for first in range(0, half, ROWS_AT_ONCE):
        count = min(ROWS_AT_ONCE, half - first)
        upper, lower = matrix + first * line, matrix + (half + first) * line
        for done in range(0, batch, 4):
            four, source, target = (
                min(4, batch - done),
                vectors + done * vector_stride,
                outs + done * out_stride + 4 * first,
            )
            _dots_of_four(upper, lower, size, count, width, four, source, vector_stride, target, half, out_stride, zero)
    if 2 * half < n_rows:
        for index in range(batch):
            vector, target = at(vectors + index * vector_stride, _ZERO), at(outs + index * out_stride + 8 * half, _ZERO)
            dots(matrix + 2 * half * line, size, 1, width, vector, target, zero)


@compiled
def mix(
    matrix: int, size: int, n_rows: int, stride: int, width: int, batch: int, vectors: int, vector_stride: int,
    outs: int, out_stride: int, zero: Any,
) -> None:  # fmt: skip
    """``out[c] = sum over r of vector[r] * matrix[r, c]`` of the first ``width`` columns, rows ``stride`` apart.

    Of ``batch`` vectors, eight rows at a time, so that each row is read from memory once; one from each eighth, as in
    :func:`dots`. (GPT-2 124M, medians, alternating: 26.0 ms a step so, 27.6 by four neighbours, 28.4 by four quarters.)
    """
    for index in range(batch):
        out = at(outs + index * out_stride, _ZERO)
        for c in range(width):
            out[c] = _ZERO
    eighth, line = n_rows // 8, stride * size
    for r in range(eighth):
        w0, w1 = at(matrix + r * line, zero), at(matrix + (eighth + r) * line, zero)
        w2, w3 = at(matrix + (2 * eighth + r) * line, zero), at(matrix + (3 * eighth + r) * line, zero)
        w4, w5 = at(matrix + (4 * eighth + r) * line, zero), at(matrix + (5 * eighth + r) * line, zero)
        w6, w7 = at(matrix + (6 * eighth + r) * line, zero), at(matrix + (7 * eighth + r) * line, zero)
        for index in range(batch):
            vector, out = at(vectors + index * vector_stride + 4 * r, _ZERO), at(outs + index * out_stride, _ZERO)
            x0, x1, x2, x3 = vector[0], vector[eighth], vector[2 * eighth], vector[3 * eighth]
            x4, x5, x6, x7 = vector[4 * eighth], vector[5 * eighth], vector[6 * eighth], vector[7 * eighth]
            for c in range(width):
                upper = x0 * wide(w0[c]) + x1 * wide(w1[c]) + x2 * wide(w2[c]) + x3 * wide(w3[c])
                out[c] += upper + x4 * wide(w4[c]) + x5 * wide(w5[c]) + x6 * wide(w6[c]) + x7 * wide(w7[c])
    for r in range(8 * eighth, n_rows):
        w0 = at(matrix + r * line, zero)
        for index in range(batch):
            x0, out = at(vectors + index * vector_stride, _ZERO)[r], at(outs + index * out_stride, _ZERO)
            for c in range(width):
                out[c] += x0 * wide(w0[c])


@compiled
def product_of(
    matrix: int,
    row_stride: int,
    tile_stride: int,
    stride: int,
    n_rows: int,
    block: int,
    width: int,
    n_tokens: int,
    out: int,
) -> None:
    """``out[r] = sum over k of matrix[r, k] * block[k]`` for ``n_tokens`` tokens of a block.

    Rows are ``row_stride`` bytes apart within a tile of `TILE_ROWS`, tiles ``tile_stride``. Of `out` a whole tile is
    written, and of its tokens perhaps all.
    """
    if n_tokens <= NARROW and tile_stride == TILE_ROWS * row_stride:
        for first in range(0, n_rows, NARROW_ROWS):
            narrow_tile(
                matrix + first * row_stride, row_stride, n_rows - first, stride, block, width, out + first * _LINE
            )
        return
    for first in range(0, n_rows, TILE_ROWS):
        base = matrix + first // TILE_ROWS * tile_stride
        tile(base, row_stride, n_rows - first, stride, block, width, out + first * _LINE)


@compiled
def multiply(matrix: int, n_rows: int, width: int, blocks: int, n_blocks: int, out: int) -> None:
    """Float32 ``matrix`` ``[n_rows, width]`` times ``blocks`` ``[n_blocks, width, BLOCK]``, as prompts are multiplied.

    Into ``out`` ``[n_blocks, n_rows, BLOCK]``; of rows in whole tiles.
    """
    for first in range(0, n_rows, 64):
        for block in range(n_blocks):
            rows, target = min(64, n_rows - first), out + (block * n_rows + first) * _LINE
            source, line = blocks + block * width * _LINE, 4 * width
            product_of(matrix + first * line, line, TILE_ROWS * line, 4, rows, source, width, BLOCK, target)


@compiled
def packed_rows(
    matrix: int, row_stride: int, stride: int, size: int, n_rows: int, width: int, into: int, zero: Any
) -> None:  # fmt: skip
    """Rows as float32 ``[tiles, width, TILE_ROWS]``: tiles that are read from front to back."""
    for first in range(0, n_rows, TILE_ROWS):
        count, target = min(TILE_ROWS, n_rows - first), at(into + 4 * first * width, _ZERO)
        if stride == size:
            for row in range(count):
                source = at(matrix + (first + row) * row_stride, zero)
                for k in range(width):
                    target[TILE_ROWS * k + row] = wide(source[k])
        else:
            for k in range(width):
                source = at(matrix + first * row_stride + k * stride, zero)
                for row in range(count):
                    target[TILE_ROWS * k + row] = wide(source[row])
