"""Triton kernels on a card: loaded and launched through CuPy, without torch, and captured into graphs."""

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np

from glm_gpu.errors import DeviceError
from glm_gpu.kernels.cubins import CubinCache, Specialization
from glm_gpu.kernels.gpu.arrays import Kernel

# Above this a function has to be allowed its shared memory.
_PLAIN_SHARED_BYTES = 48 * 1024
# Of the driver. Code needs memory of the card too; whoever holds its memory may give some back.
_OUT_OF_MEMORY = 2
_TYPES = {
    "f32": "*fp32",
    "bf16": "*bf16",
    "f16": "*fp16",
    "i8": "*i8",
    "u8": "*u8",
    "u16": "*u16",
    "u32": "*u32",
    "i32": "*i32",
    "i64": "*i64",
    "u64": "*u64",
}


def describe(
    kernel: Kernel, arguments: dict[str, Any], constants: dict[str, Any]
) -> tuple[Specialization, tuple[Any, ...]]:
    """How a kernel must be compiled to be launched with these arguments, and the arguments as CuPy takes them.

    A pointer or i64 (an offset in bytes) is promised to be a multiple of 16 if it is one: no promise can be false.
    """
    types, aligned, values = [], [], []
    for name, value in arguments.items():
        if value is None:
            types.append((name, "*fp32"))
            values.append(None)
        elif isinstance(value, np.int64):
            types.append((name, "i64"))
            values.append(value)
            if value % 16 == 0:
                aligned.append(name)
        elif isinstance(value, int):
            types.append((name, "i32"))
            values.append(np.int32(value))
        elif isinstance(value, float):
            types.append((name, "fp32"))
            values.append(np.float32(value))
        else:
            types.append((name, _TYPES[value.dtype]))
            values.append(int(value.ptr))
            if value.ptr % 16 == 0:
                aligned.append(name)
    specialization = Specialization(kernel, tuple(types), tuple(aligned), tuple(constants.items()))
    return specialization, tuple(values)


class CudaLauncher:
    """Launches kernels on one card, on CuPy's current stream; the card must be CuPy's current device.

    Args:
        cubins: where machine code comes from, for this card's architecture.
        cuda: the module cupy.cuda.
    """

    def __init__(self, cubins: CubinCache, cuda: Any) -> None:
        self._cubins = cubins
        self._cuda = cuda
        self._functions: dict[Specialization, tuple[Any, Any, int, int]] = {}

    def launch(
        self, kernel: Kernel, grid: tuple[int, ...], arguments: dict[str, Any], constants: dict[str, Any]
    ) -> None:
        """As Launcher.launch. The first launch of a kind loads its code, and may have it compiled.

        Raises:
            DeviceError: the kernel cannot be compiled, or the driver refuses its code.
            RuntimeError: CuPy's, from the driver: no memory for the code, or an error of earlier work.
        """
        if 0 in grid:
            return
        specialization, values = describe(kernel, arguments, constants)
        loaded = self._functions.get(specialization)
        if loaded is None:
            loaded = self._functions[specialization] = self._load(specialization)
        function, _, num_warps, shared_bytes = loaded
        # Every Triton kernel ends with two pointers to scratch memory, which none of ours has (compile_kernel asserts).
        function((*grid, 1, 1)[:3], (32 * num_warps, 1, 1), (*values, None, None), shared_mem=shared_bytes)

    def _load(self, specialization: Specialization) -> tuple[Any, Any, int, int]:
        cubin = self._cubins.get(specialization)
        module = self._cuda.function.Module()
        try:
            module.load(cubin.image)
            function = module.get_function(cubin.name)
            if cubin.shared_bytes > _PLAIN_SHARED_BYTES:
                driver = self._cuda.driver
                attribute = driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                driver.funcSetAttribute(function.ptr, attribute, cubin.shared_bytes)
        except RuntimeError as error:  # CuPy's errors of the driver
            if getattr(error, "status", None) == _OUT_OF_MEMORY:
                raise
            raise DeviceError(
                f"the driver refuses {cubin.name} for compute capability {self._cubins.arch / 10} ({error}); "
                "update the NVIDIA driver, or use --device cpu"
            ) from error
        return function, module, cubin.num_warps, cubin.shared_bytes


class Recorder:
    """Stands in for a launcher and launches nothing: collects how kernels would have to be compiled.

    Attributes:
        specializations: each once, in the order of their first launch.
    """

    def __init__(self) -> None:
        self._seen: dict[Specialization, None] = {}

    @property
    def specializations(self) -> list[Specialization]:
        return list(self._seen)

    def launch(
        self, kernel: Kernel, grid: tuple[int, ...], arguments: dict[str, Any], constants: dict[str, Any]
    ) -> None:
        """As Launcher.launch."""
        self._seen[describe(kernel, arguments, constants)[0]] = None


class Graph:
    """Launches recorded once and replayed as one: the same kernels on the same addresses.

    Everything the launches touch must outlive the graph, and every kernel must have been launched before, so that
    nothing is compiled or loaded, and nothing allocated, while a stream records.

    Args:
        stream: a CuPy stream of the card, not the default one.
        work: launches kernels on the current stream.
    """

    def __init__(self, stream: Any, work: Callable[[], None]) -> None:
        self._stream = stream
        with stream:
            stream.begin_capture()
            try:
                work()
            except BaseException:
                # a capture left open would make every later call on the stream fail
                with contextlib.suppress(RuntimeError):
                    stream.end_capture()
                raise
            self._graph = stream.end_capture()
            self._graph.upload(stream)

    def replay(self) -> None:
        """Queue the recorded launches on the stream they were recorded on; never waits."""
        self._graph.launch(self._stream)
