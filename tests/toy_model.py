"""A model for tests of everything around a model: it costs microseconds, and its logits depend on every cached row."""

import time
import zlib
from types import SimpleNamespace

import numpy as np

from glm_gpu.cache import CacheLayout, KVCache
from glm_gpu.model.transformer import Output

LAYOUT = CacheLayout(({"token": 32}, {"position": 64}), is_bf16=False)


class ToyModel:
    """Writes each token and its position to the cache; the next token follows from all that is cached.

    Args:
        vocab_size: V.
        choose: (ids so far) -> the token with the greatest logit; by default a hash of the ids chooses.

    Attributes:
        pass_s: seconds that a pass lasts, and each row of it more.
        before_pass: called with every batch; may raise as a model may.
        batches: rows of each sequence, for every pass.
    """

    def __init__(self, vocab_size: int = 64, choose=None) -> None:
        self.config = SimpleNamespace(vocab_size=vocab_size)
        self.store = SimpleNamespace(shrink=self._shrink, shrunk=0)
        self.choose = choose
        self.pass_s = self.row_s = 0.0
        self.before_pass = lambda batch: None
        self.batches: list[list[int]] = []

    def forward(self, batch) -> Output:
        self.before_pass(batch)
        if self.pass_s or self.row_s:
            time.sleep(self.pass_s + self.row_s * len(batch.token_ids))
        wanted, logits = set(batch.logits_at.tolist()), []
        for span in batch.spans:
            rows = batch.token_ids[span.rows].astype(np.float32)
            positions = batch.positions[span.rows].astype(np.float32)
            span.cache.write(0, "token", span.cache.length, np.repeat(rows[:, None], 32, axis=1))
            span.cache.write(1, "position", span.cache.length, np.repeat(positions[:, None], 64, axis=1))
            ids = span.cache.read(0, "token", span.cached_stop)[:, 31].astype(np.int64)
            assert np.array_equal(span.cache.read(1, "position", span.cached_stop)[:, 0], np.arange(len(ids)))
            logits += [
                self._logits(ids[: span.cache.length + row - span.start + 1])
                for row in range(span.start, span.stop)
                if row in wanted
            ]
        self.batches.append([span.stop - span.start for span in batch.spans])
        batch.commit()
        hidden = np.zeros((len(batch.token_ids), 1), np.float32)
        return Output(np.array(logits, np.float32).reshape(-1, self.config.vocab_size), hidden)

    def answer(self, prompt_ids, num_tokens: int) -> list[int]:
        """What greedy choice makes of a prompt."""
        ids = list(prompt_ids)
        for _ in range(num_tokens):
            ids.append(int(np.argmax(self._logits(np.array(ids)))))
        return ids[len(prompt_ids) :]

    def new_cache(self, max_length: int, is_bf16: bool = False) -> KVCache:
        return KVCache(LAYOUT, max_length)

    def _logits(self, ids: np.ndarray) -> np.ndarray:
        seed = zlib.crc32(ids.astype(np.int32).tobytes())
        logits = np.random.default_rng(seed).standard_normal(self.config.vocab_size).astype(np.float32)
        if self.choose is not None:
            logits[self.choose(ids.tolist())] = 30.0
        return logits

    def _shrink(self, num_bytes: int) -> int:
        self.store.shrunk += 1
        return num_bytes
