"""What a model needs, and what is said when a folder does not have it."""

import json
import logging
import re

import numpy as np
import pytest

from glm_gpu.checkpoint import Checkpoint
from glm_gpu.config import ModelConfig
from glm_gpu.errors import CheckpointError
from glm_gpu.safetensors_index import INDEX_FILE
from glm_gpu.tensors import expected_tensors, head_name, validate_tensors


@pytest.fixture
def rewrite(copy_oracle, write_shard):
    """rewrite(edit, changes) -> a copy of tiny_glm in one shard, its tensors edited in place, its config changed."""

    def make(edit=lambda tensors: None, name="tiny_olmoe", **changes):
        folder = copy_oracle(name)
        tensors = {}
        for shard in sorted(folder.glob("*.safetensors")):
            tensors |= read_tensors(shard)
            shard.unlink()
        (folder / INDEX_FILE).unlink()
        edit(tensors)
        write_shard(folder / "model.safetensors", tensors)
        fields = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps({name: value for name, value in fields.items() if value != ""}))
        return folder

    return make


def read_tensors(shard):
    """Tensors of a shard as (dtype, array of the same width): NumPy knows no bf16."""
    content = shard.read_bytes()
    data_start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:data_start])
    data = np.frombuffer(content, np.uint8)[data_start:]
    widths = {"BF16": np.uint16, "F32": np.float32, "F8_E4M3": np.uint8}
    return {
        name: (
            entry["dtype"],
            data[slice(*entry["data_offsets"])].view(widths[entry["dtype"]]).reshape(entry["shape"]),
        )
        for name, entry in header.items()
        if name != "__metadata__"
    }


def validate(folder):
    with Checkpoint.open(folder) as checkpoint:
        return validate_tensors(checkpoint.config, checkpoint)


def drop(pattern):
    def edit(tensors):
        for name in [name for name in tensors if re.search(pattern, name)]:
            del tensors[name]

    return edit


@pytest.mark.parametrize(("name", "has_mtp"), [("tiny_glm", True), ("tiny_glm_fp8", True), ("tiny_olmoe", False)])
def test_expected_tensors_are_just_those_of_the_reference(oracle_dir, name, has_mtp):
    with Checkpoint.open(oracle_dir / name) as checkpoint:
        expected = expected_tensors(checkpoint.config)
        stored = {name: checkpoint.info(name).shape for name in checkpoint.names if not name.endswith("_scale_inv")}
        assert expected == stored
        assert validate_tensors(checkpoint.config, checkpoint) is has_mtp


def test_published_size_of_glm_5_2_adds_up(oracle_dir):
    fields = json.loads((oracle_dir / "tiny_glm" / "config.json").read_text())
    fields |= {
        "hidden_size": 6144, "num_hidden_layers": 78, "vocab_size": 154880, "intermediate_size": 12288,
        "num_attention_heads": 64, "q_lora_rank": 2048, "kv_lora_rank": 512, "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64, "qk_head_dim": 256, "v_head_dim": 256, "index_n_heads": 32, "index_head_dim": 128,
        "index_topk_freq": 4, "index_skip_topk_offset": 3, "n_routed_experts": 256, "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048, "first_k_dense_replace": 3, "indexer_types": None, "mlp_layer_types": None,
    }  # fmt: skip
    expected = expected_tensors(ModelConfig.from_dict(fields))
    assert sum(name.endswith("experts.0.up_proj.weight") for name in expected) * 256 == 19_456
    assert f"{sum(np.prod(shape, dtype=np.int64) for shape in expected.values()) / 1e9:.2f}" == "753.33"


def test_full_layer_without_its_indexer_is_refused_by_name(rewrite):
    """C02."""
    folder = rewrite(drop(r"layers\.4\.self_attn\.indexer"), name="tiny_glm")
    with pytest.raises(CheckpointError, match=r"5 tensors .* are missing: model\.layers\.4\.self_attn\.indexer\.wq_b"):
        validate(folder)


def test_shared_layer_needs_an_indexer_once_indexer_types_is_gone(rewrite):
    """C02."""
    folder = rewrite(name="tiny_glm", indexer_types="", index_topk_freq="")
    with pytest.raises(CheckpointError, match=r"15 tensors .* are missing: model\.layers\.2\.self_attn\.indexer"):
        validate(folder)


def test_missing_tensors_are_counted_in_one_line(rewrite):
    folder = rewrite(drop(r"layers\.1\.mlp\.experts\.\d+\.up_proj"))
    with pytest.raises(CheckpointError) as refusal:
        validate(folder)
    message = str(refusal.value)
    assert "12 tensors that config.json asks for are missing" in message
    assert "model.layers.1.mlp.experts.0.up_proj.weight" in message
    assert "\n" not in message
    assert len(message) < 500


def test_wrong_shape_is_refused_by_name(rewrite):
    def edit(tensors):
        dtype, values = tensors["model.layers.1.self_attn.q_norm.weight"]
        tensors["model.layers.1.self_attn.q_norm.weight"] = (dtype, values[:-1])

    with pytest.raises(
        CheckpointError, match=r"'model\.layers\.1\.self_attn\.q_norm\.weight' has shape \[95\], expected \[96\]"
    ):
        validate(rewrite(edit))


def test_type_nobody_can_decode_is_refused_by_name(rewrite):
    def edit(tensors):
        tensors["lm_head.weight"] = ("I32", np.zeros((300, 96), np.float32))

    with pytest.raises(CheckpointError, match=r"'lm_head\.weight' has type I32, expected BF16"):
        validate(rewrite(edit))


def test_fp8_weight_without_its_scale_is_refused_before_loading(rewrite):
    folder = rewrite(drop(r"layers\.0\.self_attn\.q_a_proj\.weight_scale_inv"), name="tiny_glm_fp8")
    with pytest.raises(CheckpointError, match=r"q_a_proj\.weight' is FP8 and its scales .* are missing"):
        validate(folder)


def test_head_is_needed_unless_tied(rewrite):
    folder = rewrite(drop("lm_head"))
    with pytest.raises(CheckpointError, match=r"1 tensors .* are missing: lm_head\.weight"):
        validate(folder)
    fields = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(fields))
    validate(folder)
    assert head_name(ModelConfig.from_dict(fields)) == "model.embed_tokens.weight"
    assert head_name(ModelConfig.from_dict(fields | {"tie_word_embeddings": False})) == "lm_head.weight"


def test_absent_draft_layer_is_reported_and_no_error(rewrite, caplog):
    with caplog.at_level(logging.WARNING):
        assert validate(rewrite(drop(r"layers\.6\."), name="tiny_glm")) is False
    assert caplog.text == ""


def test_incomplete_draft_layer_is_not_used_and_logged(rewrite, caplog):
    with caplog.at_level(logging.WARNING):
        assert validate(rewrite(drop(r"layers\.6\.eh_proj"), name="tiny_glm")) is False
    assert "1 of 71 tensors are missing, first model.layers.6.eh_proj.weight" in caplog.text


def test_wrong_shape_in_the_draft_layer_is_refused(rewrite):
    def edit(tensors):
        tensors["model.layers.6.hnorm.weight"] = ("F32", np.zeros(1, np.float32))

    with pytest.raises(CheckpointError, match=r"layers\.6\.hnorm\.weight' has shape \[1\]"):
        validate(rewrite(edit, name="tiny_glm"))


def test_correction_bias_stored_in_16_bits_is_warned_about(rewrite, caplog):
    def edit(tensors):
        name = "model.layers.3.mlp.gate.e_score_correction_bias"
        tensors[name] = ("BF16", np.zeros(tensors[name][1].shape, np.uint16))

    with caplog.at_level(logging.WARNING):
        assert validate(rewrite(edit, name="tiny_glm"))
    assert "1 of 4 correction biases are not F32, first model.layers.3." in caplog.text


def test_correction_bias_keeps_every_bit(oracle_dir):
    name = "model.layers.3.mlp.gate.e_score_correction_bias"
    with Checkpoint.open(oracle_dir / "tiny_glm") as checkpoint:
        assert checkpoint.info(name).dtype == "F32"
        values = checkpoint.read_f32(name)
        stored = [content[name][1] for content in map(read_tensors, checkpoint.shards) if name in content]
        np.testing.assert_array_equal(values, stored[0])
        assert (values.view(np.uint32) & 0xFFFF).any()
