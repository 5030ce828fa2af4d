"""Which functions of a number do the kernels need that the compiler can compute eight at a time?"""

from typing import Any

import numpy as np

from kvprobe.native.intrinsics import compiled_in_order, power_of_two

_F = np.float32
_LOG2_E, _LN2_HIGH, _LN2_LOW = _F(1.4426950408889634), _F(0.693359375), _F(-2.12194440e-4)
_GELU_A, _GELU_B = _F(0.7978845608028654), _F(0.044715)
_HALF, _ONE, _TWO = _F(0.5), _F(1), _F(2)
_LOWEST, _HIGHEST = _F(-87.3), _F(88.0)


@compiled_in_order
def exp(x: Any) -> Any:
    """The exponential, to 1e-7 of itself (Cephes' polynomial); of what is below -87.3, that of -87.3."""
    x = _LOWEST if x < _LOWEST else x
    x = _HIGHEST if x > _HIGHEST else x
    power = np.floor(x * _LOG2_E + _HALF)
    rest = (x - power * _LN2_HIGH) - power * _LN2_LOW
    sum_ = _F(1.9875691500e-4)
    sum_ = sum_ * rest + _F(1.3981999507e-3)
    sum_ = sum_ * rest + _F(8.3334519073e-3)
    sum_ = sum_ * rest + _F(4.1665795894e-2)
    sum_ = sum_ * rest + _F(1.6666665459e-1)
    sum_ = sum_ * rest + _F(5.0000001201e-1)
    return ((sum_ * rest) * rest + rest + _ONE) * power_of_two(power)


@compiled_in_order
def tanh(x: Any) -> Any:
    """The hyperbolic tangent."""
    return _ONE - _TWO / (exp(_TWO * x) + _ONE)


@compiled_in_order
def gelu(x: Any) -> Any:
    """GELU in its tanh form."""
    return _HALF * x * (_ONE + tanh(_GELU_A * (x + _GELU_B * x * x * x)))


@compiled_in_order
def silu(x: Any) -> Any:
    """SiLU: x times its logistic function."""
    return x / (_ONE + exp(-x))
