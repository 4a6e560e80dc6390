"""What is kept: worth by rates, and the order in which experts are given up."""

from functools import partial

import numpy as np

from glm_gpu.tiers.heat import Heat
from glm_gpu.tiers.policy import FAST_SHARE, Ranking, layer_worth, worth


def counted(num_layers: int, num_experts: int, num_tokens: int, experts_per_tok: int = 4) -> Heat:
    rng, heat = np.random.default_rng(0), Heat(num_layers, num_experts)
    for layer in range(num_layers):
        ids = np.array([rng.permutation(num_experts)[:experts_per_tok] for _ in range(num_tokens)], np.int32)
        heat.count(layer, ids, "decode")
    return heat


def test_worth_mixes_both_rates():
    heat = counted(3, 16, 40)
    slow, fast = heat.rates()
    np.testing.assert_allclose(worth(heat), (1 - FAST_SHARE) * slow + FAST_SHARE * fast, rtol=1e-12)


def test_ranking_gives_up_offered_experts_in_the_order_of_their_worth():
    heat = counted(4, 16, 40)
    ranking = Ranking(partial(layer_worth, heat), [1, 3])
    assert ranking.least() is None
    for layer in (1, 3):
        ranking.offer(layer, range(16))
    ranking.withdraw(3, [0, 7])
    given_up = []
    while (least := ranking.least()) is not None:
        layer, expert, value = least
        assert value == worth(heat)[layer, expert]
        assert ranking.give_up() == (layer, expert)
        given_up.append((layer, expert))
    assert ranking.give_up() is None
    expected = [(layer, e) for layer in (1, 3) for e in range(16) if (layer, e) not in {(3, 0), (3, 7)}]
    assert given_up == sorted(expected, key=lambda key: worth(heat)[key])


def test_ranking_follows_heat_and_keeps_withdrawn_experts_out():
    heat = counted(2, 16, 40)
    ranking = Ranking(partial(layer_worth, heat), [0, 1])
    ranking.offer(0, range(16))
    ranking.offer(1, range(16))
    layer, expert, _ = ranking.least()
    for _ in range(200):
        heat.count(layer, np.array([[expert]]), "decode")
        ranking.update(layer)
    assert ranking.least()[:2] != (layer, expert)
    held = ranking.least()[1]
    ranking.withdraw(layer, [held])
    heat.count(layer, np.array([[expert]]), "decode")
    ranking.update(layer)
    assert ranking.least()[:2] != (layer, held)
