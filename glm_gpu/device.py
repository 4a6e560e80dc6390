"""Devices: what the engine needs of an accelerator.

A device is memory with a bound, two streams (one computes, one copies), and events that tie them together. There are
two kinds: a CUDA device, through CuPy, and a simulated one, which is NumPy memory with the same bound, so that all but
the arithmetic units can be tested without a card. Arrays are named by address on both; kernels take them so.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from glm_gpu.errors import CapacityError
from glm_gpu.kernels.gpu.arrays import ITEM_BYTES, Launcher, View, num_items
from glm_gpu.units import format_bytes

# What kernels may be promised of an address (`tt.divisibility` is 16), and a whole cache line of any device.
ARENA_ALIGNMENT = 256
# Where a host array has the same bytes; bf16 is its bit pattern there.
NUMPY_DTYPES = {
    "f32": np.float32, "bf16": np.uint16, "f16": np.float16, "i8": np.int8, "u8": np.uint8, "u16": np.uint16,
    "u32": np.uint32, "i32": np.int32, "i64": np.int64, "u64": np.uint64,
}  # fmt: skip


class DeviceMemoryError(CapacityError, MemoryError):
    """A device has no memory left; giving back slots of experts may help."""


@dataclass(frozen=True)
class DeviceInfo:
    """One accelerator as the driver shows it to this process.

    Attributes:
        ordinal: its number among those that this process sees, whatever CUDA_VISIBLE_DEVICES says.
        name, uuid, pci: as the driver gives them; a slice of a card has a uuid of its own, "MIG-...".
        arch: compute capability as one number, 90 for 9.0.
        total_bytes, free_bytes: memory, of the slice where it is one.
    """

    ordinal: int
    name: str
    uuid: str
    pci: str
    arch: int
    total_bytes: int
    free_bytes: int

    def __str__(self) -> str:
        return f"{self.ordinal} ({self.name}, {self.uuid or self.pci}, {format_bytes(self.free_bytes)} free)"


class Event(Protocol):
    """A point in a stream's work.

    Attributes:
        done: whether the work before it is; asking never waits.
    """

    done: bool

    def synchronize(self) -> None:
        """Block the host until the work before it is done."""


class Stream(Protocol):
    """Work of a device in order."""

    def record(self) -> Event:
        """The point behind all work queued so far; never waits."""

    def wait(self, event: Event) -> None:
        """Let later work of this stream begin only behind an event, of any device; the host never waits."""

    def synchronize(self) -> None:
        """Block the host until all work is done."""


class Graph(Protocol):
    """Kernels recorded once, to be queued again with one call."""

    def replay(self) -> None:
        """Queue them on the compute stream: the same addresses and numbers, whatever the memory holds by now."""


class Device(Protocol):
    """An accelerator. Kernels launched within `with device.computing():` run on its `compute` stream.

    Attributes:
        info: what it is.
        launcher: runs kernels on it.
        compute, copy: its streams.
        is_simulated: whether it is memory of the host.
    """

    info: DeviceInfo
    launcher: Launcher
    compute: Stream
    copy: Stream
    is_simulated: bool

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes now, within the bound that the device was opened with."""

    def allocate(self, num_bytes: int) -> int:
        """The address of so much memory, not initialised.

        Raises:
            DeviceMemoryError: there is not so much left.
        """

    def release(self, address: int) -> None:
        """Give back what `allocate` gave, once all queued work is done."""

    def computing(self) -> AbstractContextManager:
        """Makes this the current device, and `compute` the current stream, of the calling thread."""

    def load(self, target: View, source: np.ndarray, stream: Stream) -> None:
        """Queue a copy from the host; the source must stay as it is until the stream has passed it."""

    def fetch(self, target: np.ndarray, source: View) -> Event:
        """Queue a copy to the host behind the compute stream's work; it has arrived when the event is reached."""

    def hop(self, target: View, source: View, origin: "Device") -> None:
        """Queue, behind all work of the origin's compute stream, a copy from there before this one's next work.

        Goes from device to device where the two can reach each other, through the host's memory where not.
        """

    def host_array(self, shape: Sequence[int], dtype: Any) -> np.ndarray:
        """A small array of the host that copies reach at full speed, zeros."""

    def register(self, memory: np.ndarray) -> bool:
        """Lock pages of the host and let this process's devices read them: False where the system refuses."""

    def unregister(self, memory: np.ndarray) -> None:
        """Undo `register`."""

    def mapped_address(self, memory: np.ndarray) -> int:
        """Where kernels find registered memory of the host."""

    def capture(self, work: Callable[[], None]) -> Graph:
        """Record the kernels that `work` launches, without running them; each must have been launched before.

        Raises:
            DeviceMemoryError: the driver has no memory left for the graph.
        """

    def close(self) -> None:
        """Wait for all work and give all memory back. Harmless when repeated."""


class Arena:
    """One range of a device's memory, handed out from front to back, and taken back from the end.

    Args:
        num_bytes: of the whole range, allocated at once.

    Raises:
        DeviceMemoryError: the device has not so much left.
    """

    def __init__(self, device: Device, num_bytes: int) -> None:
        self.device, self.num_bytes = device, num_bytes
        self._address = device.allocate(num_bytes)
        self.used_bytes = self.peak_bytes = 0

    def take(self, shape: Sequence[int], dtype: str) -> View:
        """An array of the arena, not initialised, at an aligned address.

        Args:
            dtype: a key of NUMPY_DTYPES.

        Raises:
            DeviceMemoryError: the arena is full.
        """
        shape = tuple(shape)
        num_bytes = num_items(shape) * ITEM_BYTES[dtype]
        stop = self.used_bytes + num_bytes
        if stop > self.num_bytes:
            raise DeviceMemoryError(
                f"{self.device.info.name}: {format_bytes(num_bytes)} more do not fit an arena of "
                f"{format_bytes(self.num_bytes)}, of which {format_bytes(self.used_bytes)} are taken"
            )
        view = View(self._address + self.used_bytes, shape, dtype)
        self.used_bytes = aligned(stop)
        self.peak_bytes = max(self.peak_bytes, stop)
        return view

    def put(self, values: np.ndarray, dtype: str) -> View:
        """A copy of a host array; waits until it is there."""
        values = np.ascontiguousarray(values)
        assert values.dtype == NUMPY_DTYPES[dtype], (values.dtype, dtype)
        view = self.take(values.shape, dtype)
        self.device.load(view, values, self.device.copy)
        self.device.copy.synchronize()
        return view

    def close(self) -> None:
        """Give the range back; no array of it may be used any more."""
        self.device.release(self._address)

    def cut(self, used_bytes: int = 0) -> None:
        """Take back everything behind a former `used_bytes`; its arrays must not be used any more."""
        assert used_bytes <= self.used_bytes
        self.used_bytes = used_bytes


def aligned(num_bytes: int) -> int:
    """The next place in an arena."""
    return -(-num_bytes // ARENA_ALIGNMENT) * ARENA_ALIGNMENT


def to_host(device: Device, source: View) -> np.ndarray:
    """An array on the host, once the compute stream has written it; waits."""
    target = np.empty(source.shape, NUMPY_DTYPES[source.dtype])
    device.fetch(target, source).synchronize()
    return target
