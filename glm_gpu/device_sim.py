"""Simulated devices: NumPy memory with a bound, and streams whose work waits until somebody waits for it.

Kernels run in NumPy on the same memory. Nothing happens when it is queued: a stream's work is done when the host or
another stream waits for it, or, of streams that are eager, at once. So what relies on an order that nobody asked for
computes with wrong numbers here, where on a card it would do so by chance. What `allocate` gives holds NaN in every
float format, so a kernel that reads what nobody wrote is seen in its results.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np

from glm_gpu.device import ARENA_ALIGNMENT, DeviceInfo, DeviceMemoryError
from glm_gpu.kernels.gpu.arrays import Kernel, Launcher, View
from glm_gpu.units import format_bytes

# A simulated device without --vram: more than any model that an interpreter can run.
DEFAULT_BYTES = 4 << 30
_POISON = 0xFF  # all bits set is NaN in f32, bf16 and f16, and -1 as an integer


class SimStream:
    """Work in order, done as late as can be. See `glm_gpu.device.Stream`.

    Attributes:
        is_eager: work is done when it is queued, once what it waits for is done.
        num_done: pieces of work done so far.
    """

    def __init__(self, device: "SimDevice") -> None:
        self.device = device
        self.is_eager = False
        self._waiting: deque[Callable[[], None]] = deque()
        self._num_queued = self.num_done = 0

    def queue(self, work: Callable[[], None]) -> None:
        """Add work behind all there is."""
        self._waiting.append(work)
        self._num_queued += 1
        if self.is_eager:
            self.reach(self._num_queued)

    def reach(self, count: int) -> None:
        """Do the first `count` pieces of work there ever were, as far as they are not done."""
        while self.num_done < count:
            self.num_done += 1
            self._waiting.popleft()()

    def record(self) -> "SimEvent":
        return SimEvent(self, self._num_queued)

    def wait(self, event: "SimEvent") -> None:
        self.queue(event.reach)

    def synchronize(self) -> None:
        self.device.num_host_waits += 1
        self.reach(self._num_queued)


class SimEvent:
    """A point in a simulated stream. Waits of the host are counted."""

    def __init__(self, stream: SimStream, count: int) -> None:
        self._stream, self._count = stream, count

    @property
    def done(self) -> bool:
        return self._stream.num_done >= self._count

    def reach(self) -> None:
        """Have the work before it done."""
        self._stream.reach(self._count)

    def synchronize(self) -> None:
        self._stream.device.num_host_waits += 1
        self.reach()


class SimGraph:
    """Launches as they were recorded, with the arguments they had."""

    def __init__(self, launcher: Launcher, launches: list[tuple]) -> None:
        self._launcher, self._launches = launcher, launches

    def replay(self) -> None:
        for launch in self._launches:
            self._launcher.launch(*launch)


class _Recorder:
    """Stands in for a launcher: queues what it is given, or keeps it while a graph is made.

    Attributes:
        num_launches: so far, those of graphs included.
        fail_at: numbers of launches that fail as if memory had run out. For tests.
    """

    def __init__(self, launcher: Launcher, stream: SimStream) -> None:
        self.launcher, self._stream = launcher, stream
        self.recorded: list[tuple] | None = None
        self.num_launches = 0
        self.fail_at: set[int] = set()

    def launch(self, kernel: Kernel, grid: tuple[int, ...], arguments: dict[str, Any], constants: dict) -> None:
        if self.recorded is not None:
            self.recorded.append((kernel, grid, arguments, constants))
            return
        self.num_launches += 1
        if self.num_launches in self.fail_at:
            raise DeviceMemoryError(f"launch {self.num_launches} found no memory")
        self._stream.queue(lambda: self.launcher.launch(kernel, grid, arguments, constants))


class SimDevice:
    """A bounded part of the host's memory that behaves like a device. See `glm_gpu.device.Device`.

    Args:
        total_bytes: what `allocate` gives at most.
        launcher: runs kernels on memory of this process; None for Triton's interpreter.

    Attributes:
        num_allocations: calls of `allocate` so far.
        fail_at: numbers of calls that fail as if memory had run out. For tests.
        refuse_register: takes the bytes registered so far and those asked for; True refuses. For tests.
        num_host_waits: times that the host blocked.
        loaded_bytes: what `load` has copied.
    """

    is_simulated = True
    # Whichever device registers memory of the host, all of the process may read it.
    _registered: ClassVar[dict[int, int]] = {}

    def __init__(self, ordinal: int, total_bytes: int, launcher: Launcher | None = None) -> None:
        if launcher is None:
            from glm_gpu.kernels.simulator import Simulator

            launcher = Simulator(self._regions)
        name = f"simulated device {ordinal}"
        self.info = DeviceInfo(ordinal, name, f"SIM-{ordinal}", f"sim:{ordinal}", 90, total_bytes, total_bytes)
        self.compute, self.copy = SimStream(self), SimStream(self)
        self.launcher = _Recorder(launcher, self.compute)
        self.num_allocations = self.num_host_waits = self.loaded_bytes = self.registered_bytes = 0
        self.fail_at: set[int] = set()
        self.refuse_register: Callable[[int, int], bool] = lambda registered_bytes, num_bytes: False
        self._blocks: dict[int, np.ndarray] = {}

    def memory(self) -> tuple[int, int]:
        used_bytes = sum(block.nbytes for block in self._blocks.values())
        return self.info.total_bytes - used_bytes, self.info.total_bytes

    def allocate(self, num_bytes: int) -> int:
        self.num_allocations += 1
        free_bytes, total_bytes = self.memory()
        if num_bytes > free_bytes or self.num_allocations in self.fail_at:
            raise DeviceMemoryError(
                f"{self.info.name}: {format_bytes(num_bytes)} asked for, {format_bytes(free_bytes)} of "
                f"{format_bytes(total_bytes)} are free; give less --context or a smaller --vram"
            )
        memory = np.empty(num_bytes + ARENA_ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % ARENA_ALIGNMENT
        block = memory[start : start + num_bytes]
        block[...] = _POISON
        self._blocks[block.ctypes.data] = block
        return block.ctypes.data

    def release(self, address: int) -> None:
        self._finish()
        del self._blocks[address]

    @contextmanager
    def computing(self) -> Iterator[None]:
        yield

    def load(self, target: View, source: np.ndarray, stream: SimStream) -> None:
        assert self.launcher.recorded is None, "a copy cannot be part of a graph"
        self.loaded_bytes += source.nbytes
        memory = self._bytes(target)
        stream.queue(lambda: np.copyto(memory, source.reshape(-1).view(np.uint8)))

    def fetch(self, target: np.ndarray, source: View) -> SimEvent:
        assert self.launcher.recorded is None, "a copy cannot be part of a graph"
        memory = self._bytes(source)
        self.compute.queue(lambda: np.copyto(target.reshape(-1).view(np.uint8), memory))
        return self.compute.record()

    def hop(self, target: View, source: View, origin: "SimDevice") -> None:
        self.compute.wait(origin.compute.record())
        here, there = self._bytes(target), origin._bytes(source)
        self.compute.queue(lambda: np.copyto(here, there))

    def host_array(self, shape: Sequence[int], dtype: Any) -> np.ndarray:
        return np.zeros(shape, dtype)

    def register(self, memory: np.ndarray) -> bool:
        if self.refuse_register(self.registered_bytes, memory.nbytes):
            return False
        self.registered_bytes += memory.nbytes
        self._registered[memory.ctypes.data] = memory.nbytes
        return True

    def unregister(self, memory: np.ndarray) -> None:
        self.registered_bytes -= memory.nbytes
        self._registered.pop(memory.ctypes.data, None)

    def mapped_address(self, memory: np.ndarray) -> int:
        return memory.ctypes.data

    def capture(self, work: Callable[[], None]) -> SimGraph:
        self.launcher.recorded = []
        try:
            work()
            return SimGraph(self.launcher, self.launcher.recorded)
        finally:
            self.launcher.recorded = None

    def close(self) -> None:
        self._finish()
        self._blocks.clear()

    def _finish(self) -> None:
        for stream in (self.compute, self.copy):
            stream.record().reach()

    def _regions(self) -> list[tuple[int, int]]:
        """(begin, bytes) of all memory that kernels may reach by address."""
        blocks = [(address, block.nbytes) for address, block in self._blocks.items()]
        return blocks + list(self._registered.items())

    def _bytes(self, view: View) -> np.ndarray:
        """A view's memory; it must lie within one block."""
        for address, block in self._blocks.items():
            if address <= view.ptr and view.ptr + view.nbytes <= address + block.nbytes:
                return block[view.ptr - address : view.ptr - address + view.nbytes]
        raise AssertionError(f"{self.info.name} has no {view.nbytes} bytes at {view.ptr:#x}")
