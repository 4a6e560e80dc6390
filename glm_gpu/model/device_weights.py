"""A model's weights in devices' memory: the same description as on the host, byte for byte, with addresses in it."""

import dataclasses
from typing import Any

import numpy as np

from glm_gpu.config import ModelConfig
from glm_gpu.device import Arena, aligned
from glm_gpu.errors import RequestError
from glm_gpu.kernels.gpu.arrays import DeviceMatrix, View
from glm_gpu.quant import QuantizedMatrix
from glm_gpu.tensors import expected_tensors

# Arrays of one layer, each of which begins at an aligned place of its arena.
_MAX_ARRAYS = 48


def to_device(arena: Arena, weights: Any) -> Any:
    """The same weights in an arena: arrays become `View`s, matrices `DeviceMatrix`es; waits until they are there.

    Args:
        weights: `LayerWeights`, or anything it is made of.
    """
    if isinstance(weights, QuantizedMatrix):
        name = "u8" if weights.format.is_packed else weights.format.name
        scales = None if weights.scales is None else _put(arena, weights.scales)
        return DeviceMatrix(weights.format, weights.shape, arena.put(weights.data, name), scales)
    if isinstance(weights, np.ndarray):
        return _put(arena, weights)
    if dataclasses.is_dataclass(weights):
        fields = {f.name: to_device(arena, getattr(weights, f.name)) for f in dataclasses.fields(weights)}
        return type(weights)(**fields)
    assert weights is None, type(weights)
    return None


def arena_bytes(num_bytes: int, num_layers: int) -> int:
    """What an arena for so many layers takes, given the bytes of their weights, the ends counted as a layer."""
    return num_bytes + num_layers * aligned(1) * _MAX_ARRAYS


def check_widths(config: ModelConfig) -> None:
    """Refuse what the kernels of devices cannot multiply.

    Raises:
        RequestError: a width is odd to the kernels' words.
    """
    for name, shape in expected_tensors(config).items():
        if len(shape) == 2 and shape[1] % 4:
            raise RequestError(f"{name} has {shape[1]} columns, a GPU needs a multiple of 4; use --device cpu")


def _put(arena: Arena, array: np.ndarray) -> View:
    return arena.put(array, "f16" if array.dtype == np.float16 else "f32")
