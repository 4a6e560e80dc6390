"""The generator of slices: containers that open, always the same bytes, and no disk filled."""

import json
from pathlib import Path

import pytest

from glm_gpu.bench import slice as slices
from glm_gpu.bench.slice import SliceShape, glm_config, temporary_slice, write_slice
from glm_gpu.checkpoint import Checkpoint
from glm_gpu.config import ModelConfig
from glm_gpu.convert.verify import verify
from glm_gpu.engine import DEMO_MODEL, Engine
from glm_gpu.errors import CapacityError, RequestError
from glm_gpu.sampling import SamplingParams


@pytest.fixture
def small() -> dict:
    """A small model's config.json: the demo's, without its multi-token layer."""
    return json.loads((DEMO_MODEL / "config.json").read_text()) | {"num_nextn_predict_layers": 0}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_slice_verifies_opens_and_answers_in_text(tmp_path, small):
    num_bytes = write_slice(tmp_path / "slice", small)
    assert num_bytes == sum(path.stat().st_size for path in (tmp_path / "slice").glob("*.safetensors"))
    assert not verify(tmp_path / "slice").problems
    with Engine.open(tmp_path / "slice") as engine:
        ids = list(engine.session().generate([5, 6], SamplingParams(temperature=0.0), 8, ignore_eos=True))
        assert len(ids) == 8 and isinstance(engine.tokenizer.decode(ids), str)


def test_the_bytes_depend_on_the_seed_alone(tmp_path, small):
    for name, seed in (("one", 1), ("again", 1), ("other", 2)):
        write_slice(tmp_path / name, small, seed)
    one, again, other = (contents(tmp_path / name) for name in ("one", "again", "other"))
    assert one == again
    assert one["model-00002-of-00009.safetensors"] != other["model-00002-of-00009.safetensors"]


def test_every_expert_is_one_run(tmp_path, small):
    from glm_gpu.bench.reads import expert_runs

    write_slice(tmp_path / "slice", small)
    with Checkpoint.open(tmp_path / "slice") as checkpoint:
        expected = checkpoint.config.n_routed_experts * len(checkpoint.config.sparse_layers)
    assert len(expert_runs(tmp_path / "slice")) == expected


def test_a_slice_of_glm_has_its_dimensions():
    config = ModelConfig.from_dict(glm_config(SliceShape(num_layers=4, num_dense=1, num_experts=96)))
    assert (config.hidden_size, config.moe_intermediate_size, config.num_attention_heads) == (6144, 2048, 64)
    assert (config.q_lora_rank, config.kv_lora_rank, config.index_topk) == (2048, 512, 2048)
    assert (config.n_routed_experts, config.num_experts_per_tok, list(config.sparse_layers)) == (96, 8, [1, 2, 3])


def test_a_full_disk_is_seen_before_anything_is_written(tmp_path, small, monkeypatch):
    monkeypatch.setattr(slices, "disk_free_bytes", lambda folder: 1 << 30)
    with pytest.raises(CapacityError, match=r"a slice takes 1[0-9.]+ MiB and 1.00 GiB are free"):
        write_slice(tmp_path / "slice", small)
    assert list((tmp_path / "slice").iterdir()) == []


def test_a_folder_that_holds_something_is_left_alone(tmp_path, small):
    (tmp_path / "mine").write_text("x")
    with pytest.raises(RequestError, match="is not empty"):
        write_slice(tmp_path, small)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_temporary_slice_is_gone_afterwards_even_when_the_bench_fails(tmp_path, small, monkeypatch):
    monkeypatch.setattr(slices, "glm_config", lambda shape: small)
    with pytest.raises(ZeroDivisionError), temporary_slice(tmp_path, SliceShape()) as path:
        assert (path / "config.json").exists()
        1 / 0  # noqa: B018
    assert list(tmp_path.iterdir()) == []
