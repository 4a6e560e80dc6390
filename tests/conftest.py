"""Fixtures shared by all tests: the oracle's folders, and small checkpoints made on the spot."""

import json
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from glm_gpu import cli
from glm_gpu.safetensors_write import write_safetensors

SAFETENSORS_DTYPES = {"float32": "F32", "float16": "F16", "uint16": "BF16", "uint8": "U8", "int64": "I64"}


def pytest_configure():
    """What must not depend on how the tests are started, and on how fast the machine is at the moment."""
    # a shell's `&` has it ignored, and so would the commands be that tests start
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        from hypothesis import HealthCheck, settings
    except ImportError:  # the tests of the devices' kernels do without
        return
    # Where a failure would stop somebody else's work the examples are the same every time; elsewhere they are new ones.
    is_ci = bool(os.environ.get("CI"))
    settings.register_profile(
        "any_machine", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=is_ci
    )
    settings.load_profile("any_machine")


@pytest.fixture(scope="session")
def oracle_dir() -> Path:
    """tests/data/oracle: tiny checkpoints and what the reference computes from them; README.md there says what."""
    return Path(__file__).parent / "data" / "oracle"


@pytest.fixture(autouse=True)
def _own_state_folder(tmp_path_factory, monkeypatch):
    """Commands keep heat and status below the tests' folder, not the user's."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.getbasetemp() / "state"))


@pytest.fixture
def invoke(capsys):
    """Runs one command of the program: invoke("run", ...) -> (exit code, stdout, stderr)."""

    def call(*args) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            cli.main([str(arg) for arg in args])
        return left.value.code or 0, *capsys.readouterr()

    return call


@pytest.fixture
def copy_oracle(oracle_dir, tmp_path):
    """copy_oracle("tiny_glm") -> a copy of that checkpoint's config, index and shards that a test may damage."""

    def copy(name: str) -> Path:
        target = tmp_path / name
        target.mkdir()
        for path in (oracle_dir / name).iterdir():
            if path.suffix in (".json", ".safetensors"):
                shutil.copy(path, target)
        return target

    return copy


@pytest.fixture
def write_shard():
    """write_shard(path, {name: array}) -> path; uint16 arrays are BF16 bit patterns, "F8_E4M3" needs (dtype, array)."""

    def write(path: Path, tensors: dict) -> Path:
        entries = []
        for name, value in tensors.items():
            dtype, array = value if isinstance(value, tuple) else (SAFETENSORS_DTYPES[value.dtype.name], value)
            entries.append((name, dtype, array.shape, np.ascontiguousarray(array)))
        write_safetensors(path, entries)
        return path

    return write


@pytest.fixture
def write_config():
    """write_config(folder, fields) -> fields: writes them as the folder's config.json."""

    def write(folder: Path, fields: dict) -> dict:
        (folder / "config.json").write_text(json.dumps(fields))
        return fields

    return write
