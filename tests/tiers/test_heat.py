"""Heat against its definition, written out token by token."""

import numpy as np
import pytest

from glm_gpu.tiers.heat import Heat

NUM_EXPERTS = 8


def routing(rng: np.random.Generator, num_tokens: int, experts_per_tok: int = 3) -> np.ndarray:
    return np.array([rng.permutation(NUM_EXPERTS)[:experts_per_tok] for _ in range(num_tokens)], np.int32)


def defined_rate(tokens: list[np.ndarray], half_life: float) -> np.ndarray:
    """Weighted uses over weighted tokens, each token counting 2^(-age / half life)."""
    weights = 2.0 ** (-np.arange(len(tokens) - 1, -1, -1) / half_life)
    uses = np.zeros(NUM_EXPERTS)
    for ids, weight in zip(tokens, weights, strict=True):
        uses[ids] += weight
    return uses / weights.sum()


@pytest.mark.parametrize("half_lives", [(512.0, 16.0), (3.0, 1.0)])
def test_rates_are_weighted_uses_over_weighted_tokens_however_passes_are_cut(half_lives):
    rng = np.random.default_rng(1)
    heat, tokens = Heat(3, NUM_EXPERTS, half_lives), []
    # 1,550 tokens at a half-life of 1 pass the growth limit of 2^512 several times
    for num_tokens in (1, 1, 400, 1, 700, 1, 1, 440, 5):
        ids = routing(rng, num_tokens)
        heat.count(1, ids, "prefill" if num_tokens > 1 else "decode")
        tokens += list(ids)
    for found, half_life in zip(heat.rates(), half_lives, strict=True):
        np.testing.assert_allclose(found[1], defined_rate(tokens, half_life), rtol=1e-9)
        assert not found[[0, 2]].any()


def test_decayed_counts_a_use_half_after_a_half_life():
    heat = Heat(1, NUM_EXPERTS, (4.0, 1.0))
    heat.count(0, np.array([[5]]), "decode")
    assert heat.decayed(0)[5] == pytest.approx(1, rel=1e-12)
    for _ in range(4):
        heat.count(0, np.array([[2]]), "decode")
    assert heat.decayed(0)[5] == pytest.approx(0.5, rel=1e-12)
    assert heat.decayed(0)[2] == pytest.approx(sum(2 ** (-n / 4) for n in range(4)))


def test_phases_are_counted_apart_and_the_clock_takes_both():
    rng = np.random.default_rng(2)
    prompt, answer = routing(rng, 30), [routing(rng, 1) for _ in range(7)]
    heat = Heat(2, NUM_EXPERTS)
    heat.count(1, prompt, "prefill")
    for ids in answer:
        heat.count(1, ids, "decode")
    last = routing(rng, 1)  # a prompt of which all but a token was cached
    heat.count(1, last, "prefill")
    prompt = np.concatenate([prompt, last])
    np.testing.assert_array_equal(heat.uses["prefill"][1], np.bincount(prompt.ravel(), minlength=NUM_EXPERTS))
    np.testing.assert_array_equal(
        heat.uses["decode"][1], np.bincount(np.concatenate(answer).ravel(), minlength=NUM_EXPERTS)
    )
    assert heat.clock.tolist() == [0, 38]
    assert heat.tokens["prefill"].tolist() == [0, 31]


def test_last_use_is_the_last_token_that_chose_an_expert():
    heat = Heat(1, NUM_EXPERTS)
    heat.count(0, np.array([[1, 2], [2, 3], [1, 4]]), "prefill")
    heat.count(0, np.array([[4, 5]]), "decode")
    assert heat.last_use[0].tolist() == [-1, 2, 1, 1, 3, 3, -1, -1]


def test_a_token_of_several_layers_counts_as_layer_by_layer():
    rng = np.random.default_rng(3)
    together, apart = (Heat(4, NUM_EXPERTS, (3.0, 1.0)) for _ in range(2))
    for heat in (together, apart):
        heat.count(2, np.tile(np.arange(3), (600, 1)), "prefill")  # its clock runs ahead, past the growth limit
    for _ in range(600):
        layers, ids = np.array([3, 1, 2]), routing(rng, 3)
        together.count_layers(layers, ids[:, None], 1)
        for layer, chosen in zip(layers.tolist(), ids, strict=True):
            apart.count(layer, chosen[None], "decode")
    for name, counted in together.arrays().items():
        np.testing.assert_allclose(counted, apart.arrays()[name], rtol=1e-12, err_msg=name)


def test_rows_of_a_mixed_pass_count_as_what_they_are_layer_by_layer():
    """Two answers go on while five tokens of a prompt are computed."""
    rng = np.random.default_rng(4)
    together, apart = (Heat(3, NUM_EXPERTS) for _ in range(2))
    for _ in range(20):
        layers, ids = np.array([2, 1]), np.stack([routing(rng, 7), routing(rng, 7)])
        together.count_layers(layers, ids, 2)
        for layer, chosen in zip(layers.tolist(), ids, strict=True):
            apart.count(layer, chosen[:2], "decode")
            apart.count(layer, chosen[2:], "prefill")
    assert together.tokens["decode"].tolist() == [0, 40, 40] and together.tokens["prefill"].tolist() == [0, 100, 100]
    for name, counted in together.arrays().items():
        np.testing.assert_allclose(counted, apart.arrays()[name], rtol=1e-12, err_msg=name)
