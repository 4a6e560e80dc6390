"""What this machine can do at best, measured on the spot: the figures a kernel's speed is held against."""

import time

import numpy as np

from glm_gpu.errors import DeviceError
from glm_gpu.kernels import cpu

_MEASURE_S = 0.2


def read_bytes_s(num_bytes: int) -> float:
    """Bytes a second that the kernels' threads read from memory, best of the passes that fit into 0.2 s.

    Args:
        num_bytes: what a pass reads, at least 1 MiB; more than the last-level cache holds, to measure memory.

    Raises:
        DeviceError: the C extension is not in use.
    """
    data = np.ones((max(1, num_bytes >> 20), 1 << 20), dtype=np.uint8)
    sums = np.empty(len(data), dtype=np.int32)
    return data.nbytes / _best_s(lambda: _extension().read_all(data, sums))


def multiply_add_flops() -> float:
    """F32 products and sums a second on all of the kernels' threads, each rounded on its own, best of 0.2 s.

    Raises:
        DeviceError: the C extension is not in use.
    """
    sums = np.empty(8 * cpu.get_threads(), dtype=np.float32)
    num_operations = _extension().multiply_add(sums)
    return num_operations / _best_s(lambda: _extension().multiply_add(sums))


def integer_multiply_adds_s() -> float:
    """Products of int16 a second, added up, on all of the kernels' threads, best of 0.2 s: what int16 activations need.

    Raises:
        DeviceError: the C extension is not in use.
    """
    sums = np.empty(8 * cpu.get_threads(), dtype=np.int32)
    num_operations = _extension().integer_multiply_add(sums)
    return num_operations / _best_s(lambda: _extension().integer_multiply_add(sums))


def _best_s(call) -> float:
    end = time.perf_counter() + _MEASURE_S
    best = float("inf")
    while True:
        began = time.perf_counter()
        call()
        now = time.perf_counter()
        best = min(best, now - began)
        if now > end:
            return best


def _extension():
    if cpu.active is None:
        raise DeviceError(
            "limits are measured by the C kernels, which are not in use; install a C compiler and reinstall"
        )
    return cpu.active
