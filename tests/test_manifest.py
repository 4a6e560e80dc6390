"""glm_gpu.json: written and read back, refused when it contradicts itself or the folder."""

import json

import pytest

from glm_gpu.config import ModelConfig
from glm_gpu.errors import CheckpointError
from glm_gpu.manifest import MANIFEST_FILE, Manifest, ShardRecord, StoredFormat, name_pattern
from glm_gpu.quant import FORMATS

EXPERT = "model.layers.2.mlp.experts.11.gate_proj.weight"
SHARD = "model-00001-of-00001.safetensors"


@pytest.fixture
def manifest():
    return Manifest(
        tool="glm-gpu 0.1.0",
        source="zai-org/GLM-5.2-FP8",
        revision=None,
        classes={
            "expert": StoredFormat(FORMATS["int4_g64"], "F16"),
            "mtp_expert": StoredFormat(FORMATS["int8"], "F32"),
        },
        shapes={"model.layers.*.mlp.experts.*.gate_proj.weight": (72, 160)},
        shards={SHARD: ShardRecord(4096, "0" * 64)},
    )


@pytest.fixture
def config(oracle_dir):
    return ModelConfig.open(oracle_dir / "tiny_glm")


def changed(manifest, *path, value):
    """The manifest's JSON with one value replaced; ... removes it."""
    values = json.loads(manifest.to_json())
    inner = values
    for key in path[:-1]:
        inner = inner[key]
    if value is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return json.dumps(values).encode()


def test_what_is_written_is_read_back(manifest, tmp_path):
    assert Manifest.from_json(manifest.to_json().encode()) == manifest
    (tmp_path / MANIFEST_FILE).write_text(manifest.to_json())
    assert Manifest.open(tmp_path) == manifest


def test_folder_without_manifest_has_none(tmp_path):
    assert Manifest.open(tmp_path) is None


def test_dangling_manifest_is_not_taken_for_none(tmp_path):
    (tmp_path / MANIFEST_FILE).symlink_to("elsewhere")
    with pytest.raises(CheckpointError, match="link to elsewhere"):
        Manifest.open(tmp_path)


def test_file_says_in_full_how_each_class_is_stored(manifest):
    values = json.loads(manifest.to_json())
    assert values["classes"]["expert"] == {"format": "int4_g64", "bits": 4, "group": 64, "scale_dtype": "F16"}
    assert values["classes"]["mtp_expert"] == {"format": "int8", "bits": 8, "group": None, "scale_dtype": "F32"}
    assert values["shapes"] == {"model.layers.*.mlp.experts.*.gate_proj.weight": [72, 160]}
    assert values["shards"] == {SHARD: {"bytes": 4096, "sha256": "0" * 64}}


def test_weight_is_looked_up_by_class_and_pattern(manifest, config):
    assert manifest.stored(EXPERT, config) == (StoredFormat(FORMATS["int4_g64"], "F16"), (72, 160))
    stored, _ = manifest.stored("model.layers.6.mlp.experts.11.gate_proj.weight", config)
    assert stored.format == FORMATS["int8"]


@pytest.mark.parametrize("name", ["model.layers.0.mlp.gate_proj.weight", "model.layers.2.mlp.experts.0.up_proj.weight"])
def test_weight_the_manifest_does_not_know_is_refused_by_name(manifest, config, name):
    with pytest.raises(CheckpointError, match=f"no entry for the packed tensor '{name}'"):
        manifest.stored(name, config)


def test_pattern_replaces_whole_numbers_between_dots_only():
    assert name_pattern(EXPERT) == "model.layers.*.mlp.experts.*.gate_proj.weight"
    assert name_pattern("lm_head2.weight") == "lm_head2.weight"


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        (("version",), 2, "version 2, expected 1"),
        (("version",), True, "version True, expected 1"),
        (("version",), ..., "version None, expected 1"),
        (("classes",), ..., "classes is missing"),
        (("revision",), ..., "revision is missing"),
        (("tool",), 1, "1 is no string"),
        (("classes",), [], "convert the model again"),
        (("classes", "expert"), "int4", "convert the model again"),
        (("classes", "expert", "format"), "int3", "format 'int3' is no packed format"),
        (("classes", "expert", "format"), "bf16", "format 'bf16' is no packed format"),
        (("classes", "expert", "format"), ["int4"], "convert the model again"),
        (("classes", "expert", "bits"), 8, "int4_g64 does not go with 8 bits"),
        (("classes", "expert", "group"), 128, "int4_g64 does not go with 4 bits, group 128"),
        (("classes", "expert", "scale_dtype"), "F64", "scale_dtype 'F64'"),
        (("shapes", "x"), [1], r"shape \[1\] is not \[O, I\]"),
        (("shapes", "x"), [0, 4], r"shape \[0, 4\] is not \[O, I\]"),
        (("shapes", "x"), [1, 2**40], "is not"),
        (("shapes", "x"), [True, 4], "is not"),
        (("shards", SHARD, "bytes"), -1, "is not bytes and sha256"),
        (("shards", SHARD, "sha256"), "abc", "is not bytes and sha256"),
        (("shards", SHARD, "sha256"), ..., "sha256 is missing"),
        (("shards", SHARD), [1, 2], "convert the model again"),
    ],
    ids=str,
)
def test_contradictions_are_refused_with_a_next_step(manifest, path, value, expected):
    with pytest.raises(CheckpointError, match=expected) as refusal:
        Manifest.from_json(changed(manifest, *path, value=value))
    assert str(refusal.value).startswith(MANIFEST_FILE)
    assert "convert the model again" in str(refusal.value) or "use the glm-gpu" in str(refusal.value)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({SHARD: 4095}, f"{SHARD}: 4095 bytes, glm_gpu.json expects 4096 bytes"),
        ({}, f"{SHARD}: missing, glm_gpu.json expects 4096 bytes"),
        ({SHARD: 4096, "other.safetensors": 1}, r"other\.safetensors: 1 bytes, glm_gpu\.json does not list it"),
    ],
    ids=["size", "missing", "additional"],
)
def test_shards_must_be_those_of_the_manifest(manifest, sizes, expected):
    manifest.validate({SHARD: 4096})
    with pytest.raises(CheckpointError, match=expected):
        manifest.validate(sizes)
