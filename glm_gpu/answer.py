"""One answer as it grows: each token chosen from logits, and when it ends."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from glm_gpu.grammar import Constraint
from glm_gpu.sampling import SamplingParams, found_elsewhere, make_rng, sample

FinishReason = Literal["stop", "length"]


@dataclass
class GenerationStats:
    """What one answer took, as far as it was handed out.

    `reused_tokens` of the prompt were already cached. `num_passes` went through the model after the prompt; they
    verified `drafted_tokens`, of which `accepted_tokens` were what the model chose.
    """

    prompt_tokens: int
    reused_tokens: int = 0
    completion_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    num_passes: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    finish_reason: FinishReason | None = None

    @property
    def prefill_tok_s(self) -> float:
        """Prompt tokens a second, those that were already cached not counted."""
        return (self.prompt_tokens - self.reused_tokens) / self.prefill_s if self.prefill_s else 0.0

    @property
    def decode_tok_s(self) -> float:
        """Tokens a second after the first, which prefill yields."""
        return (self.completion_tokens - 1) / self.decode_s if self.decode_s and self.completion_tokens > 1 else 0.0

    @property
    def tokens_per_pass(self) -> float:
        """Tokens that a pass after the prompt gave on average: 1 without speculation."""
        return (self.num_passes + self.accepted_tokens) / self.num_passes if self.num_passes else 1.0


class Answer:
    """An answer and all that decides its next token.

    Args:
        ids: the prompt; grows by the answer's tokens.
        max_tokens: the answer ends at so many.
        end_ids: tokens that end it; they are chosen, but no part of it.
        constraint: what it must conform to; it ends once that is complete.
    """

    def __init__(
        self,
        ids: list[int],
        params: SamplingParams,
        max_tokens: int,
        end_ids: frozenset[int] = frozenset(),
        constraint: Constraint | None = None,
    ) -> None:
        self.ids, self.constraint = ids, constraint
        self.stats = GenerationStats(len(ids))
        self.finish_reason: FinishReason | None = None
        self._params, self._max_tokens, self._end_ids = params, max_tokens, end_ids
        self._rng = make_rng(params.seed)

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def num_left(self) -> int:
        """Tokens that may still come."""
        return self._max_tokens - (len(self.ids) - self.stats.prompt_tokens)

    @property
    def takes_best(self) -> bool:
        """Whether the token with the best logit is what is chosen, whatever the others are."""
        return self._params.is_greedy and not self._params.has_penalties and self.constraint is None

    def choose(self, logits: np.ndarray) -> int:
        """The next token, appended unless it ends the answer. Draws one number, or none when greedy.

        Args:
            logits: [V] f32, those behind the last token; or, where it `takes_best`, that token's id alone.
        """
        assert not self.is_finished
        if np.ndim(logits) == 0:
            assert self.takes_best
            token_id = found_elsewhere(int(logits))
        else:
            if self.constraint is not None:
                logits = self.constraint.mask(logits)
            token_id = sample(logits, self._params, self.ids, self._rng, self.stats.prompt_tokens)
        if token_id in self._end_ids:
            self.finish_reason = "stop"
            return token_id
        self.ids.append(token_id)
        if self.constraint is not None:
            self.constraint.push(token_id)
        if self.constraint is not None and self.constraint.is_complete:
            self.finish_reason = "stop"
        elif self.num_left == 0:
            self.finish_reason = "length"
        return token_id

    def verify(self, drafted_ids: Sequence[int], logits: np.ndarray) -> list[int]:
        """Choose token after token as long as the drafts are what is chosen, and one more.

        Each token is chosen from the same logits, with the same history and the same draw as without drafts, so the
        answer is the same token for token, greedy or sampled with a seed. For sampling this is rejection sampling: a
        draft x is kept with probability p(x), and when it is not, the token that takes its place is distributed as p
        without x.

        Args:
            drafted_ids: K tokens that were run behind the last one.
            logits: [K + 1, V] f32, behind the last token and behind each draft; or [K + 1] best ids, as in `choose`.

        Returns:
            The tokens chosen, one that ends the answer included: at least 1, at most K + 1.

        Source: Leviathan et al., speculative decoding (arXiv 2211.17192), with drafts that are certain of their token.
        """
        assert len(logits) == len(drafted_ids) + 1
        chosen_ids: list[int] = []
        for row, behind in enumerate(logits):
            chosen_ids.append(self.choose(behind))
            if self.is_finished or row == len(drafted_ids) or chosen_ids[-1] != drafted_ids[row]:
                break
        return chosen_ids
