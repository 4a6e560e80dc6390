"""What a pass has to read and to multiply, part by part, from shapes and formats alone."""

from dataclasses import dataclass

import numpy as np

from glm_gpu.checkpoint import Checkpoint
from glm_gpu.config import ModelConfig
from glm_gpu.recipe import Recipe, tensor_class
from glm_gpu.slab import F32
from glm_gpu.stored import StoredMatrix
from glm_gpu.tensors import expected_tensors, head_name


@dataclass(frozen=True)
class Parts:
    """Bytes of a model's parts as they lie in memory, and their weights: a row costs a multiply-add for each.

    Attributes:
        attention_bytes, attention_weights: [L], everything of a layer but its MLP: projections, indexer, router, norms.
        mlp_bytes, mlp_weights: [L], the dense MLP, or the shared expert.
        slab_bytes: [L], one routed expert; 0 in layers without.
        expert_weights: of one routed expert.
        head_bytes, head_weights: what turns hidden states into logits.
        core_macs: multiply-adds of a row with one cached position, in one layer.
        most_positions: so many cached positions are attended at most.
        experts_per_tok: K.
    """

    attention_bytes: np.ndarray
    attention_weights: np.ndarray
    mlp_bytes: np.ndarray
    mlp_weights: np.ndarray
    slab_bytes: np.ndarray
    expert_weights: int
    head_bytes: int
    head_weights: int
    core_macs: int
    most_positions: int
    experts_per_tok: int

    @property
    def num_layers(self) -> int:
        return len(self.slab_bytes)

    @property
    def token_bytes(self) -> int:
        """Bytes of weights that one decoded token takes."""
        layers = self.attention_bytes + self.mlp_bytes + self.slab_bytes * self.experts_per_tok
        return int(layers.sum()) + self.head_bytes


class PlannedContainer:
    """Stands in for a container that nobody has written yet: what `model_sizes` asks one, without a file.

    Args:
        recipe: the formats that it would have.
    """

    def __init__(self, config: ModelConfig, recipe: Recipe) -> None:
        self.config = config
        self._recipe, self._shapes = recipe, expected_tensors(config)

    def __contains__(self, name: str) -> bool:
        return False  # nothing is decoded while it is loaded

    def stored(self, name: str) -> StoredMatrix | None:
        """How a weight would be stored; None for plain numbers."""
        format = self._recipe.format_for(name, self.config)
        return StoredMatrix(format, self._shapes[name], F32) if format.is_packed else None


def model_parts(config: ModelConfig, recipe: Recipe, checkpoint: Checkpoint | None = None) -> Parts:
    """The parts of a model as they lie in memory, its multi-token layer left out.

    Args:
        recipe: the formats asked for.
        checkpoint: what stores some weights packed already, and they then stay as they are; None for a model that
            nobody has yet.
    """
    num_layers = config.num_hidden_layers
    found = {part: np.zeros((num_layers, 2), np.int64) for part in ("attention", "mlp")}
    head, slabs = np.zeros(2, np.int64), np.zeros(num_layers, np.int64)
    for name, shape in expected_tensors(config).items():
        layer = int(name.split(".")[2]) if name.startswith("model.layers.") else None
        if layer is not None and layer >= num_layers:
            continue
        if tensor_class(name, config) == "expert":
            if ".experts.0." in name:
                slabs[layer] += _weight_bytes(name, shape, config, recipe, checkpoint)
        elif layer is not None or name == head_name(config):
            part = found["mlp" if ".mlp." in name and ".mlp.gate." not in name else "attention"]
            target = head if layer is None else part[layer]
            target += (_weight_bytes(name, shape, config, recipe, checkpoint), np.prod(shape))
    if config.is_latent:
        core = config.num_attention_heads * (config.latent_width + config.kv_lora_rank)
        most = config.index_topk
    else:
        core, most = 2 * config.num_attention_heads * config.head_dim, config.max_position_embeddings
    return Parts(
        *found["attention"].T,
        *found["mlp"].T,
        slabs,
        3 * config.hidden_size * config.moe_intermediate_size,
        int(head[0]),
        int(head[1]),
        core,
        most,
        config.num_experts_per_tok,
    )


def _weight_bytes(
    name: str, shape: tuple[int, ...], config: ModelConfig, recipe: Recipe, checkpoint: Checkpoint | None
) -> int:
    format, scale_nbytes = recipe.format_for(name, config), 4
    stored = None if checkpoint is None else checkpoint.stored(name)
    if stored is not None and format.is_packed:
        format, scale_nbytes = stored.format, stored.scale_dtype.itemsize
    matrix = shape if len(shape) == 2 else (1, shape[0])
    return format.data_nbytes(*matrix) + format.scale_count(*matrix) * scale_nbytes
