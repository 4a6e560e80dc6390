import builtins
import importlib.util
import logging
import shutil

import pytest

from glm_gpu.errors import DeviceError
from glm_gpu.kernels import cubins
from glm_gpu.kernels.cubins import Compiled, Cubin, CubinCache, Specialization, cache_folder, file_name
from glm_gpu.kernels.gpu.arrays import Kernel

KERNEL = Kernel("norm", "rms_norm_kernel", num_warps=8)
SPECIALIZATION = Specialization(KERNEL, (("x_ptr", "*fp32"),), ("x_ptr",), (("WIDTH", 64),))
CUBIN = Cubin(b"\x7fELF" + bytes(range(256)), "rms_norm_kernel", 1024, 8)


@pytest.fixture
def compilations(monkeypatch):
    """Compiles nothing: gives CUBIN, and a list of what was asked for."""
    asked = []

    def compile_kernel(specialization, arch):
        asked.append((specialization, arch))
        return Compiled(CUBIN, "")

    monkeypatch.setattr(cubins, "compile_kernel", compile_kernel)
    return asked


def test_kernel_is_compiled_once_and_then_read(tmp_path, compilations):
    assert CubinCache(90, tmp_path).get(SPECIALIZATION) == CUBIN
    assert CubinCache(90, tmp_path).get(SPECIALIZATION) == CUBIN
    assert compilations == [(SPECIALIZATION, 90)]


def test_damaged_file_is_compiled_again(tmp_path, compilations, caplog):
    CubinCache(90, tmp_path).get(SPECIALIZATION)
    (path,) = tmp_path.rglob("*.cubin")
    path.write_bytes(path.read_bytes()[:-1])
    with caplog.at_level(logging.WARNING):
        assert CubinCache(90, tmp_path).get(SPECIALIZATION) == CUBIN
    assert "checksum" in caplog.text and len(compilations) == 2
    assert CubinCache(90, tmp_path).get(SPECIALIZATION) == CUBIN and len(compilations) == 2


def test_without_a_folder_or_a_writable_one_kernels_still_run(tmp_path, compilations):
    assert CubinCache(90, None).get(SPECIALIZATION) == CUBIN
    (tmp_path / "file").write_text("no folder")
    assert CubinCache(90, tmp_path / "file").get(SPECIALIZATION) == CUBIN


def test_prebuilt_kernel_serves_whatever_compiler_is_there(tmp_path, compilations, monkeypatch):
    CubinCache(90, None).export(SPECIALIZATION, tmp_path / "shipped")
    monkeypatch.setattr(cubins, "_compiler_name", lambda: "triton-none")
    assert CubinCache(90, None, [tmp_path / "shipped"]).get(SPECIALIZATION) == CUBIN
    assert len(compilations) == 1


def test_another_compiler_has_a_folder_of_its_own(tmp_path, compilations, monkeypatch):
    CubinCache(90, tmp_path).get(SPECIALIZATION)
    monkeypatch.setenv("PTXAS_OPTIONS", "--opt-level 1")
    CubinCache(90, tmp_path).get(SPECIALIZATION)
    assert len(compilations) == 2 and len(list(tmp_path.iterdir())) == 2


def test_name_follows_from_everything_that_code_follows_from(tmp_path, monkeypatch):
    kernel = KERNEL
    others = [
        Specialization(kernel, (("x_ptr", "*bf16"),), ("x_ptr",), (("WIDTH", 64),)),
        Specialization(kernel, (("x_ptr", "*fp32"),), (), (("WIDTH", 64),)),
        Specialization(kernel, (("x_ptr", "*fp32"),), ("x_ptr",), (("WIDTH", 65),)),
        Specialization(Kernel("norm", "rms_norm_kernel", 4), *_rest()),
        Specialization(Kernel("norm", "rms_norm_kernel", 8, 2), *_rest()),
        Specialization(Kernel("rows", "rms_norm_kernel", 8), *_rest()),
    ]
    names = {file_name(SPECIALIZATION, 90), file_name(SPECIALIZATION, 80), *(file_name(o, 90) for o in others)}
    assert len(names) == 2 + len(others)
    source = tmp_path / "source"
    shutil.copytree(cubins._SOURCE, source, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(cubins, "_SOURCE", source)
    assert file_name(SPECIALIZATION, 90) in names
    (source / "product.py").write_text((source / "product.py").read_text() + "\n")
    assert file_name(SPECIALIZATION, 90) not in names


def _rest():
    return SPECIALIZATION.types, SPECIALIZATION.aligned, SPECIALIZATION.constants


def test_cards_older_than_ampere_are_refused():
    with pytest.raises(DeviceError, match=r"7\.5 found, expected 8\.0 or newer; use --device cpu"):
        CubinCache(75, None)


def test_missing_triton_is_told_with_what_to_install(tmp_path, monkeypatch):
    imported = builtins.__import__

    def without_triton(name, *rest, **named):
        if name.split(".")[0] == "triton":
            raise ImportError(name)
        return imported(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without_triton)
    with pytest.raises(DeviceError, match=r"rms_norm_kernel.*9\.0.*pip install 'triton>=3.6,<3.10'"):
        CubinCache(90, tmp_path).get(SPECIALIZATION)


@pytest.mark.parametrize(
    ("environment", "platform", "expected"),
    [
        ({"XDG_CACHE_HOME": "/c", "HOME": "/h"}, "linux", "/c/glm-gpu/kernels"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/h"}, "linux", "/h/.cache/glm-gpu/kernels"),
        ({"HOME": ""}, "linux", None),
    ],
)
def test_cache_lies_where_the_environment_says(environment, platform, expected):
    folder = cache_folder(environment, platform)
    assert (None if folder is None else folder.as_posix()) == expected


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_kernel_that_triton_refuses_is_a_device_error():
    with pytest.raises(DeviceError, match=r"cannot compile rms_norm_kernel for compute capability 9\.0"):
        CubinCache(90, None).get(SPECIALIZATION)
