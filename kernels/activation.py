"""Exponential, sigmoid, and SiLU with the same bits in NumPy and on every instruction set."""

import numpy as np

from glm_gpu.kernels import cpu

# Below LOWEST the result would be subnormal and is 0; above HIGHEST 2^n would overflow.
LOWEST = np.float32(-87.33654)
HIGHEST = np.float32(88.37626)
_LOG2_E = np.float32(1.44269504)
# ln 2 in two parts: n * _LN2_HIGH is exact for |n| <= 2^15.
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_POLYNOMIAL = tuple(
    np.float32(c)
    for c in (
        1.9875691500e-4,
        1.3981999507e-3,
        8.3334519073e-3,
        4.1665795894e-2,
        1.6666665459e-1,
        5.0000001201e-1,
    )
)


def exp(x):
    """e to the power of x, relative error at most 1e-7; 0 below -87.33654, e^88.37626 above 88.37626.

    NumPy's own exp may differ between the vectorised body and the tail of an array, so a value's bits would
    depend on where it stands.

    Args:
        x: f32, any shape.

    Returns:
        f32, the same shape; NaN stays NaN.

    Source: Cephes expf.
    """
    x = np.asarray(x, dtype=np.float32)
    bounded = np.minimum(np.maximum(x, LOWEST), HIGHEST)
    n = np.rint(bounded * _LOG2_E)
    r = bounded - n * _LN2_HIGH
    r = r - n * _LN2_LOW
    p = np.full_like(r, _POLYNOMIAL[0])
    for coefficient in _POLYNOMIAL[1:]:
        p = p * r + coefficient
    y = p * (r * r) + r
    y = y + np.float32(1)
    with np.errstate(invalid="ignore"):  # NaN has no exponent; y is NaN already
        exponent = n.astype(np.int32)
    power = ((exponent + np.int32(127)) << np.int32(23)).view(np.float32)
    return np.where(x < LOWEST, np.float32(0), y * power)


def sigmoid(x):
    """1 / (1 + e^-x), f32 in and out."""
    one = np.float32(1)
    return one / (one + exp(-x))


def silu_mul(gate, up):
    """SiLU(gate) * up, the middle of every gated MLP: (gate / (1 + e^-gate)) * up.

    Args:
        gate, up: f32, the same shape.

    Returns:
        f32, a new array.
    """
    if cpu.active:
        out = np.empty(gate.shape, dtype=np.float32)
        cpu.active.silu_mul(
            np.ascontiguousarray(gate).reshape(-1), np.ascontiguousarray(up).reshape(-1), out.reshape(-1)
        )
        return out
    return gate / (np.float32(1) + exp(-gate)) * up
