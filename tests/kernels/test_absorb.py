import numpy as np
import pytest
from product_weights import IMPLEMENTATIONS, random_activations, random_matrix

from glm_gpu import quant
from glm_gpu.kernels import cpu
from glm_gpu.kernels.absorb import absorb_query, attend_absorbed, expand_value
from glm_gpu.kernels.matmul import ACTIVATIONS

HEADS, NOPE, VALUE = 3, 5, 7
SIZES = [(tokens, columns) for tokens in (1, 3, 4, 7) for columns in (1, 33, 64, 130, 512)] + [(17, 320)]


@pytest.mark.parametrize("compiled", IMPLEMENTATIONS)
@pytest.mark.parametrize("scale_dtype", [np.float32, np.float16])
@pytest.mark.parametrize("format_name", list(quant.FORMATS))
def test_absorbed_queries_have_the_bits_of_the_specification(compiled, format_name, scale_dtype):
    rng = np.random.default_rng(1)
    for tokens, columns in SIZES:
        kv_b = random_matrix(rng, format_name, HEADS * (NOPE + VALUE), columns, scale_dtype)
        q = random_activations(rng, tokens, HEADS, NOPE)
        with cpu.use("numpy"):
            expected = absorb_query(q, kv_b, VALUE)
        out = np.full((tokens, HEADS, columns), np.nan, np.float32)
        with cpu.use(compiled):
            cpu.active.absorb_query(q, *kv_b.arguments, VALUE, out)
        np.testing.assert_array_equal(out, expected, err_msg=f"{tokens} tokens, {columns} columns")


@pytest.mark.parametrize("compiled", IMPLEMENTATIONS)
@pytest.mark.parametrize("activations", ACTIVATIONS)
@pytest.mark.parametrize("format_name", list(quant.FORMATS))
def test_expanded_values_have_the_bits_of_the_specification(compiled, format_name, activations):
    rng = np.random.default_rng(2)
    for tokens, columns in SIZES:
        kv_b = random_matrix(rng, format_name, HEADS * (NOPE + VALUE), columns)
        o = random_activations(rng, tokens, HEADS, columns)
        with cpu.use("numpy"):
            expected = expand_value(o, kv_b, NOPE, activations)
        out = np.full((tokens, HEADS, VALUE), np.nan, np.float32)
        with cpu.use(compiled):
            arguments = *kv_b.arguments, NOPE, ACTIVATIONS.index(activations), out
            cpu.active.expand_value(o, *arguments)
        np.testing.assert_array_equal(out, expected, err_msg=f"{tokens} tokens, {columns} columns")


@pytest.mark.parametrize("compiled", IMPLEMENTATIONS)
@pytest.mark.parametrize("format_name", ["f32", "bf16", "int8", "int4_g64"])
@pytest.mark.parametrize("tokens", [1, 3, 8, 9])
def test_absorbed_attention_is_its_three_steps(compiled, format_name, tokens):
    rng = np.random.default_rng(4)
    rank, rope, cached = 66, 10, 21
    kv_b = random_matrix(rng, format_name, HEADS * (NOPE + VALUE), rank)
    q_nope, q_rope = random_activations(rng, tokens, HEADS, NOPE), random_activations(rng, tokens, HEADS, rope)
    cache = quant.f32_to_bf16(random_activations(rng, cached, rank + rope))
    counts = rng.integers(1, 8, tokens).astype(np.int32)
    chosen = np.sort([rng.permutation(cached)[:7] for _ in range(tokens)], axis=-1).reshape(tokens, 7).astype(np.int32)
    for rows in (None, chosen):
        with cpu.use("numpy"):
            expected = attend_absorbed(q_nope, q_rope, kv_b, cache, rows, counts, np.float32(0.3))
        with cpu.use(compiled):
            found = attend_absorbed(q_nope, q_rope, kv_b, cache, rows, counts, np.float32(0.3))
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", cpu.available())
@pytest.mark.parametrize("format_name", ["f32", "int8", "int4_g64"])
def test_scores_in_latent_space_equal_scores_of_explicit_keys(name, format_name):
    rng = np.random.default_rng(3)
    weight = rng.standard_normal((HEADS * (NOPE + VALUE), 128)).astype(np.float32)
    kv_b = quant.quantize(weight, quant.Format.parse(format_name))
    exact = quant.dequantize(kv_b).astype(np.float64).reshape(HEADS, NOPE + VALUE, 128)
    q = rng.standard_normal((4, HEADS, NOPE)).astype(np.float32)
    latent = rng.standard_normal(128).astype(np.float32)
    keys = exact[:, :NOPE] @ latent  # [H, N]
    with cpu.use(name):
        absorbed = absorb_query(q, kv_b, VALUE)
        values = expand_value(np.broadcast_to(latent, (4, HEADS, 128)), kv_b, NOPE, "f32")
    scores = np.einsum("thn,hn->th", q, keys)
    np.testing.assert_allclose(absorbed @ latent, scores, rtol=0, atol=1e-5 * np.abs(scores).max())
    explicit = exact[:, NOPE:] @ latent
    np.testing.assert_allclose(values[0], explicit, rtol=0, atol=1e-5 * np.abs(explicit).max())


@pytest.mark.skipif(not IMPLEMENTATIONS, reason="the C extension is not built")
def test_bad_arguments_raise():
    kv_b = random_matrix(np.random.default_rng(4), "int8", HEADS * (NOPE + VALUE), 64)
    q, out = np.zeros((2, HEADS, NOPE), np.float32), np.zeros((2, HEADS, 64), np.float32)
    o, values = np.zeros((2, HEADS, 64), np.float32), np.zeros((2, HEADS, VALUE), np.float32)
    for value_dim in (-1, VALUE - 1, VALUE + 1, 1 << 40):
        with pytest.raises((ValueError, OverflowError)):
            cpu.active.absorb_query(q, *kv_b.arguments, value_dim, out)
    for nope_dim in (-1, NOPE - 1, NOPE + 1):
        with pytest.raises(ValueError):
            cpu.active.expand_value(o, *kv_b.arguments, nope_dim, 0, values)
    with pytest.raises(ValueError):
        cpu.active.absorb_query(q, *kv_b.arguments, VALUE, out[:, :, :63].copy())
    with pytest.raises(ValueError):
        cpu.active.expand_value(o[:, :2].copy(), *kv_b.arguments, NOPE, 0, values)
    cache, counts = np.zeros((4, 64 + 8), np.float32), np.array([1, 4], np.int32)
    parts, rope = kv_b.arguments, np.zeros((2, HEADS, 8), np.float32)
    call = cpu.active.attend_absorbed
    call(q, rope, *parts, cache, None, counts, 1.0, 0, values)
    for arguments in [
        (q, rope[:1], *parts, cache, None, counts, 1.0, 0, values),
        (q, rope, *parts, cache[:, :8].copy(), None, counts, 1.0, 0, values),
        (q, rope, *parts, cache[:, :71].copy(), None, counts, 1.0, 0, values),
        (q, rope, *parts, cache[:3], None, counts, 1.0, 0, values),
        (q, rope, *parts, cache, None, counts, 1.0, 3, values),
        (q, rope, *parts, cache, None, counts, 1.0, 0, values[:, :, :-1].copy()),
    ]:
        with pytest.raises(ValueError):
            call(*arguments)
