"""What does a decode step do to one token's vector? Norms, rotations, the highest of its numbers."""

from typing import Any

import numpy as np

from kvprobe.native.intrinsics import at, compiled, compiled_for_numbers

# how a layer turns its heads: first half with second, or neighbours
HALVES, INTERLEAVED = 1, 2

_F = np.float32
_ZERO, _ONE = _F(0), _F(1)


@compiled_for_numbers
def highest_of(numbers: Any, count: int) -> Any:
    """The highest of ``count`` numbers, at least one."""
    highest = numbers[0]
    for k in range(count):
        highest = numbers[k] if numbers[k] > highest else highest
    return highest


@compiled
def norm_of(source: Any, width: int, norm: int, is_layer_norm: int, eps: Any, out: Any) -> None:
    """RMSNorm, or LayerNorm; at ``norm`` the weights and, for LayerNorm, after them the biases."""
    weight = at(norm, _ZERO)
    mean, square = _ZERO, _ZERO
    if is_layer_norm:
        for k in range(width):
            mean += source[k]
        mean /= _F(width)
    for k in range(width):
        square += (source[k] - mean) * (source[k] - mean)
    factor = _ONE / np.sqrt(square / _F(width) + eps)
    if is_layer_norm:
        bias = at(norm + 4 * width, _ZERO)
        for k in range(width):
            out[k] = (source[k] - mean) * factor * weight[k] + bias[k]
    else:
        for k in range(width):
            out[k] = source[k] * factor * weight[k]


@compiled
def turn(head: Any, head_dim: int, rotary: int, angles: int) -> None:
    """A head turned in place; at ``angles`` float32 ``[2, head_dim / 2]``, cosines and sines."""
    cos, sin = at(angles, _ZERO), at(angles + 2 * head_dim, _ZERO)
    for j in range(head_dim // 2):
        first, second = (2 * j, 2 * j + 1) if rotary == INTERLEAVED else (j, j + head_dim // 2)
        x, y = head[first], head[second]
        head[first], head[second] = x * cos[j] - y * sin[j], y * cos[j] + x * sin[j]
