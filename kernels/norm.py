"""RMSNorm and LayerNorm; statistics in f64, so that the mean's error is below f32's own rounding."""

import numpy as np

from glm_gpu.kernels import cpu
from glm_gpu.kernels.lanes import lane_sum


def rms_norm(x, weight, eps):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis.

    Args:
        x: [..., D] f32.
        weight: [D] f32.
        eps: added to the mean of squares.

    Returns:
        [..., D] f32, a new array.
    """
    if cpu.active:
        return _on_cpu(x, weight, None, eps)
    wide = x.astype(np.float64)
    mean = lane_sum(wide * wide) / x.shape[-1]
    r = 1.0 / np.sqrt(mean + eps)
    return (wide * r[..., None]).astype(np.float32) * weight


def layer_norm(x, weight, bias, eps):
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last axis.

    Args:
        x: [..., D] f32.
        weight, bias: [D] f32.
        eps: added to the variance.

    Returns:
        [..., D] f32, a new array.
    """
    if cpu.active:
        return _on_cpu(x, weight, bias, eps)
    wide = x.astype(np.float64)
    centred = wide - (lane_sum(wide) / x.shape[-1])[..., None]
    r = 1.0 / np.sqrt(lane_sum(centred * centred) / x.shape[-1] + eps)
    return (centred * r[..., None]).astype(np.float32) * weight + bias


def _on_cpu(x, weight, bias, eps):
    rows = np.ascontiguousarray(x)
    if x.ndim != 2:
        rows = rows.reshape(-1, x.shape[-1])
    out = np.empty(rows.shape, np.float32)
    cpu.active.norm(rows, weight, bias, eps, out)
    return out if x.ndim == 2 else out.reshape(x.shape)
