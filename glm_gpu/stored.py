"""Which tensors of a folder are packed weights, and in which format each is stored.

A packed weight is NAME (U8, the bytes of `quant`) beside NAME.qs (its scales). With glm_gpu.json nothing is guessed;
without it the container is taken for one that colibri wrote: F32 scales, and one group size for all int4 weights.
"""

from dataclasses import dataclass

import numpy as np

from glm_gpu.config import ModelConfig
from glm_gpu.errors import CheckpointError
from glm_gpu.manifest import MANIFEST_FILE, SCALE_DTYPES, Manifest
from glm_gpu.quant import FORMATS, Format
from glm_gpu.safetensors_index import TensorInfo
from glm_gpu.tensors import expected_tensors

SCALES_SUFFIX = ".qs"
# in the order of preference where they mean the same: a single group in every row
_INT4_FORMATS = (FORMATS["int4"], FORMATS["int4_g64"], FORMATS["int4_g128"])


@dataclass(frozen=True)
class StoredMatrix:
    """How one packed weight is stored.

    Attributes:
        format: of its bytes.
        shape: (O, I).
        scale_dtype: of its scales, float32 or float16.
    """

    format: Format
    shape: tuple[int, int]
    scale_dtype: np.dtype


def stored_matrices(
    tensors: dict[str, TensorInfo], config: ModelConfig, manifest: Manifest | None
) -> dict[str, StoredMatrix]:
    """Every packed weight the model knows, by name; empty for a checkpoint of plain numbers. Reads no data.

    Raises:
        CheckpointError: bytes and scales do not fit the manifest, or without one no single reading fits all weights.
    """
    packed = [name.removesuffix(SCALES_SUFFIX) for name in tensors if name.endswith(SCALES_SUFFIX)]
    for name in packed:
        if name not in tensors or tensors[name].dtype != "U8":
            found = tensors[name].dtype if name in tensors else "missing"
            shard = tensors[name + SCALES_SUFFIX].shard
            raise CheckpointError(f"{shard}: {name} is {found}, expected U8 beside its scales; convert the model again")
    if manifest is not None:
        return {name: _from_manifest(name, tensors, config, manifest) for name in packed}
    return _recognise(packed, tensors, config) if packed else {}


def _from_manifest(name: str, tensors: dict[str, TensorInfo], config: ModelConfig, manifest: Manifest) -> StoredMatrix:
    stored, shape = manifest.stored(name, config)
    matrix = StoredMatrix(stored.format, shape, SCALE_DTYPES[stored.scale_dtype])
    scales = tensors[name + SCALES_SUFFIX]
    expected = (stored.format.data_nbytes(*shape), stored.scale_dtype, stored.format.scale_count(*shape))
    found = (tensors[name].nbytes, scales.dtype, scales.nbytes // matrix.scale_dtype.itemsize)
    if found != expected:
        raise CheckpointError(
            f"{scales.shard}: {name}: {found[0]} bytes and {found[2]} scales ({found[1]}), {MANIFEST_FILE} expects "
            f"{expected[0]} and {expected[2]} ({expected[1]}); convert the model again"
        )
    return matrix


def _recognise(packed: list[str], tensors: dict[str, TensorInfo], config: ModelConfig) -> dict[str, StoredMatrix]:
    """The readings of a container without manifest: bits from each weight's bytes, one group from all int4 together."""
    shapes = expected_tensors(config)
    result = {}
    int4_names = []
    int4_candidates = set(_INT4_FORMATS)
    for name in packed:
        shape = shapes.get(name)
        if shape is None or len(shape) != 2:
            continue  # nothing the model reads
        scales = tensors[name + SCALES_SUFFIX]
        fitting = [
            format for format in FORMATS.values() if format.is_packed and _fits(format, shape, tensors[name], scales)
        ]
        widths = {format.bits for format in fitting}
        if len(widths) != 1:
            raise CheckpointError(
                f"{scales.shard}: {name}: {tensors[name].nbytes} bytes with {scales.nbytes} bytes of {scales.dtype} "
                f"scales fit {'several formats' if widths else 'no format'} for shape {list(shape)}; "
                f"convert the model again to get {MANIFEST_FILE}"
            )
        result[name] = StoredMatrix(fitting[0], shape, SCALE_DTYPES["F32"])
        if widths == {4}:
            int4_names.append(name)
            int4_candidates &= set(fitting)
    if int4_names and not int4_candidates:
        raise CheckpointError(
            f"{tensors[int4_names[0]].shard.parent}: {int4_names[0]} and {len(int4_names) - 1} other int4 weights fit "
            f"no single group size; convert the model again to get {MANIFEST_FILE}"
        )
    for name in int4_names:
        format = next(format for format in _INT4_FORMATS if format in int4_candidates)
        result[name] = StoredMatrix(format, shapes[name], SCALE_DTYPES["F32"])
    return result


def _fits(format: Format, shape: tuple[int, int], data: TensorInfo, scales: TensorInfo) -> bool:
    has_scales = scales.dtype == "F32" and scales.nbytes == 4 * format.scale_count(*shape)
    return has_scales and data.nbytes == format.data_nbytes(*shape)
