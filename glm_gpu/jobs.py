"""What the scheduler is asked for, what it reports while it works, and what comes out."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from glm_gpu.answer import Answer
from glm_gpu.beginnings import Loading
from glm_gpu.errors import GlmGpuError, RequestError
from glm_gpu.grammar import Constraint
from glm_gpu.histogram import Histogram
from glm_gpu.pages import PagedCache
from glm_gpu.sampling import SamplingParams
from glm_gpu.speculative import Speculator, Turn

log = logging.getLogger(__name__)

FinishReason = Literal["stop", "length", "cancelled", "error"]
# A token's id and its natural log-probability before any sampling parameter.
Scored = tuple[int, float]

_LATENCIES = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


@dataclass(frozen=True)
class Request:
    """One answer to one prompt.

    Args:
        prompt_ids: at least one.
        max_tokens: most tokens of the answer; 0 only scores the prompt.
        eos_ids: tokens that end the answer and are no part of it.
        logit_bias: added to the logits of these ids.
        num_logprobs: alternatives to report with each token, 0 for the chosen one's value alone; None for none.
        scores_prompt: report the prompt's own log-probabilities too, with as many alternatives.
        constraint: at its beginning, used by this request only; with one, `eos_ids` should be its own.
        deadline_s: seconds from submission after which the request fails, whatever it has come to.
    """

    prompt_ids: Sequence[int]
    params: SamplingParams
    max_tokens: int
    eos_ids: frozenset[int] = frozenset()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    num_logprobs: int | None = None
    scores_prompt: bool = False
    constraint: Constraint | None = None
    deadline_s: float | None = None

    def check(self, vocab_size: int, context: int) -> None:
        """See that a model with so many tokens and positions could answer.

        Raises:
            RequestError: an empty prompt, ids outside the vocabulary, or more than the context holds.
        """
        num_prompt = len(self.prompt_ids)
        if not num_prompt:
            raise RequestError("the prompt has no tokens; give at least one")
        bad = next((i for i in (*self.prompt_ids, *self.logit_bias) if not 0 <= i < vocab_size), None)
        if bad is not None:
            raise RequestError(f"token id {bad} is outside the vocabulary of {vocab_size}; was another tokenizer used?")
        if self.max_tokens < 0 or num_prompt + self.max_tokens > context:
            raise RequestError(
                f"the prompt has {num_prompt} tokens, {self.max_tokens} more are asked for, and the context holds "
                f"{context}; shorten the prompt or ask for fewer"
            )


@dataclass(frozen=True)
class Token:
    """One token; `logprob` and `top`, best first, where the request asked for them (a prompt's first has none)."""

    id: int
    logprob: float | None = None
    top: tuple[Scored, ...] = ()


@dataclass
class Result:
    """How a request went. `error` is set where the finish reason is "error".

    Args:
        reused_tokens: of the prompt, those that were cached already.
        queue_s: until its first token was computed.
        first_token_s: from submission to the first token of the answer; None where none came.
        total_s: from submission to the end.
        prompt: the prompt's tokens, where their scores were asked for.
        end_token: the one that ended it, where it was an end token.
    """

    prompt_tokens: int
    reused_tokens: int = 0
    completion_tokens: int = 0
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    queue_s: float = 0.0
    first_token_s: float | None = None
    total_s: float = 0.0
    prompt: list[Token] = field(default_factory=list)
    end_token: Token | None = None


class Listener(Protocol):
    """Told of a request's course, on the scheduler's thread, one call at a time; must neither wait nor take long."""

    def prefilled(self, num_done: int, num_prompt: int) -> None:
        """So much of the prompt is computed."""

    def token(self, token: Token) -> bool:
        """The next token; True when it was the last one wanted."""

    def ended(self, result: Result) -> None:
        """Nothing more comes. Called just once."""


@dataclass
class Counts:
    """What the scheduler has done since it was made. Written by its thread, read by anyone.

    Args:
        ended: requests by finish reason.
        refused: requests that found the queue full.
        prompt_rows, answer_rows: computed in all passes, of prompts and behind them.
        preempted: times that an answer gave up its pages for an older one.
        retried: passes repeated because one failed.
        answer_steps: times that a pass gave an answer tokens.
        drafted_tokens, accepted_tokens: verified in them, and those that were what the model chose.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0
    completion_tokens: int = 0
    passes: int = 0
    prompt_rows: int = 0
    answer_rows: int = 0
    ended: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("stop", "length", "cancelled", "error"), 0))
    refused: int = 0
    preempted: int = 0
    retried: int = 0
    answer_steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    first_token_s: Histogram = field(default_factory=lambda: Histogram(_LATENCIES))
    token_gap_s: Histogram = field(default_factory=lambda: Histogram(_LATENCIES))
    queue_s: Histogram = field(default_factory=lambda: Histogram(_LATENCIES))

    @property
    def computed_rows(self) -> int:
        """Rows computed in all passes."""
        return self.prompt_rows + self.answer_rows


class Job:
    """A request under way. Only `cancel` is for other threads than the scheduler's."""

    def __init__(self, request: Request, listener: Listener, turn: int, wake: Callable[[], None]) -> None:
        self.request = request
        self.listener = listener
        self.turn = turn
        self.is_cancelled = False
        ids = list(request.prompt_ids)
        self.answer = Answer(ids, request.params, request.max_tokens, request.eos_ids, request.constraint)
        self.ids = self.answer.ids
        self.result = Result(len(self.ids))
        self.cache: PagedCache | None = None
        self.loading: Loading | None = None
        self.speculator: Speculator | None = None
        self.submitted_at = time.monotonic()
        self.last_token_at = 0.0
        self.ids_array = np.array(self.ids, np.int32)
        self._wake = wake

    def cancel(self) -> None:
        """End it before the next pass, queued or running; no token comes after that pass."""
        self.is_cancelled = True
        self._wake()

    @property
    def num_pending(self) -> int:
        """Tokens whose rows are still to be computed: many in prefill, one in decode."""
        return len(self.ids) - (self.cache.length if self.cache else 0)

    @property
    def is_answering(self) -> bool:
        """Whether its answer has begun."""
        return self.result.completion_tokens > 0

    @property
    def scores_prompt(self) -> bool:
        """Whether the logits of all the prompt's rows are still wanted."""
        return self.request.scores_prompt and not self.is_answering

    @property
    def takes_best(self) -> bool:
        """Whether of each row's logits nothing but the best token is wanted."""
        request = self.request
        is_scored = self.scores_prompt or request.num_logprobs is not None
        return self.answer.takes_best and not is_scored and not request.logit_bias

    @property
    def max_length(self) -> int:
        """Most tokens of prompt and answer together."""
        return self.result.prompt_tokens + self.request.max_tokens

    def turn_to_draft(self, max_drafts: int) -> Turn:
        """What drafts behind the last token may be, at most so many; none before the answer's first."""
        assert self.speculator is not None
        limit = min(self.answer.num_left - 1, max_drafts) if self.result.completion_tokens else 0
        return Turn(self.speculator, self.ids, limit, self.request.constraint)

    def observe(self, token_ids: Sequence[int], hidden: np.ndarray) -> None:
        """Show drafters what the cache now holds for good; where that fails, the answer goes on without drafts."""
        if self.speculator is not None:
            try:
                self.speculator.observe(token_ids, hidden)
            except (GlmGpuError, OSError, MemoryError) as error:
                self.stop_drafting(error)

    def stop_drafting(self, error: Exception) -> None:
        """Go on without drafts."""
        assert self.speculator is not None
        log.warning("drafting failed (%s); the answer goes on without", error)
        self.speculator = Speculator("off", self.speculator.policy)

    @property
    def is_late(self) -> bool:
        limit = self.request.deadline_s
        return limit is not None and time.monotonic() - self.submitted_at > limit
