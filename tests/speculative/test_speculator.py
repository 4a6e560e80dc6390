"""Drafters put together: which tokens are proposed, and what is learned from how they went."""

import pytest

from glm_gpu.speculative import Draft, Speculator, WidthPolicy

LOOP = [1, 2, 3, 4, 5, 6, 1, 2]  # 3, 4, 5, 6, 1, 2, ... follows


class StubConstraint:
    """Forces some tokens, then allows all below a limit."""

    def __init__(self, forced_ids: list[int], limit: int = 100) -> None:
        self.forced_ids, self.limit = forced_ids, limit

    def forced(self, limit: int) -> list[int]:
        return self.forced_ids[:limit]

    def num_valid(self, token_ids: list[int]) -> int:
        return next((n for n, token_id in enumerate(token_ids) if token_id >= self.limit), len(token_ids))


class StubMtp:
    """Drafts 50, 51, ...; counts how often it was asked."""

    num_pending, is_ready = 0, True

    def __init__(self) -> None:
        self.num_drafts = 0

    def observe(self, token_ids, hidden) -> None:
        pass

    def cut(self, length: int) -> int:
        return max(length - 1, 0)

    def draft(self, ids, width: int) -> Draft:
        self.num_drafts += 1
        return Draft("mtp", list(range(50, 50 + width)))


@pytest.fixture
def mtp():
    return StubMtp()


def test_off_proposes_nothing(mtp):
    assert Speculator("off", WidthPolicy(fixed_width=8), mtp).propose(LOOP, 8, StubConstraint([7])) == []


def test_forced_tokens_come_first_and_repetition_goes_on_behind_them(mtp):
    speculator = Speculator("auto", WidthPolicy(fixed_width=3), mtp)
    assert speculator.propose(LOOP, 20, StubConstraint([3, 4])) == [3, 4, 5, 6, 1]
    assert speculator.propose(LOOP, 4, StubConstraint([3, 4])) == [3, 4, 5, 6]
    assert speculator.propose(LOOP, 1, StubConstraint([3, 4])) == [3]
    assert mtp.num_drafts == 0


def test_repetition_is_preferred_and_the_layer_asked_where_there_is_none(mtp):
    speculator = Speculator("auto", WidthPolicy(fixed_width=2), mtp)
    assert speculator.propose(LOOP, 8) == [3, 4]
    assert speculator.propose([1, 2, 3], 8) == [50, 51]
    assert mtp.num_drafts == 1


def test_guesses_are_cut_where_the_grammar_forbids_them(mtp):
    speculator = Speculator("auto", WidthPolicy(fixed_width=4), mtp)
    assert speculator.propose(LOOP, 8, StubConstraint([], limit=5)) == [3, 4]
    assert speculator.propose([1, 2, 3], 8, StubConstraint([], limit=52)) == [50, 51]


def test_one_kind_alone_where_it_is_named(mtp):
    fixed = WidthPolicy(fixed_width=2)
    assert Speculator("ngram", fixed).propose([1, 2, 3], 8, StubConstraint([9])) == []
    assert Speculator("mtp", fixed, mtp).propose(LOOP, 8, StubConstraint([9])) == [50, 51]
    assert Speculator("grammar", fixed).propose(LOOP, 8, StubConstraint([9])) == [9]


def test_unverified_repetition_is_judged_too(mtp):
    policy = WidthPolicy()  # nothing timed yet: a plain pass
    speculator = Speculator("auto", policy, mtp)
    assert speculator.propose(LOOP, 8) == []
    speculator.learn([3])
    (source,) = policy.acceptance.counts
    assert [(depth.tried, depth.right) for depth in policy.acceptance.counts[source][:2]] == [(1, 1), (0, 0)]


def test_forced_tokens_are_proposed_in_passes_without_a_look_too(mtp):
    policy = WidthPolicy()
    policy.times(1).observe(1, 1.0)
    policy.times(1).observe(2, 9.0)
    speculator = Speculator("auto", policy, mtp)
    proposed = [speculator.propose(LOOP, 8, StubConstraint([3, 4] if n % 2 else [])) for n in range(60)]
    assert proposed == [[3, 4] if n % 2 else [] for n in range(60)]
    speculator.learn([3, 4, 5])
    assert not policy.acceptance.counts, "nothing was guessed"


def test_guesses_behind_forced_tokens_are_judged_by_what_came_behind_those():
    policy = WidthPolicy(fixed_width=3)
    speculator = Speculator("auto", policy)
    assert speculator.propose(LOOP, 8, StubConstraint([3, 4])) == [3, 4, 5, 6, 1]
    speculator.learn([3, 4, 5, 7])
    (source,) = policy.acceptance.counts
    assert [(depth.tried, depth.right) for depth in policy.acceptance.counts[source][:3]] == [(1, 1), (1, 0), (0, 0)]


def test_as_much_is_kept_as_every_drafter_can_keep(mtp):
    assert Speculator("auto", WidthPolicy(), mtp).cut(7) == 6
    assert Speculator("ngram", WidthPolicy()).cut(7) == 7
