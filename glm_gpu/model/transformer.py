"""The whole model: token ids in, logits out."""

from dataclasses import dataclass

import numpy as np

from glm_gpu.batch import Batch
from glm_gpu.cache import CacheLayout, KVCache
from glm_gpu.config import ModelConfig
from glm_gpu.kernels.matmul import matmul
from glm_gpu.kernels.norm import rms_norm
from glm_gpu.kernels.rope import rope_tables
from glm_gpu.model.layer import decoder_layer
from glm_gpu.model.numerics import Numerics, Probe
from glm_gpu.model.weights import ModelWeights
from glm_gpu.quant import QuantizedMatrix, dequantize
from glm_gpu.tiers.store import ExpertStore


@dataclass(frozen=True)
class Output:
    """What a pass leaves behind.

    Args:
        logits: [n, V] f32, of the batch's `logits_at`; None where the batch asked for the best only and got it.
        hidden: [T, D] f32, after the final norm.
        best_ids: [n] int32, in place of logits: each row's best token, the lowest of equals, -1 where a logit is NaN or
            infinite.
    """

    logits: np.ndarray | None
    hidden: np.ndarray
    best_ids: np.ndarray | None = None

    @property
    def choices(self) -> np.ndarray:
        """What tokens are chosen from, a row for each of `logits_at`: logits, or the best id alone."""
        return self.best_ids if self.logits is None else self.logits

    @property
    def greedy_ids(self) -> np.ndarray:
        """[n] int, the best token of each row."""
        return self.best_ids if self.logits is None else np.argmax(self.logits, axis=1)


def cache_layout(config: ModelConfig, is_bf16: bool) -> CacheLayout:
    """What the trunk's layers cache of each position."""
    if not config.is_latent:
        width = config.num_key_value_heads * config.head_dim
        return CacheLayout(({"key": width, "value": width},) * config.num_hidden_layers, is_bf16)
    return CacheLayout(
        tuple(latent_streams(config, config.is_full_indexer(i)) for i in range(config.num_hidden_layers)), is_bf16
    )


def latent_streams(config: ModelConfig, has_indexer: bool) -> dict[str, int]:
    """The streams of one layer with latent attention."""
    streams = {"latent": config.latent_width}
    return streams | {"index_key": config.index_head_dim} if has_indexer else streams


def embed(token_ids: np.ndarray, embedding: QuantizedMatrix) -> np.ndarray:
    """The tokens' embeddings, [T, D] f32; only their rows are dequantized."""
    scales = None if embedding.scales is None else embedding.scales[token_ids]
    shape = (len(token_ids), embedding.shape[1])
    return dequantize(QuantizedMatrix(embedding.format, shape, embedding.data[token_ids], scales))


class Transformer:
    """A model ready to run: weights in memory, experts behind a store.

    Row r of a pass gets the same bits whatever else is in the pass, so prefill, decode, verification of drafts, and
    batching are one code path.
    """

    def __init__(
        self, config: ModelConfig, weights: ModelWeights, store: ExpertStore, numerics: Numerics | None = None
    ) -> None:
        self.config = config
        self.weights = weights
        self.store = store
        self.numerics = numerics or Numerics()

    def new_cache(self, max_length: int, is_bf16: bool) -> KVCache:
        """An empty cache for one sequence."""
        return KVCache(cache_layout(self.config, is_bf16), max_length)

    def forward(self, batch: Batch, probe: Probe | None = None) -> Output:
        """Run a pass; afterwards the batch's caches hold its tokens.

        If a layer raises, the caches keep the lengths they had, so the pass can be repeated.
        """
        config, weights = self.config, self.weights
        x = embed(batch.token_ids, weights.embedding)
        if probe is not None:
            probe("hidden", -1, x)
        rope = rope_tables(batch.positions, config.rope_theta, config.qk_rope_head_dim or config.head_dim)
        selections, layers = None, weights.layers
        self.store.begin_pass(batch.phase)
        for i, layer in enumerate(layers):
            shared = None if config.is_full_indexer(i) else selections
            upcoming = (i + 1, layers[i + 1]) if i + 1 < len(layers) else None
            x, selections = decoder_layer(
                x, layer, config, self.store, batch, i, i, rope, shared, self.numerics, probe, upcoming
            )
        hidden = rms_norm(x, weights.norm, config.rms_norm_eps)
        logits = matmul(hidden[batch.logits_at], weights.head, self.numerics.activations)
        batch.commit()
        return Output(logits, hidden)
