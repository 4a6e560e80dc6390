"""One sequence's drafters put together: what to verify in the next pass, and what that pass teaches."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from glm_gpu.grammar import Constraint
from glm_gpu.speculative.acceptance import MAX_WIDTH
from glm_gpu.speculative.draft import Draft, Drafter
from glm_gpu.speculative.mtp import MtpDrafter, draft_together
from glm_gpu.speculative.ngram import NgramDrafter
from glm_gpu.speculative.width import Offer, WidthPolicy

SpeculateMode = Literal["auto", "off", "mtp", "ngram", "grammar"]
# Tokens that a grammar forces are right for certain, so more of them than guesses go into a pass.
MAX_FORCED = 64
# A first step over more waiting rows a sequence says nothing about what a draft usually takes.
_MAX_TIMED_PENDING = 16


class Speculator:
    """Drafts for one sequence: tokens that its grammar forces, then those of one drafter, as many as pay.

    What is free to guess (repetition) is guessed and compared with what came, verified or not, so its acceptance is
    known while it is off and it is soon back when text repeats.

    Args:
        mode: which drafters work: all of them, none, or one alone.
        policy: shared by all sequences of an engine.
        mtp: this sequence's multi-token drafter, where the checkpoint has the layer and it is wanted.
    """

    def __init__(self, mode: SpeculateMode, policy: WidthPolicy, mtp: MtpDrafter | None = None) -> None:
        assert mode != "mtp" or mtp is not None
        self.policy = policy
        self._mtp = mtp if mode in ("auto", "mtp") else None
        self._ngram = NgramDrafter() if mode in ("auto", "ngram") else None
        self._uses_forced = mode in ("auto", "grammar")
        self._drafters: list[Drafter] = [drafter for drafter in (self._mtp, self._ngram) if drafter is not None]
        self._forced: list[int] = []
        self._to_judge: list[Draft] = []

    def observe(self, token_ids: Sequence[int], hidden: np.ndarray) -> None:
        """See `Drafter.observe`."""
        if self._mtp is not None:
            self._mtp.is_idle = not self.policy.wants_costly
        for drafter in self._drafters:
            drafter.observe(token_ids, hidden)

    def cut(self, length: int) -> int:
        """See `Drafter.cut`."""
        return min((drafter.cut(length) for drafter in self._drafters), default=length)

    def skip_beginning(self, length: int) -> None:
        """The sequence begins with so many tokens that no drafter observed."""
        if self._mtp is not None:
            self._mtp.skip(length)

    def propose(self, ids: Sequence[int], limit: int, constraint: Constraint | None = None) -> list[int]:
        """`propose` for this sequence alone."""
        return propose([Turn(self, ids, limit, constraint)])[0]

    def learn(self, chosen_ids: Sequence[int]) -> None:
        """Compare the drafts of the last `propose` with the tokens that were chosen behind the last one."""
        for draft in self._to_judge:
            self.policy.judge(draft.source, draft.token_ids, chosen_ids[len(self._forced) :])

    def _offer(self, turn: "Turn", can_guess: bool) -> Offer:
        """What could be drafted behind the forced tokens, which are found here."""
        self._to_judge = []
        self._forced, limit = [], turn.limit
        if turn.constraint is not None and self._uses_forced and limit > 0:
            self._forced = turn.constraint.forced(min(limit, MAX_FORCED))
            limit -= len(self._forced)
        if limit < 1 or not can_guess:
            return Offer(0)
        free = None
        if self._ngram is not None:
            repeated = self._ngram.draft([*turn.ids, *self._forced] if self._forced else turn.ids, MAX_WIDTH)
            repeated = _valid(repeated, turn.constraint, self._forced)
            self._to_judge.append(repeated)
            free = (repeated.source, len(repeated.token_ids))
        # behind forced tokens the multi-token layer has no hidden state to go on
        if self._mtp is None or self._forced or not self._mtp.is_ready:
            return Offer(limit, free)
        return Offer(limit, free, "mtp", self._mtp.num_pending)


@dataclass(slots=True)
class Turn:
    """A sequence that goes on by a token in the next pass.

    Args:
        ids: all tokens so far, the last one not yet run through the model.
        limit: at most so many tokens behind it.
        constraint: what the answer must conform to, with all of its tokens pushed.
    """

    speculator: Speculator
    ids: Sequence[int]
    limit: int
    constraint: Constraint | None = None


def propose(turns: Sequence[Turn], can_guess: bool = True) -> list[list[int]]:
    """Tokens to verify behind each sequence's last one; none for a plain row.

    Args:
        turns: all sequences of the next pass; their speculators share a policy.
        can_guess: False for forced tokens alone.
    """
    policy = turns[0].speculator.policy
    can_guess = can_guess and not policy.rests(len(turns))
    offers = [turn.speculator._offer(turn, can_guess) for turn in turns]
    if not can_guess:
        return [turn.speculator._forced for turn in turns]
    choices = policy.choose(offers).choices
    guessing = [
        (turn, choice.width)
        for turn, offer, choice in zip(turns, offers, choices, strict=True)
        if choice.source is not None and choice.source == offer.costly
    ]
    guesses = dict(zip((id(turn) for turn, _ in guessing), _guess(policy, guessing), strict=True))
    proposed = []
    for turn, choice in zip(turns, choices, strict=True):
        speculator = turn.speculator
        if id(turn) in guesses:
            guess = guesses[id(turn)]
            speculator._to_judge.append(guess)
            proposed.append(guess.token_ids)
        else:
            guessed = speculator._to_judge[0].token_ids[: choice.width] if choice.width else []
            proposed.append(speculator._forced + guessed)
    return proposed


def _guess(policy: WidthPolicy, guessing: list[tuple[Turn, int]]) -> list[Draft]:
    """The multi-token layer's drafts for some sequences, as far as their grammars allow."""
    if not guessing:
        return []
    mtps = [turn.speculator._mtp for turn, _ in guessing]
    is_usual = sum(mtp.num_pending for mtp in mtps) <= _MAX_TIMED_PENDING * len(mtps)
    began = time.perf_counter()
    wanted = [(mtp, turn.ids, width) for mtp, (turn, width) in zip(mtps, guessing, strict=True)]
    drafts = draft_together(wanted) if len(wanted) > 1 else [mtp.draft(ids, width) for mtp, ids, width in wanted]
    if is_usual:
        policy.drafted(len(mtps), max(width for _, width in guessing), time.perf_counter() - began)
    return [_valid(draft, turn.constraint) for draft, (turn, _) in zip(drafts, guessing, strict=True)]


def _valid(draft: Draft, constraint: Constraint | None, before: Sequence[int] = ()) -> Draft:
    """A draft cut where the grammar forbids it behind the tokens before it."""
    if constraint is None or not draft.token_ids:
        return draft
    num_valid = constraint.num_valid([*before, *draft.token_ids]) - len(before)
    return Draft(draft.source, draft.token_ids[: max(num_valid, 0)])
