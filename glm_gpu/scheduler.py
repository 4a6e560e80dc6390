"""Many conversations on one model: each pass takes a token of every running answer and a part of a waiting prompt."""

import itertools
import logging
import threading
import time
from collections.abc import Callable

import numpy as np

from glm_gpu.arrays import common_length
from glm_gpu.beginnings import Beginnings
from glm_gpu.conversations import ConversationStore
from glm_gpu.errors import CapacityError, GlmGpuError, OverloadedError
from glm_gpu.jobs import Counts, Job, Listener, Request
from glm_gpu.model.transformer import Transformer
from glm_gpu.pace import Pace
from glm_gpu.pages import PagedCache, PagePool
from glm_gpu.parts import Part, draft, lay_out, take
from glm_gpu.speculative import Speculator

log = logging.getLogger(__name__)

# Rows of a prompt whose logits are wanted too: at GLM's vocabulary 64 rows are 40 MB of them.
_SCORED_ROWS = 64
# What is asked back from experts' memory when an allocation failed.
_SHRINK_BYTES = 256 * 1024**2
# While conversations come from disk and nothing else is to do, deadlines are looked at so often.
_LOOK_S = 0.05


class Scheduler:
    """Runs requests on a thread of its own, or pass by pass with `step`. A context manager.

    A row's bits do not depend on what else is in its pass, so an answer is the one that its request gets alone.

    Order: a request's turn is the work done before it came, in rows, plus its own prompt's length; the smallest turn
    goes first, into the running set and in prefill. Short prompts so pass long ones, but only those that were waiting
    for less work than their own length: none waits for ever. Running answers get a token in every pass, and those of
    their drafts that come true; guesses are drafted only in passes without rows of prompts.

    Pages: answers take them as they grow. When none is left, the least recently used remembered ones go; then the
    request with the latest turn gives up its own, and waits to be computed again from where it was.

    Args:
        model: used by nobody else meanwhile.
        pool: holds at least `context` tokens; closed by the caller.
        context: positions of one sequence.
        max_running, max_queued: requests in passes, and waiting.
        max_rows: most rows of prompts in one pass.
        conversations: where beginnings may be found that are not in memory.
        make_speculator: drafts for a sequence of at most so many tokens, all by one policy; None for no drafts.

    Attributes:
        after_step: called on the scheduler's thread when all listeners were told of a step.
    """

    def __init__(
        self,
        model: Transformer,
        pool: PagePool,
        context: int,
        max_running: int = 32,
        max_queued: int = 256,
        max_rows: int = 512,
        conversations: ConversationStore | None = None,
        make_speculator: Callable[[int], Speculator] | None = None,
    ) -> None:
        assert pool.num_pages * pool.page_tokens >= context
        self.context = context
        self.max_running, self.max_queued = max_running, max_queued
        self.pool = pool
        self.beginnings = Beginnings(pool, conversations)
        self.tree = self.beginnings.tree
        self.counts = Counts()
        self.after_step: Callable[[], None] = lambda: None
        self._model = model
        self._make_speculator = make_speculator
        self._pace = Pace(max_rows)
        self._queue: list[Job] = []
        self._running: list[Job] = []
        self._changed = threading.Condition()
        self._is_closing = self._has_warned = False
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "Scheduler":
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def start(self) -> None:
        """Begin to work on a thread."""
        self._thread = threading.Thread(target=self._work, name="scheduler", daemon=True)
        self._thread.start()

    def close(self, drain_s: float = 0.0) -> None:
        """Take no more requests, give those there are `drain_s` seconds to end, and cancel what is left. Waits."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if self._thread is None:
            return
        self._thread.join(drain_s)
        with self._changed:
            for job in (*self._queue, *self._running):
                job.is_cancelled = True
            self._changed.notify_all()
        self._thread.join()
        self._thread = None

    def submit(self, request: Request, listener: Listener) -> Job:
        """Queue a request. Never waits.

        Raises:
            RequestError: an empty prompt, ids outside the vocabulary, or more than the context holds.
            OverloadedError: the queue is full, or the scheduler is closing.
        """
        request.check(self._model.config.vocab_size, self.context)
        with self._changed:
            if self._is_closing:
                raise OverloadedError("the server is shutting down; try again on another one or later")
            if len(self._queue) >= self.max_queued:
                self.counts.refused += 1
                raise OverloadedError(
                    f"{len(self._queue)} requests are waiting, the most there may be; try again in a few seconds"
                )
            turn = self.counts.computed_rows + len(request.prompt_ids)
            job = Job(request, listener, turn, self._notify)
            self._queue.append(job)
            self._changed.notify_all()
        return job

    def step(self) -> bool:
        """Run one pass, or wait for a conversation from disk where nobody has anything else; False when all is done."""
        self._drop_ended()
        self._admit()
        parts = self._compose()
        if parts:
            self._forward(parts)
        elif any(job.loading for job in self._running):
            with self._changed:
                if not any(job.loading.is_done for job in self._running if job.loading):
                    self._changed.wait(_LOOK_S)
            return True
        return bool(parts)

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not (self._queue or self._running):
                    if self._is_closing:
                        return
                    self._changed.wait()
            try:
                self.step()
            except Exception as error:
                log.exception("a pass failed outside the model; its requests are ended")
                for job in self._running.copy():
                    self._end(job, "error", error)
            self.after_step()

    def _drop_ended(self) -> None:
        with self._changed:
            dropped = [job for job in self._queue if job.is_cancelled or job.is_late]
            self._queue = [job for job in self._queue if job not in dropped]
        for job in (*dropped, *(j for j in self._running.copy() if j.is_cancelled or j.is_late)):
            if job.is_cancelled:
                self._end(job, "cancelled")
            else:
                message = f"the deadline of {job.request.deadline_s:g} s has passed"
                self._end(job, "error", OverloadedError(f"{message}; allow more time, or ask when there is less to do"))

    def _admit(self) -> None:
        """Move requests from the queue to the running set, while there is room for them and their prompts."""
        num_spare = self._num_spare_pages() if self._queue else 0
        with self._changed:
            for job in sorted(self._queue, key=lambda job: job.turn):
                num_needed = len(job.ids) // self.pool.page_tokens + 1
                if len(self._running) >= self.max_running or (self._running and num_needed > num_spare):
                    return
                self._queue.remove(job)
                self._running.append(job)
                num_spare -= num_needed

    def _num_spare_pages(self) -> int:
        """Pages that nobody uses, or would not once the tree forgot them, less what prompts will still take."""
        used = {page for job in self._running if job.cache for page in job.cache.pages}
        owed = sum(
            max(0, len(job.ids) // self.pool.page_tokens + 1 - (len(job.cache.pages) if job.cache else 0))
            for job in self._running
        )
        return self.pool.num_pages - len(used) - owed

    def _compose(self) -> list[Part]:
        """Who is in the next pass, with how many rows. Their caches have room for them."""
        parts: list[Part] = []
        # answers, and behind them prompts of which a row is left: those answer at once
        for job in sorted(self._running, key=lambda job: (not job.is_answering, job.turn)):
            if job.cache and not job.loading and job.num_pending == 1 and self._make_room(job, 1, parts):
                parts.append(Part(job, 1, is_prompt=not job.is_answering))
        num_answers, budget = sum(not part.is_prompt for part in parts), None
        for job in sorted(self._running, key=lambda job: job.turn):
            if job not in self._running or job in [part.job for part in parts]:
                continue
            if job.cache is None:
                if self._is_computed_beside(job, parts):
                    continue
                self._begin(job)
            if job.loading is not None:
                if not job.loading.is_done:
                    continue
                self._loaded(job)
            if budget is None:
                budget = self._pace.rows(num_answers, job.cache.length)
            if budget == 0:
                break
            num_rows = min(job.num_pending, budget, _SCORED_ROWS if job.scores_prompt else budget)
            if self._make_room(job, num_rows, parts):
                parts.append(Part(job, num_rows, is_prompt=job.num_pending > 1 or not job.is_answering))
                budget -= num_rows
        if self._make_speculator is not None:
            draft(parts, self._pace.max_rows)
        return parts

    def _is_computed_beside(self, job: Job, parts: list[Part]) -> bool:
        """Whether a request in this pass computes what this one could share a pass later."""
        if job.scores_prompt:
            return False
        known = self.tree.match(job.ids[:-1]).num_tokens
        others = [part.job for part in parts if part.is_prompt] + [other for other in self._running if other.loading]
        return any(common_length(job.ids_array, other.ids_array) - 1 > known for other in others)

    def _begin(self, job: Job) -> None:
        """Give a request a cache, with what is known of its tokens; at least its last one is computed again."""
        job.cache = PagedCache(self.pool, self.context)
        if job.scores_prompt:
            job.result.prompt.clear()
        else:
            job.loading = self.beginnings.share(job.cache, job.ids[:-1], self._notify)
        if job.result.first_token_s is None:
            job.result.reused_tokens = 0 if job.loading else job.cache.length
            job.result.queue_s = time.monotonic() - job.submitted_at
        if job.loading is None:
            self._give_drafts(job)

    def _loaded(self, job: Job) -> None:
        """Go on with what came from disk, or without it."""
        self.beginnings.loaded(job.loading, job.ids[:-1])
        job.loading = None
        self._give_drafts(job)
        if job.result.first_token_s is None:
            job.result.reused_tokens = job.cache.length

    def _give_drafts(self, job: Job) -> None:
        if self._make_speculator is not None:
            job.speculator = self._make_speculator(job.max_length)
            job.speculator.skip_beginning(job.cache.length)

    def _make_room(self, job: Job, num_rows: int, parts: list[Part]) -> bool:
        """Get pages for a request's next rows; False when it had to give up its own instead."""
        assert job.cache is not None
        while True:
            length = job.cache.length + num_rows
            try:
                job.cache.grow(length)
                return True
            except CapacityError:
                num_missing = -(-(length - job.cache.capacity) // self.pool.page_tokens)
                if self.tree.evict(num_missing):
                    continue
            in_pass = [part.job for part in parts]
            later = [j for j in self._running if j.cache and j.turn >= job.turn and j not in in_pass]
            victim = max(later, key=lambda j: j.turn)
            self._preempt(victim)
            if victim is job:
                return False

    def _preempt(self, job: Job) -> None:
        self.counts.preempted += 1
        self._release(job)
        self._running.remove(job)
        with self._changed:
            self._queue.append(job)

    def _release(self, job: Job) -> None:
        """Leave a request's pages to the tree."""
        if job.loading is not None:
            job.loading.give_up()
            job.loading = None
        if job.cache is not None:
            self.tree.insert(job.ids[: job.cache.length], job.cache.pages)
            job.cache.release()
            job.cache = job.speculator = None

    def _forward(self, parts: list[Part]) -> None:
        """Run a pass and hand on its tokens. If it fails, each of its requests alone: only those that fail end."""
        try:
            outputs = self._run(parts)
        except Exception as error:
            if len(parts) > 1:
                log.warning("a pass of %d requests failed (%s); each is tried alone", len(parts), error)
                self.counts.retried += 1
                for part in parts:
                    self._forward([part])
                return
            job = parts[0].job
            if not isinstance(error, GlmGpuError | OSError | MemoryError):
                log.exception("the model failed on a request")
            if not isinstance(error, MemoryError):
                self._end(job, "error", error)
                return
            self.counts.retried += 1
            freed = self._model.store.shrink(_SHRINK_BYTES)
            log.warning("out of memory; %d bytes of experts were given back and the pass is repeated", freed)
            try:
                outputs = self._run(parts)
            except Exception as again:
                self._end(job, "error", again)
                return
        for part, logits, hidden in outputs:
            try:
                reason = take(part, logits, hidden, self.counts)
            except Exception as error:
                if not isinstance(error, GlmGpuError):
                    log.exception("a request failed behind the model")
                self._end(part.job, "error", error)
            else:
                if reason is not None:
                    self._end(part.job, reason)

    def _run(self, parts: list[Part]) -> list[tuple[Part, np.ndarray, np.ndarray]]:
        """One pass: for each request the logits that it wanted, as `take` has them, and its rows' hidden states.

        Drafts are run, but not yet counted as cached.
        """
        prompts = [(part, part.job.cache.length) for part in parts if part.is_prompt]
        num_prefill, num_answers = sum(part.num_rows for part, _ in prompts), len(parts) - len(prompts)
        batch, wanted = lay_out(parts)
        began = time.perf_counter()
        output = self._model.forward(batch)
        seconds, num_rows = time.perf_counter() - began, len(batch.token_ids)
        self._pace.record(seconds, num_answers, num_prefill, prompts[0][1] if prompts else 0)
        if not prompts and (speculator := parts[0].job.speculator) is not None:
            speculator.policy.times(num_answers).observe(num_rows, seconds)
        self.counts.passes += 1
        self.counts.prompt_rows += num_prefill
        self.counts.answer_rows += num_rows - num_prefill
        for part in parts:
            part.job.cache.rewind(part.job.cache.length - len(part.drafted_ids))
        for part, before in prompts:
            job = part.job
            # what a page holds is told when it is full, for a look at all ids takes a while
            if not job.num_pending or before // self.pool.page_tokens != job.cache.length // self.pool.page_tokens:
                self.tree.insert(job.ids[: job.cache.length], job.cache.pages)
            self._tell_progress(job)
        stops = itertools.accumulate(len(rows) for rows in wanted)
        return [
            (part, output.choices[stop - len(rows) : stop], output.hidden[span.rows])
            for part, span, rows, stop in zip(parts, batch.spans, wanted, stops, strict=True)
        ]

    def _tell_progress(self, job: Job) -> None:
        try:
            job.listener.prefilled(min(job.cache.length, job.result.prompt_tokens), job.result.prompt_tokens)
        except Exception:
            log.exception("a listener failed; its request is cancelled")
            job.is_cancelled = True

    def _end(self, job: Job, reason: str, error: Exception | None = None) -> None:
        """Take a request out of the running set, or of nothing if it was queued, and tell its listener."""
        result = job.result
        result.finish_reason, result.error = reason, error
        result.total_s = time.monotonic() - job.submitted_at
        self._check_drafts(job)
        self._release(job)
        if job in self._running:
            self._running.remove(job)
        counts = self.counts
        counts.ended[reason] += 1
        counts.prompt_tokens += result.prompt_tokens
        counts.reused_tokens += result.reused_tokens
        counts.queue_s.record(result.queue_s)
        try:
            job.listener.ended(result)
        except Exception:
            log.exception("a listener failed at the end of its request")

    def _check_drafts(self, job: Job) -> None:
        """Say once in the log that the multi-token layer guesses implausibly badly."""
        warning = job.speculator and job.speculator.policy.warning
        if warning and not self._has_warned:
            self._has_warned = True
            log.warning(warning)
