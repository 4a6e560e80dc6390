"""How fast a device gets at pinned memory of the host, measured in a few milliseconds."""

import time
from collections.abc import Callable

import numpy as np

from glm_gpu.device import Arena, Device
from glm_gpu.kernels.gpu.arrays import View
from glm_gpu.kernels.gpu.norm import rms_norm
from glm_gpu.tiers.link import LinkRates

_WIDTH = 4096
_NUM_BYTES = 32 << 20
_REPEATS = 3


def measure_link(device: Device, num_bytes: int | None = None) -> LinkRates:
    """Rates of copies from pinned memory, and of a kernel that reads it; the best of three each."""
    num_rows = (num_bytes or _NUM_BYTES) // (4 * _WIDTH)
    source = device.host_array((num_rows, _WIDTH), np.float32)
    arena = Arena(device, num_rows * _WIDTH * 6)
    try:
        target, split = arena.take(source.shape, "f32"), arena.take(source.shape, "bf16")
        mapped = View(device.mapped_address(source), source.shape, "f32")

        def copy() -> None:
            device.load(target, source, device.compute)

        def read() -> None:
            rms_norm(device.launcher, mapped, None, 1e-5, split=split)

        return LinkRates(*(source.nbytes / _best(device, work) for work in (copy, read)))
    finally:
        arena.close()


def _best(device: Device, work: Callable[[], None]) -> float:
    times = []
    with device.computing():
        for _ in range(1 + _REPEATS):  # the first loads the kernel
            began = time.perf_counter()
            work()
            device.compute.synchronize()
            times.append(time.perf_counter() - began)
    return min(times[1:])
