"""config.json as the hub has it, as older checkpoints have it, and as nobody should."""

import json

import numpy as np
import pytest

from glm_gpu.config import ModelConfig
from glm_gpu.errors import CheckpointError, UnsupportedModelError

ABSENT = object()


@pytest.fixture
def glm(oracle_dir):
    return json.loads((oracle_dir / "tiny_glm" / "config.json").read_text())


@pytest.fixture
def olmoe(oracle_dir):
    return json.loads((oracle_dir / "tiny_olmoe" / "config.json").read_text())


def changed(fields, **changes):
    """The config with some fields replaced, or left out where ABSENT."""
    return {name: value for name, value in (fields | changes).items() if value is not ABSENT}


def glm_5_2(glm):
    """The published sizes of GLM-5.2."""
    return changed(
        glm,
        hidden_size=6144, num_hidden_layers=78, vocab_size=154880, intermediate_size=12288, num_attention_heads=64,
        num_key_value_heads=64, q_lora_rank=2048, kv_lora_rank=512, qk_nope_head_dim=192, qk_rope_head_dim=64,
        qk_head_dim=256, v_head_dim=256, head_dim=192, max_position_embeddings=1048576, index_n_heads=32,
        index_head_dim=128, index_topk=2048, index_topk_freq=4, index_skip_topk_offset=3, n_routed_experts=256,
        num_experts_per_tok=8, moe_intermediate_size=2048, first_k_dense_replace=3,
        eos_token_id=[154820, 154827, 154829], indexer_types=ABSENT, mlp_layer_types=ABSENT,
    )  # fmt: skip


def test_published_config_is_read_as_it_is_meant(glm):
    config = ModelConfig.from_dict(glm_5_2(glm))
    assert config.full_layers == (0, 1, 2, *range(6, 75, 4))
    assert len(config.full_layers) == 21
    assert config.sparse_layers == tuple(range(3, 78))
    assert config.rope_theta == 8e6
    assert config.qk_head_dim == 256
    assert config.latent_width == 576
    assert config.eos_token_id == (154820, 154827, 154829)
    assert (config.mtp_layer, config.num_layers) == (78, 78)
    assert [config.index_owner(layer) for layer in (0, 2, 5, 6, 75, 77, 78)] == [0, 2, 2, 6, 74, 74, 78]
    assert config.is_sparse(78)
    assert config.is_full_indexer(78)


def test_tiny_glm_agrees_with_the_reference_about_layers(glm, oracle_dir):
    config = ModelConfig.open(oracle_dir / "tiny_glm")
    with np.load(oracle_dir / "tiny_glm" / "reference.npz") as reference:
        assert config.full_layers == tuple(reference["full_layers"])
        assert [config.index_owner(layer) for layer in range(6)] == reference["index_owner"].tolist()
        assert config.sparse_layers == tuple(reference["moe_layers"])


def test_indexer_types_beat_pattern_and_formula(glm):
    types = ["full", "shared", "full", "shared", "shared", "full"]
    config = ModelConfig.from_dict(changed(glm, indexer_types=types, index_topk_pattern="FFFFFF"))
    assert config.indexer_types == tuple(types)


def test_pattern_beats_formula(glm):
    config = ModelConfig.from_dict(changed(glm, indexer_types=ABSENT, index_topk_pattern="FSFSSF"))
    assert config.full_layers == (0, 2, 5)


@pytest.mark.parametrize(
    ("freq", "offset", "expected"),
    [(3, 2, (0, 1, 4)), (1, 2, (0, 1, 2, 3, 4, 5)), (4, 3, (0, 1, 2)), (2, 0, (1, 3, 5)), (ABSENT, 2, tuple(range(6)))],
)
def test_formula_decides_when_nothing_else_does(glm, freq, offset, expected):
    fields = changed(glm, indexer_types=ABSENT, index_topk_freq=freq, index_skip_topk_offset=offset)
    if expected[0] != 0:
        with pytest.raises(CheckpointError, match="layer 0 to be 'full'"):
            ModelConfig.from_dict(fields)
        return
    assert ModelConfig.from_dict(fields).full_layers == expected


def test_without_any_indexer_key_every_layer_is_full(glm):
    names = ("indexer_types", "index_topk_pattern", "index_topk_freq", "index_skip_topk_offset")
    config = ModelConfig.from_dict(changed(glm, **dict.fromkeys(names, ABSENT)))
    assert config.full_layers == tuple(range(6))


@pytest.mark.parametrize(
    ("value", "expected"), [(ABSENT, (3, 4, 5)), (0, tuple(range(6))), (5, (5,)), (6, ()), (60, ())]
)
def test_first_k_dense_replace_decides_without_mlp_layer_types(glm, value, expected):
    config = ModelConfig.from_dict(changed(glm, mlp_layer_types=ABSENT, first_k_dense_replace=value))
    assert config.sparse_layers == expected


def test_mlp_layer_types_beat_first_k_dense_replace(glm):
    types = ["sparse", "dense", "sparse", "sparse", "dense", "sparse"]
    assert ModelConfig.from_dict(changed(glm, mlp_layer_types=types)).sparse_layers == (0, 2, 3, 5)


def test_nested_rope_theta_beats_the_top_level_one(glm):
    assert ModelConfig.from_dict(changed(glm, rope_theta=10000.0)).rope_theta == 8e6
    assert ModelConfig.from_dict(changed(glm, rope_theta=1e6, rope_parameters=ABSENT)).rope_theta == 1e6


def test_glm_without_rope_theta_is_refused(glm):
    with pytest.raises(CheckpointError, match="rope_theta is missing"):
        ModelConfig.from_dict(changed(glm, rope_parameters={"rope_type": "default"}))


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 8e6, "factor": 4}},
        {"rope_parameters": {"type": "linear", "rope_theta": 8e6}},
        {"rope_scaling": {"type": "yarn", "factor": 4}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 8e6, "partial_rotary_factor": 0.5}},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"scoring_func": "softmax"},
        {"topk_method": "greedy"},
        {"hidden_act": "gelu"},
        {"rope_interleave": False},
        {"moe_layer_freq": 2},
        {"moe_router_dtype": "bfloat16"},
        {"attention_bias": 0},
        {"quantization_config": {"quant_method": "awq", "bits": 4}},
        {"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}},
    ],
    ids=str,
)
def test_what_is_not_implemented_is_refused_by_field(glm, changes):
    with pytest.raises(UnsupportedModelError) as refusal:
        ModelConfig.from_dict(changed(glm, **changes))
    named = next(iter(changes))
    inner = changes[named]
    assert named in str(refusal.value) or any(key in str(refusal.value) for key in inner)


@pytest.mark.parametrize("model_type", ["glm5_next", "glm4_moe", "deepseek_v3", "llama", ""])
def test_other_models_are_refused_by_model_type(glm, model_type):
    with pytest.raises(UnsupportedModelError, match=f"model_type '{model_type}'.*glm_moe_dsa.*olmoe"):
        ModelConfig.from_dict(changed(glm, model_type=model_type))


def test_head_dim_of_glm_is_never_used(glm):
    for head_dim in (28, 192, "nonsense", ABSENT):
        assert ModelConfig.from_dict(changed(glm, head_dim=head_dim)).head_dim == 0


def test_indexer_rope_interleave_is_read(glm):
    assert ModelConfig.from_dict(changed(glm, indexer_rope_interleave=ABSENT)).indexer_rope_interleave is True
    assert ModelConfig.from_dict(changed(glm, indexer_rope_interleave=False)).indexer_rope_interleave is False


@pytest.mark.parametrize(("value", "expected"), [(317, (317,)), ([317, 0], (317, 0)), (ABSENT, ()), (None, ())])
def test_eos_token_id_is_a_tuple(glm, value, expected):
    assert ModelConfig.from_dict(changed(glm, eos_token_id=value)).eos_token_id == expected


def test_no_draft_layer_when_the_config_counts_none(glm):
    for value in (0, ABSENT):
        assert ModelConfig.from_dict(changed(glm, num_nextn_predict_layers=value)).mtp_layer is None


def test_weight_block_size_is_read(glm):
    for method, expected in (({"weight_block_size": [64, 32]}, (64, 32)), ({"weight_block_size": None}, (128, 128))):
        config = ModelConfig.from_dict(changed(glm, quantization_config={"quant_method": "fp8", **method}))
        assert config.weight_block_size == expected


def test_olmoe_fields_are_found_under_the_shared_names(olmoe):
    config = ModelConfig.from_dict(changed(olmoe, num_key_value_heads=3, clip_qkv=8))
    assert (config.moe_intermediate_size, config.n_routed_experts, config.num_experts_per_tok) == (40, 12, 3)
    assert (config.head_dim, config.qk_head_dim, config.num_key_value_heads) == (16, 16, 3)
    assert (config.rope_theta, config.clip_qkv, config.norm_topk_prob) == (10000.0, 8.0, False)
    assert config.sparse_layers == (0, 1, 2)
    assert not config.is_latent
    assert not config.is_full_indexer(0)
    assert config.mtp_layer is None


def test_olmoe_accepts_the_newer_rope_parameters(olmoe):
    fields = changed(olmoe, rope_theta=ABSENT, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    assert ModelConfig.from_dict(fields).rope_theta == 5e5
    assert ModelConfig.from_dict(changed(olmoe, rope_theta=ABSENT)).rope_theta == 10000.0


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": 97},
        {"num_key_value_heads": 4},
        {"n_group": 2},
        {"clip_qkv": -1},
        {"head_dim": 8},
        {"num_experts_per_tok": 13},
    ],
    ids=str,
)
def test_olmoe_fields_that_contradict_each_other_are_refused(olmoe, changes):
    with pytest.raises(CheckpointError, match=next(iter(changes))):
        ModelConfig.from_dict(changed(olmoe, **changes))


REQUIRED = [
    "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size", "q_lora_rank",
    "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "index_n_heads", "index_head_dim",
    "index_topk", "n_routed_experts", "moe_intermediate_size", "max_position_embeddings", "model_type",
]  # fmt: skip


@pytest.mark.parametrize("name", REQUIRED)
def test_missing_size_is_named(glm, name):
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        ModelConfig.from_dict(changed(glm, **{name: ABSENT}))


@pytest.mark.parametrize("value", [-1, 0, 1.5, "6", True, [6], {}, 10**30, float("nan")], ids=str)
@pytest.mark.parametrize("name", [name for name in REQUIRED if name != "model_type"])
def test_size_out_of_range_or_mistyped_is_named(glm, name, value):
    with pytest.raises(CheckpointError, match=f"{name} is .*expected"):
        ModelConfig.from_dict(changed(glm, **{name: value}))


@pytest.mark.parametrize(
    "changes",
    [
        {"qk_rope_head_dim": 11},
        {"qk_rope_head_dim": 34, "qk_head_dim": ABSENT},  # wider than an index head
        {"qk_head_dim": 28},
        {"num_experts_per_tok": 17},
        {"n_group": 3},
        {"n_group": 16, "topk_group": 16},  # groups of one
        {"topk_group": 5, "n_group": 4},
        {"num_experts_per_tok": 5, "n_group": 4, "topk_group": 1},
        {"num_nextn_predict_layers": 2},
        {"indexer_types": ["full"] * 5},
        {"indexer_types": ["shared"] + ["full"] * 5},
        {"indexer_types": ["full"] * 5 + ["maybe"]},
        {"indexer_types": "FFSSFS"},
        {"index_topk_pattern": "FFSSFX", "indexer_types": ABSENT},
        {"index_topk_pattern": ["F"] * 6, "indexer_types": ABSENT},
        {"mlp_layer_types": ["dense"] * 7},
        {"mlp_layer_types": [["dense"]] * 6},
        {"rms_norm_eps": 0},
        {"rms_norm_eps": float("inf")},
        {"rope_parameters": {"rope_theta": float("nan")}},
        {"rope_parameters": [8000000]},
        {"routed_scaling_factor": "2.5"},
        {"norm_topk_prob": 1},
        {"tie_word_embeddings": "false"},
        {"eos_token_id": 320},
        {"eos_token_id": [-1]},
        {"eos_token_id": True},
        {"n_shared_experts": 0},
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [0, 128]}},
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": 128}},
        {"quantization_config": "fp8"},
    ],
    ids=str,
)
def test_fields_that_do_not_add_up_are_refused_by_name(glm, changes):
    with pytest.raises(CheckpointError, match=r"^config\.json: .*expected ") as refusal:
        ModelConfig.from_dict(changed(glm, **changes))
    named = next(iter(changes))
    inner = changes[named] if isinstance(changes[named], dict) else {}
    assert named in str(refusal.value) or any(key in str(refusal.value) for key in inner)


def test_largest_config_accepted_has_no_more_experts_than_a_table_can_hold(glm):
    fields = changed(glm, num_hidden_layers=512, n_routed_experts=513, indexer_types=ABSENT, mlp_layer_types=ABSENT)
    with pytest.raises(CheckpointError, match="n_routed_experts is 513, expected a whole number from 1 to 512"):
        ModelConfig.from_dict(fields)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[]", "expected a JSON object, found list"),
        (b"null", "expected a JSON object"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"hidden_size": 1, "hidden_size": 2}', "'hidden_size' given twice"),
        (b'{"hidden_size": ' + b"9" * 5000 + b"}", "not valid JSON"),
    ],
    ids=["empty", "cut", "list", "null", "binary", "deep", "twice", "digits"],
)
def test_broken_file_is_refused_by_path(tmp_path, text, expected):
    path = tmp_path / "config.json"
    path.write_bytes(text)
    with pytest.raises(CheckpointError, match=expected) as refusal:
        ModelConfig.open(tmp_path)
    assert str(refusal.value).startswith(str(path))


def test_missing_file_and_folder_are_told_apart(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json: not found"):
        ModelConfig.open(tmp_path)
    with pytest.raises(CheckpointError, match="no such folder"):
        ModelConfig.open(tmp_path / "nowhere")


def test_dangling_link_names_its_target(tmp_path):
    (tmp_path / "config.json").symlink_to("../../blobs/0123abcd")
    with pytest.raises(CheckpointError, match=r"link to \.\./\.\./blobs/0123abcd"):
        ModelConfig.open(tmp_path)
