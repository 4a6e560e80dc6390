"""Products with weights in their stored form: the one operation behind every projection.

Numeric contract, the same bits in NumPy and on every instruction set, for any number of rows and threads. The columns
are cut into groups of 64, the last one filled up with zeros; groups are added in order, every operation rounded to f32:

    packed weights, activations "int16" or "int8" (limit 32639 = 127 * 257, so that both bytes are signed, or 127)
        per 64 activations  amax = max |x|;  sx = amax / limit;  xi = rint(x * (limit / amax))
        p = sum of xi * wi, an exact integer, converted to f32 once
        group formats:  acc = acc + p * (s * sx)        row formats:  acc = acc + p * sx;  y = acc * s
    activations "f32", and plain weights always
        p = glm_gpu.kernels.lanes.dot of the group with the integers (or plain numbers)
        group formats:  acc = acc + p * s               row formats:  acc = acc + p;  y = acc * s
        plain numbers:  y = acc = acc + p
"""

from collections.abc import Sequence

import numpy as np

from glm_gpu.kernels import cpu
from glm_gpu.kernels.lanes import GROUP, dot_rows, widen
from glm_gpu.quant import QuantizedMatrix, unpack

_LIMITS = {"int16": np.float32(32639), "int8": np.float32(127)}
ACTIVATIONS = (*_LIMITS, "f32")  # the index is the number that the C functions take

# Below this the reciprocal of a group's amax comes near overflow; such a group counts as zeros.
SMALLEST_AMAX = np.float32(1e-30)


def matmul(x: np.ndarray, w: QuantizedMatrix, activations: str = "int16") -> np.ndarray:
    """x @ w.T by the contract above; row t depends on nothing but row t of x.

    Args:
        x: [T, I] f32.
        w: [O, I].
        activations: what packed weights are multiplied with: "int16" (relative error 2e-5), "int8" (6e-3) or "f32".

    Returns:
        [T, O] f32. NaN or infinity in x makes every output of that row NaN or infinite.
    """
    assert x.dtype == np.float32 and x.ndim == 2 and x.shape[1] == w.shape[1], (x.dtype, x.shape, w.shape)
    assert activations in ACTIVATIONS, activations
    if cpu.active:
        out = np.empty((x.shape[0], w.shape[0]), np.float32)
        cpu.active.matmul(np.ascontiguousarray(x), *w.arguments, ACTIVATIONS.index(activations), out)
        return out
    if not w.format.is_packed:
        return dot_rows(x, widen(w.data))
    if activations == "f32":
        integers = unpack(w).astype(np.float32)
        if w.format.group is None:
            return dot_rows(x, integers) * w.scales[:, 0].astype(np.float32)
        return dot_rows(x, integers, _scales_by_64(w))
    return _matmul_integer(x, w, activations)


def matmuls(x: np.ndarray, weights: Sequence[QuantizedMatrix], activations: str = "int16") -> list[np.ndarray]:
    """`matmul` of x with each of at most eight weights, in one call: [T, O] f32 each.

    Between two large products Python finds its own code and data evicted from the caches, so fewer calls are faster.
    """
    if not cpu.active:
        return [matmul(x, w, activations) for w in weights]
    assert x.dtype == np.float32 and all(x.shape[1] == w.shape[1] for w in weights), (x.dtype, x.shape)
    outs = [np.empty((x.shape[0], w.shape[0]), np.float32) for w in weights]
    matrices = tuple(w.arguments for w in weights)
    cpu.active.matmuls(np.ascontiguousarray(x), matrices, ACTIVATIONS.index(activations), tuple(outs))
    return outs


def quantize_activations(x: np.ndarray, activations: str) -> tuple[np.ndarray, np.ndarray]:
    """Activations as integers in groups of 64, each with its own scale.

    Args:
        x: [T, I] f32.
        activations: "int16" or "int8".

    Returns:
        integers: [T, ceil(I / 64), 64] of that type, zeros beyond I. All zeros in a group whose amax is below 1e-30,
            NaN, or infinite.
        scales: [T, ceil(I / 64)] f32, amax / limit; NaN or infinite like its amax, so that it shows in the product.
    """
    limit = _LIMITS[activations]
    num_rows, num_columns = x.shape
    groups = -(-num_columns // GROUP)
    padded = np.zeros((num_rows, groups * GROUP), np.float32)
    padded[:, :num_columns] = x
    padded = padded.reshape(num_rows, groups, GROUP)
    amax = np.abs(padded).max(axis=2)
    usable = (amax >= SMALLEST_AMAX) & (amax < np.inf)
    factor = np.where(usable, limit / np.where(usable, amax, limit), np.float32(0))
    with np.errstate(invalid="ignore"):  # NaN and infinite groups are zeroed right after
        integers = np.where(usable[..., None], np.rint(padded * factor[..., None]), np.float32(0))
    return integers.astype(activations), amax / limit


def _matmul_integer(x, w, activations):
    xi, sx = quantize_activations(x, activations)
    num_rows, groups, _ = xi.shape
    wi = np.zeros((w.shape[0], groups * GROUP))
    wi[:, : w.shape[1]] = unpack(w)
    wi = wi.reshape(-1, groups, GROUP)
    acc = np.zeros((num_rows, w.shape[0]), np.float32)
    scales = None if w.format.group is None else _scales_by_64(w)
    with np.errstate(invalid="ignore"):  # infinite activations: 0 * inf is NaN
        for g in range(groups):
            # |p| <= 64 * 32639 * 128 < 2^53: exact in f64 in any order
            p = (xi[:, g].astype(np.float64) @ wi[:, g].T).astype(np.float32)
            acc += p * sx[:, g, None] if scales is None else p * (scales[:, g] * sx[:, g, None])
    return acc if scales is not None else acc * w.scales[:, 0].astype(np.float32)


def _scales_by_64(w):
    """[O, ceil(I / 64)] f32: a scale of 128 columns stands twice."""
    scales = w.scales.astype(np.float32)
    return np.repeat(scales, w.format.group // GROUP, axis=1)[:, : -(-w.shape[1] // GROUP)]
