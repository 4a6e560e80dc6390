import numpy as np
import pytest
from product_weights import IMPLEMENTATIONS, random_activations, random_matrix

from glm_gpu import quant
from glm_gpu.kernels import cpu
from glm_gpu.kernels.experts import expert_ffn, mlp
from glm_gpu.kernels.matmul import ACTIVATIONS
from glm_gpu.slab import SlabLayout


def random_slab(rng, layout):
    """An expert whose weights are small enough for three products in a row."""
    slab = np.empty(layout.nbytes + 1, np.uint8)[1:]  # an odd address
    for view in layout.views(slab):
        weight = (rng.standard_normal(view.shape) * 0.2).astype(np.float32)
        made = quant.quantize(weight, layout.format, layout.scale_dtype)
        view.data[...] = made.data
        if made.scales is not None:
            view.scales[...] = made.scales
    return slab


def random_routing(rng, tokens, num_slabs, experts_per_tok):
    choice = np.stack([rng.permutation(num_slabs)[:experts_per_tok] for _ in range(tokens)]).astype(np.int32)
    return choice, rng.random((tokens, experts_per_tok)).astype(np.float32)


@pytest.mark.parametrize("compiled", IMPLEMENTATIONS)
@pytest.mark.parametrize("activations", ACTIVATIONS)
@pytest.mark.parametrize("format_name", list(quant.FORMATS))
def test_experts_have_the_bits_of_the_specification(compiled, format_name, activations):
    rng = np.random.default_rng(1)
    for tokens, hidden, width, scale_dtype in [
        (1, 130, 33, "f4"),
        (3, 65, 96, "f2"),
        (5, 128, 64, "f4"),
        (40, 96, 31, "f2"),
    ]:
        layout = SlabLayout(quant.Format.parse(format_name), hidden, width, np.dtype(scale_dtype))
        slabs = [random_slab(rng, layout) for _ in range(6)]
        choice, weights = random_routing(rng, tokens, 6, 3)
        x = rng.standard_normal((tokens, hidden)).astype(np.float32)
        with cpu.use("numpy"):
            expected = expert_ffn(x, slabs, layout, choice, weights, activations)
        with cpu.use(compiled):
            y = expert_ffn(x, slabs, layout, choice, weights, activations)
        np.testing.assert_array_equal(y, expected, err_msg=f"{tokens} tokens, D {hidden}, F {width}")


@pytest.mark.parametrize("compiled", IMPLEMENTATIONS)
@pytest.mark.parametrize("format_name", list(quant.FORMATS))
def test_mlp_has_the_bits_of_the_specification(compiled, format_name):
    rng = np.random.default_rng(2)
    gate, up = (random_matrix(rng, format_name, 70, 100) for _ in range(2))
    down = random_matrix(rng, format_name, 100, 70)
    for tokens in (1, 2, 5, 20):
        x = random_activations(rng, tokens, 100) * np.float32(1e-6)
        with np.errstate(over="ignore", invalid="ignore"):
            with cpu.use("numpy"):
                expected = mlp(x, gate, up, down)
            with cpu.use(compiled):
                np.testing.assert_array_equal(mlp(x, gate, up, down), expected)


@pytest.mark.parametrize("name", cpu.available())
def test_a_token_has_the_same_bits_alone_and_among_others(name):
    rng = np.random.default_rng(3)
    layout = SlabLayout(quant.Format.parse("int4_g64"), 128, 64)
    slabs = [random_slab(rng, layout) for _ in range(8)]
    choice, weights = random_routing(rng, 90, 8, 4)
    x = rng.standard_normal((90, 128)).astype(np.float32)
    with cpu.use(name):
        together = expert_ffn(x, slabs, layout, choice, weights)
        for t in range(0, 90, 11):
            alone = expert_ffn(x[t : t + 1], slabs, layout, choice[t : t + 1], weights[t : t + 1])
            np.testing.assert_array_equal(alone[0], together[t])


@pytest.mark.parametrize("name", cpu.available())
def test_experts_add_up_to_weighted_networks(name):
    rng = np.random.default_rng(4)
    layout = SlabLayout(quant.Format.parse("int8"), 64, 96)
    slabs = [random_slab(rng, layout) for _ in range(4)]
    choice = np.array([[2, 2, 0], [3, 1, 2]], np.int32)  # one expert twice is two choices
    weights = np.array([[0.5, 0.25, 2], [1, 0, 3]], np.float32)
    x = rng.standard_normal((2, 64)).astype(np.float32)
    expected = np.zeros((2, 64))
    for t in range(2):
        for place, index in enumerate(choice[t]):
            gate, up, down = (quant.dequantize(m).astype(np.float64) for m in layout.views(slabs[index]))
            g, u = gate @ x[t], up @ x[t]
            expected[t] += weights[t, place] * (down @ (g / (1 + np.exp(-g)) * u))
    with cpu.use(name):
        y = expert_ffn(x, slabs, layout, choice, weights)
    np.testing.assert_allclose(y, expected, rtol=0, atol=2e-4 * np.abs(expected).max())


@pytest.mark.skipif(not IMPLEMENTATIONS, reason="the C extension is not built")
def test_bad_arguments_raise():
    rng = np.random.default_rng(5)
    layout = SlabLayout(quant.Format.parse("int4_g64"), 64, 32)
    slabs = [random_slab(rng, layout) for _ in range(2)]
    x, weights = np.ones((1, 64), np.float32), np.ones((1, 2), np.float32)
    choice = np.array([[0, 1]], np.int32)
    expert_ffn(x, slabs, layout, choice, weights)
    for bad in ([[0, 2]], [[-1, 0]]):
        with pytest.raises(ValueError, match="choice: found"):
            expert_ffn(x, slabs, layout, np.array(bad, np.int32), weights)
    with pytest.raises(ValueError, match="too few for its matrices"):
        expert_ffn(x, [slabs[0], slabs[1][:-1]], layout, choice, weights)
    with pytest.raises(TypeError, match="slab"):
        expert_ffn(x, [slabs[0], slabs[1].astype(np.float32)], layout, choice, weights)
    with pytest.raises(ValueError, match="expected slabs"):
        expert_ffn(x, [], layout, choice, weights)


def test_experts_of_one_and_of_many_tokens_share_a_pass():
    """Chunks are longer for single tokens, but not when any expert of the pass has several."""
    rng, layout = np.random.default_rng(5), SlabLayout(quant.FORMATS["int4_g64"], 160, 72)
    slabs = [rng.integers(0, 256, layout.nbytes, np.uint8) for _ in range(24)]
    for slab in slabs:
        for matrix in layout.views(slab):
            matrix.scales[:] = rng.uniform(0.01, 0.02, matrix.scales.shape)
    choice = np.concatenate([np.arange(4)[None], np.array([rng.permutation(23)[:4] + 1 for _ in range(40)])])
    x = rng.standard_normal((len(choice), 160)).astype(np.float32)
    weights = rng.random(choice.shape).astype(np.float32)
    with cpu.use("numpy"):
        expected = expert_ffn(x, slabs, layout, choice.astype(np.int32), weights)
    for _ in range(5):
        np.testing.assert_array_equal(expert_ffn(x, slabs, layout, choice.astype(np.int32), weights), expected)
