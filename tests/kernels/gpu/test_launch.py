"""What the driver is given, seen by a stand-in for CuPy's modules."""

import struct
from types import SimpleNamespace

import numpy as np
import pytest

from glm_gpu.errors import DeviceError
from glm_gpu.kernels.cubins import Cubin
from glm_gpu.kernels.gpu.arrays import Kernel, View
from glm_gpu.kernels.launch import CudaLauncher, Graph, describe

KERNEL = Kernel("projection", "project_kernel", num_warps=4, num_stages=2)
ARGUMENTS = {
    "x_ptr": View(0x7F0000001000, (3, 160), "bf16"),
    "s_ptr": View(0x7F0000002004, (72,), "f32"),
    "add_ptr": None,
    "offset": np.int64(1 << 40),
    "num_rows": 3,
    "scale": 0.5,
}


class Driver:
    """Functions of cupy.cuda that a launcher calls; keeps what it was given."""

    def __init__(self, refuses=None):
        self.images, self.names, self.attributes, self.launches = [], [], [], []
        driver = SimpleNamespace(
            CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8,
            funcSetAttribute=lambda *arguments: self.attributes.append(arguments),
        )
        outer = self

        class Module:
            def load(self, image):
                if refuses:
                    raise refuses
                outer.images.append(image)

            def get_function(self, name):
                outer.names.append(name)
                return Function()

        class Function:
            ptr = 0x3333

            def __call__(self, grid, block, args, *, shared_mem):
                outer.launches.append((grid, block, pack(args), shared_mem))

        self.cuda = SimpleNamespace(driver=driver, function=SimpleNamespace(Module=Module))


def pack(args):
    """Kernel parameters as CuPy 14 makes them: an int is an int64, None a null pointer, a NumPy scalar its bytes."""
    bytes_of = {type(None): lambda _: struct.pack("<Q", 0), int: lambda value: struct.pack("<q", value)}
    return [bytes_of.get(type(value), lambda scalar: scalar.tobytes())(value) for value in args]


class Cubins:
    arch = 90

    def __init__(self, shared_bytes=0):
        self.asked = []
        self._shared_bytes = shared_bytes

    def get(self, specialization):
        self.asked.append(specialization)
        return Cubin(b"\x7fELF", "project_kernel", self._shared_bytes, 4)


def test_driver_sees_grid_block_shared_memory_and_every_parameter():
    driver, cubins = Driver(), Cubins(shared_bytes=4096)
    CudaLauncher(cubins, driver.cuda).launch(KERNEL, (5, 2), ARGUMENTS, {"K": 160})
    ((grid, block, parameters, shared),) = driver.launches
    assert grid == (5, 2, 1) and block == (128, 1, 1) and shared == 4096
    assert parameters == [
        struct.pack("<Q", 0x7F0000001000),
        struct.pack("<Q", 0x7F0000002004),
        struct.pack("<Q", 0),
        struct.pack("<q", 1 << 40),
        struct.pack("<i", 3),
        struct.pack("<f", 0.5),
        struct.pack("<Q", 0),  # global scratch
        struct.pack("<Q", 0),  # profile scratch
    ]
    assert driver.images == [b"\x7fELF"] and driver.names == ["project_kernel"]


@pytest.mark.parametrize(("shared_bytes", "attributes"), [(49152, []), (49153, [(0x3333, 8, 49153)])])
def test_shared_memory_is_allowed_above_48_kib(shared_bytes, attributes):
    driver = Driver()
    CudaLauncher(Cubins(shared_bytes), driver.cuda).launch(KERNEL, (1,), ARGUMENTS, {})
    assert driver.attributes == attributes


def test_code_is_loaded_once_for_each_way_of_compiling():
    driver, cubins = Driver(), Cubins()
    launcher = CudaLauncher(cubins, driver.cuda)
    for constants in ({"K": 160}, {"K": 160}, {"K": 320}):
        launcher.launch(KERNEL, (1,), ARGUMENTS, constants)
    assert len(cubins.asked) == len(driver.images) == 2 and len(driver.launches) == 3


def test_nothing_is_launched_on_an_empty_grid():
    driver = Driver()
    CudaLauncher(Cubins(), driver.cuda).launch(KERNEL, (4, 0), ARGUMENTS, {})
    assert driver.launches == [] and driver.images == []


def test_only_addresses_that_are_multiples_of_16_are_promised_to_be():
    specialization, _ = describe(KERNEL, ARGUMENTS, {"K": 160})
    assert specialization.aligned == ("x_ptr", "offset")
    types = ["*bf16", "*fp32", "*fp32", "i64", "i32", "fp32"]
    assert specialization.types == tuple(zip(ARGUMENTS, types, strict=True))
    moved = ARGUMENTS | {"x_ptr": View(0x7F0000001008, (3, 160), "bf16"), "offset": np.int64(8)}
    assert describe(KERNEL, moved, {"K": 160})[0].aligned == ()


def test_number_that_does_not_fit_is_refused_before_the_launch():
    driver = Driver()
    with pytest.raises(OverflowError):
        CudaLauncher(Cubins(), driver.cuda).launch(KERNEL, (1,), ARGUMENTS | {"num_rows": 1 << 31}, {})
    assert driver.launches == []


def test_code_that_the_driver_refuses_is_a_device_error():
    driver = Driver(refuses=RuntimeError("CUDA_ERROR_NO_BINARY_FOR_GPU"))
    with pytest.raises(DeviceError, match=r"refuses project_kernel.*9\.0.*NO_BINARY.*update the NVIDIA driver"):
        CudaLauncher(Cubins(), driver.cuda).launch(KERNEL, (1,), ARGUMENTS, {})


def test_memory_that_is_short_for_code_is_told_as_such():
    """Whoever holds the card's memory gives some back and repeats the pass."""
    error = RuntimeError("CUDA_ERROR_OUT_OF_MEMORY")
    error.status = 2
    with pytest.raises(RuntimeError) as raised:
        CudaLauncher(Cubins(), Driver(refuses=error).cuda).launch(KERNEL, (1,), ARGUMENTS, {})
    assert raised.value is error


class Stream:
    """A stream of CuPy; keeps the order of calls."""

    def __init__(self, is_broken=False):
        self.calls = []
        self._is_broken = is_broken

    def __enter__(self):
        self.calls.append("enter")

    def __exit__(self, *_):
        self.calls.append("exit")

    def begin_capture(self):
        self.calls.append("begin")

    def end_capture(self):
        self.calls.append("end")
        if self._is_broken:
            raise RuntimeError("cudaErrorStreamCaptureInvalidated")
        graph = SimpleNamespace(upload=lambda stream: self.calls.append("upload"))
        graph.launch = lambda stream: self.calls.append("launch")
        return graph


def test_work_is_captured_once_and_replayed_on_its_stream():
    stream = Stream()
    graph = Graph(stream, lambda: stream.calls.append("work"))
    graph.replay()
    graph.replay()
    assert stream.calls == ["enter", "begin", "work", "end", "upload", "exit", "launch", "launch"]


@pytest.mark.parametrize("is_broken", [True, False])
def test_capture_is_ended_when_work_fails_and_its_error_is_told(is_broken):
    stream = Stream(is_broken)
    with pytest.raises(ZeroDivisionError):
        Graph(stream, lambda: 1 // 0)
    assert stream.calls == ["enter", "begin", "end", "exit"]
