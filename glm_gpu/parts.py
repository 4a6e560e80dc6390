"""A request's share of a pass: which rows, drafts behind them, and what the pass means for the request."""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from glm_gpu.batch import Batch
from glm_gpu.errors import CapacityError, GlmGpuError
from glm_gpu.jobs import Counts, FinishReason, Job, Request, Token
from glm_gpu.sampling import logprobs, top_logprobs
from glm_gpu.speculative import propose


@dataclass
class Part:
    """A request's share of a pass: its next rows, and drafts behind them, which are rows too.

    Args:
        is_prompt: the rows are of a prompt, or of an answer that is computed again; else it is one, of the last token.
    """

    job: Job
    num_rows: int
    is_prompt: bool
    drafted_ids: list[int] = field(default_factory=list)


def draft(parts: Sequence[Part], max_rows: int) -> None:
    """Add drafts to answers' rows, as far as there are pages for them; answers whose drafter fails go on without.

    Beside rows of prompts only tokens that a grammar forces are drafted: guesses pay where a pass is short.

    Args:
        parts: of one pass; their requests have speculators.
        max_rows: most drafts and rows of prompts.
    """
    answering = [part for part in parts if not part.is_prompt]
    if not answering:
        return
    num_prefill = sum(part.num_rows for part in parts if part.is_prompt)
    max_drafts = (max_rows - num_prefill) // len(answering)
    turns = [part.job.turn_to_draft(max_drafts) for part in answering]
    try:
        proposed = propose(turns, can_guess=num_prefill == 0)
    except (GlmGpuError, OSError, MemoryError) as error:
        for part in answering:
            part.job.stop_drafting(error)
        return
    for part, drafted_ids in zip(answering, proposed, strict=True):
        cache = part.job.cache
        with contextlib.suppress(CapacityError):
            cache.grow(cache.length + 1 + len(drafted_ids))
        part.drafted_ids = drafted_ids[: cache.capacity - cache.length - 1]


def lay_out(parts: Sequence[Part]) -> tuple[Batch, list[range]]:
    """The pass of these parts, and for each the rows whose logits it wants: those that choose, or a scored prompt's.

    Args:
        parts: those of answers first.
    """
    spans, wanted, start = [], [], 0
    for part in parts:
        job, done = part.job, part.job.cache.length
        rows = [*job.ids[done : done + part.num_rows], *part.drafted_ids]
        spans.append((rows, job.cache))
        stop, first = start + len(rows), start + part.num_rows - 1
        if job.scores_prompt:
            first = start
        elif done + part.num_rows < len(job.ids):
            first = stop
        wanted.append(range(first, stop))
        start = stop
    batch = Batch.of(spans, "prefill" if parts[-1].is_prompt else "decode", no_logits=True)
    logits_at = np.array([row for rows in wanted for row in rows], np.int32)
    num_decode = sum(1 + len(part.drafted_ids) for part in parts if not part.is_prompt)
    only_best = all(part.job.takes_best for part in parts)
    return replace(batch, logits_at=logits_at, num_decode=num_decode, only_best=only_best), wanted


def take(part: Part, logits: np.ndarray, hidden: np.ndarray, counts: Counts) -> FinishReason | None:
    """Score the prompt's rows where that is asked for; behind the last token, choose those that follow.

    Tokens are chosen as long as the drafts are what is chosen, and one more: see `Answer.verify`. Whatever ends the
    answer in between, its cache counts rows of its own tokens only.

    Args:
        logits: [n, V] f32, of the rows that were asked for: drafts, the row before them, a scored prompt's; or [n] best
            ids, where no job of the pass wants more.
        hidden: [T, D] f32, of the part's rows and drafts.

    Returns:
        Why the request ends now; None where it goes on.

    Raises:
        Exception: what its constraint or listener failed with.
    """
    job, drafted_ids, num_rows = part.job, part.drafted_ids, part.num_rows
    job.observe(job.ids[job.cache.length - num_rows : job.cache.length], hidden[:num_rows])
    if job.scores_prompt:
        _score_prompt(job, logits)
    if job.num_pending:
        return None
    if job.request.max_tokens == 0:
        return "length"
    chosen_ids: list[int] = []
    for row, drafted_id in zip(logits[len(logits) - 1 - len(drafted_ids) :], (*drafted_ids, None), strict=True):
        token_id, reason = _choose(job, row, counts)
        chosen_ids.append(token_id)
        if reason is not None or token_id != drafted_id:
            break
        job.cache.length += 1
    num_accepted = sum(chosen == drafted for chosen, drafted in zip(chosen_ids, drafted_ids, strict=False))
    counts.answer_steps += not part.is_prompt
    counts.drafted_tokens += len(drafted_ids)
    counts.accepted_tokens += num_accepted
    if job.speculator is not None:
        job.speculator.learn(chosen_ids)
        if reason is None:
            job.observe(drafted_ids[:num_accepted], hidden[num_rows : num_rows + num_accepted])
    return reason


def _choose(job: Job, logits: np.ndarray, counts: Counts) -> tuple[int, FinishReason | None]:
    """The next token of an answer, handed on, and whether that was the last.

    Args:
        logits: [V] f32, those behind the last token, or the best id alone.
    """
    request, result = job.request, job.result
    num_before = len(job.ids)
    token_id = job.answer.choose(_biased(logits, request))
    if len(job.ids) == num_before:
        result.end_token = _scored(token_id, logits, request.num_logprobs)
        return token_id, "stop"
    result.completion_tokens += 1
    counts.completion_tokens += 1
    _note_time(job, counts)
    if job.listener.token(_scored(token_id, logits, request.num_logprobs)):
        return token_id, "stop"
    return token_id, job.answer.finish_reason


def _score_prompt(job: Job, logits: np.ndarray) -> None:
    prompt, first = job.result.prompt, job.cache.length - len(logits)
    if not prompt:
        prompt.append(Token(job.ids[0]))
    for position, row in enumerate(logits, first + 1):
        if position < job.result.prompt_tokens:
            prompt.append(_scored(job.ids[position], row, job.request.num_logprobs or 0))


def _note_time(job: Job, counts: Counts) -> None:
    now = time.monotonic()
    if job.result.first_token_s is None:
        job.result.first_token_s = now - job.submitted_at
        counts.first_token_s.record(job.result.first_token_s)
    else:
        counts.token_gap_s.record(now - job.last_token_at)
    job.last_token_at = now


def _biased(logits: np.ndarray, request: Request) -> np.ndarray:
    """The logits with the request's bias added; a copy if there is any."""
    if request.logit_bias:
        logits = logits.copy()
        for token_id, bias in request.logit_bias.items():
            logits[token_id] += np.float32(bias)
    return logits


def _scored(token_id: int, logits: np.ndarray, num_alternatives: int | None) -> Token:
    if num_alternatives is None:
        return Token(token_id)
    values = logprobs(logits)
    return Token(token_id, float(values[token_id]), tuple(top_logprobs(values, num_alternatives)))
