import itertools
import json
import shutil

import numpy as np
import pytest
from small_sources import AWKWARD_CONFIG, as_fp8, bf16, write_shards

from glm_gpu.checkpoint import Checkpoint
from glm_gpu.convert import blocks
from glm_gpu.convert.convert import convert
from glm_gpu.convert.settings import ConvertSettings
from glm_gpu.convert.source import LocalSource, open_source
from glm_gpu.engine import Engine
from glm_gpu.errors import CheckpointError, RequestError, UnsupportedModelError
from glm_gpu.fp8 import E4M3
from glm_gpu.kernels.quantize import quantize_search, quantizer
from glm_gpu.opening import EngineOptions
from glm_gpu.quant import FORMATS, bf16_to_f32, f32_to_bf16, quantize
from glm_gpu.recipe import tensor_class
from glm_gpu.sampling import SamplingParams
from glm_gpu.tensors import expected_tensors

WIDTHS = [(16, 16, 64), (8, 8, 64), (4, 4, 64), (4, 4, 128), (4, 4, 0), (2, 2, 64), (4, 8, 64)]


def converted(source_dir, out, **settings):
    """Convert with the default settings but for those given."""
    with LocalSource(source_dir) as source:
        return convert(source, out, ConvertSettings(**settings), threads=2)


def same_as_load_time(source_dir, out, settings: ConvertSettings):
    """Compare every weight of a container with what quantizing the source at load time makes of it."""
    with Checkpoint.open(source_dir) as source, Checkpoint.open(out) as container:
        config = source.config
        for name, shape in expected_tensors(config).items():
            if len(shape) == 1:
                np.testing.assert_array_equal(container.read_f32(name), source.read_f32(name), err_msg=name)
                continue
            format = settings.recipe.format_for(name, config)
            put = quantizer(settings.rounding)
            expected = put(source.read_f32(name), format, settings.scale_dtype)
            if settings.scales == "f32":
                at_load = source.read_matrix(name, shape, format, quantizer=put)
                np.testing.assert_array_equal(at_load.data, expected.data)
            found = container.read_matrix(name, shape, format)
            assert found.format == format, name
            np.testing.assert_array_equal(found.data, expected.data, err_msg=name)
            if format.is_packed:
                assert found.scales.dtype == settings.scale_dtype
                np.testing.assert_array_equal(found.scales, expected.scales, err_msg=name)


@pytest.mark.parametrize(
    ("model", "widths"), [*(("tiny_glm_fp8", widths) for widths in WIDTHS), ("tiny_glm", (4, 4, 64))], ids=str
)
@pytest.mark.parametrize("rounding", ["rtn", "search"])
def test_container_has_the_bytes_of_load_time_quantization(model, widths, rounding, oracle_dir, tmp_path):
    options = dict(zip(("expert_bits", "dense_bits", "group"), widths, strict=True)) | {"rounding": rounding}
    converted(oracle_dir / model, tmp_path / "out", **options)
    same_as_load_time(oracle_dir / model, tmp_path / "out", ConvertSettings(**options))


@pytest.mark.parametrize(
    ("kind", "scales", "widths"),
    [
        *(("fp8", "f32", widths) for widths in WIDTHS),
        *(("bf16", "f32", widths) for widths in WIDTHS),
        *(("bf16", "f16", widths) for widths in [(8, 8, 64), (4, 4, 64), (2, 2, 64)]),
    ],
    ids=str,
)
def test_awkward_sizes_and_values_in_blocks_of_a_few_rows(kind, scales, widths, make_source, tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_WEIGHTS", 257 * 13)  # 13 rows: never a multiple of the 128 rows of a scale
    options = dict(zip(("expert_bits", "dense_bits", "group"), widths, strict=True)) | {"scales": scales}
    source = make_source(kind)
    converted(source, tmp_path / "out", **options)
    same_as_load_time(source, tmp_path / "out", ConvertSettings(**options))


@pytest.mark.parametrize("scales", ["f32", "f16"])
def test_searched_scales_are_those_of_whole_weights(scales, make_source, tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_WEIGHTS", 257 * 13)
    source = make_source("bf16")
    settings = ConvertSettings(4, 2, 64, scales, "search")
    with LocalSource(source) as opened:
        convert(opened, tmp_path / "out", settings, threads=2)
    with Checkpoint.open(source) as ck, Checkpoint.open(tmp_path / "out") as container:
        assert container.manifest.rounding == "search"
        for name, shape in expected_tensors(ck.config).items():
            format = settings.recipe.format_for(name, ck.config)
            if format.is_packed:
                expected = quantize_search(ck.read_f32(name), format, settings.scale_dtype)
                found = container.read_matrix(name, shape, format)
                np.testing.assert_array_equal(found.data, expected.data, err_msg=name)
                np.testing.assert_array_equal(found.scales, expected.scales, err_msg=name)


def test_fp8_weights_equal_a_loop_over_single_values(make_source, tmp_path):
    # C09: 576 and 130 rows, 257 columns: the last block is just smaller
    source = make_source("fp8")
    converted(source, tmp_path / "out", expert_bits=16, dense_bits=16)
    names = ["model.layers.0.self_attn.kv_a_proj_with_mqa.weight", "model.layers.0.mlp.gate_proj.weight"]
    with Checkpoint.open(source) as ck, Checkpoint.open(tmp_path / "out") as container:
        for name, (num_rows, num_columns) in zip(names, [(576, 257), (130, 257)], strict=True):
            codes = ck.read_raw(name).reshape(num_rows, num_columns)
            scales = ck.read_raw(name + "_scale_inv").view(np.float32).reshape(-(-num_rows // 128), 3)
            expected = np.empty(codes.shape, np.float32)
            for row, column in itertools.product(range(num_rows), range(num_columns)):
                expected[row, column] = E4M3[codes[row, column]] * scales[row // 128, column // 128]
            np.testing.assert_array_equal(ck.read_f32(name), expected)
            np.testing.assert_array_equal(container.read_f32(name), bf16_to_f32(f32_to_bf16(expected)))


@pytest.mark.parametrize("scale_shape", [(130,), (130, 1), (), (1,)], ids=str)
def test_fp8_scales_by_row_or_for_the_whole_tensor(scale_shape, make_source, tmp_path):
    name = "model.layers.0.mlp.gate_proj.weight"
    rng = np.random.default_rng(3)
    (entry, _) = as_fp8(name, (130, 257), rng)
    scales = rng.uniform(1e-3, 1e-2, scale_shape).astype(np.float32)
    source = make_source("fp8", replace={name: [entry, (name + "_scale_inv", "F32", scale_shape, np.asarray(scales))]})
    converted(source, tmp_path / "out", rounding="rtn")
    expected = E4M3[entry[3]] * (np.asarray(scales).reshape(-1, 1) if scales.ndim else scales)
    with Checkpoint.open(tmp_path / "out") as container:
        found = container.read_matrix(name, (130, 257), FORMATS["int4_g64"])
    np.testing.assert_array_equal(found.data, quantize(expected, FORMATS["int4_g64"]).data)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_scale_that_is_not_finite_stops_with_tensor_and_index(bad, make_source, tmp_path):
    # C18
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    weight, (scale_name, *_, scales) = as_fp8(name, (33, 257), np.random.default_rng(1))
    scales[0, 2] = bad
    source = make_source("fp8", replace={name: [weight, (scale_name, "F32", scales.shape, scales)]})
    with pytest.raises(CheckpointError, match=rf"{name}_scale_inv.* \[0, 2\]"):
        converted(source, tmp_path / "out")


def test_fp8_code_that_is_nan_stops_with_tensor_and_index(make_source, tmp_path, monkeypatch):
    # C18; in blocks of 13 rows, so that the index must be that of the whole tensor
    monkeypatch.setattr(blocks, "BLOCK_WEIGHTS", 257 * 13)
    name = "model.layers.0.mlp.up_proj.weight"
    entries = as_fp8(name, (130, 257), np.random.default_rng(1))
    entries[0][3][101, 7] = 0x7F
    source = make_source("fp8", replace={name: entries})
    with pytest.raises(CheckpointError, match=rf"{name}.* nan at \[101, 7\]"):
        converted(source, tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.partial.safetensors"))
    assert not (tmp_path / "out" / "glm_gpu.json").exists()


def test_bf16_weight_that_is_not_finite_stops_with_tensor_and_index(make_source, tmp_path):
    name = "model.layers.0.mlp.up_proj.weight"
    values = np.ones((130, 257), np.float32)
    values[129, 256] = np.inf
    source = make_source("bf16", replace={name: [(name, "BF16", values.shape, bf16(values))]})
    with pytest.raises(CheckpointError, match=rf"{name}.* inf at \[129, 256\]"):
        converted(source, tmp_path / "out")


def test_scale_of_zero_gives_zeros(make_source, tmp_path):
    name = "model.layers.0.mlp.gate_proj.weight"
    entries = as_fp8(name, (130, 257), np.random.default_rng(1))
    entries[1][3][:] = 0
    source = make_source("fp8", replace={name: entries})
    converted(source, tmp_path / "out")
    with Checkpoint.open(tmp_path / "out") as container:
        assert not container.read_f32(name).any()


def test_f16_scale_that_overflows_stops_with_the_tensor(make_source, tmp_path):
    name = "model.layers.0.mlp.gate_proj.weight"
    values = np.full((130, 257), 1e8, np.float32)
    source = make_source("bf16", replace={name: [(name, "BF16", values.shape, bf16(values))]})
    with pytest.raises(CheckpointError, match=rf"{name}.*use float32 scales"):
        converted(source, tmp_path / "out", scales="f16")
    converted(source, tmp_path / "out32", scales="f32")


def test_router_bias_and_norms_stay_f32(make_source, tmp_path):
    # C04: 7 +- 0.12 has 8 distinct values in bf16
    source = make_source("fp8")
    converted(source, tmp_path / "out")
    with Checkpoint.open(tmp_path / "out") as container:
        config = container.config
        for name in expected_tensors(config):
            if tensor_class(name, config) == "float":
                assert container.info(name).dtype == "F32", name


def test_every_weight_of_the_model_is_kept_and_nothing_else(make_source, tmp_path):
    source = make_source("fp8", num_shards=1)
    path = source / "model-00001-of-00001.safetensors"
    with Checkpoint.open(source) as ck:
        entries = [(name, ck.info(name).dtype, ck.info(name).shape, ck.read_raw(name)) for name in ck.names]
    extra = "model.layers.2.embed_tokens.weight"  # a draft layer's copy, which the main one stands for
    path.unlink()
    write_shards(source, [*entries, (extra, "BF16", (67, 257), bf16(np.zeros((67, 257))))], 1)
    report = converted(source, tmp_path / "out")
    assert report.dropped == (extra,)
    with Checkpoint.open(tmp_path / "out") as container:
        kept = {name.removesuffix(".qs") for name in container.names if not name.startswith("padding.")}
        assert kept == expected_tensors(container.config).keys()
        assert "model.layers.2.self_attn.indexer.wk.weight" in kept


def test_threads_do_not_change_the_bytes(make_source, tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_WEIGHTS", 1000)
    source = make_source("fp8")
    reports = []
    for threads in (1, 5):
        with LocalSource(source) as opened:
            settings = ConvertSettings(rounding="rtn")
            reports.append(convert(opened, tmp_path / f"out{threads}", settings, threads=threads))
    assert reports[0].shards == reports[1].shards


def test_colibri_container_reads_back_the_same(make_source, tmp_path):
    source = make_source("fp8")
    for group in (64, 0):
        colibri, own = tmp_path / f"colibri{group}", tmp_path / f"own{group}"
        converted(source, colibri, group=group, container="colibri")
        converted(source, own, group=group)
        assert not (colibri / "glm_gpu.json").exists() and not (colibri / "glm_gpu.json.partial").exists()
        with Checkpoint.open(colibri) as one, Checkpoint.open(own) as other:
            assert one.manifest is None
            for name, shape in expected_tensors(one.config).items():
                assert one.stored(name) == other.stored(name)
                np.testing.assert_array_equal(one.read_raw(name), other.read_raw(name))
                if one.stored(name):
                    assert one.info(name + ".qs").dtype == "F32"
                    np.testing.assert_array_equal(one.read_raw(name + ".qs"), other.read_raw(name + ".qs"))
                else:
                    assert one.info(name).shape == shape


def test_model_family_that_is_not_known_is_refused_before_any_shard_is_opened(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(AWKWARD_CONFIG | {"model_type": "llama"}))
    (tmp_path / "model.safetensors").write_bytes(b"not opened")
    with pytest.raises(UnsupportedModelError, match="llama"):
        open_source(str(tmp_path), None, tmp_path / "download")


def test_container_is_refused_as_a_source(make_source, tmp_path):
    converted(make_source("fp8"), tmp_path / "out")
    with pytest.raises(RequestError, match="container already"):
        LocalSource(tmp_path / "out")


def test_source_folder_is_refused_as_output(make_source):
    source = make_source("fp8")
    before = sorted(path.name for path in source.iterdir())
    with pytest.raises(RequestError, match="source itself"):
        converted(source, source)
    assert sorted(path.name for path in source.iterdir()) == before


def test_snapshot_in_the_hub_cache_is_read_through_its_links_with_its_revision(make_source, tmp_path):
    revision = "0123456789abcdef0123456789abcdef01234567"
    snapshot = tmp_path / "models--zai-org--GLM-5.2-FP8" / "snapshots" / revision
    snapshot.mkdir(parents=True)
    blobs = snapshot.parent.parent / "blobs"
    shutil.copytree(make_source("fp8"), blobs)
    for blob in blobs.iterdir():
        (snapshot / blob.name).symlink_to(f"../../blobs/{blob.name}")
    converted(snapshot, tmp_path / "out")
    with Checkpoint.open(tmp_path / "out") as container:
        assert (container.manifest.source, container.manifest.revision) == ("zai-org/GLM-5.2-FP8", revision)


def test_side_files_are_copied_and_missing_ones_listed(make_source, tmp_path):
    # C22
    source = make_source("fp8")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (source / name).write_text(json.dumps({"file": name}))
    report = converted(source, tmp_path / "out")
    assert report.missing_files == ("chat_template.jinja",)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    (source / "tokenizer.json").unlink()
    assert converted(source, tmp_path / "out2").missing_files == ("tokenizer.json", "chat_template.jinja")


def test_a_container_gives_the_tokens_of_load_time_quantization(oracle_dir, tmp_path):
    converted(oracle_dir / "tiny_glm_fp8", tmp_path / "out")
    prompt, tokens = list(range(5, 45)), {}
    for folder in (oracle_dir / "tiny_glm_fp8", tmp_path / "out"):
        with Engine.open(folder, EngineOptions(context=128)) as engine:
            tokens[folder] = list(engine.session().generate(prompt, SamplingParams(temperature=0), 40, ignore_eos=True))
    assert len(set(map(tuple, tokens.values()))) == 1
