"""A disk that is too small, or fills up: on a small tmpfs where one may be mounted, else through a failing writer."""

import errno
import os
import re
import subprocess

import pytest
from small_sources import make_awkward_source

from glm_gpu import machine
from glm_gpu.convert.convert import convert
from glm_gpu.convert.settings import ConvertSettings
from glm_gpu.convert.source import LocalSource
from glm_gpu.errors import CapacityError
from glm_gpu.safetensors_write import write_safetensors

SETTINGS = ConvertSettings(rounding="rtn", shard_bytes=256 << 10)


@pytest.fixture(scope="module")
def source_dir(tmp_path_factory):
    return make_awkward_source(tmp_path_factory.mktemp("space") / "source", "bf16")


@pytest.fixture
def small_disk(tmp_path):
    """small_disk(num_bytes) -> folder on a file system of that size; called again, it changes the size.

    Needs the right to mount. Without it there is no such disk: the tests that need one are skipped, and
    `test_write_that_finds_the_disk_full` still drives the same path through a writer that fails.
    """
    folder = tmp_path / "disk"
    folder.mkdir()

    def resize(num_bytes: int):
        options = f"size={num_bytes // 4096 * 4096}" + (",remount" if os.path.ismount(folder) else "")
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"no tmpfs may be mounted here: {done.stderr.strip()}")
        return folder

    yield resize
    if os.path.ismount(folder):
        subprocess.run(["umount", "-l", str(folder)], check=True)


def run_conversion(source_dir, out, **options):
    with LocalSource(source_dir) as source:
        return convert(source, out, SETTINGS, threads=2, **options)


def test_disk_that_is_too_small_is_refused_with_bytes_needed_before_a_shard_is_written(
    source_dir, small_disk, tmp_path
):
    # C21
    whole = run_conversion(source_dir, tmp_path / "whole")
    needed_bytes = sum(record.nbytes for record in whole.shards.values())
    out = small_disk(needed_bytes // 2) / "out"
    with pytest.raises(CapacityError, match="bytes needed") as caught:
        run_conversion(source_dir, out)
    assert int(re.search(r"(\d+) bytes needed", str(caught.value))[1]) >= needed_bytes
    assert not list(out.glob("*.safetensors*"))
    small_disk(needed_bytes + (4 << 20))
    assert run_conversion(source_dir, out).shards == whole.shards


def test_disk_that_fills_up_stops_cleanly_keeps_finished_shards_and_resumes(source_dir, small_disk, tmp_path):
    # C21: another program takes the room of all but three shards while the conversion runs
    whole = run_conversion(source_dir, tmp_path / "whole")
    needed_bytes = sum(record.nbytes for record in whole.shards.values())
    disk = small_disk(needed_bytes + (4 << 20))
    out = disk / "out"

    def fill(progress):
        if progress.num_written == 3 and not (disk / "ballast").exists():
            (disk / "ballast").write_bytes(bytes(machine.disk_free_bytes(disk) - (100 << 10)))

    with pytest.raises(CapacityError, match="finished shards stay") as caught:
        run_conversion(source_dir, out, on_progress=fill)
    finished = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(finished) == 3
    assert not list(out.glob("*.partial.safetensors")) and not list(out.glob("*.safetensors.partial"))
    left_bytes = sum(record.nbytes for name, record in whole.shards.items() if name not in finished)
    assert int(re.search(r"(\d+) bytes needed", str(caught.value))[1]) >= left_bytes
    identities = {name: (out / name).stat().st_ino for name in finished}
    with pytest.raises(CapacityError):  # nothing has changed yet
        run_conversion(source_dir, out)
    (disk / "ballast").unlink()
    report = run_conversion(source_dir, out)
    assert report.num_written == len(whole.shards) - 3
    assert report.shards == whole.shards
    assert {name: (out / name).stat().st_ino for name in finished} == identities


def test_disk_that_is_full_in_the_middle_of_a_shard_leaves_no_part_of_it(source_dir, small_disk, tmp_path, monkeypatch):
    whole = run_conversion(source_dir, tmp_path / "whole")
    needed_bytes = sum(record.nbytes for record in whole.shards.values())
    out = small_disk(needed_bytes // 2) / "out"
    # as if room that was there when a shard began went away before it ended
    monkeypatch.setattr(machine, "disk_free_bytes", lambda folder: 1 << 40)
    with pytest.raises(CapacityError, match="bytes needed"):
        run_conversion(source_dir, out)
    monkeypatch.undo()
    assert 0 < len(list(out.glob("*.safetensors"))) < len(whole.shards)
    assert not list(out.glob("*.safetensors.partial"))
    small_disk(needed_bytes + (4 << 20))
    assert run_conversion(source_dir, out).shards == whole.shards


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_write_that_finds_the_disk_full(code, source_dir, tmp_path, monkeypatch):
    whole = run_conversion(source_dir, tmp_path / "whole")
    num_calls = 0

    def failing_writer(path, tensors, **options):
        nonlocal num_calls
        num_calls += 1
        if num_calls == 3:
            raise OSError(code, os.strerror(code))
        return write_safetensors(path, tensors, **options)

    monkeypatch.setattr("glm_gpu.convert.convert.write_safetensors", failing_writer)
    with pytest.raises(CapacityError, match="finished shards stay"):
        run_conversion(source_dir, tmp_path / "out")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 2
    assert run_conversion(source_dir, tmp_path / "out").shards == whole.shards


def test_disk_that_breaks_is_reported_as_what_it_is(source_dir, tmp_path, monkeypatch):
    def failing_writer(path, tensors, **options):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("glm_gpu.convert.convert.write_safetensors", failing_writer)
    with pytest.raises(Exception, match="Input/output error"):
        run_conversion(source_dir, tmp_path / "out")
