"""Drafts from the checkpoint's multi-token layer, used recurrently."""

from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np

from glm_gpu.batch import Batch
from glm_gpu.cache import KVCache
from glm_gpu.model.indexer import Selection
from glm_gpu.model.transformer import Output
from glm_gpu.speculative.draft import Draft

# Rows that may wait for the layer to run over them: bounds what they take (3 MB a sequence at GLM-5.2's width) and
# costs one pass of one layer when they are many.
MAX_PENDING = 128
# Most rows of a pass that sequences share, as many as one of a prompt has: before it, long waiting ones are run alone.
_MAX_ROWS = 512


class DraftHead(Protocol):
    """The multi-token layer, wherever it runs: `glm_gpu.model.mtp.MtpHead`, or the same on a device."""

    def new_cache(self, max_length: int, is_bf16: bool) -> KVCache:
        """An empty cache for one sequence's rows."""

    def forward(
        self, batch: Batch, hidden: np.ndarray, selections: Sequence[Selection] | None = None
    ) -> tuple[Output, list[Selection]]:
        """Guess, for every row, the token after its own; and what at least each span's last row attended over."""


class MtpDrafter:
    """One sequence's multi-token layer: a cache with a row for each token whose successor is known, and drafts.

    Row i is computed from the trunk's hidden state of position i and the token at i + 1. Rows wait until a draft is
    wanted or there are MAX_PENDING of them. Rows of drafted tokens are provisional and gone when `draft` returns: the
    cache then holds just what a fresh pass over the text would give.

    Args:
        head: the layer, shared with other sequences.
        max_length: positions that the trunk's cache can hold.
        is_bf16: whether cached rows are bfloat16.
        shares_selection: `index_share_for_mtp_iteration` of the config: later steps attend over what the indexer chose
            in the first.

    Attributes:
        is_idle: drafts do not pay now; what is observed is then forgotten, so an answer without drafts costs nothing,
            and the layer sees a shorter text when it is asked again.
    """

    def __init__(self, head: DraftHead, max_length: int, is_bf16: bool, shares_selection: bool) -> None:
        self._head = head
        self.cache = head.new_cache(max_length, is_bf16)
        self._shares_selection = shares_selection
        self._next_ids: list[int] = []  # of the cached rows
        self._pending: list[tuple[np.ndarray, int]] = []  # rows behind them: hidden state, next token
        self._skipped = 0  # tokens before the first observed one; rows count from there
        self._length = 0
        self._last_hidden: np.ndarray | None = None
        self.is_idle = False

    @property
    def num_pending(self) -> int:
        """Rows that the next draft has to run first."""
        return len(self._pending)

    @property
    def is_ready(self) -> bool:
        """Whether there is a hidden state behind which to draft."""
        return self._last_hidden is not None

    def skip(self, length: int) -> None:
        """Begin behind so many tokens whose hidden states nobody has, as when the trunk's cache came from a file.

        Rows hold positions relative to each other only, so the layer just sees a shorter text.
        """
        assert self._length == 0
        self._skipped = length

    def observe(self, token_ids: Sequence[int], hidden: np.ndarray) -> None:
        if self.is_idle:
            self._forget(len(token_ids))
            return
        for token_id, state in zip(token_ids, hidden, strict=True):
            self._add_row(token_id)
            self._last_hidden = state.copy()  # not a view, which would keep the rows of the whole pass
            self._length += 1
        if len(self._pending) >= MAX_PENDING:
            self._run_pending()

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
        return draft_together([(self, ids, width)])[0]

    def _forget(self, num_tokens: int) -> None:
        """Begin anew behind what was observed and so many tokens more."""
        if self._length:
            self._cut_rows(0)
            self._pending, self._last_hidden = [], None
        self._skipped += self._length + num_tokens
        self._length = 0

    def _add_row(self, token_id: int) -> None:
        """The row that the token at `_length` completes, unless it is cached from drafting behind that token."""
        row = self._length - 1
        if row < 0 or (row < len(self._next_ids) and self._next_ids[row] == token_id):
            return
        self._cut_rows(min(row, len(self._next_ids)))
        assert self._last_hidden is not None
        self._pending.append((self._last_hidden, token_id))

    def _due_rows(self, ids: Sequence[int]) -> list[tuple[np.ndarray, int]]:
        """The rows to cache before a draft behind `ids`."""
        assert len(ids) == self._skipped + self._length + 1 and self._last_hidden is not None
        self._cut_rows(min(len(self._next_ids), self._length - 1))
        return [*self._pending, (self._last_hidden, ids[-1])]

    def _run_pending(self) -> None:
        _forward([(self, self._pending)], "prefill")
        self._pending = []

    def _cut_rows(self, num_rows: int) -> None:
        self.cache.truncate(num_rows)
        del self._next_ids[num_rows:]


def draft_together(turns: Sequence[tuple[MtpDrafter, Sequence[int], int]]) -> list[Draft]:
    """Drafts for several sequences over one head, each what its drafter alone would give, in shared passes.

    Args:
        turns: drafter, all tokens of its sequence, and how many to guess, at least 1.
    """
    drafters = [drafter for drafter, _, _ in turns]
    for drafter in drafters:
        if drafter.num_pending and drafter.num_pending >= _MAX_ROWS // len(turns):
            drafter._run_pending()
    output, selections = _forward([(drafter, drafter._due_rows(ids)) for drafter, ids, _ in turns], "decode")
    for drafter in drafters:
        drafter._pending = []
    drafts = [[token_id] for token_id in _guesses(output)]
    hidden, left = output.hidden, list(range(len(turns)))
    for depth in range(2, max(width for _, _, width in turns) + 1):
        keeps = [place for place, turn in enumerate(left) if turns[turn][2] >= depth]
        hidden, left = hidden[keeps], [left[place] for place in keeps]
        shared = [selections[turn].last_row() for turn in left] if drafters[0]._shares_selection else None
        batch = Batch.of([(drafts[turn][-1:], drafters[turn].cache) for turn in left], "decode", only_best=True)
        output, _ = drafters[0]._head.forward(batch, hidden, shared)
        hidden = output.hidden
        for turn, token_id in zip(left, _guesses(output), strict=True):
            drafts[turn].append(token_id)
    for drafter in drafters:
        drafter.cache.truncate(drafter._length)
    return [Draft("mtp", token_ids) for token_ids in drafts]


def _forward(
    parts: list[tuple[MtpDrafter, list[tuple[np.ndarray, int]]]], phase: Literal["prefill", "decode"]
) -> tuple[Output, list[Selection]]:
    """Cache rows of several sequences.

    Returns:
        What each sequence's last row gave; what its rows attended over.
    """
    next_ids = [[token_id for _, token_id in rows] for _, rows in parts]
    rows = [(ids, drafter.cache) for ids, (drafter, _) in zip(next_ids, parts, strict=True)]
    batch = Batch.of(rows, phase, only_best=True)
    states = np.stack([state for _, rows in parts for state, _ in rows])
    output, selections = parts[0][0]._head.forward(batch, states)
    for ids, (drafter, _) in zip(next_ids, parts, strict=True):
        drafter._next_ids += ids
    last = [span.stop - 1 for span in batch.spans]
    return Output(output.logits, output.hidden[last], output.best_ids), selections


def _guesses(output: Output) -> list[int]:
    """The best token of each row; some token where a logit is no number, for a guess need not be good."""
    return np.maximum(output.greedy_ids, 0).tolist()
