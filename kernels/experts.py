"""Feed-forward networks: all chosen experts of a layer in one call, and the dense or shared one."""

from collections.abc import Sequence

import numpy as np

from glm_gpu.kernels import cpu
from glm_gpu.kernels.activation import silu_mul
from glm_gpu.kernels.matmul import ACTIVATIONS, matmul
from glm_gpu.quant import QuantizedMatrix
from glm_gpu.slab import SlabLayout


def mlp(
    x: np.ndarray, gate: QuantizedMatrix, up: QuantizedMatrix, down: QuantizedMatrix, activations: str = "int16"
) -> np.ndarray:
    """down(silu(gate x) * up x), each product by the contract of glm_gpu.kernels.matmul.

    Args:
        x: [T, D] f32.
        gate, up: [F, D].
        down: [D, F].
        activations: as in matmul, for both products.

    Returns:
        [T, D] f32.
    """
    if cpu.active and gate.format.bits == up.format.bits == down.format.bits:
        out = np.empty_like(x, order="C")
        matrices = *gate.arguments, *up.arguments, *down.arguments
        cpu.active.mlp(np.ascontiguousarray(x), *matrices, ACTIVATIONS.index(activations), out)
        return out
    hidden = silu_mul(matmul(x, gate, activations), matmul(x, up, activations))
    return matmul(hidden, down, activations)


def expert_ffn(
    x: np.ndarray,
    slabs: Sequence[np.ndarray],
    layout: SlabLayout,
    choice: np.ndarray,
    weights: np.ndarray,
    activations: str = "int16",
) -> np.ndarray:
    """Each token's chosen experts, weighted and added in the order of its choices: ((w0 * e0) + w1 * e1) + ...

    Args:
        x: [T, D] f32.
        slabs: U arrays of at least layout.nbytes uint8, the experts' bytes; never copied, never written.
        layout: where a slab's matrices lie.
        choice: [T, K] int32, indices into slabs; K at least 1.
        weights: [T, K] f32.
        activations: as in matmul.

    Returns:
        [T, D] f32.
    """
    num_rows, num_choices = choice.shape
    assert x.dtype == np.float32 and x.shape == (num_rows, layout.hidden), (x.dtype, x.shape, layout)
    assert weights.shape == choice.shape and num_choices >= 1, (weights.shape, choice.shape)
    if cpu.active:
        return _expert_ffn_c(x, slabs, layout, choice, weights, activations)
    results = np.empty((num_rows, num_choices, layout.hidden), np.float32)
    for index in np.unique(choice):
        tokens, places = np.nonzero(choice == index)
        results[tokens, places] = mlp(x[tokens], *layout.views(slabs[index]), activations)
    results *= weights[:, :, None]
    y = results[:, 0].copy()
    for place in range(1, num_choices):
        y += results[:, place]
    return y


def _expert_ffn_c(x, slabs, layout, choice, weights, activations):
    out = np.empty_like(x, order="C")
    cpu.active.expert_ffn(
        np.ascontiguousarray(x),
        slabs,
        layout.format.bits,
        layout.format.group or 0,
        int(layout.scale_dtype == np.float16),
        layout.width,
        tuple(begin for begin, _ in layout.parts.values()),
        np.ascontiguousarray(choice, np.int32),
        np.ascontiguousarray(weights),
        ACTIVATIONS.index(activations),
        out,
    )
    return out
