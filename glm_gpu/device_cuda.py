"""CUDA devices through CuPy: memory, streams, events, peer copies. Needs a driver, and no toolkit."""

import ctypes
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from glm_gpu.device import DeviceInfo, DeviceMemoryError, to_host
from glm_gpu.errors import DeviceError
from glm_gpu.kernels.cubins import CubinCache
from glm_gpu.kernels.gpu.arrays import View
from glm_gpu.kernels.launch import CudaLauncher, Graph
from glm_gpu.units import format_bytes

log = logging.getLogger(__name__)

_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
_PEER_ALREADY_ENABLED = 704  # cudaErrorPeerAccessAlreadyEnabled
_PORTABLE_MAPPED = 1 | 2  # cudaHostRegisterPortable | cudaHostRegisterMapped


def find_gpus() -> tuple[list[DeviceInfo], str]:
    """The devices that CUDA shows to this process, or none and why.

    CUDA_VISIBLE_DEVICES is CUDA's to read: ordinals, UUIDs and slices are numbered from 0 here whatever it says.
    """
    try:
        import cupy
    except ImportError as error:
        return [], f"CuPy is not installed ({error}); pip install 'glm-gpu[cuda13]', or [cuda12] for an older driver"
    try:
        found = [_info(cupy, ordinal) for ordinal in range(cupy.cuda.runtime.getDeviceCount())]
    except RuntimeError as error:
        return [], f"CUDA shows no device ({error}){_visible()}"
    return found, "" if found else f"CUDA shows no device{_visible()}"


def _visible() -> str:
    """What to look at when no device is there: named, never interpreted."""
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if value is None else f"; CUDA_VISIBLE_DEVICES is {value!r}"


def _info(cupy: Any, ordinal: int) -> DeviceInfo:
    device = cupy.cuda.Device(ordinal)
    properties = cupy.cuda.runtime.getDeviceProperties(ordinal)
    with device:
        free_bytes, total_bytes = cupy.cuda.runtime.memGetInfo()
    name = properties["name"]
    arch = 10 * properties["major"] + properties["minor"]
    return DeviceInfo(
        ordinal,
        name.decode() if isinstance(name, bytes) else name,
        _uuid(ordinal),
        device.pci_bus_id,
        arch,
        total_bytes,
        free_bytes,
    )


def _uuid(ordinal: int) -> str:
    """A device's UUID from the driver, whose ordinals are the runtime's; "" where it does not tell."""
    with suppress(OSError, AttributeError):
        driver = ctypes.CDLL("libcuda.so.1")
        device, raw, name = ctypes.c_int(), (ctypes.c_ubyte * 16)(), ctypes.create_string_buffer(256)
        failed = driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), ordinal)
        failed = failed or driver.cuDeviceGetUuid_v2(raw, device) or driver.cuDeviceGetName(name, 256, device)
        if not failed:
            text = bytes(raw).hex()
            parts = (text[:8], text[8:12], text[12:16], text[16:20], text[20:])
            return ("MIG-" if b" MIG " in name.value else "GPU-") + "-".join(parts)
    return ""


class CudaStream:
    """A stream of one device. See `glm_gpu.device.Stream`."""

    def __init__(self, device: "CudaDevice") -> None:
        self._device = device
        with device.current():
            self.stream = device.cuda.Stream(non_blocking=True)

    def record(self) -> Any:
        with self._device.current():
            event = self._device.cuda.Event(disable_timing=True)
            self.stream.record(event)
        return event

    def wait(self, event: Any) -> None:
        with self._device.current():
            self.stream.wait_event(event)

    def synchronize(self) -> None:
        self.stream.synchronize()


class CudaDevice:
    """A card, or a slice of one. See `glm_gpu.device.Device`.

    Args:
        bound: so much memory is used at most; None for all that is free.
        cubin_folder: where compiled kernels are kept.
        prebuilt: folders with kernels that were compiled elsewhere.
    """

    is_simulated = False

    def __init__(
        self,
        info: DeviceInfo,
        bound: int | None = None,
        cubin_folder: Path | None = None,
        prebuilt: Sequence[Path] = (),
    ) -> None:
        import cupy

        self.cuda, self.info, self._bound = cupy.cuda, info, bound
        self.launcher = CudaLauncher(CubinCache(info.arch, cubin_folder, prebuilt), cupy.cuda)
        self._blocks: dict[int, int] = {}
        self._peers: dict[int, bool] = {}
        self.compute, self.copy = CudaStream(self), CudaStream(self)

    def current(self) -> AbstractContextManager:
        """Makes this the thread's device, as CuPy wants it for every call."""
        return self.cuda.Device(self.info.ordinal)

    def memory(self) -> tuple[int, int]:
        with self.current():
            free_bytes, total_bytes = self.cuda.runtime.memGetInfo()
        if self._bound is not None:
            free_bytes = min(free_bytes, max(0, self._bound - sum(self._blocks.values())))
        return free_bytes, total_bytes

    def allocate(self, num_bytes: int) -> int:
        free_bytes, total_bytes = self.memory()
        exhausted = DeviceMemoryError(
            f"{self.info.name}: {format_bytes(num_bytes)} asked for, {format_bytes(free_bytes)} of "
            f"{format_bytes(total_bytes)} are free; give less --context or a smaller --vram"
        )
        if self._bound is not None and sum(self._blocks.values()) + num_bytes > self._bound:
            raise exhausted
        with self.current():
            try:
                # Straight from the driver: CuPy's pool would keep what is given back.
                address = self.cuda.runtime.malloc(max(1, num_bytes))
            except self.cuda.runtime.CUDARuntimeError as error:
                if error.status == _OUT_OF_MEMORY:
                    raise exhausted from error
                raise DeviceError(f"{self.info.name} failed: {error}; see `dmesg` and nvidia-smi") from error
        self._blocks[address] = num_bytes
        return address

    def release(self, address: int) -> None:
        with self.current():
            self.compute.synchronize()
            self.copy.synchronize()
            self.cuda.runtime.free(address)
        del self._blocks[address]

    @contextmanager
    def computing(self) -> Iterator[None]:
        with self.current(), self.compute.stream:
            try:
                yield
            except RuntimeError as error:  # CuPy's errors; kernels are loaded, and stacks grow, at their first launch
                if getattr(error, "status", None) == _OUT_OF_MEMORY:
                    raise DeviceMemoryError(f"{self.info.name} has no memory left for a kernel") from error
                raise

    def load(self, target: View, source: np.ndarray, stream: CudaStream) -> None:
        assert target.nbytes == source.nbytes and source.flags.c_contiguous
        kind = self.cuda.runtime.memcpyHostToDevice
        with self.current():
            self.cuda.runtime.memcpyAsync(target.ptr, source.ctypes.data, source.nbytes, kind, stream.stream.ptr)

    def fetch(self, target: np.ndarray, source: View) -> Any:
        assert target.nbytes == source.nbytes and target.flags.c_contiguous
        kind, stream = self.cuda.runtime.memcpyDeviceToHost, self.compute.stream
        with self.current():
            self.cuda.runtime.memcpyAsync(target.ctypes.data, source.ptr, source.nbytes, kind, stream.ptr)
        return self.compute.record()

    def hop(self, target: View, source: View, origin: "CudaDevice") -> None:
        if not self._reaches(origin):
            self.load(target, to_host(origin, source), self.compute)
            self.compute.synchronize()  # the host's copy is gone after this call
            return
        self.compute.wait(origin.compute.record())
        with self.current():
            self.cuda.runtime.memcpyPeerAsync(
                target.ptr,
                self.info.ordinal,
                source.ptr,
                origin.info.ordinal,
                source.nbytes,
                self.compute.stream.ptr,
            )

    def _reaches(self, origin: "CudaDevice") -> bool:
        """Whether copies from another device need not pass through the host; tried once."""
        ordinal, runtime = origin.info.ordinal, self.cuda.runtime
        if ordinal == self.info.ordinal:
            return True
        if ordinal not in self._peers:
            self._peers[ordinal] = False
            if runtime.deviceCanAccessPeer(self.info.ordinal, ordinal):
                try:
                    with self.current():
                        runtime.deviceEnablePeerAccess(ordinal)
                    self._peers[ordinal] = True
                except runtime.CUDARuntimeError as error:
                    self._peers[ordinal] = error.status == _PEER_ALREADY_ENABLED
            if not self._peers[ordinal]:
                log.info("devices %d and %d copy through the host's memory", self.info.ordinal, ordinal)
        return self._peers[ordinal]

    def host_array(self, shape: Sequence[int], dtype: Any) -> np.ndarray:
        num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        with self.current():
            memory = self.cuda.alloc_pinned_memory(max(1, num_bytes))
        array = np.frombuffer(memory, dtype, num_bytes // np.dtype(dtype).itemsize).reshape(shape)
        array[...] = 0
        return array

    def register(self, memory: np.ndarray) -> bool:
        runtime = self.cuda.runtime
        with self.current():
            try:
                runtime.hostRegister(memory.ctypes.data, memory.nbytes, _PORTABLE_MAPPED)
            except runtime.CUDARuntimeError as error:
                log.debug("%d bytes were not registered: %s", memory.nbytes, error)
                return False
        return True

    def unregister(self, memory: np.ndarray) -> None:
        with self.current(), suppress(self.cuda.runtime.CUDARuntimeError):
            self.cuda.runtime.hostUnregister(memory.ctypes.data)

    def mapped_address(self, memory: np.ndarray) -> int:
        with self.current():
            return self.cuda.runtime.pointerGetAttributes(memory.ctypes.data).devicePointer

    def capture(self, work: Callable[[], None]) -> Graph:
        with self.current():
            try:
                return Graph(self.compute.stream, work)
            except self.cuda.runtime.CUDARuntimeError as error:
                if error.status == _OUT_OF_MEMORY:
                    raise DeviceMemoryError(f"{self.info.name} has no memory left for a graph") from error
                raise DeviceError(f"{self.info.name} failed: {error}; see `dmesg` and nvidia-smi") from error

    def close(self) -> None:
        runtime = self.cuda.runtime
        with self.current(), suppress(runtime.CUDARuntimeError):
            self.compute.synchronize()
            self.copy.synchronize()
            while self._blocks:
                runtime.free(self._blocks.popitem()[0])
