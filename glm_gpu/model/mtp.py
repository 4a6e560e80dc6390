"""The multi-token layer: guesses the token after next from the trunk's hidden state and the next token."""

import numpy as np

from glm_gpu.batch import Batch
from glm_gpu.cache import CacheLayout, KVCache
from glm_gpu.kernels.matmul import matmul
from glm_gpu.kernels.norm import rms_norm
from glm_gpu.kernels.rope import rope_tables
from glm_gpu.model.indexer import Selection
from glm_gpu.model.layer import decoder_layer
from glm_gpu.model.numerics import Probe
from glm_gpu.model.transformer import Output, Transformer, embed, latent_streams


class MtpHead:
    """The checkpoint's extra layer, run beside a `Transformer` whose embedding, head, and expert store it shares."""

    def __init__(self, model: Transformer) -> None:
        assert model.weights.mtp is not None
        self._model = model
        self._weights = model.weights.mtp

    def new_cache(self, max_length: int, is_bf16: bool) -> KVCache:
        """An empty cache for one sequence's rows of this layer, apart from the trunk's."""
        return KVCache(CacheLayout((latent_streams(self._model.config, True),), is_bf16), max_length)

    def forward(
        self,
        batch: Batch,
        hidden: np.ndarray,
        selections: list[Selection] | None = None,
        probe: Probe | None = None,
    ) -> tuple[Output, list[Selection]]:
        """Guess, for every row, the token after its own.

        Row i takes the trunk's hidden state of position i and the token of position i + 1. A further draft feeds back
        this method's hidden state and the token it drafted.

        Args:
            batch: the next tokens, over this head's caches.
            hidden: [T, D] f32, the trunk's `Output.hidden`, or the previous draft's.
            selections: one a span, to attend over instead of the indexer's choice (`index_share_for_mtp_iteration`).

        Returns:
            Output, whose hidden is after `shared_head.norm`; and the selections used.

        Source: DeepSeek-V3 report, multi-token prediction; the layer's glue as in vLLM and SGLang.
        """
        model, weights = self._model, self._weights
        config, numerics = model.config, model.numerics
        embedded = embed(batch.token_ids, model.weights.embedding)
        embedded = rms_norm(embedded, weights.embedding_norm, config.rms_norm_eps)
        recurrent = rms_norm(hidden, weights.hidden_norm, config.rms_norm_eps)
        x = matmul(np.concatenate([embedded, recurrent], axis=1), weights.projection, numerics.activations)
        rope = rope_tables(batch.positions, config.rope_theta, config.qk_rope_head_dim)
        x, used = decoder_layer(
            x, weights.layer, config, model.store, batch, config.mtp_layer, 0, rope, selections, numerics, probe
        )
        normed = rms_norm(x, weights.head_norm, config.rms_norm_eps)
        logits = matmul(normed[batch.logits_at], model.weights.head, numerics.activations)
        batch.commit()
        return Output(logits, normed), used
