import numpy as np
import pytest
from product_weights import IMPLEMENTATIONS, PACKED, random_activations, random_matrix

from glm_gpu import quant
from glm_gpu.kernels import cpu
from glm_gpu.kernels.matmul import ACTIVATIONS, matmul, matmuls, quantize_activations

COLUMNS = [1, 31, 33, 64, 127, 128, 129, 512, 1000, 1024, 1088, 1536]
SHAPES = [(tokens, columns) for tokens in (1, 2, 3, 4, 13) for columns in COLUMNS] + [
    (5, 1088), (6, 640), (8, 832), (16, 161), (63, 130), (70, 192),
]  # fmt: skip


@pytest.fixture
def threads():
    before = cpu.get_threads()
    yield cpu.set_threads
    cpu.set_threads(before)


@pytest.mark.parametrize("compiled", IMPLEMENTATIONS)
@pytest.mark.parametrize("scale_dtype", [np.float32, np.float16])
@pytest.mark.parametrize("activations", ACTIVATIONS)
@pytest.mark.parametrize("format_name", list(quant.FORMATS))
def test_every_implementation_gives_the_bits_of_the_specification(compiled, format_name, activations, scale_dtype):
    rng = np.random.default_rng(7)
    for tokens, columns in SHAPES:
        w = random_matrix(rng, format_name, 51, columns, scale_dtype)
        x = random_activations(rng, tokens, columns)
        with cpu.use("numpy"):
            expected = matmul(x, w, activations)
        out = np.full((tokens, 51), np.nan, np.float32)
        with cpu.use(compiled):
            cpu.active.matmul(x, *w.arguments, ACTIVATIONS.index(activations), out)
        np.testing.assert_array_equal(out, expected, err_msg=f"{tokens} tokens, {columns} columns")


@pytest.mark.parametrize("compiled", IMPLEMENTATIONS)
@pytest.mark.parametrize("format_name", ["int8", "int4_g64"])
def test_more_columns_than_one_panel_of_groups(compiled, format_name):
    rng = np.random.default_rng(8)
    w = random_matrix(rng, format_name, 5, 64 * 256 + 70)
    for tokens in (1, 4, 17):
        x = random_activations(rng, tokens, w.shape[1])
        with cpu.use("numpy"):
            expected = matmul(x, w)
        with cpu.use(compiled):
            np.testing.assert_array_equal(matmul(x, w), expected)


@pytest.mark.parametrize("format_name", [*PACKED, "bf16"])
def test_a_row_has_the_same_bits_alone_and_among_others_on_any_number_of_threads(format_name, threads):
    rng = np.random.default_rng(9)
    w = random_matrix(rng, format_name, 200, 320)
    x = random_activations(rng, 67, 320)
    threads(1)
    alone = np.concatenate([matmul(x[t : t + 1], w) for t in range(len(x))])
    for num_threads in (1, 2, 3):
        threads(num_threads)
        for tokens in (1, 2, 3, 4, 5, 12, 13, 16, 33, 48, 67):
            np.testing.assert_array_equal(matmul(x[:tokens], w), alone[:tokens])


@pytest.mark.parametrize("format_name", PACKED)
def test_int16_activations_are_as_exact_as_their_sixteen_bits(format_name):
    rng = np.random.default_rng(10)
    w = quant.quantize(rng.standard_normal((64, 512)).astype(np.float32), quant.Format.parse(format_name))
    x = rng.standard_normal((8, 512)).astype(np.float32)
    exact = x.astype(np.float64) @ quant.dequantize(w).astype(np.float64).T
    for activations, limit in (("int16", 3e-5), ("int8", 8e-3), ("f32", 1e-6)):
        error = matmul(x, w, activations) - exact
        assert np.sqrt(np.mean(error**2) / np.mean(exact**2)) < limit


def test_quantized_activations_stay_within_half_a_step():
    x = np.random.default_rng(11).standard_normal((3, 200)).astype(np.float32)
    for activations in ("int16", "int8"):
        integers, scales = quantize_activations(x, activations)
        assert integers.dtype == activations
        back = (integers * scales[..., None].astype(np.float64)).reshape(3, -1)
        assert not back[:, 200:].any()
        assert (np.abs(back[:, :200] - x) <= np.repeat(scales, 64, axis=1)[:, :200] * 0.5001).all()


@pytest.mark.parametrize("name", cpu.available())
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_activation_shows_in_its_row_only(name, bad):
    rng = np.random.default_rng(12)
    w = quant.quantize(rng.standard_normal((20, 256)).astype(np.float32), quant.Format.parse("int4_g64"))
    x = rng.standard_normal((6, 256)).astype(np.float32)
    with cpu.use(name):
        expected = matmul(x, w)
        x[2, 130] = bad
        y = matmul(x, w)
    assert not np.isfinite(y[2]).any()
    keep = [0, 1, 3, 4, 5]
    np.testing.assert_array_equal(y[keep], expected[keep])


@pytest.mark.parametrize("name", cpu.available())
def test_no_tokens_give_no_rows(name):
    w = random_matrix(np.random.default_rng(13), "int4_g64", 3, 64)
    with cpu.use(name):
        assert matmul(np.zeros((0, 64), np.float32), w).shape == (0, 3)


@pytest.mark.parametrize("num_rows", [1, 5])
def test_several_weights_give_what_each_gives_alone(num_rows, implementation):
    rng = np.random.default_rng(15)
    x = rng.standard_normal((num_rows, 200), dtype=np.float32)
    weights = [
        random_matrix(rng, name, 3 + i, 200) for i, name in enumerate(("int4_g64", "int8", "f32", "bf16", "int2"))
    ]
    for found, w in zip(matmuls(x, weights), weights, strict=True):
        np.testing.assert_array_equal(found, matmul(x, w))
    assert matmuls(x, []) == []


@pytest.mark.skipif(not IMPLEMENTATIONS, reason="the C extension is not built")
def test_bad_arguments_raise():
    w = random_matrix(np.random.default_rng(14), "int4_g64", 3, 128)
    x, out = np.zeros((2, 128), np.float32), np.zeros((2, 3), np.float32)
    bits, group, data, scales = w.arguments
    call = cpu.active.matmul
    call(x, bits, group, data, scales, 0, out)
    wrong = [
        (TypeError, (x.astype(np.float64), bits, group, data, scales, 0, out)),
        (ValueError, (x[:, :126].copy(), bits, group, data, scales, 0, out)),
        (TypeError, (x[:, ::2], bits, group, data, scales, 0, out)),
        (ValueError, (x[0], bits, group, data, scales, 0, out)),
        (ValueError, (x, 3, group, data, scales, 0, out)),
        (ValueError, (x, bits, 32, data, scales, 0, out)),
        (ValueError, (x, bits, 128, data, scales, 0, out)),
        (ValueError, (x, 8, group, data, scales, 0, out)),
        (TypeError, (x, 32, 0, data, scales, 0, out)),
        (TypeError, (x, bits, group, data, None, 0, out)),
        (ValueError, (x, bits, group, data, scales[:2], 0, out)),
        (ValueError, (x, bits, group, data, scales, 3, out)),
        (ValueError, (x, bits, group, data, scales, 0, out[:1])),
        (TypeError, (x, bits, group, data, scales, 0, out.T)),
        (TypeError, (x, bits, group, data, scales, 0)),
    ]
    for error, arguments in wrong:
        with pytest.raises(error):
            call(*arguments)
    several = cpu.active.matmuls
    several(x, (w.arguments,), 0, (out,))
    for error, weights, outs in [
        (ValueError, (w.arguments,), ()),
        (ValueError, [w.arguments], [out]),
        (ValueError, (w.arguments,) * 9, (out,) * 9),
        (ValueError, (w.arguments[:3],), (out,)),
        (ValueError, (w.arguments, w.arguments), (out, out[:1])),
        (ValueError, (w.arguments, None), (out, out)),
        (TypeError, (w.arguments,), (None,)),
    ]:
        with pytest.raises(error):
            several(x, weights, 0, outs)
    out.flags.writeable = False
    with pytest.raises(TypeError, match="out: expected a C-contiguous writable array"):
        call(x, bits, group, data, scales, 0, out)
