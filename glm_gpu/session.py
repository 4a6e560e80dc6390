"""One conversation: its tokens, its cache, and how they grow."""

import time
from collections.abc import Iterator, Sequence

import numpy as np

from glm_gpu.answer import Answer, GenerationStats
from glm_gpu.batch import Batch
from glm_gpu.cache import KVCache
from glm_gpu.errors import RequestError
from glm_gpu.grammar import Constraint
from glm_gpu.model.transformer import Transformer
from glm_gpu.sampling import SamplingParams
from glm_gpu.speculative import Speculator

# Rows of a prompt that go through the model at once: enough to use every weight many times, and few enough that their
# activations stay below 200 MB at GLM-5.2's widths.
PREFILL_CHUNK = 512


class Session:
    """A sequence that can be continued, cut back, and continued again.

    Args:
        model: shared with other sessions, one pass at a time.
        cache: empty, and no other session's.
        eos_ids: tokens that end an answer.
        speculator: drafts for this sequence; changes how many passes an answer takes, never the answer.
    """

    def __init__(self, model: Transformer, cache: KVCache, eos_ids: frozenset[int], speculator: Speculator) -> None:
        self._model = model
        self._cache = cache
        self._eos_ids = eos_ids
        self._speculator = speculator
        self._cached_ids: list[int] = []
        self.last: GenerationStats | None = None

    @property
    def cached_ids(self) -> list[int]:
        """The tokens whose keys and values are cached, in order."""
        return self._cached_ids

    @property
    def cache(self) -> KVCache:
        """Its rows, to be saved or, while it is empty, filled from a file."""
        return self._cache

    def resume(self, ids: Sequence[int]) -> None:
        """Go on from a cache that was filled with the rows of these tokens while the session was empty."""
        assert not self._cached_ids and self._cache.length == len(ids)
        self._cached_ids = list(ids)
        self._speculator.skip_beginning(len(ids))

    def reset(self) -> None:
        """Forget everything."""
        self._cut(0)

    def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        max_tokens: int | None = None,
        ignore_eos: bool = False,
        constraint: Constraint | None = None,
    ) -> Iterator[int]:
        """The answer to a prompt, token by token; `last` tells how it went.

        What the prompt has in common with the cached tokens is not computed again, except its last token, whose logits
        are needed. May be abandoned at any token; the session then holds the prompt and what was computed.

        Args:
            prompt_ids: the whole prompt, what earlier calls fed or yielded included.
            max_tokens: at most so many tokens; None or too many: as many as the context has room for.
            ignore_eos: treat end tokens as any other. Otherwise they end the answer and are not yielded.
            constraint: what the answer must conform to, at its beginning; it alone then decides where the answer may
                end, whatever `ignore_eos` says.

        Raises:
            RequestError: the prompt is empty, has ids outside the vocabulary, or leaves no room in the context; later,
                the constraint cannot be followed.
        """
        room = self._cache.max_length - len(prompt_ids)
        self._check(prompt_ids, room, max_tokens)
        end_ids = constraint.end_ids if constraint else frozenset() if ignore_eos else self._eos_ids
        max_tokens = min(room, max_tokens or room)
        return self._generate(Answer(list(prompt_ids), params, max_tokens, end_ids, constraint))

    def _check(self, prompt_ids: Sequence[int], room: int, max_tokens: int | None) -> None:
        vocab_size = self._model.config.vocab_size
        if not prompt_ids:
            raise RequestError("the prompt has no tokens; give at least one")
        if not all(0 <= i < vocab_size for i in prompt_ids):
            bad = next(i for i in prompt_ids if not 0 <= i < vocab_size)
            raise RequestError(f"token id {bad} is outside the vocabulary of {vocab_size}; was another tokenizer used?")
        if room < 1:
            raise RequestError(
                f"the prompt has {len(prompt_ids)} tokens and the context holds {self._cache.max_length}, one of them "
                "for the answer; shorten the prompt or raise --context"
            )
        if max_tokens is not None and max_tokens < 1:
            raise RequestError(f"max_tokens is {max_tokens}, expected at least 1")

    def _generate(self, answer: Answer) -> Iterator[int]:
        self._cut(min(common_prefix(self._cached_ids, answer.ids), len(answer.ids) - 1))
        stats = self.last = answer.stats
        stats.reused_tokens = len(self._cached_ids)
        began = time.perf_counter()
        logits = self._prefill(answer.ids[len(self._cached_ids) :], answer.takes_best)
        stats.prefill_s = time.perf_counter() - began
        answer.choose(logits)
        while True:
            while (num_shown := stats.prompt_tokens + stats.completion_tokens) < len(answer.ids):
                stats.completion_tokens += 1
                if num_shown + 1 == len(answer.ids):
                    stats.finish_reason = answer.finish_reason
                yield answer.ids[num_shown]
            stats.finish_reason = answer.finish_reason
            if answer.is_finished:
                return
            began = time.perf_counter()
            self._decode(answer)
            stats.decode_s += time.perf_counter() - began

    def _prefill(self, ids: list[int], only_best: bool) -> np.ndarray:
        """Run a prompt's new tokens; what is chosen from behind the last one."""
        for start in range(0, len(ids), PREFILL_CHUNK):
            chunk = ids[start : start + PREFILL_CHUNK]
            is_last = start + PREFILL_CHUNK >= len(ids)
            batch = Batch.of([(chunk, self._cache)], "prefill", no_logits=not is_last, only_best=only_best)
            output = self._model.forward(batch)
            self._keep(chunk, output.hidden)
        return output.choices[0]

    def _decode(self, answer: Answer) -> None:
        """One pass over the last token and the drafts behind it; the answer grows by one token at least, or ends."""
        num_before, stats = len(answer.ids), answer.stats
        drafted_ids = self._speculator.propose(answer.ids, answer.num_left - 1, answer.constraint)
        rows = [answer.ids[-1], *drafted_ids]
        began = time.perf_counter()
        batch = Batch.of([(rows, self._cache)], "decode", all_logits=True, only_best=answer.takes_best)
        output = self._model.forward(batch)
        self._speculator.policy.times(1).observe(len(rows), time.perf_counter() - began)
        num_accepted = 0
        try:
            chosen_ids = answer.verify(drafted_ids, output.choices)
            num_accepted = common_prefix(drafted_ids, answer.ids[num_before:])
        finally:
            num_kept = 1 + num_accepted
            self._keep(rows[:num_kept], output.hidden[:num_kept])
            self._cache.truncate(len(self._cached_ids))
        self._speculator.learn(chosen_ids)
        stats.num_passes += 1
        stats.drafted_tokens += len(drafted_ids)
        stats.accepted_tokens += num_accepted

    def _keep(self, ids: list[int], hidden: np.ndarray) -> None:
        """Count tokens that a pass has run as cached for good."""
        self._cached_ids += ids
        self._speculator.observe(ids, hidden)

    def _cut(self, length: int) -> None:
        length = self._speculator.cut(length)
        self._cache.truncate(length)
        del self._cached_ids[length:]


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading tokens two sequences share."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
