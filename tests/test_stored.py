"""Packed containers: read as the manifest says, recognised without one, refused when no single reading fits."""

import json
import os
import re

import numpy as np
import pytest

from glm_gpu.checkpoint import Checkpoint
from glm_gpu.errors import CheckpointError
from glm_gpu.manifest import MANIFEST_FILE, Manifest, ShardRecord, StoredFormat, name_pattern
from glm_gpu.quant import FORMATS, dequantize, quantize
from glm_gpu.recipe import Recipe, tensor_class
from glm_gpu.stored import SCALES_SUFFIX
from glm_gpu.tensors import validate_tensors

SHARD = "model.safetensors"
EXPERT = "model.layers.1.mlp.experts.3.gate_proj.weight"  # [40, 96] in tiny_olmoe
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture
def convert(oracle_dir, write_shard, tmp_path):
    """convert(recipe, ...) -> (folder, matrices): tiny_olmoe packed as by a converter, and what was packed."""

    def make(recipe, scale_dtype=np.float32, has_manifest=False, edit=lambda tensors: None):
        tensors, matrices, classes, shapes = {}, {}, {}, {}
        with Checkpoint.open(oracle_dir / "tiny_olmoe") as checkpoint:
            for name in checkpoint.names:
                values = checkpoint.read_f32(name)
                format = recipe.format_for(name, checkpoint.config)
                if not format.is_packed:
                    tensors[name] = values
                    continue
                matrices[name] = matrix = quantize(values, format, scale_dtype)
                tensors[name] = matrix.data.ravel()
                tensors[name + SCALES_SUFFIX] = matrix.scales.ravel()
                scale_type = "F32" if scale_dtype == np.float32 else "F16"
                classes[tensor_class(name, checkpoint.config)] = StoredFormat(format, scale_type)
                shapes[name_pattern(name)] = values.shape
        edit(tensors)
        write_shard(tmp_path / SHARD, tensors)
        (tmp_path / "config.json").write_bytes((oracle_dir / "tiny_olmoe" / "config.json").read_bytes())
        if has_manifest:
            record = ShardRecord((tmp_path / SHARD).stat().st_size, "0" * 64)
            manifest = Manifest("test", "tiny_olmoe", None, classes, shapes, {SHARD: record})
            (tmp_path / MANIFEST_FILE).write_text(manifest.to_json())
        return tmp_path, matrices

    return make


def assert_reads_back(folder, matrices):
    with Checkpoint.open(folder) as checkpoint:
        validate_tensors(checkpoint.config, checkpoint)
        for name, matrix in matrices.items():
            read = checkpoint.read_matrix(name, matrix.shape, FORMATS["int8"])
            np.testing.assert_array_equal(dequantize(read), dequantize(matrix))
            np.testing.assert_array_equal(checkpoint.read_f32(name), dequantize(matrix))
        return {name: checkpoint.stored(name).format.name for name in matrices}


@pytest.mark.parametrize("scale_dtype", [np.float32, np.float16])
@pytest.mark.parametrize(("bits", "group"), [(4, 64), (4, 128), (4, 0), (8, 64), (2, 64)])
def test_container_with_manifest_is_read_as_it_says(convert, bits, group, scale_dtype):
    recipe = Recipe.from_bits(bits, 4, group)
    folder, matrices = convert(recipe, scale_dtype, has_manifest=True)
    formats = assert_reads_back(folder, matrices)
    assert formats == {name: matrix.format.name for name, matrix in matrices.items()}


@pytest.mark.parametrize(("bits", "group"), [(4, 64), (4, 128), (4, 0), (8, 64), (2, 64)])
def test_container_without_manifest_is_recognised(convert, bits, group):
    folder, matrices = convert(Recipe.from_bits(bits, 4, group))
    assert_reads_back(folder, matrices)


def test_one_group_size_is_taken_from_all_weights_together(convert):
    folder, matrices = convert(Recipe.from_bits(4, 4, 64))
    formats = assert_reads_back(folder, matrices)
    # down_proj has 40 inputs: by itself a row of it could be anything
    assert formats["model.layers.0.mlp.experts.0.down_proj.weight"] == "int4_g64"
    assert formats[EMBEDDING] == "int8"


def edit_expert(name, value):
    def edit(tensors):
        tensors[name] = value

    return edit


@pytest.mark.parametrize("has_manifest", [True, False])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        (EXPERT, np.zeros(40 * 48 - 1, np.uint8)),
        (EXPERT + SCALES_SUFFIX, np.zeros(40 * 2 + 1, np.float32)),
        (EXPERT + SCALES_SUFFIX, np.zeros(40 * 2, np.float16)),
        (EXPERT + SCALES_SUFFIX, np.zeros(40 * 8, np.uint8)),
    ],
    ids=["bytes", "scales", "f16 scales", "u8 scales"],
)
def test_bytes_or_scales_that_fit_no_reading_are_refused_by_name(convert, name, value, has_manifest):
    folder, _ = convert(Recipe.default(), has_manifest=has_manifest, edit=edit_expert(name, value))
    with pytest.raises(CheckpointError, match=re.escape(EXPERT)):
        Checkpoint.open(folder)


def test_two_group_sizes_without_a_manifest_are_refused(convert):
    folder, _ = convert(Recipe.from_bits(4, 4, 64), edit=edit_expert(EXPERT + SCALES_SUFFIX, np.ones(40, np.float32)))
    with pytest.raises(CheckpointError, match="int4 weights fit no single group size"):
        Checkpoint.open(folder)


def test_weight_too_narrow_to_tell_its_bits_is_refused_and_readable_with_a_manifest(oracle_dir, write_shard, tmp_path):
    fields = json.loads((oracle_dir / "tiny_olmoe" / "config.json").read_text()) | {"intermediate_size": 1}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    name = "model.layers.0.mlp.experts.0.down_proj.weight"  # [96, 1]: a byte a row in every format
    matrix = quantize(np.ones((96, 1), np.float32), FORMATS["int4"])
    write_shard(tmp_path / SHARD, {name: matrix.data.ravel(), name + SCALES_SUFFIX: matrix.scales.ravel()})
    with pytest.raises(CheckpointError, match=rf"{name}: 96 bytes .* fit several formats"):
        Checkpoint.open(tmp_path)
    record = ShardRecord((tmp_path / SHARD).stat().st_size, "0" * 64)
    classes, shapes = {"expert": StoredFormat(FORMATS["int4"])}, {name_pattern(name): (96, 1)}
    (tmp_path / MANIFEST_FILE).write_text(Manifest("test", "x", None, classes, shapes, {SHARD: record}).to_json())
    with Checkpoint.open(tmp_path) as checkpoint:
        np.testing.assert_array_equal(checkpoint.read_f32(name), np.ones((96, 1), np.float32))


@pytest.mark.parametrize("value", [None, np.zeros((40, 96), np.float32)], ids=["missing", "f32"])
def test_scales_without_their_packed_weight_are_refused(convert, value):
    def edit(tensors):
        del tensors[EXPERT]
        if value is not None:
            tensors[EXPERT] = value

    folder, _ = convert(Recipe.default(), edit=edit)
    with pytest.raises(CheckpointError, match=f"{EXPERT} is {'missing' if value is None else 'F32'}, expected U8"):
        Checkpoint.open(folder)


def test_packed_weight_without_scales_is_refused_by_name(convert):
    def edit(tensors):
        del tensors[EXPERT + SCALES_SUFFIX]

    folder, _ = convert(Recipe.default(), edit=edit)
    with Checkpoint.open(folder) as checkpoint, pytest.raises(CheckpointError, match=rf"'{EXPERT}' has shape \[1920\]"):
        validate_tensors(checkpoint.config, checkpoint)


def test_manifest_beats_what_the_sizes_suggest(convert):
    folder, _ = convert(Recipe.from_bits(4, 4, 64), has_manifest=True)
    path = folder / MANIFEST_FILE
    path.write_text(path.read_text().replace('"int4_g64"', '"int4"').replace('"group": 64', '"group": null'))
    with pytest.raises(CheckpointError, match=r"1920 bytes and 320 of F32 scales, glm_gpu\.json expects 1920 and 160"):
        Checkpoint.open(folder)


@pytest.mark.parametrize("size", [None, 0, 100_000], ids=["missing", "empty", "cut"])
def test_incomplete_container_is_refused_with_both_sizes(convert, size):
    folder, _ = convert(Recipe.default(), has_manifest=True)
    expected = (folder / SHARD).stat().st_size
    if size is None:
        (folder / SHARD).rename(folder / "away")
    else:
        os.truncate(folder / SHARD, size)
    found = "missing" if size is None else f"{size} bytes"
    with pytest.raises(CheckpointError, match=f"{SHARD}: {found}, glm_gpu.json expects {expected} bytes"):
        Checkpoint.open(folder)


def test_shard_the_manifest_does_not_list_is_refused(convert, write_shard):
    folder, _ = convert(Recipe.default(), has_manifest=True)
    write_shard(folder / "stray.safetensors", {"extra": np.zeros(3, np.float32)})
    with pytest.raises(CheckpointError, match=r"stray\.safetensors: \d+ bytes, glm_gpu\.json does not list it"):
        Checkpoint.open(folder)


def test_packed_tensor_the_model_does_not_know_is_left_alone(convert):
    def edit(tensors):
        tensors["extra.weight"] = np.zeros(7, np.uint8)
        tensors["extra.weight.qs"] = np.zeros(3, np.float32)

    folder, matrices = convert(Recipe.default(), edit=edit)
    assert_reads_back(folder, matrices)
