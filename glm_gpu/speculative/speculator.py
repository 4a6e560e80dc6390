"""One sequence's drafters put together: what to verify in the next pass, and what that pass teaches."""

import time
from collections.abc import Sequence
from typing import Literal

import numpy as np

from glm_gpu.grammar import Constraint
from glm_gpu.speculative.draft import Draft, Drafter
from glm_gpu.speculative.mtp import MtpDrafter
from glm_gpu.speculative.ngram import NgramDrafter
from glm_gpu.speculative.width import MAX_WIDTH, WidthPolicy

SpeculateMode = Literal["auto", "off", "mtp", "ngram", "grammar"]
# Tokens that a grammar forces are right for certain, so more of them than guesses go into a pass.
MAX_FORCED = 64
# A first step over more waiting rows says nothing about what a draft usually takes.
_MAX_TIMED_PENDING = 16


class Speculator:
    """Drafts for one sequence: tokens that its grammar forces, then those of one drafter, as many as pay.

    What is free to guess (repetition) is guessed for every pass and compared with what came, verified or not, so its
    acceptance is known while it is off and it is back at once when text repeats.

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
        self._num_forced = 0
        self._to_judge: list[Draft] = []

    def observe(self, token_ids: Sequence[int], hidden: np.ndarray) -> None:
        """See `Drafter.observe`."""
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
        """Tokens to verify behind the last one, at most `limit`; none for a plain pass.

        Args:
            ids: all tokens so far, the last one not yet run through the model.
            constraint: what the answer must conform to, with all of its tokens pushed.
        """
        self._to_judge = []
        forced = constraint.forced(min(limit, MAX_FORCED)) if constraint and self._uses_forced else []
        self._num_forced = len(forced)
        limit -= len(forced)
        if limit < 1:
            return forced
        repeated = self._repeated([*ids, *forced])
        if constraint and repeated.token_ids:
            num_valid = constraint.num_valid([*forced, *repeated.token_ids]) - len(forced)
            repeated = Draft(repeated.source, repeated.token_ids[: max(num_valid, 0)])
        # behind forced tokens the multi-token layer has no hidden state to go on
        costly = ["mtp"] if self._mtp is not None and not forced else []
        choice = self.policy.choose([(repeated.source, len(repeated.token_ids))], costly, limit)
        guessed = self._guess(ids, choice.width, constraint) if choice.source == "mtp" else repeated
        self._to_judge = [repeated] if guessed is repeated else [repeated, guessed]
        return forced + guessed.token_ids[: choice.width]

    def learn(self, chosen_ids: Sequence[int]) -> None:
        """Compare the drafts of the last `propose` with the tokens that were chosen behind the last one."""
        for draft in self._to_judge:
            self.policy.acceptance.observe(draft.source, draft.token_ids, chosen_ids[self._num_forced :])

    def _repeated(self, ids: Sequence[int]) -> Draft:
        return Draft("ngram", []) if self._ngram is None else self._ngram.draft(ids, MAX_WIDTH)

    def _guess(self, ids: Sequence[int], width: int, constraint: Constraint | None) -> Draft:
        assert self._mtp is not None
        is_usual = self._mtp.num_pending <= _MAX_TIMED_PENDING
        began = time.perf_counter()
        draft = self._mtp.draft(ids, width)
        if is_usual:
            self.policy.drafted(draft.source, width, time.perf_counter() - began)
        if constraint is None:
            return draft
        return Draft(draft.source, draft.token_ids[: constraint.num_valid(draft.token_ids)])
