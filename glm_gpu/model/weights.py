"""The weights that every token needs, as the forward pass names them. Routed experts live in `glm_gpu.tiers`."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from glm_gpu.checkpoint import Checkpoint
from glm_gpu.config import ModelConfig
from glm_gpu.kernels.quantize import quantizer
from glm_gpu.quant import QuantizedMatrix
from glm_gpu.recipe import Recipe
from glm_gpu.tensors import expected_tensors


@dataclass(frozen=True)
class IndexerWeights:
    """A full layer's lightning indexer; `head_weights` is `weights_proj`."""

    query: QuantizedMatrix
    key: QuantizedMatrix
    key_norm: np.ndarray
    key_norm_bias: np.ndarray
    head_weights: QuantizedMatrix


@dataclass(frozen=True)
class LatentAttentionWeights:
    """Multi-head latent attention. `indexer` is None in layers that share the selection of an earlier one."""

    q_a: QuantizedMatrix
    q_a_norm: np.ndarray
    q_b: QuantizedMatrix
    kv_a: QuantizedMatrix
    kv_a_norm: np.ndarray
    kv_b: QuantizedMatrix
    output: QuantizedMatrix
    indexer: IndexerWeights | None


@dataclass(frozen=True)
class HeadAttentionWeights:
    """OLMoE's plain multi-head attention, with norms over the whole query and key projections."""

    query: QuantizedMatrix
    key: QuantizedMatrix
    value: QuantizedMatrix
    query_norm: np.ndarray
    key_norm: np.ndarray
    output: QuantizedMatrix


@dataclass(frozen=True)
class MlpWeights:
    """A dense layer's MLP, or a sparse layer's shared expert."""

    gate: QuantizedMatrix
    up: QuantizedMatrix
    down: QuantizedMatrix


@dataclass(frozen=True)
class MoeWeights:
    """A sparse layer's router, [E, D] and [E] f32, and its shared expert. OLMoE has neither bias nor shared expert."""

    gate: np.ndarray
    bias: np.ndarray | None
    shared: MlpWeights | None


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer."""

    input_norm: np.ndarray
    attention: LatentAttentionWeights | HeadAttentionWeights
    post_attention_norm: np.ndarray
    mlp: MlpWeights | MoeWeights


@dataclass(frozen=True)
class MtpWeights:
    """The multi-token layer: a whole sparse layer and the glue around it."""

    embedding_norm: np.ndarray
    hidden_norm: np.ndarray
    projection: QuantizedMatrix
    layer: LayerWeights
    head_norm: np.ndarray


@dataclass(frozen=True)
class ModelWeights:
    """Everything but the routed experts. A tied model's `head` is its embedding."""

    embedding: QuantizedMatrix
    layers: Sequence[LayerWeights]
    norm: np.ndarray
    head: QuantizedMatrix
    mtp: MtpWeights | None


class StreamedLayers(Sequence[LayerWeights]):
    """Layers that are read anew in every pass, for models whose dense weights do not fit in memory.

    At most three layers are held: the one asked for last, the one after it, which is read in the background, and one
    that the caller may still use.

    Args:
        load: reads a layer; called on a thread of this object's own.
    """

    def __init__(self, load: Callable[[int], LayerWeights], num_layers: int) -> None:
        self._load, self._num_layers = load, num_layers
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="glm-gpu-layers")
        self._layers: dict[int, Future[LayerWeights]] = {}

    def __len__(self) -> int:
        return self._num_layers

    def __getitem__(self, layer: int) -> LayerWeights:
        if not 0 <= layer < self._num_layers:
            raise IndexError(layer)
        following = (layer + 1) % self._num_layers
        self._layers = {n: future for n, future in self._layers.items() if n in (layer, following)}
        for n in (layer, following):
            if n not in self._layers:
                self._layers[n] = self._reader.submit(self._load, n)
        try:
            return self._layers[layer].result()
        except BaseException:
            self._layers.clear()  # so that the next pass reads it again
            raise


class _Reader:
    """Reads tensors below one name prefix, matrices in the format that the recipe gives them."""

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig, recipe: Recipe, prefix: str = "") -> None:
        self._checkpoint, self._config, self._recipe, self._prefix = checkpoint, config, recipe, prefix
        self._shapes = expected_tensors(config)

    def under(self, prefix: str) -> "_Reader":
        reader = _Reader.__new__(_Reader)
        reader.__dict__.update(self.__dict__, _prefix=self._prefix + prefix)
        return reader

    def has(self, name: str) -> bool:
        return self._prefix + name in self._checkpoint

    def matrix(self, name: str) -> QuantizedMatrix:
        full = f"{self._prefix}{name}.weight"
        format = self._recipe.format_for(full, self._config)
        return self._checkpoint.read_matrix(
            full, self._shapes[full], format, quantizer=quantizer(self._recipe.rounding)
        )

    def vector(self, name: str) -> np.ndarray:
        return self._checkpoint.read_f32(self._prefix + name)


class WeightSource:
    """A checkpoint's weights in the recipe's formats, a part at a time, quantized here where they are not stored so.

    All methods raise CheckpointError where a tensor cannot be read, or holds values that are not finite.
    """

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig, recipe: Recipe) -> None:
        self._root, self._config = _Reader(checkpoint, config, recipe), config
        self._model = self._root.under("model.")

    def ends(self) -> tuple[QuantizedMatrix, np.ndarray, QuantizedMatrix]:
        """Embedding, final norm and head; a tied model's head is its embedding."""
        embedding = self._model.matrix("embed_tokens")
        head = embedding if self._config.tie_word_embeddings else self._root.matrix("lm_head")
        return embedding, self._model.vector("norm.weight"), head

    def layer(self, layer: int) -> LayerWeights:
        """One decoder layer."""
        return read_layer(self._model.under(f"layers.{layer}."), self._config, layer)

    def mtp(self) -> MtpWeights:
        """The multi-token layer; the checkpoint must have it."""
        return read_mtp(self._model.under(f"layers.{self._config.mtp_layer}."), self._config)


def load_weights(
    checkpoint: Checkpoint, config: ModelConfig, recipe: Recipe, with_mtp: bool, stream_layers: bool = False
) -> ModelWeights:
    """All of a checkpoint's weights but the routed experts.

    Args:
        with_mtp: load the multi-token layer too; the checkpoint must have it.
        stream_layers: keep no layer in memory, read each when a pass comes to it; the checkpoint must stay open.

    Raises:
        CheckpointError: a tensor cannot be read, or holds values that are not finite.
    """
    source, num_layers = WeightSource(checkpoint, config, recipe), config.num_hidden_layers
    embedding, norm, head = source.ends()
    layers = StreamedLayers(source.layer, num_layers) if stream_layers else tuple(map(source.layer, range(num_layers)))
    return ModelWeights(embedding, layers, norm, head, source.mtp() if with_mtp else None)


def read_layer(reader: _Reader, config: ModelConfig, layer: int) -> LayerWeights:
    """One decoder layer through anything that reads as `_Reader` does, below the layer's prefix."""
    return LayerWeights(
        input_norm=reader.vector("input_layernorm.weight"),
        attention=(_latent_attention if config.is_latent else _head_attention)(reader.under("self_attn.")),
        post_attention_norm=reader.vector("post_attention_layernorm.weight"),
        mlp=_moe(reader.under("mlp.")) if config.is_sparse(layer) else _mlp(reader.under("mlp.")),
    )


def _latent_attention(reader: _Reader) -> LatentAttentionWeights:
    indexer = reader.under("indexer.")
    return LatentAttentionWeights(
        q_a=reader.matrix("q_a_proj"),
        q_a_norm=reader.vector("q_a_layernorm.weight"),
        q_b=reader.matrix("q_b_proj"),
        kv_a=reader.matrix("kv_a_proj_with_mqa"),
        kv_a_norm=reader.vector("kv_a_layernorm.weight"),
        kv_b=reader.matrix("kv_b_proj"),
        output=reader.matrix("o_proj"),
        indexer=IndexerWeights(
            query=indexer.matrix("wq_b"),
            key=indexer.matrix("wk"),
            key_norm=indexer.vector("k_norm.weight"),
            key_norm_bias=indexer.vector("k_norm.bias"),
            head_weights=indexer.matrix("weights_proj"),
        )
        if indexer.has("wk.weight")
        else None,
    )


def _head_attention(reader: _Reader) -> HeadAttentionWeights:
    return HeadAttentionWeights(
        query=reader.matrix("q_proj"),
        key=reader.matrix("k_proj"),
        value=reader.matrix("v_proj"),
        query_norm=reader.vector("q_norm.weight"),
        key_norm=reader.vector("k_norm.weight"),
        output=reader.matrix("o_proj"),
    )


def _mlp(reader: _Reader) -> MlpWeights:
    return MlpWeights(reader.matrix("gate_proj"), reader.matrix("up_proj"), reader.matrix("down_proj"))


def _moe(reader: _Reader) -> MoeWeights:
    shared = reader.under("shared_experts.")
    return MoeWeights(
        gate=reader.vector("gate.weight"),
        bias=reader.vector("gate.e_score_correction_bias") if reader.has("gate.e_score_correction_bias") else None,
        shared=_mlp(shared) if shared.has("gate_proj.weight") else None,
    )


def read_mtp(reader: _Reader, config: ModelConfig) -> MtpWeights:
    """The multi-token layer through anything that reads as `_Reader` does, below the layer's prefix."""
    return MtpWeights(
        embedding_norm=reader.vector("enorm.weight"),
        hidden_norm=reader.vector("hnorm.weight"),
        projection=reader.matrix("eh_proj"),
        layer=read_layer(reader, config, config.mtp_layer),
        head_norm=reader.vector("shared_head.norm.weight"),
    )
