"""What a model folder holds: weights and bytes by class and width, like a bill, and an expert to look at."""

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from glm_gpu.checkpoint import FP8_SCALE_SUFFIX, Checkpoint
from glm_gpu.errors import CheckpointError
from glm_gpu.quant import dequantize
from glm_gpu.recipe import tensor_class
from glm_gpu.slab import ROLES, SLAB_ALIGNMENT
from glm_gpu.stored import PADDING_PREFIX, SCALES_SUFFIX
from glm_gpu.tensors import expected_tensors

_FIRST_VALUES = 4


@dataclass(frozen=True)
class CensusRow:
    """All weights of one class that are stored in one way.

    Attributes:
        name_class: as `recipe.tensor_class` calls it; "padding" and "other" for what is no weight of the model.
        stored: "int4_g64", "BF16", "F8_E4M3", ...; with the type of its scales, "int4_g64 + F32".
        num_tensors: weights, their scales not counted.
        num_weights: single numbers.
        data_bytes, scale_bytes: on the disk.
    """

    name_class: str
    stored: str
    num_tensors: int = 0
    num_weights: int = 0
    data_bytes: int = 0
    scale_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        """Data and scales."""
        return self.data_bytes + self.scale_bytes

    @property
    def bits_per_weight(self) -> float:
        """Bits on the disk for each weight, scales included; 0 for padding."""
        return 8 * self.num_bytes / self.num_weights if self.num_weights else 0.0


@dataclass(frozen=True)
class ExpertSample:
    """One routed expert as proof that the bytes mean something.

    Attributes:
        prefix: of its three weights' names.
        shapes: (O, I) of "gate", "up" and "down".
        stored: how each is stored.
        first_values: the first decoded numbers of each.
        is_one_run: whether its parts lie behind each other in one shard, from a 4 KiB border on.
    """

    prefix: str
    shapes: dict[str, tuple[int, int]]
    stored: dict[str, str]
    first_values: dict[str, list[float]]
    is_one_run: bool


def census(checkpoint: Checkpoint) -> list[CensusRow]:
    """Every tensor of a folder, added up by class and width, largest class first; reads no weights."""
    rows: dict[tuple[str, str], list[int]] = {}
    for name in checkpoint.names:
        if name.endswith((SCALES_SUFFIX, FP8_SCALE_SUFFIX)):
            continue
        info, stored = checkpoint.info(name), checkpoint.stored(name)
        scales = _scales_info(checkpoint, name)
        how = stored.format.name if stored else info.dtype
        if scales:
            how += f" + {scales.dtype}"
        counts = rows.setdefault((_class_of(name, checkpoint), how), [0, 0, 0, 0])
        shape = stored.shape if stored else info.shape
        is_weight = not name.startswith(PADDING_PREFIX)
        amounts = (1, math.prod(shape) if is_weight else 0, info.nbytes, scales.nbytes if scales else 0)
        for index, amount in enumerate(amounts):
            counts[index] += amount
    found = [CensusRow(*key, *counts) for key, counts in rows.items()]
    return sorted(found, key=lambda row: (-row.num_bytes, row.name_class, row.stored))


def expert_sample(checkpoint: Checkpoint) -> ExpertSample | None:
    """The first routed expert, a few of its numbers decoded; None when a folder has none.

    Raises:
        CheckpointError: its weights cannot be read.
    """
    shapes = expected_tensors(checkpoint.config)
    first = next((name for name in shapes if tensor_class(name, checkpoint.config) == "expert"), None)
    if first is None or first not in checkpoint:
        return None
    prefix = first.rsplit(".", 2)[0]
    names = {role: f"{prefix}.{role}_proj.weight" for role in ROLES}
    return ExpertSample(
        prefix,
        {role: shapes[name] for role, name in names.items()},
        {role: _how_stored(checkpoint, name) for role, name in names.items()},
        {role: _first_values(checkpoint, name) for role, name in names.items()},
        _is_one_run(checkpoint, list(names.values())),
    )


def _class_of(name: str, checkpoint: Checkpoint) -> str:
    if name.startswith(PADDING_PREFIX):
        return "padding"
    try:
        return tensor_class(name, checkpoint.config)
    except CheckpointError:
        return "other"


def _scales_info(checkpoint: Checkpoint, name: str):
    for suffix in (SCALES_SUFFIX, FP8_SCALE_SUFFIX):
        if name + suffix in checkpoint:
            return checkpoint.info(name + suffix)
    return None


def _how_stored(checkpoint: Checkpoint, name: str) -> str:
    stored = checkpoint.stored(name)
    return stored.format.name if stored else checkpoint.info(name).dtype


def _first_values(checkpoint: Checkpoint, name: str) -> list[float]:
    stored = checkpoint.stored(name)
    if stored:
        matrix = checkpoint.read_matrix(name, stored.shape, stored.format).rows(0, 1)
        values = dequantize(matrix)[0]
    else:
        values = checkpoint.decode_rows(name, checkpoint.read_rows(name, 0, 1))[0]
    return [float(np.float32(value)) for value in values[:_FIRST_VALUES]]


def _is_one_run(checkpoint: Checkpoint, names: list[str]) -> bool:
    parts = names + [name + SCALES_SUFFIX for name in names if name + SCALES_SUFFIX in checkpoint]
    infos = [checkpoint.info(name) for name in parts]
    follows = all(a.shard == b.shard and a.end == b.begin for a, b in pairwise(infos))
    return follows and infos[0].begin % SLAB_ALIGNMENT == 0
