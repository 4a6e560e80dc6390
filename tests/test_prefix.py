"""The tree of cached beginnings: finds the longest, shares whole pages, forgets the oldest first."""

import numpy as np
import pytest
from toy_model import LAYOUT

from glm_gpu.pages import PagePool
from glm_gpu.prefix import PrefixTree

P = PagePool(LAYOUT, 1).page_tokens


@pytest.fixture
def pool():
    pool = PagePool(LAYOUT, 64 * P)
    yield pool
    pool.close()


@pytest.fixture
def remember(pool):
    """remember(tree, ids) -> pages, which only the tree still uses."""

    def call(tree, ids):
        pages = [pool.take() for _ in range(-(-len(ids) // P))]
        tree.insert(ids, pages)
        for page in pages:
            pool.release(page)
        return pages

    return call


def ids(*parts):
    """Token ids from (count, seed) parts."""
    return [i for count, seed in parts for i in np.random.default_rng(seed).integers(0, 50, count).tolist()]


def test_nothing_is_found_in_an_empty_tree_or_for_other_tokens(pool, remember):
    tree = PrefixTree(pool)
    assert tree.match(ids((5, 1))).num_tokens == 0
    remember(tree, [1] * 9)
    assert tree.match([2, 1, 1]).num_tokens == 0


@pytest.mark.parametrize("common", [1, P - 1, P, P + 1, 2 * P, 2 * P + 7])
def test_the_longest_common_beginning_is_found_to_the_token(pool, remember, common):
    tree = PrefixTree(pool)
    pages = remember(tree, ids((common, 1), (3 * P - common, 2)))
    remember(tree, [99] * P)
    match = tree.match([*ids((common, 1)), 77, 78])
    assert match.num_tokens == common
    assert match.pages == pages[: common // P]
    assert match.tail == ((pages[common // P], common % P) if common % P else None)


def test_a_longer_sequence_takes_the_place_of_its_beginning(pool, remember):
    tree = PrefixTree(pool)
    remember(tree, ids((P + 5, 1)))
    remember(tree, ids((P + 5, 1), (4, 2)))
    assert tree.num_pages == 2
    remember(tree, ids((P + 2, 1)))
    assert tree.num_pages == 2 and pool.num_free == 62
    assert tree.match(ids((P + 5, 1), (4, 2))).num_tokens == P + 9


def test_eviction_takes_the_least_recently_used_and_never_a_page_in_use(pool, remember):
    tree = PrefixTree(pool)
    old = remember(tree, ids((2 * P, 1)))
    remember(tree, ids((2 * P, 2)))
    pool.retain(old[1])
    tree.match(ids((2 * P, 1)))
    assert tree.evict(1) == 1
    assert tree.match(ids((2 * P, 2))).num_tokens == P
    assert tree.evict(10) == 1  # the rest hangs on the page in use
    pool.release(old[1])
    assert tree.evict(10) == 2
    assert tree.num_pages == 0 and pool.num_free == 64


def test_sequences_come_whole_and_latest_first(pool, remember):
    tree = PrefixTree(pool)
    first, second = ids((P, 1), (9, 2)), ids((P, 1), (P, 3))
    remember(tree, first)
    pages = remember(tree, second)
    assert [found for found, _ in tree.sequences()] == [second, first]
    assert tree.sequences()[0][1][1] == pages[1]
    tree.clear()
    assert pool.num_free == 64
