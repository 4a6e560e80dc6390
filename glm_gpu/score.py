"""How well a model expects a text: teacher-forced log-likelihood and perplexity."""

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from glm_gpu.engine import Engine
from glm_gpu.errors import CapacityError, RequestError
from glm_gpu.machine import disk_free_bytes
from glm_gpu.sampling import logprobs
from glm_gpu.state import sync_folder
from glm_gpu.units import format_bytes


@dataclass(frozen=True)
class Score:
    """The likelihood of a text: natural logarithms, summed over `scored_tokens`, which are all but the first."""

    tokens: int
    scored_tokens: int
    log_likelihood: float
    windows: int
    seconds: float

    @property
    def perplexity(self) -> float:
        """exp of the mean surprise of a token: 1 when every token was certain, V when the model knew nothing."""
        return math.exp(-self.log_likelihood / self.scored_tokens)

    @property
    def tok_s(self) -> float:
        return self.tokens / self.seconds


def score(engine: Engine, ids: Sequence[int], on_logits: Callable[[np.ndarray], None] | None = None) -> Score:
    """Score a text of any length.

    A text longer than the context is read in windows of the context's length. Each begins with the last token of the
    one before, so every token but the first is scored once.

    Args:
        ids: [T], T at least 2.
        on_logits: is handed the logits in order, T rows in all, some at a time: [<= 512, V] f32.

    Raises:
        RequestError: fewer than 2 tokens, or ids outside the vocabulary.
    """
    if len(ids) < 2:
        raise RequestError(f"{len(ids)} tokens to score, expected at least 2: the first is only read")
    began = time.perf_counter()
    log_likelihood = 0.0
    starts = range(0, len(ids) - 1, engine.context - 1)
    # `logits` checks its tokens when called and computes when read, so all are checked before the first is computed
    windows = [engine.logits(ids[start : start + engine.context]) for start in starts]
    for start, window in zip(starts, windows, strict=True):
        position, stop = start, min(start + engine.context, len(ids))
        for logits in window:
            for row, next_id in zip(logits, ids[position + 1 : stop], strict=False):
                log_likelihood += float(logprobs(row)[next_id])
            if on_logits:
                # the first row of a later window repeats the last of the one before, which saw more
                on_logits(logits[1:] if position == start > 0 else logits)
            position += len(logits)
    return Score(len(ids), len(ids) - 1, log_likelihood, len(windows), time.perf_counter() - began)


@contextmanager
def logits_writer(path: Path | None, num_tokens: int, vocab_size: int) -> Iterator[Callable[[np.ndarray], None] | None]:
    """A function for `score` that writes the logits to a .npy file, [T, V] float32; None when there is no path.

    The file is written as path + ".partial" and gets its name when all rows are there.

    Raises:
        CapacityError: the disk has no room for it.
        OSError: the folder cannot be written.
    """
    if path is None:
        yield None
        return
    num_bytes, free = num_tokens * vocab_size * 4, disk_free_bytes(path.parent)
    if num_bytes > free:
        raise CapacityError(
            f"{path}: the logits need {format_bytes(num_bytes)} and the disk has {format_bytes(free)}; "
            "score fewer tokens or write elsewhere"
        )
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            header = {"descr": "<f4", "fortran_order": False, "shape": (num_tokens, vocab_size)}
            np.lib.format.write_array_header_2_0(file, header)
            yield lambda rows: file.write(np.ascontiguousarray(rows, "<f4").data) and None
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)
        sync_folder(path.parent)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise
