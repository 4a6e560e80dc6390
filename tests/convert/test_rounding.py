import numpy as np
import pytest

from glm_gpu.convert.rounding import quantize_search, shrink_factors
from glm_gpu.quant import FORMATS, Format, dequantize, quantize

PACKED = [format for format in FORMATS.values() if format.is_packed]


def awkward(num_columns: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    weight = rng.normal(0, 0.1, (9, num_columns)).astype(np.float32)
    weight[0] = 0
    weight[1, num_columns // 2] = 1e4
    weight[2] = 1e-12
    weight[3] = -np.abs(weight[3])
    weight[4] = np.round(weight[4] * 30)
    return weight


def searched_one_by_one(row: np.ndarray, format: Format, scale_dtype) -> tuple[list[int], list[float]]:
    """Integers and scales of one row, group by group, in plain Python over f64."""
    integers, scales = [], []
    group = format.group or len(row)
    for start in range(0, len(row), group):
        part = row[start : start + group]
        full = quantize(part[None], format, scale_dtype).scales[0, 0]
        best = None
        for factor in shrink_factors(format):
            floor = np.float32(2.0**-24 if scale_dtype == np.float16 else 1e-8)
            scale = scale_dtype(max(np.float32(full) * np.float32(factor), floor)) if factor != 1 else full
            q = [int(np.clip(np.rint(w / np.float32(scale)), -format.qmax - 1, format.qmax)) for w in part]
            error = sum(
                (float(np.float32(n) * np.float32(scale)) - float(w)) ** 2 for n, w in zip(q, part, strict=True)
            )
            if best is None or error < best[0] * (1 - 1e-9):
                best = (error, q, scale)
        integers += best[1]
        scales.append(float(best[2]))
    return integers, scales


@pytest.mark.parametrize("num_columns", [1, 31, 64, 65, 257])
@pytest.mark.parametrize("format", PACKED, ids=lambda format: format.name)
def test_search_never_has_more_squared_error_than_rounding_to_nearest(format, num_columns):
    weight = awkward(num_columns)
    errors = [
        ((dequantize(quantized).astype(np.float64) - weight) ** 2).sum(axis=1)
        for quantized in (quantize_search(weight, format), quantize(weight, format))
    ]
    assert (errors[0] <= errors[1] * (1 + 1e-6)).all()


@pytest.mark.parametrize("scale_dtype", [np.float32, np.float16])
@pytest.mark.parametrize("format", [FORMATS["int4_g64"], FORMATS["int2"]], ids=lambda format: format.name)
def test_search_takes_the_scale_of_least_squared_error_on_the_grid(format, scale_dtype):
    rng = np.random.default_rng(5)
    weight = rng.normal(0, 0.1, (4, 150)).astype(np.float32)
    found = quantize_search(weight, format, scale_dtype)
    for row in range(len(weight)):
        _, scales = searched_one_by_one(weight[row], format, scale_dtype)
        np.testing.assert_array_equal(found.scales[row].astype(np.float64), scales)


@pytest.mark.parametrize(("format", "most"), [("int4_g64", 0.82), ("int4_g128", 0.78), ("int4", 0.5), ("int2", 0.25)])
def test_search_saves_a_known_share_of_the_error_of_gaussian_weights(format, most):
    weight = np.random.default_rng(1).normal(0, 1, (16, 6144)).astype(np.float32)
    errors = [
        float(((dequantize(quantized) - weight) ** 2).sum())
        for quantized in (quantize_search(weight, FORMATS[format]), quantize(weight, FORMATS[format]))
    ]
    assert errors[0] < most * errors[1]


def test_group_that_is_exact_keeps_its_scale():
    weight = np.arange(-7, 8, dtype=np.float32)[None].repeat(3, 0) * np.float32(0.25)
    for searched, nearest in zip(*(q(weight, FORMATS["int4"]).__dict__.items() for q in (quantize_search, quantize)),
                                 strict=True):  # fmt: skip
        if searched[0] in ("data", "scales"):
            np.testing.assert_array_equal(searched[1], nearest[1])


def test_search_of_one_row_does_not_depend_on_the_others():
    weight = awkward(200)
    whole = quantize_search(weight, FORMATS["int4_g64"])
    for row in range(len(weight)):
        alone = quantize_search(weight[row : row + 1], FORMATS["int4_g64"])
        np.testing.assert_array_equal(alone.data[0], whole.data[row])
        np.testing.assert_array_equal(alone.scales[0], whole.scales[row])
