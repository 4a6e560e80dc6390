"""Checks of the machine that doctor and deploy/provision.sh share: each fault is named with what to change."""

import os
import resource

import pytest

from glm_gpu import host_checks, machine
from glm_gpu.bench.slice import Slice, SliceShape, glm_config
from glm_gpu.config import ModelConfig
from glm_gpu.host_checks import check_disk, check_driver, check_limits
from glm_gpu.recipe import Recipe
from glm_gpu.safetensors_write import tensor_nbytes


@pytest.fixture
def write(tmp_path):
    def put(path: str, text: str) -> None:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    return put


@pytest.fixture
def limits(monkeypatch):
    """limits(RLIMIT_MEMLOCK=…): what the process would be allowed."""
    allowed = dict.fromkeys(("RLIMIT_MEMLOCK", "RLIMIT_NOFILE"), resource.RLIM_INFINITY)
    monkeypatch.setattr(
        resource, "getrlimit",
        lambda which: next((v, v) for name, v in allowed.items() if getattr(resource, name) == which),
    )  # fmt: skip
    return allowed.update


def test_tight_limits_are_warnings_that_say_what_to_write_where(tmp_path, write, limits):
    write("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n")
    limits(RLIMIT_MEMLOCK=8 << 20, RLIMIT_NOFILE=1024)
    found = {check.name: check for check in check_limits(tmp_path)}
    assert [check.state for check in found.values()] == ["warn"] * 3
    assert "8.00 MiB" in found["memlock"].found and "LimitMEMLOCK=infinity" in found["memlock"].advice
    assert "1024" in found["open files"].found and "LimitNOFILE" in found["open files"].advice
    assert "never" in found["huge pages"].found and "echo madvise" in found["huge pages"].advice


def test_wide_limits_are_fine(tmp_path, write, limits):
    write("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n")
    assert [(check.state, check.advice) for check in check_limits(tmp_path)] == [("ok", "")] * 3


@pytest.mark.parametrize(("version", "state"), [("470.256.02", "warn"), ("525.60.13", "ok"), ("570.86.15", "ok")])
def test_an_old_driver_is_named_with_the_version_expected(tmp_path, write, version, state):
    write("proc/driver/nvidia/version", f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {version}  Wed Jan 1 2025\n")
    write("proc/driver/nvidia/gpus/0000:01:00.0/information", "")
    write("dev/nvidia0", "")
    check = check_driver(tmp_path)
    assert check.state == state and version in check.found
    assert ("newer driver" in check.advice) == (state == "warn")


def test_no_device_is_fine(tmp_path):
    assert check_driver(tmp_path).state == "ok"


def test_a_disk_is_judged_by_room_kind_and_direct_reads(tmp_path, monkeypatch):
    assert check_disk(tmp_path / "none").state == "fail"
    assert "mkdir" in check_disk(tmp_path / "none").advice
    full = check_disk(tmp_path, 1 << 60)
    assert full.state == "fail" and "expected 1048576 TiB" in full.found
    for kind, word in (("tmpfs", "memory"), ("nfs4", "network")):
        monkeypatch.setattr(machine, "filesystem", lambda path, root, kind=kind: kind)
        assert check_disk(tmp_path, 1).state == "warn" and word in check_disk(tmp_path, 1).found
    monkeypatch.setattr(machine, "filesystem", lambda path, root: "ext4")
    monkeypatch.setattr(host_checks, "_takes_direct_reads", lambda folder: False)
    assert "refuses reads past the page cache" in check_disk(tmp_path, 1).found
    monkeypatch.setattr(host_checks, "_takes_direct_reads", lambda folder: True)
    assert check_disk(tmp_path, 1).state == "ok"


def test_looking_at_a_disk_leaves_nothing_there_and_sees_a_refusal(tmp_path, monkeypatch):
    assert host_checks._takes_direct_reads(tmp_path) in (True, False)
    assert list(tmp_path.iterdir()) == []

    def refuse(path, flags, *rest, real=os.open):
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)
    assert not host_checks._takes_direct_reads(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_room_asked_for_is_that_of_the_whole_model():
    config = ModelConfig.from_dict(glm_config(SliceShape(78, 3, 256, 154_880)))
    made = Slice(config, Recipe.default(), seed=1)
    trunk_bytes = sum(tensor_nbytes(*entry[1:3]) for entry in made.tensors(""))
    mtp_bytes = 256 * 3 * 6144 * 2048
    assert trunk_bytes + mtp_bytes <= host_checks.GLM_CONTAINER_BYTES < 1.01 * (trunk_bytes + mtp_bytes)


def test_doctor_shows_the_same_checks(invoke, tmp_path):
    code, out, _ = invoke("doctor", "--disk", tmp_path / "none")
    assert code == 1
    assert all(name in out for name in ("memlock", "open files", "huge pages", "gpu", "disk"))
