"""Arrays as device operations take them, in this process's memory, and how the simulator is asked to run them.

With TRITON_INTERPRET=1 the same tests run in Triton's own interpreter.
"""

import os
from dataclasses import dataclass

import numpy as np

from glm_gpu.kernels.gpu.arrays import DeviceMatrix, Launcher, View
from glm_gpu.kernels.simulator import Simulator
from glm_gpu.quant import Format, QuantizedMatrix, bf16_to_f32, f32_to_bf16, quantize

_NAMES = {"float32": "f32", "float16": "f16", "uint16": "bf16", "uint8": "u8", "int32": "i32", "int64": "i64"}
# Half a unit in the last place of each 16-bit type, relative.
HALF_ULP = {"bf16": 2.0**-8, "f16": 2.0**-11}


def checked_over(*memory: np.ndarray) -> Launcher:
    """A simulator that looks for everything it can find; addresses from tables may reach the given memory only."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        from triton_interpreter import TritonInterpreter

        return TritonInterpreter()
    return Simulator(lambda: [(array.ctypes.data, array.nbytes) for array in memory], is_checked=True)


def checked() -> Launcher:
    """The same for kernels that take no addresses from tables."""
    return checked_over()


@dataclass(frozen=True)
class HostView(View):
    """A view that keeps its array alive."""

    array: np.ndarray


def view(array: np.ndarray) -> HostView:
    """An array of this process; uint16 holds bf16."""
    assert array.flags.c_contiguous
    return HostView(array.ctypes.data, array.shape, _NAMES[array.dtype.name], array)


def matrix_view(matrix: QuantizedMatrix) -> DeviceMatrix:
    """The same bytes; the caller keeps the matrix alive."""
    scales = None if matrix.scales is None else view(matrix.scales)
    return DeviceMatrix(matrix.format, matrix.shape, view(matrix.data), scales)


def random_matrix(rng, num_rows: int, num_columns: int, format: str, scale_dtype=np.float32) -> QuantizedMatrix:
    weight = rng.standard_normal((num_rows, num_columns)).astype(np.float32)
    return quantize(weight, Format.parse(format), scale_dtype)


def narrow(x: np.ndarray, dtype: str) -> np.ndarray:
    """f32 rounded to a 16-bit type, as its bytes."""
    return f32_to_bf16(x) if dtype == "bf16" else x.astype(np.float16)


def wide(x: np.ndarray) -> np.ndarray:
    return bf16_to_f32(x) if x.dtype == np.uint16 else x.astype(np.float32)


def empty(shape, dtype: str) -> np.ndarray:
    """An output that shows what nobody wrote: NaN, or -7 for integers."""
    if dtype in ("i32", "i64"):
        return np.full(shape, -7, {"i32": np.int32, "i64": np.int64}[dtype])
    return np.full(shape, np.nan, np.float32) if dtype == "f32" else narrow(np.full(shape, np.nan, np.float32), dtype)


def split(x: np.ndarray) -> np.ndarray:
    """Quarter-split along the last axis."""
    return np.ascontiguousarray(x.reshape(*x.shape[:-1], -1, 4).swapaxes(-1, -2).reshape(x.shape))


def unsplit(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x.reshape(*x.shape[:-1], 4, -1).swapaxes(-1, -2).reshape(x.shape))


@dataclass
class Caches:
    """Rows of cached positions, one array a sequence, and the addresses by which rows of a pass find them."""

    arrays: list[np.ndarray]
    addresses: np.ndarray

    @staticmethod
    def of(rng, lengths, width: int, dtype: str, offset: int = 0) -> "Caches":
        """Random rows behind `offset` bytes that nobody may read."""
        arrays, addresses = [], []
        for length in lengths:
            rows = narrow(rng.standard_normal((length, width)).astype(np.float32), dtype).reshape(-1)
            # a multiple of 16 from which rows begin `offset` bytes on
            memory = np.full(offset + rows.nbytes + 16, 0xFF, np.uint8)
            start = -memory.ctypes.data % 16
            array = memory[start : start + offset + rows.nbytes]
            array[offset:] = rows.view(np.uint8)
            arrays.append(array)
            addresses.append(array.ctypes.data)
        return Caches(arrays, np.array(addresses, np.int64))

    def rows(self, sequence: int, width: int, dtype: str, offset: int = 0) -> np.ndarray:
        type = np.uint16 if dtype == "bf16" else np.float16
        return self.arrays[sequence][offset:].view(type).reshape(-1, width)
