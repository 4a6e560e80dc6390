"""One conversation: its tokens, its cache, and how they grow."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from glm_gpu.batch import Batch
from glm_gpu.cache import KVCache
from glm_gpu.errors import RequestError
from glm_gpu.model.transformer import Transformer
from glm_gpu.sampling import SamplingParams, make_rng, sample

# Rows of a prompt that go through the model at once: enough to use every weight many times, and few enough that their
# activations stay below 200 MB at GLM-5.2's widths.
PREFILL_CHUNK = 512


@dataclass
class GenerationStats:
    """What one answer took. `reused_tokens` of the prompt were already cached."""

    prompt_tokens: int
    reused_tokens: int = 0
    completion_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    finish_reason: Literal["stop", "length"] | None = None

    @property
    def prefill_tok_s(self) -> float:
        """Prompt tokens a second, those that were already cached not counted."""
        return (self.prompt_tokens - self.reused_tokens) / self.prefill_s if self.prefill_s else 0.0

    @property
    def decode_tok_s(self) -> float:
        """Tokens a second after the first, which prefill yields."""
        return (self.completion_tokens - 1) / self.decode_s if self.decode_s and self.completion_tokens > 1 else 0.0


class Session:
    """A sequence that can be continued, cut back, and continued again.

    Args:
        model: shared with other sessions, one pass at a time.
        cache: this session's own, empty.
        eos_ids: tokens that end an answer.
    """

    def __init__(self, model: Transformer, cache: KVCache, eos_ids: frozenset[int]) -> None:
        self._model = model
        self._cache = cache
        self._eos_ids = eos_ids
        self._cached_ids: list[int] = []
        self.last: GenerationStats | None = None

    @property
    def cached_ids(self) -> list[int]:
        """The tokens whose keys and values are cached, in order."""
        return self._cached_ids

    def reset(self) -> None:
        """Forget everything."""
        self._cut(0)

    def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, max_tokens: int | None = None, ignore_eos: bool = False
    ) -> Iterator[int]:
        """The answer to a prompt, token by token; `last` tells how it went.

        What the prompt has in common with the cached tokens is not computed again, except its last token, whose logits
        are needed. May be abandoned at any token; the session then holds the prompt and what was computed.

        Args:
            prompt_ids: the whole prompt, what earlier calls fed or yielded included.
            max_tokens: at most so many tokens; None or too many: as many as the context has room for.
            ignore_eos: treat end tokens as any other. Otherwise they end the answer and are not yielded.

        Raises:
            RequestError: the prompt is empty, has ids outside the vocabulary, or leaves no room in the context.
        """
        room = self._cache.max_length - len(prompt_ids)
        self._check(prompt_ids, room, max_tokens)
        return self._generate(list(prompt_ids), params, min(room, max_tokens or room), ignore_eos)

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

    def _generate(self, ids: list[int], params: SamplingParams, max_tokens: int, ignore_eos: bool) -> Iterator[int]:
        rng = make_rng(params.seed)
        self._cut(min(common_prefix(self._cached_ids, ids), len(ids) - 1))
        stats = self.last = GenerationStats(len(ids), reused_tokens=len(self._cached_ids))
        began = time.perf_counter()
        logits = self._prefill(ids[len(self._cached_ids) :])
        stats.prefill_s = time.perf_counter() - began
        while True:
            token_id = sample(logits, params, ids, rng, stats.prompt_tokens)
            if token_id in self._eos_ids and not ignore_eos:
                stats.finish_reason = "stop"
                return
            ids.append(token_id)
            stats.completion_tokens += 1
            if stats.completion_tokens == max_tokens:
                stats.finish_reason = "length"
                yield token_id
                return
            yield token_id
            began = time.perf_counter()
            logits = self._feed([token_id], "decode")
            stats.decode_s += time.perf_counter() - began

    def _prefill(self, ids: list[int]) -> np.ndarray:
        for start in range(0, len(ids) - PREFILL_CHUNK, PREFILL_CHUNK):
            self._feed(ids[start : start + PREFILL_CHUNK], "prefill", no_logits=True)
        return self._feed(ids[(len(ids) - 1) // PREFILL_CHUNK * PREFILL_CHUNK :], "prefill")

    def _feed(self, ids: list[int], phase: Literal["prefill", "decode"], no_logits: bool = False) -> np.ndarray:
        """Run a pass over new tokens; the last one's logits, [V] f32, unless none are wanted."""
        output = self._model.forward(Batch.of([(ids, self._cache)], phase, no_logits=no_logits))
        self._cached_ids += ids
        return output.logits[0] if not no_logits else output.logits

    def _cut(self, length: int) -> None:
        self._cache.truncate(length)
        del self._cached_ids[length:]


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading tokens two sequences share."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
