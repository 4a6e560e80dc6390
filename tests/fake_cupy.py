"""A stand-in for CuPy over this process's memory: the calls that a CUDA device makes, held to what CUDA allows.

Names and argument orders are CuPy 14's. Copies are made at once, and must lie in memory that was allocated for them; a
stream that captures takes kernels alone.
"""

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np

from glm_gpu.kernels.simulator import Simulator

H2D, D2H = 1, 2


class FakeError(RuntimeError):
    """As cupy_backends.cuda.api.runtime.CUDARuntimeError: a number says what happened."""

    def __init__(self, status: int) -> None:
        super().__init__(f"cudaError {status}")
        self.status = status


class FakeStream:
    """A stream: current inside `with`, and recording between begin_capture and end_capture."""

    def __init__(self, cuda: "FakeCuda", non_blocking: bool = False) -> None:
        assert non_blocking, "the legacy stream would wait for all others"
        self._cuda, self.device = cuda, cuda.current_device
        self.recorded: list[Any] | None = None
        self.ptr = id(self)
        cuda.streams[self.ptr] = self

    def __enter__(self) -> "FakeStream":
        assert self._cuda.current_device == self.device, "a stream of another device than the current one"
        self._cuda.stack.append(self)
        return self

    def __exit__(self, *exception: object) -> None:
        self._cuda.stack.pop()

    def record(self, event: Any) -> None:
        assert self.recorded is None

    def wait_event(self, event: Any) -> None:
        assert self.recorded is None

    def synchronize(self) -> None:
        assert self.recorded is None, "a stream that captures cannot be waited for"

    def begin_capture(self) -> None:
        self.recorded = []

    def end_capture(self) -> Any:
        recorded, self.recorded = self.recorded, None

        def launch(stream: FakeStream) -> None:
            assert stream is self
            for work in recorded:
                work()

        return SimpleNamespace(upload=lambda stream: None, launch=launch)


class FakeCuda:
    """The module cupy.cuda.

    Args:
        memories: of each device, in bytes.
        has_peers: whether devices reach each other's memory.

    Attributes:
        can_register: takes the bytes asked for; False refuses.
    """

    def __init__(self, memories: list[int], has_peers: bool = True) -> None:
        self.memories, self.has_peers = memories, has_peers
        self.current_device = 0
        self.stack: list[FakeStream] = []
        self.streams: dict[int, FakeStream] = {}
        self.blocks: dict[int, tuple[int, np.ndarray]] = {}
        self.registered: dict[int, int] = {}
        self.num_peer_copies = 0
        self.can_register = lambda num_bytes: True
        self.runtime = SimpleNamespace(
            CUDARuntimeError=FakeError,
            memcpyHostToDevice=H2D,
            memcpyDeviceToHost=D2H,
            getDeviceCount=lambda: len(memories),
            getDeviceProperties=lambda ordinal: {"name": b"NVIDIA Fake", "major": 9, "minor": 0},
            driverGetVersion=lambda: 13000,
            memGetInfo=self._mem_info,
            malloc=self._malloc,
            free=lambda address: self.blocks.pop(address),
            memcpyAsync=self._copy,
            memcpyPeerAsync=self._copy_peer,
            hostRegister=self._register,
            hostUnregister=lambda address: self.registered.pop(address),
            pointerGetAttributes=lambda address: SimpleNamespace(devicePointer=self._registered_at(address)),
            deviceCanAccessPeer=lambda device, peer: has_peers,
            deviceEnablePeerAccess=lambda peer: None,
        )

    def Device(self, ordinal: int) -> Any:
        cuda = self

        class Current:
            pci_bus_id = f"0000:0{ordinal}:00.0"

            def __enter__(self) -> None:
                self.before, cuda.current_device = cuda.current_device, ordinal

            def __exit__(self, *exception: object) -> None:
                cuda.current_device = self.before

        return Current()

    def Stream(self, non_blocking: bool = False) -> FakeStream:
        return FakeStream(self, non_blocking)

    def Event(self, block: bool = False, disable_timing: bool = False) -> Any:
        return SimpleNamespace(synchronize=lambda: None, done=True)

    def alloc_pinned_memory(self, num_bytes: int) -> bytearray:
        memory = bytearray(num_bytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.registered[address] = num_bytes
        return memory

    def launcher(self, cubins: Any, cuda: Any) -> Any:
        """In the place of CudaLauncher: kernels run in the simulator, or are recorded by the current stream."""
        simulator = Simulator()

        def launch(*arguments: Any) -> None:
            stream = self.stack[-1]
            assert stream.device == self.current_device
            if stream.recorded is not None:
                stream.recorded.append(lambda: simulator.launch(*arguments))
            else:
                simulator.launch(*arguments)

        return SimpleNamespace(launch=launch)

    def _mem_info(self) -> tuple[int, int]:
        used = sum(block.nbytes for device, block in self.blocks.values() if device == self.current_device)
        return self.memories[self.current_device] - used, self.memories[self.current_device]

    def _malloc(self, num_bytes: int) -> int:
        if num_bytes > self._mem_info()[0]:
            raise FakeError(2)
        memory = np.full(num_bytes + 256, 0xFF, np.uint8)
        start = -memory.ctypes.data % 256
        block = memory[start : start + num_bytes]
        self.blocks[block.ctypes.data] = self.current_device, block
        return block.ctypes.data

    def _holds(self, address: int, num_bytes: int) -> int:
        """The device whose memory a range lies in."""
        (device,) = {
            device
            for begin, (device, block) in self.blocks.items()
            if begin <= address and address + num_bytes <= begin + block.nbytes
        }
        return device

    def _copy(self, target: int, source: int, num_bytes: int, kind: int, stream: int) -> None:
        owner = self.streams[stream]
        assert owner.recorded is None and owner.device == self.current_device
        assert self._holds({H2D: target, D2H: source}[kind], num_bytes) == owner.device
        ctypes.memmove(target, source, num_bytes)

    def _copy_peer(self, target: int, to: int, source: int, origin: int, num_bytes: int, stream: int) -> None:
        assert self.has_peers or to == origin
        assert (self._holds(target, num_bytes), self._holds(source, num_bytes)) == (to, origin)
        self.num_peer_copies += 1
        ctypes.memmove(target, source, num_bytes)

    def _register(self, address: int, num_bytes: int, flags: int) -> None:
        assert num_bytes > 0 and flags == 3
        if not self.can_register(num_bytes):
            raise FakeError(2)
        self.registered[address] = num_bytes

    def _registered_at(self, address: int) -> int:
        assert any(begin <= address < begin + size for begin, size in self.registered.items()), "not registered"
        return address
