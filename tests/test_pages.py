"""Pages under a cache: the same rows as a private cache, whoever shares them and wherever they lie."""

import numpy as np
import pytest
from small_models import open_model

from glm_gpu.batch import Batch
from glm_gpu.cache import CacheLayout, KVCache
from glm_gpu.errors import CapacityError
from glm_gpu.model.transformer import cache_layout
from glm_gpu.pages import PagedCache, PagePool
from glm_gpu.recipe import Recipe

LAYOUT = CacheLayout(({"latent": 64, "index_key": 32}, {"latent": 64}), is_bf16=False)
P = PagePool(LAYOUT, 1).page_tokens


def fill(cache, start, stop, seed):
    """Grow and write rows [start, stop) of every stream; the value tells seed, position and layer."""
    if isinstance(cache, PagedCache):
        cache.grow(stop)
    for layer, streams in enumerate(LAYOUT.widths):
        for name, width in streams.items():
            rows = (seed * 1e6 + layer + 10 * np.arange(start, stop))[:, None] + np.zeros(width)
            cache.write(layer, name, start, rows.astype(np.float32))
    cache.length = stop


def same_rows(one, other, stop):
    return all(
        np.array_equal(one.read(layer, name, stop), other.read(layer, name, stop))
        for layer, streams in enumerate(LAYOUT.widths)
        for name in streams
    )


@pytest.fixture
def pool():
    pool = PagePool(LAYOUT, 12 * P)
    yield pool
    pool.close()


def private(*parts):
    cache = KVCache(LAYOUT, 12 * P)
    for part in parts:
        fill(cache, *part)
    return cache


def test_rows_are_those_of_a_private_cache_and_views(pool):
    cache = PagedCache(pool, 5 * P)
    fill(cache, 0, P + 3, 1)
    fill(cache, P + 3, 3 * P, 1)
    assert same_rows(cache, private((0, 3 * P, 1)), 3 * P)
    assert np.shares_memory(cache.read(0, "latent", 5), cache.read(0, "latent", 3 * P))
    assert cache.read(0, "latent", 3 * P).flags.c_contiguous


def test_sequences_that_grow_in_turns_do_not_touch_each_other(pool):
    caches = [PagedCache(pool, 4 * P) for _ in range(3)]
    for start in range(0, 4 * P, P // 2):
        for seed, cache in enumerate(caches):
            fill(cache, start, start + P // 2, seed)
    for seed, cache in enumerate(caches):
        assert same_rows(cache, private((0, 4 * P, seed)), 4 * P)
    assert pool.num_free == 0
    with pytest.raises(CapacityError, match="12 pages"):
        PagedCache(pool, P).grow(1)


def test_shared_pages_are_stored_once_and_a_tail_is_copied(pool):
    first = PagedCache(pool, 4 * P)
    fill(first, 0, 2 * P + 5, 1)
    second = PagedCache(pool, 4 * P)
    second.share(first.pages[:2], (first.pages[2], 5))
    assert second.length == 2 * P + 5 and second.pages[:2] == first.pages[:2]
    assert pool.num_free == 12 - 4
    fill(first, 2 * P + 5, 3 * P, 1)
    fill(second, 2 * P + 5, 3 * P, 2)
    assert same_rows(first, private((0, 3 * P, 1)), 3 * P)
    assert same_rows(second, private((0, 2 * P + 5, 1), (2 * P + 5, 3 * P, 2)), 3 * P)
    first.release()
    assert same_rows(second, private((0, 2 * P + 5, 1), (2 * P + 5, 3 * P, 2)), 3 * P)
    second.release()
    assert pool.num_free == 12


@pytest.mark.parametrize("cut", [0, 3, P, P + 3, 2 * P])
def test_a_cut_inside_a_shared_page_leaves_the_other_sequence_as_it_was(pool, cut):
    first, second = PagedCache(pool, 4 * P), PagedCache(pool, 4 * P)
    fill(first, 0, 2 * P, 1)
    second.share(first.pages)
    second.truncate(cut)
    assert second.length == cut
    fill(second, cut, 3 * P, 2)
    assert same_rows(first, private((0, 2 * P, 1)), 2 * P)
    assert same_rows(second, private((0, cut, 1), (cut, 3 * P, 2)), 3 * P)
    first.release(), second.release()
    assert pool.num_free == 12


def test_a_refused_growth_or_share_loses_no_page(pool):
    first, second = PagedCache(pool, 12 * P), PagedCache(pool, 12 * P)
    fill(first, 0, 8 * P, 1)
    with pytest.raises(CapacityError):
        second.grow(5 * P)
    assert len(second.pages) == 4
    third = PagedCache(pool, 12 * P)
    with pytest.raises(CapacityError):
        third.share(first.pages[:2], (first.pages[2], 4))
    assert third.length == 0
    for cache in (first, second):
        cache.release()
    assert pool.num_free == 12


def test_a_context_of_100_000_tokens_takes_the_stated_bytes_a_token():
    layout = CacheLayout(({"latent": 576, "index_key": 128}, {"latent": 576}), is_bf16=True)
    pool = PagePool(layout, 100_000)
    cache = PagedCache(pool, 100_000)
    cache.grow(100_000)
    assert layout.bytes_per_token == 2 * (576 + 128 + 576)
    assert cache.nbytes - layout.bytes_per_token * 100_000 < pool.page_bytes
    pool.close()


@pytest.mark.parametrize("folder", ["tiny_glm", "tiny_olmoe"])
@pytest.mark.parametrize("is_bf16", [False, True])
def test_logits_have_the_bits_of_a_private_cache(oracle_dir, folder, is_bf16):
    model = open_model(oracle_dir / folder, Recipe.default())
    pool = PagePool(cache_layout(model.config, is_bf16), 2048)
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, 24).tolist()
    first, second, expected = PagedCache(pool, 512), PagedCache(pool, 512), model.new_cache(64, is_bf16)
    model.forward(Batch.of([(ids[:10], expected)], "prefill"))
    first.grow(10)
    model.forward(Batch.of([(ids[:10], first)], "prefill"))
    second.share([], (first.pages[0], 10))
    for cache in (first, second):
        cache.grow(24)
    logits = model.forward(Batch.of([(ids[10:], first), (ids[10:], second)], "prefill", all_logits=True)).logits
    alone = model.forward(Batch.of([(ids[10:], expected)], "prefill", all_logits=True)).logits
    assert np.array_equal(logits, np.concatenate([alone, alone]))
