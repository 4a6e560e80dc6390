"""Drawn routing is as skewed and as repetitive as was published of GLM-5.2."""

import json
from functools import lru_cache

import numpy as np
import pytest

from glm_gpu.predict.routing import (
    PROFILE,
    Router,
    learned_heat,
    popularity_of,
    published_profile,
    routings,
)
from glm_gpu.tiers.replay import LeastRecentlyUsed, replay
from glm_gpu.tiers.trace import Trace, TraceHeader

PUBLISHED = json.loads(PROFILE.read_text(encoding="utf-8"))["published"]
NUM_LAYERS, NUM_EXPERTS, EXPERTS_PER_TOK = 12, 256, 8


@lru_cache
def drawn(num_subjects: int, num_tokens: int) -> np.ndarray:
    """[subjects * tokens, layers, K], as the published texts were: ten of 127 tokens."""
    router = Router(published_profile(), (NUM_LAYERS, NUM_EXPERTS), EXPERTS_PER_TOK, seed=3)
    parts = []
    for _ in range(num_subjects):
        router.begin_subject()
        parts.append(router.draw(num_tokens))
    return np.concatenate(parts)


def test_the_hottest_experts_take_the_published_share():
    ids = drawn(10, 127)
    counts = np.stack([np.bincount(ids[:, n].ravel(), minlength=NUM_EXPERTS) for n in range(NUM_LAYERS)])
    covered = np.cumsum(-np.sort(-counts, axis=1), axis=1) / counts.sum(axis=1, keepdims=True)
    for number, share in PUBLISHED["coverage"]["figures"].items():
        assert covered[:, int(number) - 1].mean() == pytest.approx(share, abs=0.02), number


def test_a_cache_hits_as_often_as_published():
    ids, layers = drawn(10, 127)[:127], list(range(NUM_LAYERS))
    header = TraceHeader("", NUM_LAYERS, NUM_EXPERTS, EXPERTS_PER_TOK, (10,) * NUM_LAYERS)
    warm = routings(ids[:32], layers, "prefill", 1) + routings(ids[32:], layers, "decode", 1)
    for number, share in PUBLISHED["lru"]["figures"].items():
        slots = round(float(number) * NUM_LAYERS)
        found = replay(Trace(header, warm, False), LeastRecentlyUsed(header), 10 * slots).hit_rate("decode")
        assert found == pytest.approx(share, abs=0.06), number


def test_the_same_seed_draws_the_same_and_another_does_not():
    def ids(seed: int) -> np.ndarray:
        return Router(published_profile(), (2, 32), 4, seed).draw(5)

    assert np.array_equal(ids(1), ids(1)) and not np.array_equal(ids(1), ids(2))


def test_a_tokens_experts_are_distinct():
    assert all(len(set(row)) == EXPERTS_PER_TOK for row in drawn(10, 127)[:50].reshape(-1, EXPERTS_PER_TOK).tolist())


def test_popularity_follows_a_users_heat():
    uses = np.full((1, 64), 0.05)
    uses[0, :4] = 0.9
    profile = published_profile()
    popularity = popularity_of(uses, profile.spread)
    router = Router(profile, (1, 64), 8, seed=0, popularity=popularity)
    found = np.zeros(64)
    for _ in range(60):
        router.begin_subject()
        found += np.bincount(router.draw(20).ravel(), minlength=64) / 1200
    assert found[:4].min() > 0.7 > 0.2 > found[4:].max()
    alike = popularity_of(np.full((2, 3), 0.1), 1.0)
    assert (alike == alike[0, 0]).all()


def test_learned_heat_knows_what_is_popular_but_not_the_next_text():
    router = Router(published_profile(), (2, 64), 8, seed=0)
    heat = learned_heat(router, [1, 2], 4, 64)
    assert heat.clock.tolist() == [0, 256, 256, 0]
    rates, _ = heat.rates(np.array([1, 2]))
    assert np.corrcoef(rates.ravel(), router.popularity.ravel())[0, 1] > 0.5


def test_passes_hold_every_token_once_in_order():
    ids = np.arange(7 * 2 * 3).reshape(7, 2, 3)
    found = routings(ids, [4, 9], "prefill", 3)
    assert [(r.layer, len(r.ids)) for r in found] == [(4, 3), (9, 3), (4, 3), (9, 3), (4, 1), (9, 1)]
    assert np.array_equal(np.concatenate([r.ids for r in found if r.layer == 9]), ids[:, 1])
