from itertools import pairwise

import pytest

from glm_gpu.checkpoint import Checkpoint
from glm_gpu.convert.convert import convert
from glm_gpu.convert.plan import plan_conversion
from glm_gpu.convert.settings import ConvertSettings
from glm_gpu.convert.source import LocalSource
from glm_gpu.errors import RequestError
from glm_gpu.safetensors_index import read_header


def expert_prefixes(config):
    for layer in (*config.sparse_layers, config.mtp_layer):
        for expert in range(config.n_routed_experts):
            yield f"model.layers.{layer}.mlp.experts.{expert}."


@pytest.mark.parametrize("num_shards", [1, 2, 3, 9])
@pytest.mark.parametrize("shard_bytes", [64 << 10, 1 << 30])
def test_expert_is_one_run_on_a_page_border_of_one_shard(num_shards, shard_bytes, make_source, tmp_path):
    # dealing tensors out over 9 shards tears experts, and FP8 weights from their scales
    settings = ConvertSettings(rounding="rtn", shard_bytes=shard_bytes)
    with LocalSource(make_source("fp8", num_shards)) as source:
        convert(source, tmp_path / "out", settings, threads=1)
    with Checkpoint.open(tmp_path / "out") as container:
        for prefix in expert_prefixes(container.config):
            names = [f"{prefix}{role}_proj.weight{suffix}" for suffix in ("", ".qs") for role in ("gate", "up", "down")]
            infos = [container.info(name) for name in names]
            assert len({info.shard for info in infos}) == 1
            assert infos[0].begin % 4096 == 0
            for before, after in pairwise(infos):
                assert before.end == after.begin


def test_experts_come_first_in_every_shard(make_source, tmp_path):
    with LocalSource(make_source("fp8", 3)) as source:
        plan = plan_conversion(source.config, source.tensors, ConvertSettings(), source.has_mtp)
    for shard in plan.shards:
        is_expert = [".mlp.experts." in tensor.name for tensor in shard.tensors if tensor.part != "padding"]
        assert is_expert == sorted(is_expert, reverse=True)


def test_planned_sizes_and_headers_are_those_of_the_files(make_source, tmp_path):
    with LocalSource(make_source("fp8", 3)) as source:
        settings = ConvertSettings(rounding="rtn", shard_bytes=128 << 10)
        plan = plan_conversion(source.config, source.tensors, settings, source.has_mtp)
        convert(source, tmp_path / "out", settings, threads=1)
    assert len(plan.shards) > 5
    for shard in plan.shards:
        path = tmp_path / "out" / shard.name
        assert path.stat().st_size == shard.nbytes
        assert shard.header[8:] == read_header(path)[0]
        assert len(shard.header) % 4096 == 0


def test_shard_needs_no_source_shard_behind_the_one_that_completes_it(make_source):
    with LocalSource(make_source("fp8", 9)) as source:
        plan = plan_conversion(source.config, source.tensors, ConvertSettings(), source.has_mtp)
        last = [max(source.tensors[name].shard.name for name in shard.reads) for shard in plan.shards]
        files = sorted({info.shard.name for info in source.tensors.values()})
    assert last == sorted(last)
    # whatever is read from an earlier source shard than the last belongs to a unit that the border tears
    for shard, file in zip(plan.shards, last, strict=True):
        earlier = [name for name in shard.reads if source.tensors[name].shard.name != file]
        assert len(earlier) <= 5, earlier
        assert all(files.index(source.tensors[name].shard.name) >= files.index(file) - 1 for name in earlier)


@pytest.mark.parametrize(
    "bad",
    [
        {"expert_bits": 3},
        {"dense_bits": 0},
        {"group": 32},
        {"shard_bytes": 1},
        {"container": "colibri", "scales": "f16"},
    ],
    ids=str,
)
def test_settings_that_no_container_has_are_refused(bad):
    with pytest.raises(RequestError):
        ConvertSettings(**bad)
