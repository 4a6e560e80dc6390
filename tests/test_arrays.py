import numpy as np
import pytest

from glm_gpu.arrays import CACHE_LINE, line_aligned


@pytest.mark.parametrize("num_bytes", [1, 63, 64, 1000, 5 << 20])
def test_memory_for_weights_begins_with_a_cache_line(num_bytes):
    arrays = [line_aligned(num_bytes) for _ in range(4)]
    for number, array in enumerate(arrays):
        assert array.shape == (num_bytes,) and array.dtype == np.uint8 and array.flags.c_contiguous
        assert array.ctypes.data % CACHE_LINE == 0
        array[...] = number
    assert all((array == number).all() for number, array in enumerate(arrays))
