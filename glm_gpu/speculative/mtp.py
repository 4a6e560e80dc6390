"""Drafts from the checkpoint's multi-token layer, used recurrently."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from glm_gpu.batch import Batch
from glm_gpu.model.indexer import Selection
from glm_gpu.model.mtp import MtpHead
from glm_gpu.model.transformer import Output
from glm_gpu.speculative.draft import Draft

# Rows that may wait for the layer to run over them: bounds what they take (12 MB at GLM-5.2's width) and costs one
# pass of one layer when they are many.
MAX_PENDING = 512


class MtpDrafter:
    """One sequence's multi-token layer: a cache with a row for each token whose successor is known, and drafts.

    Row i is computed from the trunk's hidden state of position i and the token at i + 1. Rows wait until a draft is
    wanted or there are MAX_PENDING of them, so an answer without drafts does not pay for them. Rows of drafted tokens
    are provisional and gone when `draft` returns: the cache then holds just what a fresh pass over the text would give.

    Args:
        head: the layer, shared with other sequences.
        max_length: positions that the trunk's cache can hold.
        is_bf16: whether cached rows are bfloat16.
        shares_selection: `index_share_for_mtp_iteration` of the config: later steps attend over what the indexer chose
            in the first.
    """

    def __init__(self, head: MtpHead, max_length: int, is_bf16: bool, shares_selection: bool) -> None:
        self._head = head
        self.cache = head.new_cache(max_length, is_bf16)
        self._shares_selection = shares_selection
        self._next_ids: list[int] = []  # of the cached rows
        self._pending: list[tuple[np.ndarray, int]] = []  # rows behind them: hidden state, next token
        self._skipped = 0  # tokens before the first observed one; rows count from there
        self._length = 0
        self._last_hidden: np.ndarray | None = None

    @property
    def num_pending(self) -> int:
        """Rows that the next draft has to run first."""
        return len(self._pending)

    def skip(self, length: int) -> None:
        """Begin behind so many tokens whose hidden states nobody has, as when the trunk's cache came from a file.

        Rows hold positions relative to each other only, so the layer just sees a shorter text.
        """
        assert self._length == 0
        self._skipped = length

    def observe(self, token_ids: Sequence[int], hidden: np.ndarray) -> None:
        for token_id, state in zip(token_ids, hidden, strict=True):
            self._add_row(token_id)
            self._last_hidden = state
            self._length += 1
        if len(self._pending) >= MAX_PENDING:
            self._run(self._pending, "prefill")
            self._pending = []

    def cut(self, length: int) -> int:
        """See `Drafter.cut`. The row behind the last token kept needs that token's hidden state: where it is no longer
        held, one token less is kept."""
        length -= self._skipped
        if length <= 0:
            self._skipped += length
            length = 0
        if length == self._length:
            return self._skipped + length
        num_rows = len(self._next_ids)
        if length > num_rows:
            self._last_hidden = self._pending[length - 1 - num_rows][0]
            del self._pending[length - 1 - num_rows :]
        else:
            length = max(length - 1, 0)
            self._pending = []
            self._cut_rows(length)
            self._last_hidden = None
        self._length = length
        return self._skipped + length

    def draft(self, ids: Sequence[int], width: int) -> Draft:
        """The layer's best guess, fed back `width - 1` times together with the hidden state it came with."""
        assert len(ids) == self._skipped + self._length + 1 and self._last_hidden is not None
        self._cut_rows(min(len(self._next_ids), self._length - 1))
        output, selections = self._run([*self._pending, (self._last_hidden, ids[-1])], "decode")
        self._pending = []
        shared = [selection.last_row() for selection in selections] if self._shares_selection else None
        token_ids = [int(np.argmax(output.logits[0]))]
        while len(token_ids) < width:
            batch = Batch.of([(token_ids[-1:], self.cache)], "decode")
            output, _ = self._head.forward(batch, output.hidden[-1:], shared)
            token_ids.append(int(np.argmax(output.logits[0])))
        self.cache.truncate(self._length)
        return Draft("mtp", token_ids)

    def _add_row(self, token_id: int) -> None:
        """The row that the token at `_length` completes, unless it is cached from drafting behind that token."""
        row = self._length - 1
        if row < 0 or (row < len(self._next_ids) and self._next_ids[row] == token_id):
            return
        self._cut_rows(min(row, len(self._next_ids)))
        assert self._last_hidden is not None
        self._pending.append((self._last_hidden, token_id))

    def _run(
        self, rows: list[tuple[np.ndarray, int]], phase: Literal["prefill", "decode"]
    ) -> tuple[Output, list[Selection]]:
        """Cache rows; the last one's logits and hidden state."""
        next_ids = [token_id for _, token_id in rows]
        batch = Batch.of([(next_ids, self.cache)], phase)
        result = self._head.forward(batch, np.stack([state for state, _ in rows]))
        self._next_ids += next_ids
        return result

    def _cut_rows(self, num_rows: int) -> None:
        self.cache.truncate(num_rows)
        del self._next_ids[num_rows:]
