"""Weights read by name: exactly, from every way of storing them, with broken values and files refused by name."""

import json
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from glm_gpu.checkpoint import Checkpoint
from glm_gpu.errors import CheckpointError, UnsupportedModelError
from glm_gpu.quant import FORMATS, bf16_to_f32, dequantize, quantize

WEIGHT = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"  # [68, 160] in tiny_glm
SHAPE = (68, 160)
INT4_G64 = FORMATS["int4_g64"]
FD_FOLDER = Path("/proc/self/fd")


@pytest.fixture
def one_shard(oracle_dir, write_shard, tmp_path):
    """one_shard({name: array}, config changes) -> a folder of one shard with tiny_glm's config."""

    def make(tensors, **changes):
        fields = json.loads((oracle_dir / "tiny_glm" / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(fields | changes))
        write_shard(tmp_path / "model.safetensors", tensors)
        return tmp_path

    return make


def random_f32(shape=SHAPE):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("name", ["tiny_glm", "tiny_glm_fp8", "tiny_olmoe"])
def test_every_tensor_has_the_bytes_the_reference_reader_sees(oracle_dir, name):
    with Checkpoint.open(oracle_dir / name) as checkpoint:
        seen = 0
        for shard in checkpoint.shards:
            content = shard.read_bytes()
            with safe_open(shard, "np") as reference:
                for tensor in reference.keys():  # noqa: SIM118 (a safe_open is no dict)
                    info = checkpoint.info(tensor)
                    assert info.shard == shard
                    assert list(info.shape) == reference.get_slice(tensor).get_shape()
                    np.testing.assert_array_equal(
                        checkpoint.read_raw(tensor), np.frombuffer(content[info.begin : info.end], np.uint8)
                    )
                    seen += 1
        assert seen == len(checkpoint.names)


def test_fp8_weights_equal_the_dequantised_reference(oracle_dir):
    folder = oracle_dir / "tiny_glm_fp8"
    with Checkpoint.open(folder) as checkpoint, np.load(folder / "dequantised.npz") as reference:
        assert len(reference.files) == 4
        for name in reference.files:
            np.testing.assert_array_equal(checkpoint.read_f32(name), reference[name])


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_plain_types_are_widened_exactly(one_shard, dtype):
    values = random_f32()
    stored = {"F32": values, "F16": values.astype(np.float16), "BF16": quantize(values, FORMATS["bf16"]).data}[dtype]
    expected = bf16_to_f32(stored) if dtype == "BF16" else stored.astype(np.float32)
    with Checkpoint.open(one_shard({WEIGHT: stored})) as checkpoint:
        np.testing.assert_array_equal(checkpoint.read_f32(WEIGHT), expected)
        assert checkpoint.read_f32(WEIGHT).flags.writeable


def test_scalars_and_empty_tensors_are_read(one_shard):
    with Checkpoint.open(one_shard({"s": np.array(2.5, np.float32), "e": np.zeros((0, 3), np.float32)})) as checkpoint:
        assert checkpoint.read_f32("s").shape == ()
        assert checkpoint.read_f32("s") == 2.5
        assert checkpoint.read_f32("e").shape == (0, 3)
        assert checkpoint.read_raw("e").shape == (0,)


@pytest.mark.parametrize("start_stop", [(0, 68), (0, 0), (3, 4), (60, 68)])
@pytest.mark.parametrize("name", ["tiny_glm", "tiny_glm_fp8"])
def test_rows_by_themselves_equal_the_same_rows_of_the_whole(oracle_dir, name, start_stop):
    with Checkpoint.open(oracle_dir / name) as checkpoint:
        start, stop = start_stop
        rows = checkpoint.decode_rows(WEIGHT, checkpoint.read_rows(WEIGHT, start, stop), start)
        np.testing.assert_array_equal(rows, checkpoint.read_f32(WEIGHT)[start:stop])


def test_fp8_blocks_of_another_size_follow_the_config(one_shard):
    codes = np.full(SHAPE, 0x38, np.uint8)  # 1.0
    scales = np.arange(2 * 5, dtype=np.float32).reshape(2, 5)
    folder = one_shard(
        {WEIGHT: ("F8_E4M3", codes), f"{WEIGHT}_scale_inv": scales},
        quantization_config={"quant_method": "fp8", "weight_block_size": [64, 32]},
    )
    with Checkpoint.open(folder) as checkpoint:
        expected = np.repeat(np.repeat(scales, 64, 0), 32, 1)[:68]
        np.testing.assert_array_equal(checkpoint.read_f32(WEIGHT), expected)


@pytest.mark.parametrize("scale_shape", [(68,), (68, 1), (), (1,), (1, 2)])
def test_row_scales_tensor_scales_and_blocks_are_supported(one_shard, scale_shape):
    """C18."""
    scales = np.random.default_rng(0).random(scale_shape).astype(np.float32)
    folder = one_shard({WEIGHT: ("F8_E4M3", np.full(SHAPE, 0x38, np.uint8)), f"{WEIGHT}_scale_inv": scales})
    with Checkpoint.open(folder) as checkpoint:
        values = checkpoint.read_f32(WEIGHT)
        if scale_shape == (1, 2):
            expected = np.repeat(scales, 128, axis=1)[:, :160]
        else:
            expected = scales.reshape(-1, 1) if scales.size > 1 else scales.reshape(1, 1)
        np.testing.assert_array_equal(values, np.broadcast_to(expected, SHAPE))


@pytest.mark.parametrize("scale_shape", [(160,), (2,), (2, 1), (1, 160), (1, 2, 1)])
def test_other_scale_shapes_are_refused_by_name(one_shard, scale_shape):
    folder = one_shard(
        {WEIGHT: ("F8_E4M3", np.zeros(SHAPE, np.uint8)), f"{WEIGHT}_scale_inv": np.ones(scale_shape, np.float32)}
    )
    with Checkpoint.open(folder) as checkpoint, pytest.raises(CheckpointError) as refusal:
        checkpoint.read_f32(WEIGHT)
    assert f"'{WEIGHT}_scale_inv' has shape {list(scale_shape)}, expected [1, 2], [68], [68, 1]" in str(refusal.value)


def test_fp8_without_scales_is_refused_by_name(one_shard):
    folder = one_shard({WEIGHT: ("F8_E4M3", np.zeros(SHAPE, np.uint8))})
    with (
        Checkpoint.open(folder) as checkpoint,
        pytest.raises(CheckpointError, match=r"scales .*_scale_inv' are missing"),
    ):
        checkpoint.read_f32(WEIGHT)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_scale_that_is_not_finite_is_named_with_its_index(one_shard, value):
    """C18."""
    scales = np.ones((1, 2), np.float32)
    scales[0, 1] = value
    folder = one_shard({WEIGHT: ("F8_E4M3", np.zeros(SHAPE, np.uint8)), f"{WEIGHT}_scale_inv": scales})
    with Checkpoint.open(folder) as checkpoint, pytest.raises(CheckpointError) as refusal:
        checkpoint.read_f32(WEIGHT)
    assert f"tensor '{WEIGHT}_scale_inv' is {np.float32(value)} at [0, 1]" in str(refusal.value)


def test_zero_scale_is_a_scale(one_shard):
    folder = one_shard(
        {WEIGHT: ("F8_E4M3", np.full(SHAPE, 0x38, np.uint8)), f"{WEIGHT}_scale_inv": np.zeros((1, 2), np.float32)}
    )
    with Checkpoint.open(folder) as checkpoint:
        assert not checkpoint.read_f32(WEIGHT).any()


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_fp8_code_that_is_no_number_is_named_with_its_index(one_shard, code):
    codes = np.zeros(SHAPE, np.uint8)
    codes[67, 159] = code
    folder = one_shard({WEIGHT: ("F8_E4M3", codes), f"{WEIGHT}_scale_inv": np.ones((1, 2), np.float32)})
    with Checkpoint.open(folder) as checkpoint:
        with pytest.raises(CheckpointError, match=rf"'{WEIGHT}' is nan at \[67, 159\]"):
            checkpoint.read_f32(WEIGHT)
        with pytest.raises(CheckpointError, match=rf"'{WEIGHT}' is nan at \[67, 159\]"):
            checkpoint.decode_rows(WEIGHT, checkpoint.read_rows(WEIGHT, 60, 68), 60)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_weight_that_is_not_finite_is_named_with_its_index(one_shard, dtype):
    values = random_f32().astype(dtype)
    values[5, 7] = np.inf
    folder, message = one_shard({WEIGHT: values}), rf"'{WEIGHT}' is inf at \[5, 7\]"
    with Checkpoint.open(folder) as checkpoint, pytest.raises(CheckpointError, match=message):
        checkpoint.read_matrix(WEIGHT, SHAPE, INT4_G64)


def test_type_nobody_can_decode_is_refused_by_name(one_shard):
    with Checkpoint.open(one_shard({WEIGHT: np.zeros(SHAPE, np.int64)})) as checkpoint:
        assert checkpoint.read_raw(WEIGHT).nbytes == 68 * 160 * 8
        with pytest.raises(CheckpointError, match=f"'{WEIGHT}' has type I64, expected BF16"):
            checkpoint.read_f32(WEIGHT)


@pytest.mark.parametrize("format", FORMATS.values(), ids=lambda format: format.name)
def test_matrix_of_a_plain_weight_is_its_quantization(oracle_dir, format):
    with Checkpoint.open(oracle_dir / "tiny_glm") as checkpoint:
        matrix = checkpoint.read_matrix(WEIGHT, SHAPE, format)
        expected = quantize(checkpoint.read_f32(WEIGHT), format)
        assert matrix.format == format
        np.testing.assert_array_equal(matrix.data, expected.data)


def test_matrix_of_another_shape_is_refused_by_name(oracle_dir):
    message = rf"'{WEIGHT}' has shape \[68, 160\], expected \[160, 68\]"
    with Checkpoint.open(oracle_dir / "tiny_glm") as checkpoint, pytest.raises(CheckpointError, match=message):
        checkpoint.read_matrix(WEIGHT, (160, 68), INT4_G64)


def test_packed_weight_is_returned_as_stored(one_shard):
    stored = quantize(random_f32(), INT4_G64)
    with Checkpoint.open(one_shard({WEIGHT: stored.data.ravel(), f"{WEIGHT}.qs": stored.scales.ravel()})) as checkpoint:
        assert checkpoint.stored(WEIGHT).format == INT4_G64
        for format in (INT4_G64, FORMATS["int8"]):
            matrix = checkpoint.read_matrix(WEIGHT, SHAPE, format)
            assert matrix.format == INT4_G64
            np.testing.assert_array_equal(matrix.data, stored.data)
            np.testing.assert_array_equal(matrix.scales, stored.scales)
        np.testing.assert_array_equal(checkpoint.read_f32(WEIGHT), dequantize(stored))
        plain = checkpoint.read_matrix(WEIGHT, SHAPE, FORMATS["f32"])
        np.testing.assert_array_equal(plain.data, dequantize(stored))
        with pytest.raises(CheckpointError, match=r"has shape \[68, 160\], expected \[68, 161\]"):
            checkpoint.read_matrix(WEIGHT, (68, 161), INT4_G64)


def test_packed_scale_that_is_not_finite_is_named(one_shard):
    stored = quantize(random_f32(), INT4_G64)
    stored.scales[3, 1] = np.nan
    folder = one_shard({WEIGHT: stored.data.ravel(), f"{WEIGHT}.qs": stored.scales.ravel()})
    message = rf"'{WEIGHT}\.qs' is nan at \[3, 1\]"
    with Checkpoint.open(folder) as checkpoint, pytest.raises(CheckpointError, match=message):
        checkpoint.read_matrix(WEIGHT, SHAPE, INT4_G64)


def test_read_into_fills_the_callers_memory_exactly(oracle_dir):
    with Checkpoint.open(oracle_dir / "tiny_glm") as checkpoint:
        memory = np.full(68 * 160 * 2 + 64, 0xAB, np.uint8)
        checkpoint.read_into(WEIGHT, memory[32:-32], drop_pages=True)
        np.testing.assert_array_equal(memory[32:-32], checkpoint.read_raw(WEIGHT))
        assert (memory[:32] == 0xAB).all()
        assert (memory[-32:] == 0xAB).all()
        with pytest.raises(AssertionError):
            checkpoint.read_into(WEIGHT, memory)


def test_short_reads_are_continued(oracle_dir, monkeypatch):
    with Checkpoint.open(oracle_dir / "tiny_glm") as checkpoint:
        whole = checkpoint.read_raw(WEIGHT)
        preadv = os.preadv
        monkeypatch.setattr(os, "preadv", lambda fd, views, offset: preadv(fd, [views[0][:1000]], offset))
        np.testing.assert_array_equal(checkpoint.read_raw(WEIGHT), whole)


def test_file_that_shrinks_while_in_use_is_refused(copy_oracle):
    folder = copy_oracle("tiny_glm")
    with Checkpoint.open(folder) as checkpoint:
        info = checkpoint.info(WEIGHT)
        os.truncate(info.shard, info.begin + 100)
        with pytest.raises(CheckpointError, match=rf"'{WEIGHT}' ends after 100 bytes, expected 21760"):
            checkpoint.read_raw(WEIGHT)


def test_disk_error_names_file_and_tensor(oracle_dir, monkeypatch):
    def fail(*_):
        raise OSError(5, "Input/output error")

    with Checkpoint.open(oracle_dir / "tiny_glm") as checkpoint:
        monkeypatch.setattr(os, "preadv", fail)
        with pytest.raises(
            CheckpointError, match=rf"safetensors: tensor '{WEIGHT}' cannot be read \(Input/output error\)"
        ):
            checkpoint.read_raw(WEIGHT)


def test_unknown_tensor_is_refused_by_name(oracle_dir):
    with Checkpoint.open(oracle_dir / "tiny_glm") as checkpoint:
        assert "nonsense" not in checkpoint
        for read in (checkpoint.info, checkpoint.read_raw, checkpoint.read_f32):
            with pytest.raises(CheckpointError, match="no tensor 'nonsense'"):
                read("nonsense")


def open_files(folder):
    links = (path.resolve() for path in FD_FOLDER.iterdir())
    return sorted(str(link) for link in links if link.is_relative_to(folder.resolve()))


@pytest.mark.skipif(not FD_FOLDER.is_dir(), reason="needs /proc")
def test_files_are_opened_at_the_first_read_and_closed_at_the_end(copy_oracle):
    folder = copy_oracle("tiny_glm")
    with Checkpoint.open(folder) as checkpoint:
        assert open_files(folder) == []
        checkpoint.read_raw(WEIGHT)
        checkpoint.read_raw(WEIGHT)
        assert open_files(folder) == [str(checkpoint.info(WEIGHT).shard.resolve())]
        for name in checkpoint.names:
            checkpoint.read_raw(name)
        assert len(open_files(folder)) == 3
    assert open_files(folder) == []
    checkpoint.close()
    with pytest.raises(AssertionError, match="closed"):
        checkpoint.read_raw(WEIGHT)


def test_threads_read_at_the_same_time(oracle_dir):
    with Checkpoint.open(oracle_dir / "tiny_glm") as checkpoint:
        names = list(checkpoint.names)
        expected = [checkpoint.read_raw(name).tobytes() for name in names]
    with Checkpoint.open(oracle_dir / "tiny_glm") as checkpoint:
        results = {}

        def read_all(first):
            results[first] = [checkpoint.read_raw(name).tobytes() for name in names[first:] + names[:first]]

        threads = [threading.Thread(target=read_all, args=(first,)) for first in (0, 90, 180, 270)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for first, contents in results.items():
            assert contents == expected[first:] + expected[:first]


def test_read_only_folder_with_an_unusual_name_stays_unchanged(oracle_dir, tmp_path):
    """C23."""
    folder = tmp_path / "модель 模型 é"
    shutil.copytree(oracle_dir / "tiny_olmoe", folder)
    before = sorted(path.name for path in folder.iterdir())
    folder.chmod(0o555)
    try:
        with Checkpoint.open(folder) as checkpoint:
            checkpoint.read_f32("model.norm.weight")
        assert sorted(path.name for path in folder.iterdir()) == before
    finally:
        folder.chmod(0o755)


def test_hub_cache_with_relative_links_is_read(oracle_dir, tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0123abcd"
    shutil.copytree(oracle_dir / "tiny_olmoe", blobs)
    snapshot.mkdir(parents=True)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    with Checkpoint.open(snapshot) as checkpoint:
        assert checkpoint.read_f32("model.norm.weight").shape == (96,)


def test_fingerprint_tells_models_apart_and_is_stable(oracle_dir, copy_oracle):
    def fingerprint(folder):
        with Checkpoint.open(folder) as checkpoint:
            return checkpoint.fingerprint

    copy = copy_oracle("tiny_glm")
    assert fingerprint(copy) == fingerprint(oracle_dir / "tiny_glm")
    names = ("tiny_glm", "tiny_glm_fp8", "tiny_olmoe")
    assert len({fingerprint(oracle_dir / name) for name in names}) == 3
    (copy / "config.json").write_text((copy / "config.json").read_text().replace("5.12.0", "5.15.0"))
    assert fingerprint(copy) != fingerprint(oracle_dir / "tiny_glm")


def test_unsupported_model_is_refused_before_its_shards_are_looked_at(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "glm5_next"}')
    with pytest.raises(UnsupportedModelError, match="glm5_next"):
        Checkpoint.open(tmp_path)


def test_missing_folder_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"nowhere: no such folder"):
        Checkpoint.open(tmp_path / "nowhere")


def test_fingerprint_tells_fine_tunes_with_the_same_config_apart(oracle_dir, copy_oracle):
    copy = copy_oracle("tiny_glm")
    shard = sorted(copy.glob("*.safetensors"))[1]
    with Checkpoint.open(copy) as checkpoint:
        before = checkpoint.fingerprint
        first = min(checkpoint.info(name).begin for name in checkpoint.names if checkpoint.info(name).shard == shard)
    content = bytearray(shard.read_bytes())
    content[first] ^= 1
    shard.write_bytes(content)
    with Checkpoint.open(copy) as checkpoint:
        assert checkpoint.fingerprint != before
