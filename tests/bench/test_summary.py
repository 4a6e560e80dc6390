"""The sum of a bench: this machine as measured, through the simulator of the whole model."""

import pytest

from glm_gpu.bench.measurement import Limit, Part
from glm_gpu.bench.summary import measured_machine


def io_part(*rates: tuple[str, int, float, bool]) -> dict:
    part = Part("io", "a slice")
    for mode, depth, gb_s, is_disk in rates:
        part.add(f"{mode} {depth}", [gb_s], "GB/s", depth=depth, is_disk=is_disk, expert_bytes=20_000_000)
    return part.document()


def kernel_part() -> dict:
    part = Part("kernels", "a slice")
    for gb_s in (28.0, 30.0, 29.0):
        part.add("matmul", [20.0], "GB/s", Limit(gb_s, "memory read"))
    part.add("matmul, 64 tokens", [120.0], "GMAC/s", Limit(150.0, "int16 products"))
    return part.document()


def test_the_machine_is_what_was_measured():
    machine = measured_machine([kernel_part(), io_part(("direct", 1, 1.0, True), ("direct", 8, 2.0, True))])
    assert (machine.memory_gb_s, machine.disk_gb_s) == (29.0, 2.0)
    assert machine.disk_latency_ms == pytest.approx(10.0)  # 20 MB take 20 ms alone and 10 ms at the best rate
    assert machine.core_gmac_s == pytest.approx(120.0 / machine.cores)
    assert 0 < machine.used_bytes < machine.ram_bytes


def test_a_rate_of_the_page_cache_is_no_disk():
    found = [kernel_part(), io_part(("buffered", 1, 9.0, False), ("direct", 1, 1.0, True))]
    assert measured_machine(found).disk_gb_s == 1.0
    assert measured_machine([kernel_part(), io_part(("buffered", 1, 9.0, False))]) is None


def test_without_kernels_there_is_no_sum():
    assert (
        measured_machine([io_part(("direct", 1, 1.0, True)), {"bench": "kernels", "error": "no C extension"}]) is None
    )
