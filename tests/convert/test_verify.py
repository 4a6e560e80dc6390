import json

import pytest

from glm_gpu.checkpoint import Checkpoint
from glm_gpu.convert.census import census, expert_sample
from glm_gpu.convert.convert import convert
from glm_gpu.convert.settings import ConvertSettings
from glm_gpu.convert.source import LocalSource
from glm_gpu.convert.verify import verify
from glm_gpu.errors import CheckpointError
from glm_gpu.quant import FORMATS, dequantize, quantize
from glm_gpu.tensors import expected_tensors

SETTINGS = ConvertSettings(shard_bytes=128 << 10, rounding="rtn")


@pytest.fixture
def container(make_source, tmp_path):
    with LocalSource(make_source("fp8")) as source:
        convert(source, tmp_path / "out", SETTINGS, threads=2)
    return tmp_path / "out"


def test_whole_container_is_proven_whole(container):
    found = verify(container)
    assert found.problems == ()
    assert found.has_manifest and found.has_mtp
    assert found.nbytes == sum(path.stat().st_size for path in container.glob("*.safetensors"))


@pytest.mark.parametrize("offset", [-1, 4096])
def test_flipped_bit_is_found_and_its_shard_named(offset, container):
    shard = sorted(container.glob("*.safetensors"))[3]
    content = bytearray(shard.read_bytes())
    content[offset] ^= 1
    shard.write_bytes(content)
    (problem,) = verify(container).problems
    assert problem.startswith(shard.name) and "SHA-256" in problem


def test_shard_that_is_missing_cut_or_strange_is_refused_by_name(container):
    shards = sorted(container.glob("*.safetensors"))
    content = shards[2].read_bytes()
    shards[2].write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match=shards[2].name):
        verify(container)
    shards[2].unlink()
    with pytest.raises(CheckpointError, match=shards[2].name):
        verify(container)
    shards[2].write_bytes(content)
    (container / "stray.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"stray.safetensors"):
        verify(container)


def test_shard_of_another_width_is_refused(container, make_source, tmp_path):
    with LocalSource(make_source("fp8", seed=1)) as source:
        convert(source, tmp_path / "other", ConvertSettings(8, 8, rounding="rtn"), threads=2)
    manifest = json.loads((container / "glm_gpu.json").read_text())
    other = json.loads((tmp_path / "other" / "glm_gpu.json").read_text())
    (tmp_path / "other" / "glm_gpu.json").write_text(json.dumps(other | {"classes": manifest["classes"]}))
    with pytest.raises(CheckpointError, match=r"glm_gpu.json expects"):
        verify(tmp_path / "other")


def test_conversion_that_is_not_finished_is_said_so(make_source, tmp_path):
    def stop(progress):
        if progress.num_written == 2:
            raise KeyboardInterrupt

    with LocalSource(make_source("fp8")) as source, pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "out", SETTINGS, on_progress=stop)
    with pytest.raises(CheckpointError, match="not finished, 2 shards are"):
        verify(tmp_path / "out")


def test_checkpoint_without_manifest_is_checked_but_for_its_content(oracle_dir):
    found = verify(oracle_dir / "tiny_glm_fp8")
    assert found.problems == () and not found.has_manifest
    assert all(shard.expected_sha256 is None for shard in found.shards)


@pytest.mark.parametrize("kind", ["container", "source"])
def test_bill_adds_up_to_every_byte_and_weight(kind, container, tmp_path):
    folder = container if kind == "container" else tmp_path / "source_fp8_0"
    with Checkpoint.open(folder) as checkpoint:
        rows = census(checkpoint)
        assert sum(row.num_bytes for row in rows) == sum(checkpoint.info(name).nbytes for name in checkpoint.names)
        shapes = expected_tensors(checkpoint.config)
        num_weights = sum(shape[0] * (shape[1] if len(shape) == 2 else 1) for shape in shapes.values())
        assert sum(row.num_weights for row in rows) == num_weights
        assert sum(row.num_tensors for row in rows if row.name_class != "padding") == len(shapes)
        by_class = {(row.name_class, row.stored) for row in rows}
    expert = ("expert", "int4_g64 + F32" if kind == "container" else "F8_E4M3 + F32")
    assert expert in by_class and ("float", "F32") in by_class


def test_expert_shown_is_the_expert_stored(container, tmp_path):
    with Checkpoint.open(tmp_path / "source_fp8_0") as source, Checkpoint.open(container) as checkpoint:
        expert = expert_sample(checkpoint)
        assert expert.prefix == "model.layers.1.mlp.experts.0" and expert.is_one_run
        assert expert.shapes == {"gate": (33, 257), "up": (33, 257), "down": (257, 33)}
        for role, values in expert.first_values.items():
            weight = source.read_f32(f"{expert.prefix}.{role}_proj.weight")
            assert values == dequantize(quantize(weight, FORMATS["int4_g64"]))[0, :4].tolist()
        assert not expert_sample(source).is_one_run
