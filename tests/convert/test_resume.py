"""Interrupted conversions: a rerun ends in the bytes of an uninterrupted run, or says what is wrong."""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from glm_gpu.checkpoint import Checkpoint
from glm_gpu.convert import convert as convert_module
from glm_gpu.convert.convert import convert
from glm_gpu.convert.journal import JOURNAL_FILE
from glm_gpu.convert.settings import ConvertSettings
from glm_gpu.convert.source import LocalSource
from glm_gpu.errors import CheckpointError, RequestError

# 57 shards of tiny_glm_fp8, so that a kill has many moments to hit
SMALL_SHARDS = ConvertSettings(rounding="rtn", shard_bytes=64 << 10)
CONVERT_SCRIPT = """
import sys
from pathlib import Path
from glm_gpu.convert.convert import convert
from glm_gpu.convert.settings import ConvertSettings
from glm_gpu.convert.source import LocalSource
print("begins", flush=True)
with LocalSource(Path(sys.argv[1])) as source:
    convert(source, Path(sys.argv[2]), ConvertSettings(rounding="rtn", shard_bytes=64 << 10), threads=2)
"""
ROOT = Path(__file__).parents[2]


def run_conversion(source: Path, out: Path, settings: ConvertSettings = SMALL_SHARDS, **options):
    with LocalSource(source) as opened:
        return convert(opened, out, settings, threads=2, **options)


def container_hash(folder: Path) -> str:
    """Over every file's name and bytes."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        digest.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


@pytest.fixture(scope="module")
def uninterrupted(oracle_dir, tmp_path_factory) -> str:
    """The hash of a container of tiny_glm_fp8 that was written in one go."""
    out = tmp_path_factory.mktemp("uninterrupted") / "out"
    run_conversion(oracle_dir / "tiny_glm_fp8", out)
    return container_hash(out)


def start_child(source: Path, out: Path) -> subprocess.Popen:
    child = subprocess.Popen(
        [sys.executable, "-c", CONVERT_SCRIPT, source, out], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdout.readline() == b"begins\n", child.stderr.read()
    return child


def stop_after_shards(num_shards: int):
    def on_progress(progress):
        if progress.num_written == num_shards:
            raise KeyboardInterrupt

    return on_progress


def begin(source: Path, out: Path, num_shards: int = 5) -> None:
    """A conversion that was interrupted when some shards were finished."""
    with pytest.raises(KeyboardInterrupt):
        run_conversion(source, out, on_progress=stop_after_shards(num_shards))
    assert len(list(out.glob("*.safetensors"))) == num_shards


def test_killed_at_20_random_moments_a_rerun_gives_the_same_container(oracle_dir, tmp_path, uninterrupted):
    # C19
    source, out = oracle_dir / "tiny_glm_fp8", tmp_path / "out"
    rng = random.Random(19)
    began = time.monotonic()
    child = start_child(source, tmp_path / "timed")
    assert child.wait() == 0, child.stderr.read()
    child.stdout.close(), child.stderr.close()
    whole_s = time.monotonic() - began
    seen: dict[str, bytes] = {}
    num_kills = num_found_half_written = 0
    patience_s = whole_s / 8
    while num_kills < 20 or not num_found_half_written:
        child = start_child(source, out)
        time.sleep(rng.uniform(0, patience_s))
        child.kill()
        was_killed = child.wait() == -signal.SIGKILL
        child.stdout.close(), child.stderr.close()
        assert was_killed or child.returncode == 0
        num_kills += was_killed
        num_found_half_written += any(out.glob("*.safetensors.partial"))
        if not num_found_half_written:  # the machine has become slower: later moments are in the middle of something
            patience_s *= 1.2
        for path in out.glob("*.safetensors"):  # never overwritten: the same file for good
            identity = (path.stat().st_ino, path.stat().st_mtime_ns)
            assert seen.setdefault(path.name, identity) == identity
        if child.returncode == 0:
            assert container_hash(out) == uninterrupted
            out = tmp_path / f"out{num_kills}"
            seen.clear()
    run_conversion(source, out)
    assert container_hash(out) == uninterrupted


def test_interrupt_leaves_no_half_written_shard_and_a_rerun_goes_on(oracle_dir, tmp_path, uninterrupted):
    source, out = oracle_dir / "tiny_glm_fp8", tmp_path / "out"
    begin(source, out)
    assert not list(out.glob("*.partial.safetensors"))
    report = run_conversion(source, out)
    assert report.num_written == len(report.shards) - 5
    assert container_hash(out) == uninterrupted


def test_rerun_of_a_complete_conversion_writes_nothing(oracle_dir, tmp_path, uninterrupted):
    out = tmp_path / "out"
    run_conversion(oracle_dir / "tiny_glm_fp8", out)
    times = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    assert run_conversion(oracle_dir / "tiny_glm_fp8", out).num_written == 0
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == times


OTHER_SETTINGS = [
    ({"expert_bits": 8}, "--expert-bits 4"), ({"dense_bits": 8}, "--dense-bits 4"), ({"group": 128}, "--group 64"),
    ({"scales": "f16"}, "--scales f32"), ({"rounding": "search"}, "--rounding rtn"),
    ({"container": "colibri"}, "--format glm-gpu"),
]  # fmt: skip


@pytest.mark.parametrize(("other", "message"), OTHER_SETTINGS, ids=str)
def test_other_settings_are_refused_by_name(other, message, oracle_dir, tmp_path):
    source, out = oracle_dir / "tiny_glm_fp8", tmp_path / "out"
    begin(source, out, 1)
    with pytest.raises(RequestError, match=message):
        run_conversion(source, out, ConvertSettings(**{"rounding": "rtn", "shard_bytes": 64 << 10} | other))


@pytest.mark.parametrize("other", [other for other, _ in OTHER_SETTINGS[:5]], ids=str)
def test_other_settings_are_refused_for_a_complete_container(other, oracle_dir, tmp_path):
    source, out = oracle_dir / "tiny_glm_fp8", tmp_path / "out"
    run_conversion(source, out)
    before = container_hash(out)
    with pytest.raises(RequestError, match="asked for"):
        run_conversion(source, out, ConvertSettings(**{"rounding": "rtn", "shard_bytes": 64 << 10} | other))
    assert container_hash(out) == before


def test_changed_source_shard_is_refused_by_name(copy_oracle, tmp_path):
    source, out = copy_oracle("tiny_glm_fp8"), tmp_path / "out"
    begin(source, out, 1)
    shard = source / "model-00002-of-00003.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003.safetensors: the source file has changed"):
        run_conversion(source, out)


def test_source_shard_of_other_weights_is_refused_even_with_the_old_time(copy_oracle, tmp_path):
    source, out = copy_oracle("tiny_glm_fp8"), tmp_path / "out"
    begin(source, out, 1)
    shard = source / "model-00003-of-00003.safetensors"
    content, times = bytearray(shard.read_bytes()), shard.stat()
    half = len(content) // 2
    content[half:] = bytes(byte ^ 3 for byte in content[half:])
    shard.write_bytes(content)
    os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(CheckpointError, match=r"model-00003-of-00003.safetensors: the source file has changed"):
        run_conversion(source, out)


def test_source_shard_changed_while_it_is_read_stops_the_conversion(copy_oracle, tmp_path, monkeypatch):
    source, out = copy_oracle("tiny_glm_fp8"), tmp_path / "out"
    shard = source / "model-00001-of-00003.safetensors"

    def on_progress(progress):
        if progress.num_written == 2:
            shard.touch()

    with pytest.raises(CheckpointError, match=r"model-00001-of-00003.safetensors: the source file was changed"):
        run_conversion(source, out, on_progress=on_progress)
    assert len(list(out.glob("*.safetensors"))) == 2


def test_changed_config_is_refused(copy_oracle, tmp_path):
    source, out = copy_oracle("tiny_glm_fp8"), tmp_path / "out"
    begin(source, out, 1)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-4}))
    with pytest.raises(CheckpointError, match=r"config.json: the source file has changed"):
        run_conversion(source, out)


@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_damaged_finished_shard_is_refused_by_name_and_rewritten_once_deleted(
    damage, oracle_dir, tmp_path, uninterrupted
):
    source, out = oracle_dir / "tiny_glm_fp8", tmp_path / "out"
    begin(source, out)
    shard = sorted(out.glob("*.safetensors"))[2]
    content = bytearray(shard.read_bytes())
    content[5000] ^= 0x10
    shard.write_bytes({"flip": content, "cut": content[:-1], "empty": b""}[damage])
    with pytest.raises(CheckpointError, match=f"{shard.name}.*delete this shard"):
        run_conversion(source, out)
    shard.unlink()
    assert run_conversion(source, out).num_written == 57 - 4
    assert container_hash(out) == uninterrupted


def test_half_written_shard_of_a_kill_is_removed(oracle_dir, tmp_path, uninterrupted):
    source, out = oracle_dir / "tiny_glm_fp8", tmp_path / "out"
    begin(source, out)
    (out / "model-00007-of-00057.safetensors.partial").write_bytes(b"half")
    (out / "model-00057-of-00057.safetensors.partial").write_bytes(b"half")
    run_conversion(source, out)
    assert container_hash(out) == uninterrupted


def test_kill_between_record_and_name_leaves_a_shard_to_be_written_again(
    oracle_dir, tmp_path, uninterrupted, monkeypatch
):
    source, out = oracle_dir / "tiny_glm_fp8", tmp_path / "out"
    real_record, calls = convert_module._record, []

    def record_then_stop(*args):
        real_record(*args)
        calls.append(args)
        if len(calls) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(convert_module, "_record", record_then_stop)
    with pytest.raises(KeyboardInterrupt):
        run_conversion(source, out)
    monkeypatch.undo()
    assert len(json.loads((out / JOURNAL_FILE).read_text())["shards"]) == 4
    assert len(list(out.glob("*.safetensors"))) == 3
    run_conversion(source, out)
    assert container_hash(out) == uninterrupted


def test_folder_with_somebody_elses_shards_is_refused(oracle_dir, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "model.safetensors").write_bytes(b"mine")
    with pytest.raises(RequestError, match=r"holds model.safetensors"):
        run_conversion(oracle_dir / "tiny_glm_fp8", out)
    assert [path.name for path in out.iterdir()] == ["model.safetensors"]


def test_shard_without_a_record_is_never_overwritten(oracle_dir, tmp_path):
    source, out = oracle_dir / "tiny_glm_fp8", tmp_path / "out"
    begin(source, out, 2)
    stranger = out / "model-00009-of-00057.safetensors"
    stranger.write_bytes(b"mine")
    with pytest.raises(RequestError, match=r"model-00009-of-00057.*not written by"):
        run_conversion(source, out)
    assert stranger.read_bytes() == b"mine"


def test_second_conversion_into_the_same_folder_is_refused(oracle_dir, tmp_path):
    source, out = oracle_dir / "tiny_glm_fp8", tmp_path / "out"

    def on_progress(progress):
        with pytest.raises(RequestError, match="another conversion"):
            run_conversion(source, out)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_conversion(source, out, on_progress=on_progress)


def test_unfinished_container_cannot_be_opened(oracle_dir, tmp_path):
    out = tmp_path / "out"
    begin(oracle_dir / "tiny_glm_fp8", out)
    with pytest.raises(CheckpointError, match="not there"):
        Checkpoint.open(out)
