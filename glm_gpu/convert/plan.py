"""Which tensors go into which output shard, in what order and size: known before any weight is read."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from glm_gpu.checkpoint import FP8_SCALE_SUFFIX
from glm_gpu.config import ModelConfig
from glm_gpu.convert.journal import Journal
from glm_gpu.convert.settings import ConvertSettings
from glm_gpu.manifest import Manifest, StoredFormat, name_pattern
from glm_gpu.quant import Format
from glm_gpu.recipe import tensor_class
from glm_gpu.safetensors_index import TensorInfo
from glm_gpu.safetensors_write import safetensors_header, tensor_nbytes
from glm_gpu.slab import SLAB_ALIGNMENT
from glm_gpu.stored import PADDING_PREFIX, SCALES_SUFFIX
from glm_gpu.tensors import expected_tensors

_EXPERT_CLASSES = ("expert", "mtp_expert")


class PlannedTensor(NamedTuple):
    """One tensor of an output shard.

    Attributes:
        name, dtype, shape: as they will be in the file.
        part: "data" (packed or plain numbers), "scales", or "padding" between two experts.
        source: name of the weight it comes from; "" for padding.
        format: that the weight is put into; None for padding.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    part: Literal["data", "scales", "padding"]
    source: str
    format: Format | None


@dataclass(frozen=True)
class PlannedShard:
    """One output shard.

    Attributes:
        name: of its file.
        tensors: in the order they are written.
        nbytes: of the whole file.
        reads: source tensors it is made from, FP8 scales included.
    """

    name: str
    tensors: tuple[PlannedTensor, ...]
    nbytes: int
    reads: tuple[str, ...]

    @property
    def header(self) -> bytes:
        """The first bytes of the file, up to its data."""
        return safetensors_header(tensor[:3] for tensor in self.tensors)


@dataclass(frozen=True)
class ConversionPlan:
    """All output shards, and what of the source is left out.

    Attributes:
        shards: in the order they are written: whenever a source shard is the last one needed, all that it completes.
        dropped: source tensors that the model does not use.
        shapes: of every weight, by name.
    """

    shards: tuple[PlannedShard, ...]
    dropped: tuple[str, ...]
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def nbytes(self) -> int:
        """Bytes of all output shards."""
        return sum(shard.nbytes for shard in self.shards)

    def digest(self) -> str:
        """SHA-256 over every shard's name and header, in hex: names, types, shapes and order of the whole container."""
        digest = hashlib.sha256()
        for shard in self.shards:
            digest.update(shard.name.encode() + hashlib.sha256(shard.header).digest())
        return digest.hexdigest()

    def manifest(self, config: ModelConfig, journal: Journal) -> Manifest:
        """What glm_gpu.json says about the container when the shards of the journal are all of it."""
        classes, shapes = {}, {}
        for shard in self.shards:
            for tensor in shard.tensors:
                if tensor.part == "scales":
                    stored = StoredFormat(tensor.format, journal.settings.scales.upper())
                    classes[tensor_class(tensor.source, config)] = stored
                    shapes[name_pattern(tensor.source)] = self.shapes[tensor.source]
        return Manifest(
            journal.tool, journal.source, journal.revision, classes, shapes, dict(journal.shards),
            rounding=journal.settings.rounding,
        )  # fmt: skip


class _Unit(NamedTuple):
    """What must lie in one shard: an expert's three matrices, or a single weight; names of weights."""

    weights: tuple[str, ...]
    is_expert: bool


def plan_conversion(
    config: ModelConfig, tensors: Mapping[str, TensorInfo], settings: ConvertSettings, with_mtp: bool
) -> ConversionPlan:
    """Plan a container; pure.

    Output follows the source's shards: what becomes complete with source shard n is written before anything that needs
    shard n + 1, experts first. So a source shard is done with as soon as it is passed, but for parts of an expert or of
    an FP8 weight that go on in the next one.

    Args:
        config: what the model is.
        tensors: of the source, validated.
        settings: what the container shall be like.
        with_mtp: whether the source has the draft layer.
    """
    draft_prefix = f"model.layers.{config.mtp_layer}."
    shapes = {
        name: shape for name, shape in expected_tensors(config).items() if with_mtp or not name.startswith(draft_prefix)
    }
    source_shards = sorted({info.shard.name for info in tensors.values()})
    number_of = {name: number for number, name in enumerate(source_shards)}
    units_of: list[list[_Unit]] = [[] for _ in source_shards]
    for unit in _units(shapes, config):
        last = max(number_of[tensors[name].shard.name] for name in _reads(unit.weights, tensors))
        units_of[last].append(unit)
    groups = [group for units in units_of for group in _shard_groups(units, shapes, config, settings)]
    shards = tuple(
        _planned_shard(f"model-{number:05d}-of-{len(groups):05d}.safetensors", group, shapes, tensors, config, settings)
        for number, group in enumerate(groups, 1)
    )
    used = {name for shard in shards for name in shard.reads}
    return ConversionPlan(shards, tuple(name for name in tensors if name not in used), shapes)


def _units(shapes: Mapping[str, tuple], config: ModelConfig) -> Iterator[_Unit]:
    """All units in the model's order; gate, up and down of an expert follow each other there."""
    expert: list[str] = []
    for name in shapes:
        if tensor_class(name, config) not in _EXPERT_CLASSES:
            yield _Unit((name,), is_expert=False)
            continue
        expert.append(name)
        if len(expert) == 3:
            assert len({weight.rsplit(".", 2)[0] for weight in expert}) == 1, expert
            yield _Unit(tuple(expert), is_expert=True)
            expert = []


def _reads(weights: tuple[str, ...], tensors: Mapping[str, TensorInfo]) -> list[str]:
    scales = [name + FP8_SCALE_SUFFIX for name in weights if tensors[name].dtype == "F8_E4M3"]
    return [*weights, *scales]


def _shard_groups(
    units: list[_Unit], shapes: Mapping[str, tuple], config: ModelConfig, settings: ConvertSettings
) -> list[list[_Unit]]:
    """The units of one source shard in groups of at most `shard_bytes`, experts first."""
    groups: list[list[_Unit]] = []
    group_nbytes = 0
    for unit in sorted(units, key=lambda unit: not unit.is_expert):
        parts = _unit_tensors(unit, shapes, config, settings)
        nbytes = sum(tensor_nbytes(tensor.dtype, tensor.shape) for tensor in parts)
        if not groups or group_nbytes + nbytes > settings.shard_bytes:
            groups.append([])
            group_nbytes = 0
        groups[-1].append(unit)
        group_nbytes += nbytes
    return groups


def _planned_shard(
    file_name: str, units: list[_Unit], shapes: Mapping[str, tuple], tensors: Mapping[str, TensorInfo],
    config: ModelConfig, settings: ConvertSettings,
) -> PlannedShard:  # fmt: skip
    planned: list[PlannedTensor] = []
    end = 0
    for unit in units:
        gap = -end % SLAB_ALIGNMENT if unit.is_expert and settings.container != "colibri" else 0
        if gap:  # never at GLM-5.2's sizes, whose experts are whole pages
            padding_name = f"{PADDING_PREFIX}{file_name.removesuffix('.safetensors')}.{len(planned)}"
            planned.append(PlannedTensor(padding_name, "U8", (gap,), "padding", "", None))
        parts = _unit_tensors(unit, shapes, config, settings)
        planned += parts
        end += gap + sum(tensor_nbytes(tensor.dtype, tensor.shape) for tensor in parts)
    header_nbytes = len(safetensors_header(tensor[:3] for tensor in planned))
    reads = tuple(name for unit in units for name in _reads(unit.weights, tensors))
    return PlannedShard(file_name, tuple(planned), header_nbytes + end, reads)


def _unit_tensors(
    unit: _Unit, shapes: Mapping[str, tuple], config: ModelConfig, settings: ConvertSettings
) -> list[PlannedTensor]:
    """The tensors of a unit in order: all data, then all scales."""
    data, scales = [], []
    for name in unit.weights:
        format, shape = settings.recipe.format_for(name, config), shapes[name]
        if not format.is_packed:
            data.append(PlannedTensor(name, format.name.upper(), shape, "data", name, format))
            continue
        data.append(PlannedTensor(name, "U8", (format.data_nbytes(*shape),), "data", name, format))
        scale_shape = (format.scale_count(*shape),)
        scales.append(PlannedTensor(name + SCALES_SUFFIX, settings.scales.upper(), scale_shape, "scales", name, format))
    return data + scales
