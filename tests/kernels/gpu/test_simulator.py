"""The simulator finds what is wrong on a card; each fault is planted in a kernel of its own."""

import numpy as np
import pytest
from device_arrays import empty, view

from glm_gpu.kernels import simulator
from glm_gpu.kernels.gpu.arrays import Kernel, View
from glm_gpu.kernels.simulator import MemoryFault, Simulator
from glm_gpu.quant import bf16_to_f32, f32_to_bf16

HEADER = "import triton\nimport triton.language as tl\n\n\n@triton.jit\n"


@pytest.fixture
def launch(tmp_path, monkeypatch):
    """launch(source, arguments): run a kernel whose source is given, over 3 programs unless told."""
    monkeypatch.setattr(simulator, "_SOURCE", tmp_path)

    def run(source, arguments, grid=(3,), launcher=None, **constants):
        (tmp_path / "planted.py").write_text(HEADER + source)
        simulator._load.cache_clear()
        (launcher or Simulator(regions=lambda: (), is_checked=True)).launch(
            Kernel("planted", "kernel"), grid, arguments, constants
        )

    yield run
    simulator._load.cache_clear()


COPY = """def kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * {step} + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i{mask}), mask=i < n)
"""


def test_right_copy_passes(launch):
    x, y = np.arange(40, dtype=np.float32), empty(40, "f32")
    arguments = {"x_ptr": view(x), "y_ptr": view(y), "n": 40}
    launch(COPY.format(step="BLOCK", mask=", mask=i < n, other=0.0"), arguments, BLOCK=16)
    np.testing.assert_array_equal(y, x)


def test_load_out_of_bounds_is_found(launch):
    arguments = {"x_ptr": view(np.ones(40, np.float32)), "y_ptr": view(empty(40, "f32")), "n": 40}
    with pytest.raises(MemoryFault, match="load of bytes"):
        launch(COPY.format(step="BLOCK", mask=""), arguments, BLOCK=16)


def test_store_out_of_bounds_is_found_and_nothing_is_stored(launch):
    y = empty(40, "f32")
    arguments = {"x_ptr": view(np.ones(48, np.float32)), "y_ptr": view(y), "n": 48}
    with pytest.raises(MemoryFault, match="store of bytes"):
        launch(COPY.format(step="BLOCK", mask=""), arguments, BLOCK=16)
    assert np.isnan(y).all()


def test_overlapping_tiles_are_a_race(launch):
    arguments = {"x_ptr": view(np.ones(40, np.float32)), "y_ptr": view(empty(40, "f32")), "n": 40}
    with pytest.raises(MemoryFault, match="two programs store to one address"):
        launch(COPY.format(step="8", mask=", mask=i < n, other=0.0"), arguments, BLOCK=16)


def test_loading_what_another_program_stores_is_a_race(launch):
    x = np.ones(49, np.float32)
    shifted = """def kernel(x_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + i, tl.load(x_ptr + i + 1))
"""
    with pytest.raises(MemoryFault, match="loads what another one stores"):
        launch(shifted, {"x_ptr": view(x), "n": 48}, BLOCK=16)
    launch(shifted.replace("+ i + 1", "+ i"), {"x_ptr": view(x), "n": 48}, BLOCK=16)


def test_store_that_writes_an_address_twice_is_found(launch):
    source = """def kernel(y_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y_ptr + i // 2, i)
"""
    with pytest.raises(MemoryFault, match="writes an address twice"):
        launch(source, {"y_ptr": view(empty(16, "i32"))}, grid=(1,), BLOCK=16)


def test_masked_off_lanes_without_a_value_are_poisoned(launch):
    source = """def kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y_ptr, tl.sum(tl.load(x_ptr + i, mask=i < 10{other}), 0))
"""
    x, y = np.ones(10, np.float32), empty(1, "f32")
    launch(source.format(other=", other=0.0"), {"x_ptr": view(x), "y_ptr": view(y)}, grid=(1,), BLOCK=16)
    assert y == 10
    launch(source.format(other=""), {"x_ptr": view(x), "y_ptr": view(y)}, grid=(1,), BLOCK=16)
    assert y != 10


ADDRESS = """def kernel(table_ptr, y_ptr, ALIGNMENT: tl.constexpr):
    x = tl.multiple_of(tl.load(table_ptr + tl.program_id(0)), ALIGNMENT).to(tl.pointer_type(tl.float32))
    tl.store(y_ptr + tl.program_id(0), tl.load(x))
"""


def test_address_from_a_table_must_lie_in_the_devices_memory(launch):
    x, y, outside = np.arange(8, dtype=np.float32), empty(3, "f32"), np.ones(4, np.float32)
    table = x.ctypes.data + np.array([0, 4, 28], np.int64)
    launcher = Simulator(lambda: [(x.ctypes.data, x.nbytes)], is_checked=True)
    launch(ADDRESS, {"table_ptr": view(table), "y_ptr": view(y)}, launcher=launcher, ALIGNMENT=4)
    np.testing.assert_array_equal(y, [0, 1, 7])
    table[1] = outside.ctypes.data
    with pytest.raises(MemoryFault, match="where the device has no memory"):
        launch(ADDRESS, {"table_ptr": view(table), "y_ptr": view(y)}, launcher=launcher, ALIGNMENT=4)


def test_broken_alignment_promise_is_found(launch):
    x = np.arange(8, dtype=np.float32)
    table = x.ctypes.data + np.array([0, 4, 8], np.int64)
    launcher = Simulator(lambda: [(x.ctypes.data, x.nbytes)])
    with pytest.raises(AssertionError, match="multiple of 16"):
        launch(ADDRESS, {"table_ptr": view(table), "y_ptr": view(empty(3, "f32"))}, launcher=launcher, ALIGNMENT=16)


def test_address_between_items_is_found(launch):
    x = np.arange(8, dtype=np.float32)
    table = x.ctypes.data + np.array([0, 2, 8], np.int64)
    launcher = Simulator(lambda: [(x.ctypes.data, x.nbytes)])
    with pytest.raises(MemoryFault, match="no multiple of its size"):
        launch(ADDRESS, {"table_ptr": view(table), "y_ptr": view(empty(3, "f32"))}, launcher=launcher, ALIGNMENT=1)


def test_programs_that_take_different_ways_each_take_their_own(launch):
    source = """def kernel(counts_ptr, y_ptr):
    count = tl.load(counts_ptr + tl.program_id(0))
    if count == 0:
        return
    total = 0
    for step in range(count):
        total += step
    tl.store(y_ptr + tl.program_id(0), total)
"""
    counts, y = np.array([3, 0, 5, 3, 1, 0], np.int32), empty(6, "i32")
    launch(source, {"counts_ptr": view(counts), "y_ptr": view(y)}, grid=(6,))
    np.testing.assert_array_equal(y, [3, -7, 10, 3, 0, -7])


@pytest.mark.parametrize("is_checked", [True, False])
def test_bf16_is_rounded_to_nearest_even_after_every_operation(launch, is_checked):
    source = """def kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, BLOCK))
    tl.store(y_ptr + tl.arange(0, BLOCK), x + x * x)
"""
    x = np.random.default_rng(0).standard_normal(64).astype(np.float32)
    x, y = f32_to_bf16(x), empty(64, "bf16")
    launch(source, {"x_ptr": view(x), "y_ptr": view(y)}, grid=(1,), launcher=Simulator(None, is_checked), BLOCK=64)
    square = f32_to_bf16(bf16_to_f32(x) ** 2)
    np.testing.assert_array_equal(y, f32_to_bf16(bf16_to_f32(x) + bf16_to_f32(square)))


def test_assembly_that_moves_elements_is_found(launch):
    """Swapping the two halves of a register is no elementwise operation, though unpacked in order it may look right."""
    source = """def kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, BLOCK))
    (y,) = tl.inline_asm_elementwise({asm!r}, "=r,r", [x], dtype=(tl.float16,), is_pure=True, pack=2)
    tl.store(y_ptr + tl.arange(0, BLOCK), y)
"""
    x, y = np.arange(64, dtype=np.float16), empty(64, "f16")
    arguments = {"x_ptr": View(x.ctypes.data, x.shape, "u16"), "y_ptr": view(y)}
    launch(source.format(asm="{ mov.b32 $0, $1; }"), arguments, grid=(1,), BLOCK=64)
    np.testing.assert_array_equal(y, x)
    launch(source.format(asm="{ prmt.b32 $0, $1, $1, 0x1032; }"), arguments, grid=(1,), BLOCK=64)
    assert not np.array_equal(y.reshape(-1, 2)[:, ::-1], x.reshape(-1, 2))


def test_divergent_programs_store_once(launch):
    """A group that starts again forgets its first start: what it stored then would look like a race."""
    source = """def kernel(counts_ptr, y_ptr):
    tl.store(y_ptr + 2 * tl.program_id(0), 1)
    if tl.load(counts_ptr + tl.program_id(0)) > 0:
        tl.store(y_ptr + 2 * tl.program_id(0) + 1, 2)
"""
    y = empty(8, "i32")
    counts = np.array([0, 1, 0, 1], np.int32)
    launch(source, {"counts_ptr": view(counts), "y_ptr": view(y)}, grid=(4,))
    np.testing.assert_array_equal(y, [1, -7, 1, 2, 1, -7, 1, 2])
