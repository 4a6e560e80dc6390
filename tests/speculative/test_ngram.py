"""Drafts by repetition."""

import numpy as np
import pytest

from glm_gpu.speculative import NgramDrafter
from glm_gpu.speculative.ngram import MAX_MATCH


def longest_match(ids: list[int]) -> tuple[int, int]:
    """Length and start of what follows, by looking at every place: the longest match, then the latest."""
    best = (0, 0)
    for start in range(1, len(ids)):
        length = 0
        while length < min(MAX_MATCH, start) and ids[start - 1 - length] == ids[-1 - length]:
            length += 1
        best = max(best, (length, start))
    return best


def test_the_longest_match_wins_then_the_latest():
    drafter = NgramDrafter()
    assert drafter.draft([1, 2, 3, 50, 9, 2, 3, 60, 7, 2, 3, 70, 1, 2, 3], 1).token_ids == [50]
    assert NgramDrafter().draft([1, 2, 3, 50, 9, 2, 3, 60, 8, 2, 3], 1).token_ids == [60]


def test_a_text_that_repeats_is_copied_round_and_round():
    assert NgramDrafter().draft([7, 8, 9, 7, 8, 9, 7], 8).token_ids == [8, 9, 7, 8, 9, 7, 8, 9]


@pytest.mark.parametrize("ids", [[1], [1, 2], [1, 2, 3, 4, 2]])
def test_without_a_match_of_two_there_is_no_draft(ids):
    assert NgramDrafter().draft(ids, 4).token_ids == []


def test_drafts_are_those_of_an_exhaustive_search_while_the_text_grows_and_is_cut():
    rng = np.random.default_rng(0)
    drafter, ids = NgramDrafter(), rng.integers(0, 12, 8).tolist()
    num_drafts = 0
    for _ in range(400):
        length, start = longest_match(ids)
        draft = drafter.draft(ids, 1)
        if length >= 2 and ids[:-1].count(ids[-1]) < 8:  # places of older matches are forgotten beyond that
            num_drafts += 1
            assert draft.token_ids == [ids[start]]
            assert int(draft.source.removeprefix("ngram ")) >= length
        ids += rng.integers(0, 12, rng.integers(1, 4)).tolist()
        if rng.random() < 0.3:
            length = int(rng.integers(4, min(len(ids), 40)))
            assert drafter.cut(length) == length
            ids = ids[:length] + rng.integers(0, 12, 2).tolist()
    assert num_drafts > 30
