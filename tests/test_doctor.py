"""doctor and status: each fault of machine or model is named, with nothing loaded."""

import pytest

from glm_gpu import machine
from glm_gpu.checkpoint import Checkpoint
from glm_gpu.doctor import check_all
from glm_gpu.engine import DEMO_MODEL
from glm_gpu.kernels import cpu
from glm_gpu.opening import EngineOptions
from glm_gpu.status import status

SHARD = "model-00002-of-00002.safetensors"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of links to the demo model; no weight may be read."""

    def read(*_):
        raise AssertionError("a weight was read")

    monkeypatch.setattr(Checkpoint, "read_into", read)
    for file in DEMO_MODEL.iterdir():
        (tmp_path / file.name).symlink_to(file)
    return tmp_path


def checks(path, **options):
    return {check.name: check for check in check_all(path, EngineOptions(**options))}


def test_a_sound_model_on_a_sound_machine_has_no_failure(folder):
    found = checks(folder)
    assert {check.state for check in found.values()} <= {"ok", "warn"}
    assert {"python", "kernels", "memory", "memlock", "gpu", "config", "shards", "tensors", "fit", "tokenizer"} <= set(
        found
    )


def test_numpy_kernels_are_a_warning_with_a_next_step(folder):
    with cpu.use("numpy"):
        check = checks(folder)["kernels"]
    assert check.state == "warn" and "NumPy" in check.found and "install" in check.advice


@pytest.mark.parametrize("size", [0, 7, -1])
def test_a_truncated_shard_fails_and_is_named(folder, size):
    whole = (folder / SHARD).read_bytes()
    (folder / SHARD).unlink()
    (folder / SHARD).write_bytes(whole[:size])  # -1: all but the last byte
    found = checks(folder)
    assert found["model"].state == "fail" and SHARD in found["model"].found
    assert "fit" not in found
    assert SHARD in status(folder, EngineOptions()).problem


def test_a_missing_config_fails_and_the_machine_is_still_checked(folder):
    (folder / "config.json").unlink()
    found = checks(folder)
    assert found["model"].state == "fail" and "config.json" in found["model"].found
    assert found["memory"].state == "ok"


def test_a_broken_link_names_its_target(folder):
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("../blobs/0123")
    assert "../blobs/0123" in checks(folder)["model"].found


def test_a_missing_tokenizer_is_a_warning_and_a_damaged_one_a_failure(folder):
    (folder / "tokenizer.json").unlink()
    found = checks(folder)["tokenizer"]
    assert found.state == "warn" and "--prompt-ids" in found.advice
    (folder / "tokenizer.json").write_text("{")
    assert checks(folder)["tokenizer"].state == "fail"


def test_a_damaged_template_fails(folder):
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.jinja").write_text("{% for %}")
    assert "fail" in {check.state for check in check_all(folder, EngineOptions())}


def test_a_model_that_does_not_fit_fails_with_the_numbers(folder):
    found = checks(folder, ram=1 << 20)
    assert found["model"].state == "fail" and "1.00 MiB" in found["model"].found


def test_status_of_a_model_that_does_not_fit_still_describes_it(folder):
    found = status(folder, EngineOptions(ram=1 << 20))
    assert found.problem and found.plan is None
    assert found.model.formats["expert"] == "int4_g64" and found.model.num_shards == 2


def test_status_counts_bytes_and_names_the_instruction_set(folder):
    found = status(folder, EngineOptions())
    assert found.problem is None
    assert found.model.disk_bytes == sum(shard.stat().st_size for shard in DEMO_MODEL.glob("*.safetensors"))
    assert found.machine.instruction_set == cpu.implementation()
    assert found.plan.ram_bytes > found.plan.slot_bytes > 0


def test_without_a_gpu_the_reason_is_told(folder, monkeypatch):
    monkeypatch.setattr(machine, "gpu_absence", lambda *root: "no NVIDIA driver is loaded")
    assert checks(folder)["gpu"].found == "no NVIDIA driver is loaded"
