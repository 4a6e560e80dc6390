"""Which devices a run gets, without a card: what CUDA shows comes from a stand-in for CuPy."""

import sys
from types import SimpleNamespace

import pytest

from glm_gpu import machine
from glm_gpu.device import DeviceInfo
from glm_gpu.device_choice import DeviceRequest, choose_gpus, open_devices, vram_bounds
from glm_gpu.device_cuda import find_gpus
from glm_gpu.errors import DeviceError, RequestError

GIB = 1 << 30
CARDS = [
    DeviceInfo(0, "NVIDIA A", "GPU-5b31c6f0-0000-0000-0000-000000000000", "0000:01:00.0", 90, 24 * GIB, 23 * GIB),
    DeviceInfo(1, "NVIDIA B", "GPU-5b77aaaa-0000-0000-0000-000000000000", "0000:02:00.0", 89, 12 * GIB, 12 * GIB),
    DeviceInfo(2, "NVIDIA C MIG 1g", "MIG-12345678-0000-0000-0000-000000000000", "0000:03:00.0", 80, 5 * GIB, 5 * GIB),
]


class NoDevice(RuntimeError):
    status = 100


@pytest.fixture
def cuda(monkeypatch):
    """cuda(memories) makes CUDA show a device for each (free, total); none for [], with CUDA's error."""

    def show(memories):
        current = []

        class Device:
            pci_bus_id = "0000:01:00.0"

            def __init__(self, ordinal):
                self.ordinal = ordinal

            def __enter__(self):
                current.append(self.ordinal)

            def __exit__(self, *exception):
                current.pop()

        def count():
            if not memories:
                raise NoDevice("cudaErrorNoDevice: no CUDA-capable device is detected")
            return len(memories)

        runtime = SimpleNamespace(
            getDeviceCount=count,
            getDeviceProperties=lambda ordinal: {"name": b"NVIDIA X", "major": 7 + ordinal, "minor": 5},
            memGetInfo=lambda: memories[current[-1]],
        )
        monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(Device=Device, runtime=runtime)))
        monkeypatch.setattr(machine, "gpu_absence", lambda: None)

    return show


@pytest.mark.parametrize(
    ("asked", "ordinals"),
    [(None, [0, 1, 2]), ("1", [1]), ("2,0", [2, 0]), ("GPU-5b31", [0]), ("gpu-5B77aaaa,MIG-12", [1, 2]), ("5b31", [0])],
)
def test_c25_gpus_are_named_by_ordinal_or_beginning_of_uuid(asked, ordinals):
    assert [info.ordinal for info in choose_gpus(asked, CARDS)] == ordinals


@pytest.mark.parametrize("asked", ["7", "", "GPU-9", "MIG-junk", "GPU-5b", "0,,1", "-1"])
def test_c25_a_name_that_fits_no_single_gpu_is_one_line_with_those_there_are(asked):
    with pytest.raises(RequestError, match="--gpu") as caught:
        choose_gpus(asked, CARDS)
    assert "\n" not in str(caught.value) and "MIG-12345678" in str(caught.value)


def test_c25_a_gpu_named_twice_is_refused():
    with pytest.raises(RequestError, match="twice"):
        choose_gpus("0,GPU-5b31", CARDS)


@pytest.mark.parametrize("visible", ["", "7", "MIG-junk", "GPU-00000000-1111-2222-3333-444444444444"])
def test_c25_cuda_alone_reads_cuda_visible_devices_and_a_run_without_devices_is_on_the_cpu(cuda, monkeypatch, visible):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    cuda([])
    devices, reason = open_devices(DeviceRequest())
    assert devices == []
    assert "cudaErrorNoDevice" in reason and repr(visible) in reason and "\n" not in reason
    with pytest.raises(DeviceError, match="cudaErrorNoDevice"):
        open_devices(DeviceRequest("cuda"))


@pytest.mark.parametrize("visible", ["GPU-5b31c6f0", "1,0", "MIG-12345678"])
def test_c25_devices_are_those_that_cuda_numbers_with_their_own_memory(cuda, monkeypatch, visible):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    cuda([(4 * GIB, 5 * GIB), (20 * GIB, 24 * GIB)])
    found, reason = find_gpus()
    assert [(info.ordinal, info.free_bytes, info.total_bytes) for info in found] == [
        (0, 4 * GIB, 5 * GIB),
        (1, 20 * GIB, 24 * GIB),
    ]
    assert [info.arch for info in found] == [75, 85] and reason == ""


def test_old_gpus_are_refused_by_name_when_asked_for(cuda):
    cuda([(4 * GIB, 5 * GIB)])
    assert open_devices(DeviceRequest())[0] == []
    with pytest.raises(DeviceError, match=r"7\.5, expected 8\.0"):
        open_devices(DeviceRequest("cuda"))


def test_without_cupy_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(machine, "gpu_absence", lambda: None)
    devices, reason = open_devices(DeviceRequest())
    assert devices == [] and "pip install" in reason and "\n" not in reason


def test_cupy_is_not_imported_where_there_is_no_driver(monkeypatch):
    monkeypatch.setattr(machine, "gpu_absence", lambda: "no NVIDIA driver is loaded")
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert open_devices(DeviceRequest()) == ([], "no NVIDIA driver is loaded")


@pytest.mark.parametrize("kind", ["gpu", "sim", "sim:0", "sim:17", "sim:x", "cuda:1", ""])
def test_unknown_kinds_of_devices_are_refused(kind):
    with pytest.raises(RequestError, match="--device"):
        open_devices(DeviceRequest(kind))


def test_vram_is_one_size_or_one_for_each_device():
    assert vram_bounds(None, 2) == [None, None]
    assert vram_bounds("1GiB", 3) == [GIB] * 3
    assert vram_bounds("1GiB, 512MiB", 2) == [GIB, GIB // 2]
    for wrong in ("1GiB,2GiB", "1GiB,x,1GiB", ""):
        with pytest.raises(RequestError):
            vram_bounds(wrong, 3)


def test_simulated_devices_have_the_memory_they_are_given():
    devices, _ = open_devices(DeviceRequest("sim:2", vram="3MiB,1MiB"))
    assert [device.memory() for device in devices] == [(3 << 20, 3 << 20), (1 << 20, 1 << 20)]
