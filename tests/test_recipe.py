"""Which class each weight belongs to, and what the options make of the classes."""

import re
from dataclasses import replace

import pytest

from glm_gpu.config import ModelConfig
from glm_gpu.errors import CheckpointError, RequestError
from glm_gpu.quant import Format
from glm_gpu.recipe import Recipe, tensor_class
from glm_gpu.tensors import expected_tensors


@pytest.fixture
def glm(oracle_dir):
    return ModelConfig.open(oracle_dir / "tiny_glm")


def classes_of(config):
    """Every kind of weight, its layer's and expert's number left out, by class."""
    result = {}
    for name in expected_tensors(config):
        kind = re.sub(r"(layers|experts)\.\d+\.", "", name.removeprefix("model."))
        result.setdefault(tensor_class(name, config), set()).add(kind)
    return result


def test_every_glm_weight_has_its_class(glm):
    assert classes_of(glm) == {
        "embedding": {"embed_tokens.weight", "lm_head.weight"},
        "float": {
            "norm.weight", "input_layernorm.weight", "post_attention_layernorm.weight",
            "self_attn.q_a_layernorm.weight", "self_attn.kv_a_layernorm.weight",
            "self_attn.indexer.k_norm.weight", "self_attn.indexer.k_norm.bias",
            "self_attn.indexer.weights_proj.weight",
            "mlp.gate.weight", "mlp.gate.e_score_correction_bias",
            "enorm.weight", "hnorm.weight", "shared_head.norm.weight",
        },
        "dense": {
            "self_attn.q_a_proj.weight", "self_attn.q_b_proj.weight", "self_attn.kv_a_proj_with_mqa.weight",
            "self_attn.kv_b_proj.weight", "self_attn.o_proj.weight",
            "mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight",
            "mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight",
            "mlp.shared_experts.down_proj.weight",
        },
        "indexer": {"self_attn.indexer.wq_b.weight", "self_attn.indexer.wk.weight"},
        "expert": {"mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"},
        "mtp_expert": {"mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"},
        "mtp": {
            "eh_proj.weight", "self_attn.q_a_proj.weight", "self_attn.q_b_proj.weight",
            "self_attn.kv_a_proj_with_mqa.weight", "self_attn.kv_b_proj.weight", "self_attn.o_proj.weight",
            "mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight",
            "mlp.shared_experts.down_proj.weight",
        },
    }  # fmt: skip


def test_every_olmoe_weight_has_its_class(oracle_dir):
    classes = classes_of(ModelConfig.open(oracle_dir / "tiny_olmoe"))
    assert set(classes) == {"embedding", "float", "dense", "expert"}
    assert "self_attn.q_norm.weight" in classes["float"]
    assert classes["dense"] == {f"self_attn.{letter}_proj.weight" for letter in "qkvo"}


def test_draft_layer_is_told_from_a_layer_whose_number_it_begins_with(glm):
    config = replace(glm, num_hidden_layers=1)  # the draft layer is number 1
    assert tensor_class("model.layers.1.mlp.experts.0.up_proj.weight", config) == "mtp_expert"
    assert tensor_class("model.layers.10.mlp.experts.0.up_proj.weight", config) == "expert"


@pytest.mark.parametrize(
    "name", ["model.layers.0.surprise", "vision.patch.weight", "", "model.layers.0.mlp.up_proj.qs"]
)
def test_weight_of_no_class_is_refused_by_name(glm, name):
    with pytest.raises(CheckpointError, match=re.escape(repr(name))):
        tensor_class(name, glm)


def test_default_recipe_is_the_documented_one(glm):
    recipe = Recipe.default()
    formats = {
        name: recipe.format_for(name, glm).name
        for name in (
            "model.layers.2.mlp.experts.3.up_proj.weight",
            "model.layers.0.self_attn.o_proj.weight",
            "lm_head.weight",
            "model.layers.0.self_attn.indexer.wk.weight",
            "model.layers.6.mlp.experts.0.up_proj.weight",
            "model.layers.6.eh_proj.weight",
            "model.layers.2.mlp.gate.weight",
        )
    }
    assert list(formats.values()) == ["int4_g64", "int4_g64", "int8", "int8", "int8", "int8", "f32"]


@pytest.mark.parametrize(
    ("bits", "group", "expected"),
    [(16, 64, "bf16"), (8, 64, "int8"), (4, 64, "int4_g64"), (4, 128, "int4_g128"), (4, 0, "int4"), (2, 64, "int2")],
)
def test_bits_choose_the_format(bits, group, expected):
    recipe = Recipe.from_bits(bits, 4, group)
    assert recipe.expert.name == expected
    assert Recipe.from_bits(4, bits, group).dense.name == expected


def _formats(recipe: Recipe) -> set[str]:
    return {value.name for value in vars(recipe).values() if isinstance(value, Format)}


def test_sixteen_bits_leave_nothing_packed():
    recipe = Recipe.from_bits(16, 16, 64)
    assert _formats(recipe) == {"bf16"}


def test_float32_recipe_is_the_reference():
    assert _formats(Recipe.float32()) == {"f32"}


@pytest.mark.parametrize(("bits", "group"), [(3, 64), (0, 64), (4, 32), (4, -1)])
def test_widths_without_a_format_are_refused(bits, group):
    with pytest.raises(RequestError, match="choose"):
        Recipe.from_bits(bits, 4, group)
