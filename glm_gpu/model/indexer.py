"""The lightning indexer: which cached positions a token attends to."""

from dataclasses import dataclass

import numpy as np

from glm_gpu.batch import Batch
from glm_gpu.config import ModelConfig
from glm_gpu.kernels.indexer import index_scores, select_top
from glm_gpu.kernels.matmul import matmul
from glm_gpu.kernels.norm import layer_norm
from glm_gpu.kernels.quantize import round_bf16
from glm_gpu.kernels.rope import rope_half, rope_interleaved
from glm_gpu.model.numerics import INDEX_NORM_EPS, Numerics
from glm_gpu.model.weights import IndexerWeights


@dataclass(frozen=True)
class Selection:
    """The positions that the rows of one sequence attend to.

    Args:
        rows: [T, K] int32 positions, ascending, padded with -1; None means every position before `counts`.
        counts: [T] int32, how many entries of a row hold.
    """

    rows: np.ndarray | None
    counts: np.ndarray

    def positions(self) -> np.ndarray:
        """The positions themselves, [T, K] int32, padded with -1."""
        if self.rows is not None:
            return self.rows
        positions = np.arange(self.counts.max(), dtype=np.int32)
        return np.where(positions < self.counts[:, None], positions, np.int32(-1))

    def last_row(self) -> "Selection":
        """The selection of the last token alone."""
        return Selection(None if self.rows is None else self.rows[-1:], self.counts[-1:])


def store_rows(batch: Batch, layer: int, stream: str, rows: np.ndarray) -> None:
    """Write what a pass's tokens add to a stream, [T, width] f32, to the caches of their sequences."""
    if batch.spans[0].cache.layout.is_bf16:
        rows = round_bf16(rows)
    for span in batch.spans:
        span.cache.write(layer, stream, span.cache.length, rows[span.rows])


def dense_selections(batch: Batch) -> list[Selection]:
    """For each span, every position up to the row's own."""
    return [Selection(None, batch.counts[span.rows]) for span in batch.spans]


def joined(selections: list[Selection]) -> Selection:
    """The selections of a pass's spans as one of all its rows."""
    counts = np.concatenate([selection.counts for selection in selections])
    if all(selection.rows is None for selection in selections):
        return Selection(None, counts)
    parts = [selection.positions() for selection in selections]
    width, start = max(part.shape[1] for part in parts), 0
    rows = np.full((len(counts), width), -1, np.int32)
    for part in parts:
        rows[start : start + len(part), : part.shape[1]] = part
        start += len(part)
    return Selection(rows, counts)


def select(
    h: np.ndarray,
    q_latent: np.ndarray,
    keys: np.ndarray,
    weights: IndexerWeights,
    config: ModelConfig,
    batch: Batch,
    layer: int,
    rope: tuple[np.ndarray, np.ndarray],
    numerics: Numerics,
) -> list[Selection]:
    """Cache the rows' index keys and choose, for each span, the `index_topk` best positions of every row.

    Scoring is skipped while all positions fit in `index_topk`: the choice would be all of them.

    Args:
        h: [T, D] f32, the layer's normed input.
        q_latent: [T, Q] f32, the normed query latent.
        keys: [T, M] f32, the product of h with the indexer's key weight.
        layer: where the index keys are cached.
        rope: cos and sin, [T, P / 2] each.

    Source: DeepSeek-V3.2 report, lightning indexer; GLM's pairs are interleaved and lie first in a head.
    """
    num_heads, width, rope_width = config.index_n_heads, config.index_head_dim, config.qk_rope_head_dim
    rotate = rope_interleaved if config.indexer_rope_interleave else rope_half
    cos, sin = rope
    keys = layer_norm(keys, weights.key_norm, weights.key_norm_bias, INDEX_NORM_EPS)  # [T, M]
    keys = np.concatenate([rotate(keys[:, :rope_width], cos, sin), keys[:, rope_width:]], axis=1)
    store_rows(batch, layer, "index_key", keys)

    longest = max(span.cached_stop for span in batch.spans)
    if longest <= config.index_topk and not numerics.always_index:
        return dense_selections(batch)

    queries = matmul(q_latent, weights.query, numerics.activations).reshape(len(h), num_heads, width)
    queries = np.concatenate([rotate(queries[..., :rope_width], cos, sin), queries[..., rope_width:]], axis=2)
    head_weights = matmul(h, weights.head_weights, numerics.activations) * np.float32(num_heads**-0.5)  # [T, J]
    selections = []
    for span in batch.spans:
        counts = batch.counts[span.rows]
        scores = index_scores(
            queries[span.rows],
            head_weights[span.rows],
            span.cache.read(layer, "index_key", span.cached_stop),
            counts,
            np.float32(width**-0.5),
        )
        selections.append(Selection(*select_top(scores, counts, config.index_topk)))
    return selections
