"""Which tensors of a folder are packed weights, and in which format each is stored.

A packed weight is NAME (U8, the bytes of `quant`) beside NAME.qs (its scales). With glm_gpu.json nothing is guessed;
without it the container is taken for one that colibri wrote: F32 scales, and one group size for all int4 weights.
"""

from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from glm_gpu.config import ModelConfig
from glm_gpu.errors import CheckpointError
from glm_gpu.manifest import MANIFEST_FILE, SCALE_DTYPES, Manifest
from glm_gpu.quant import FORMATS, Format
from glm_gpu.safetensors_index import TensorInfo
from glm_gpu.tensors import expected_tensors

# Tensors that only fill up to the next page, so that an expert begins there: the file format knows no gaps.
PADDING_PREFIX = "padding."
SCALES_SUFFIX = ".qs"
_PACKED_FORMATS = tuple(format for format in FORMATS.values() if format.is_packed)
# the first that fits is taken: where several do, every row has one group and they mean the same
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

    @cached_property
    def data_nbytes(self) -> int:
        """Bytes of NAME."""
        return self.format.data_nbytes(*self.shape)

    @cached_property
    def scales_nbytes(self) -> int:
        """Bytes of NAME.qs."""
        return self.format.scale_count(*self.shape) * self.scale_dtype.itemsize


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
        return _from_manifest(packed, tensors, config, manifest)
    return _recognise(packed, tensors, config) if packed else {}


def _from_manifest(
    packed: list[str], tensors: dict[str, TensorInfo], config: ModelConfig, manifest: Manifest
) -> dict[str, StoredMatrix]:
    result = {}
    for name in packed:
        stored, shape = manifest.stored(name, config)
        scales = tensors[name + SCALES_SUFFIX]
        matrix = _matrix(stored.format, shape, stored.scale_dtype)
        if not _fits(matrix, tensors[name], scales):
            raise CheckpointError(
                f"{scales.shard}: {name}: {tensors[name].nbytes} bytes and {scales.nbytes} of {scales.dtype} scales, "
                f"{MANIFEST_FILE} expects {matrix.data_nbytes} and {matrix.scales_nbytes} of {stored.scale_dtype} "
                f"({stored.format.name}, {list(shape)}); convert the model again"
            )
        result[name] = matrix
    return result


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
        matrices = (_matrix(format, shape, "F32") for format in _PACKED_FORMATS)
        fitting = [matrix for matrix in matrices if _fits(matrix, tensors[name], scales)]
        widths = {matrix.format.bits for matrix in fitting}
        if len(widths) != 1:
            raise CheckpointError(
                f"{scales.shard}: {name}: {tensors[name].nbytes} bytes with {scales.nbytes} bytes of {scales.dtype} "
                f"scales fit {'several formats' if widths else 'no format'} for shape {list(shape)}; "
                f"convert the model again to get {MANIFEST_FILE}"
            )
        result[name] = fitting[0]
        if widths == {4}:
            int4_names.append(name)
            int4_candidates &= {matrix.format for matrix in fitting}
    if int4_names and not int4_candidates:
        raise CheckpointError(
            f"{tensors[int4_names[0]].shard.parent}: {int4_names[0]} and {len(int4_names) - 1} other int4 weights fit "
            f"no single group size; convert the model again to get {MANIFEST_FILE}"
        )
    for name in int4_names:
        format = next(format for format in _INT4_FORMATS if format in int4_candidates)
        result[name] = _matrix(format, shapes[name], "F32")
    return result


@cache
def _matrix(format: Format, shape: tuple[int, int], scale_dtype: str) -> StoredMatrix:
    """One object for the thousands of weights that are stored alike."""
    return StoredMatrix(format, shape, SCALE_DTYPES[scale_dtype])


def _fits(matrix: StoredMatrix, data: TensorInfo, scales: TensorInfo) -> bool:
    sizes = (data.nbytes, scales.nbytes)
    return sizes == (matrix.data_nbytes, matrix.scales_nbytes) and SCALE_DTYPES.get(scales.dtype) == matrix.scale_dtype
