"""What one forward pass is about: tokens of one or many sequences on a single axis."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from glm_gpu.cache import KVCache

Phase = Literal["prefill", "decode"]


@dataclass(frozen=True)
class Span:
    """Rows [start, stop) of a pass: one sequence's tokens, which continue what its cache holds."""

    cache: KVCache
    start: int
    stop: int

    @cached_property
    def rows(self) -> slice:
        return slice(self.start, self.stop)

    @property
    def cached_stop(self) -> int:
        """Positions in the cache once this pass has written its own."""
        return self.cache.length + self.stop - self.start


@dataclass(frozen=True)
class Batch:
    """The tokens of a pass, [T], with their positions and the sequences they belong to.

    `logits_at` names the rows whose logits are wanted, ascending; where `only_best` is set, each row's best token will
    do. A sequence may appear in one span only. The first `num_decode` rows are of answers, the others of prompts: all
    or none, but where answers go on in a prefill pass.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    spans: tuple[Span, ...]
    logits_at: np.ndarray
    phase: Phase
    num_decode: int
    only_best: bool = False

    @cached_property
    def counts(self) -> np.ndarray:
        """Positions that each row may attend to: [T] int32."""
        return self.positions + 1

    @cached_property
    def stops(self) -> np.ndarray:
        """Where each span ends: [B] int32."""
        return np.array([span.stop for span in self.spans], np.int32)

    @staticmethod
    def of(
        sequences: Sequence[tuple[Sequence[int], KVCache]],
        phase: Phase,
        all_logits: bool = False,
        no_logits: bool = False,
        only_best: bool = False,
    ) -> "Batch":
        """Lay sequences on the token axis, each continuing its cache.

        Args:
            sequences: (new token ids, cache), each with at least one token.
            all_logits: ask for every row's logits rather than each sequence's last.
            no_logits: ask for none, as a prompt's early chunks do.
            only_best: the best tokens' ids are enough.
        """
        spans, token_ids, positions, last = [], [], [], []
        for ids, cache in sequences:
            assert len(ids) > 0 and cache.length + len(ids) <= cache.max_length
            start = len(token_ids)
            token_ids.extend(ids)
            positions.extend(range(cache.length, cache.length + len(ids)))
            spans.append(Span(cache, start, len(token_ids)))
            last.append(len(token_ids) - 1)
        wanted = [] if no_logits else range(len(token_ids)) if all_logits else last
        return Batch(
            np.array(token_ids, np.int32),
            np.array(positions, np.int32),
            tuple(spans),
            np.array(wanted, np.int32),
            phase,
            len(token_ids) if phase == "decode" else 0,
            only_best,
        )

    def commit(self) -> None:
        """Count the pass's rows as cached, once every layer has written them."""
        for span in self.spans:
            span.cache.length = span.cached_stop
