"""Where an expert's matrices lie in its slab."""

import numpy as np
import pytest

from glm_gpu.quant import FORMATS, dequantize, quantize
from glm_gpu.slab import ROLES, SlabLayout


@pytest.mark.parametrize("scale_dtype", [np.float32, np.float16])
@pytest.mark.parametrize(("hidden", "width"), [(160, 72), (7, 3), (129, 65)])
@pytest.mark.parametrize("format", FORMATS.values(), ids=lambda format: format.name)
def test_views_find_the_matrices_in_the_run(format, hidden, width, scale_dtype):
    layout = SlabLayout(format, hidden, width, scale_dtype)
    rng = np.random.default_rng(0)
    matrices = [
        quantize(rng.standard_normal(layout.shape(role)).astype(np.float32), format, scale_dtype) for role in ROLES
    ]
    run = b"".join(matrix.data.tobytes() for matrix in matrices)
    if format.is_packed:
        run += b"".join(matrix.scales.tobytes() for matrix in matrices)
    assert layout.nbytes == len(run)
    slab = np.full(layout.aligned_nbytes, 0xFF, np.uint8)
    slab[: len(run)] = np.frombuffer(run, np.uint8)
    for view, matrix in zip(layout.views(slab), matrices, strict=True):
        assert view.shape == matrix.shape
        assert np.shares_memory(view.data, slab)
        np.testing.assert_array_equal(dequantize(view), dequantize(matrix))


def test_parts_follow_each_other_without_gaps():
    layout = SlabLayout(FORMATS["int4_g64"], hidden=160, width=72)
    assert layout.parts == {
        "gate": (0, 5760),
        "up": (5760, 11520),
        "down": (11520, 17280),
        "gate.qs": (17280, 17280 + 72 * 3 * 4),
        "up.qs": (18144, 18144 + 72 * 3 * 4),
        "down.qs": (19008, 19008 + 160 * 2 * 4),
    }
    assert layout.aligned_nbytes == 20480


def test_expert_of_glm_5_2_has_the_size_the_plan_counts_on():
    # 3 x 2048 x 6144 weights at half a byte, and a four-byte scale for each 64 of them
    layout = SlabLayout(FORMATS["int4_g64"], hidden=6144, width=2048)
    assert layout.nbytes == 3 * 2048 * 6144 // 2 + 3 * 2048 * 6144 // 64 * 4
