"""What a device operation takes: arrays by address, weights in their stored form, and something that launches."""

from dataclasses import dataclass
from typing import Any, Protocol

from glm_gpu.quant import Format

# A device knows bf16 by name, NumPy and CuPy do not: arrays carry these names instead of dtypes.
ITEM_BYTES = {"f32": 4, "bf16": 2, "f16": 2, "i8": 1, "u8": 1, "u16": 2, "u32": 4, "i32": 4, "i64": 8, "u64": 8}


class Array(Protocol):
    """A C-contiguous array in a device's memory."""

    @property
    def ptr(self) -> int:
        """Address of the first item; in the simulator an address of this process."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str:
        """A key of ITEM_BYTES."""


@dataclass(frozen=True)
class View:
    """An array that is part of another, or the same bytes under another type; does not keep the memory alive."""

    ptr: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return num_items(self.shape) * ITEM_BYTES[self.dtype]


def num_items(shape: tuple[int, ...]) -> int:
    """Product of the sizes."""
    count = 1
    for size in shape:
        count *= size
    return count


def retype(array: Array, dtype: str) -> View:
    """The same bytes as a flat array of another type."""
    nbytes = num_items(array.shape) * ITEM_BYTES[array.dtype]
    assert nbytes % ITEM_BYTES[dtype] == 0, (array.shape, array.dtype, dtype)
    return View(array.ptr, (nbytes // ITEM_BYTES[dtype],), dtype)


@dataclass(frozen=True)
class DeviceMatrix:
    """A weight [O, I] in a device's memory, byte for byte as QuantizedMatrix holds it.

    Attributes:
        format: any of `glm_gpu.quant.FORMATS`.
        shape: (O, I); I is a multiple of 4.
        data: packed: u8 [O, row_bytes]; plain: bf16 or f32 [O, I].
        scales: f32 or f16 [O, num_groups]; None for plain numbers.
    """

    format: Format
    shape: tuple[int, int]
    data: Array
    scales: Array | None = None


@dataclass(frozen=True)
class Kernel:
    """A Triton function and how it is scheduled.

    Attributes:
        module: its file in glm_gpu/kernels/gpu/source, without ".py".
        name: the function, `..._kernel`.
        num_warps: warps of 32 threads a program.
        num_stages: how many iterations of loads are in flight.
        max_registers: of a thread; None leaves the choice to ptxas, which may spill for the sake of occupancy.
    """

    module: str
    name: str
    num_warps: int = 4
    num_stages: int = 3
    max_registers: int | None = None


class Launcher(Protocol):
    """Runs kernels on one device."""

    def launch(
        self, kernel: Kernel, grid: tuple[int, ...], arguments: dict[str, Any], constants: dict[str, Any]
    ) -> None:
        """Queue a kernel on the current stream; never waits (the simulator runs it before it returns).

        Args:
            kernel: what to run.
            grid: programs along each of one to three axes; nothing is launched if one of them is 0.
            arguments: run-time arguments in the order of the Triton function: arrays; int (passed as i32);
                float (f32); numpy.int64 (i64); None (a null pointer to f32, for an array that is not used).
            constants: compile-time arguments by name: int, bool, or str (a Triton type).
        """
