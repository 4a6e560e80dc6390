"""Every implementation of the quantizers gives the bytes of the NumPy bodies, and those of the specification."""

import numpy as np
import pytest

from glm_gpu.fp8 import dequantize_fp8
from glm_gpu.kernels import cpu
from glm_gpu.kernels.quantize import decode_fp8, group_errors, quantize, quantize_search, round_bf16, shrink_factors
from glm_gpu.quant import FORMATS, Format, dequantize, f32_to_bf16
from glm_gpu.quant import quantize as specified

PACKED = [format for format in FORMATS.values() if format.is_packed]
COLUMNS = [1, 3, 31, 64, 65, 127, 128, 257, 1000]


def awkward(num_columns: int, seed: int = 0) -> np.ndarray:
    """Rows of zeros, an outlier, values below the smallest scale, one sign, ties, f32's largest, and Gaussian ones."""
    rng = np.random.default_rng(seed)
    weight = rng.normal(0, 0.1, (11, num_columns)).astype(np.float32)
    weight[0] = 0
    weight[1, num_columns // 2] = 1e4
    weight[2] = 1e-12
    weight[3] = -np.abs(weight[3])
    weight[4] = np.round(weight[4] * 30) + np.float32(0.5)
    weight[5] = np.finfo(np.float32).max
    weight[6] = np.round(weight[6] * 70)
    weight[6, 0] = 7
    return weight


@pytest.mark.parametrize("num_columns", COLUMNS)
@pytest.mark.parametrize("format", PACKED, ids=lambda format: format.name)
def test_rounding_to_nearest_is_that_of_the_specification(format, num_columns, implementation):
    weight = awkward(num_columns)
    found, expected = quantize(weight, format), specified(weight, format)
    np.testing.assert_array_equal(found.data, expected.data)
    np.testing.assert_array_equal(found.scales, expected.scales)


@pytest.mark.parametrize("format", PACKED, ids=lambda format: format.name)
def test_f16_scales_are_those_of_the_specification(format, implementation):
    weight = awkward(200)
    weight[5] = 1
    found, expected = quantize(weight, format, np.float16), specified(weight, format, np.float16)
    assert found.scales.dtype == np.float16
    np.testing.assert_array_equal(found.data, expected.data)
    np.testing.assert_array_equal(found.scales, expected.scales)


@pytest.mark.parametrize("name", ["int4", "int4_g64", "int8", "int4_g128"])
def test_golden_vectors(name, oracle_dir, implementation):
    golden = np.load(oracle_dir / "quant" / "quant_golden.npz")
    key = {"int4": "int4", "int4_g64": "int4g64", "int8": "int8"}.get(name)
    if key is None:
        return
    for case in range(len(golden["shapes"])):
        found = quantize(golden[f"c{case}_w"], FORMATS[name])
        packed = golden[f"c{case}_{key}_{'q' if name == 'int8' else 'packed'}"]
        np.testing.assert_array_equal(found.data, packed.view(np.uint8))
        np.testing.assert_array_equal(found.scales.ravel(), golden[f"c{case}_{key}_scale"].ravel())


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_weight_that_is_not_finite_is_refused_with_its_index(bad, implementation):
    weight = awkward(200)
    weight[8, 130] = bad
    for function in (quantize, quantize_search):
        with pytest.raises(ValueError, match=r"\[8, 130\]"):
            function(weight, FORMATS["int4_g64"])


def test_scale_too_large_for_f16_is_refused(implementation):
    weight = np.full((2, 64), 65520 * 7, np.float32)
    with pytest.raises(ValueError, match="float16"):
        quantize(weight, FORMATS["int4"], np.float16)


@pytest.mark.parametrize("num_columns", COLUMNS)
@pytest.mark.parametrize("format", PACKED, ids=lambda format: format.name)
def test_search_gives_the_bytes_of_numpy(format, num_columns, implementation):
    weight = awkward(num_columns, seed=1)
    weight[5] = 1
    for scale_dtype in (np.float32, np.float16):
        found = quantize_search(weight, format, scale_dtype)
        with cpu.use("numpy"):
            expected = quantize_search(weight, format, scale_dtype)
        np.testing.assert_array_equal(found.scales, expected.scales)
        np.testing.assert_array_equal(found.data, expected.data)


@pytest.mark.parametrize("num_columns", COLUMNS)
def test_errors_are_the_sums_they_are_said_to_be(num_columns, implementation):
    weight = np.random.default_rng(2).normal(0, 1, (5, num_columns)).astype(np.float32)
    for format in (FORMATS["int4_g64"], FORMATS["int4"]):
        quantized = specified(weight, format)
        lost = (dequantize(quantized).astype(np.float64) - weight) ** 2
        group = format.group or num_columns
        expected = [[part.sum() for part in np.split(row, range(group, num_columns, group))] for row in lost]
        np.testing.assert_allclose(group_errors(weight, format, quantized.scales), expected, rtol=1e-6, atol=1e-30)


def searched_one_by_one(row: np.ndarray, format: Format, scale_dtype) -> list[float]:
    """Scales of one row, group by group, in plain Python over f64."""
    scales = []
    group = format.group or len(row)
    for start in range(0, len(row), group):
        part = row[start : start + group]
        full = specified(part[None], format, scale_dtype).scales[0, 0]
        best = None
        for factor in shrink_factors(format):
            scale = scale_dtype(np.float32(full) * np.float32(factor))
            q = [int(np.clip(np.rint(w / np.float32(scale)), -format.qmax - 1, format.qmax)) for w in part]
            values = [float(np.float32(n) * np.float32(scale)) for n in q]
            error = sum((value - float(w)) ** 2 for value, w in zip(values, part, strict=True))
            if best is None or error < best[0] * (1 - 1e-9):
                best = (error, scale)
        scales.append(float(best[1]))
    return scales


@pytest.mark.parametrize("scale_dtype", [np.float32, np.float16])
@pytest.mark.parametrize("format", [FORMATS["int4_g64"], FORMATS["int2"]], ids=lambda format: format.name)
def test_search_takes_the_scale_of_least_squared_error_on_the_grid(format, scale_dtype, implementation):
    weight = np.random.default_rng(5).normal(0, 0.1, (4, 150)).astype(np.float32)
    found = quantize_search(weight, format, scale_dtype)
    for row in range(len(weight)):
        np.testing.assert_array_equal(
            found.scales[row].astype(np.float64), searched_one_by_one(weight[row], format, scale_dtype)
        )


@pytest.mark.parametrize("num_columns", [1, 31, 64, 257])
@pytest.mark.parametrize("format", PACKED, ids=lambda format: format.name)
def test_search_never_has_more_squared_error_than_rounding_to_nearest(format, num_columns, implementation):
    weight = awkward(num_columns)
    weight[5] = 1
    errors = [
        ((dequantize(quantized).astype(np.float64) - weight) ** 2).sum(axis=1)
        for quantized in (quantize_search(weight, format), quantize(weight, format))
    ]
    assert (errors[0] <= errors[1] * (1 + 1e-6)).all()


@pytest.mark.parametrize(("format", "most"), [("int4_g64", 0.82), ("int4_g128", 0.78), ("int4", 0.5), ("int2", 0.25)])
def test_search_saves_a_known_share_of_the_error_of_gaussian_weights(format, most):
    weight = np.random.default_rng(1).normal(0, 1, (16, 6144)).astype(np.float32)
    errors = [
        float(((dequantize(quantized) - weight) ** 2).sum())
        for quantized in (quantize_search(weight, FORMATS[format]), quantize(weight, FORMATS[format]))
    ]
    assert errors[0] < most * errors[1]


def test_group_that_is_exact_keeps_its_scale(implementation):
    weight = np.arange(-7, 8, dtype=np.float32)[None].repeat(3, 0) * np.float32(0.25)
    searched, nearest = quantize_search(weight, FORMATS["int4"]), quantize(weight, FORMATS["int4"])
    np.testing.assert_array_equal(searched.scales, nearest.scales)
    np.testing.assert_array_equal(searched.data, nearest.data)


def test_row_does_not_depend_on_the_others(implementation):
    weight = awkward(200)
    whole = quantize_search(weight, FORMATS["int4_g64"])
    for row in range(len(weight)):
        alone = quantize_search(weight[row : row + 1], FORMATS["int4_g64"])
        np.testing.assert_array_equal(alone.data[0], whole.data[row])
        np.testing.assert_array_equal(alone.scales[0], whole.scales[row])


def test_bf16_bits_are_those_of_the_specification(implementation):
    high = np.arange(1 << 16, dtype=np.uint32)[:, None] << np.uint32(16)  # every sign, exponent and kept mantissa
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)  # below, at and above half way
    values = (high | low).view(np.float32)
    np.testing.assert_array_equal(round_bf16(values), f32_to_bf16(values))


@pytest.mark.parametrize("shape", [(576, 192), (130, 257), (1, 1), (128, 128), (3, 300)], ids=str)
def test_fp8_rows_are_those_of_the_specification(shape, implementation):
    rng = np.random.default_rng(3)
    codes = rng.integers(0, 256, shape, dtype=np.uint8)
    grid = (-(-shape[0] // 128), -(-shape[1] // 128))
    for scale_shape in (grid, (shape[0],), (shape[0], 1), (), (1,)):
        scales = np.asarray(rng.uniform(1e-4, 1, scale_shape), np.float32)
        expected = dequantize_fp8(codes, scales, (128, 128))
        for start, stop in ((0, shape[0]), (shape[0] // 3, shape[0] // 2 + 1)):
            found = decode_fp8(codes[start:stop], scales, (128, 128), start, shape[0])
            np.testing.assert_array_equal(found, expected[start:stop])


@pytest.mark.parametrize(
    ("function", "args"),
    [
        ("group_absmax", (np.zeros((2, 100), np.float32), 65, np.zeros((2, 2), np.float32))),
        ("group_absmax", (np.zeros((2, 100), np.float32), 64, np.zeros((2, 1), np.float32))),
        ("group_errors", (np.zeros((2, 64), np.float32), np.ones((1, 1), np.float32), 64, 7, np.zeros((2, 1)))),
        ("round_bf16", (np.zeros((2, 64), np.float32), np.zeros((2, 63), np.uint16))),
        ("pack_rows", (np.zeros((2, 64), np.float32), np.ones((2, 1), np.float32), 64, 4, np.zeros((2, 31), np.uint8))),
        ("pack_rows", (np.zeros((2, 64), np.float32), np.ones((2, 1), np.float32), 64, 3, np.zeros((2, 24), np.uint8))),
        (
            "decode_fp8",
            (np.zeros((2, 300), np.uint8), np.zeros(256, np.float32), np.ones((1, 2), np.float32), 128, 128, 0,
             np.zeros((2, 300), np.float32)),
        ),
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit_are_refused(function, args, implementation):
    if implementation != "numpy":  # whose body is called with checked arguments only
        with pytest.raises(ValueError):
            getattr(cpu.active, function)(*args)
