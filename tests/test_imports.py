"""What is imported before a command runs: nothing heavy, so that --help answers at once."""

import subprocess
import sys
from pathlib import Path

import pytest

import glm_gpu

# the folder that holds the package under test: the checkout, or site-packages
IMPORTED_FROM = Path(glm_gpu.__file__).parent.parent
HEAVY = {"numpy", "tokenizers", "jinja2", "safetensors", "pydantic", "rich", "cupy", "triton", "fastapi"}


@pytest.mark.parametrize("module", ["glm_gpu", "glm_gpu.cli"])
def test_import_loads_nothing_heavy(module):
    code = f"import sys, {module}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    loaded = subprocess.run(
        [sys.executable, "-c", code], cwd=IMPORTED_FROM, capture_output=True, text=True, check=True
    ).stdout
    assert not HEAVY & set(loaded.split())


def test_help_of_a_command_loads_nothing_heavy():
    code = (
        "import sys; from glm_gpu import cli\ntry: cli.main(['run', '--help'])\nfinally: print('loaded:', *sys.modules)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=IMPORTED_FROM, capture_output=True, text=True, check=True
    ).stdout
    assert not HEAVY & {name.partition(".")[0] for name in out.split("loaded:")[1].split()}


def test_device_operations_need_neither_triton_nor_cupy_to_be_imported():
    """Triton is for compiling alone, and kernels that are found compiled need no Triton."""
    modules = "attention experts indexer norm projection router rows sampling"
    code = (
        f"import sys, glm_gpu.kernels.launch, glm_gpu.kernels.simulator\nfrom glm_gpu.kernels.gpu import "
        f"{', '.join(modules.split())}\nprint(*sys.modules)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=IMPORTED_FROM, capture_output=True, text=True, check=True
    ).stdout
    assert not {"triton", "cupy", "torch"} & {name.partition(".")[0] for name in out.split()}


def test_cpu_kernels_load_nothing_of_devices():
    code = "import sys, glm_gpu.engine; print(*sys.modules)"
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=IMPORTED_FROM, capture_output=True, text=True, check=True
    ).stdout
    assert not {
        name for name in out.split() if name.startswith(("glm_gpu.kernels.launch", "glm_gpu.kernels.simulator"))
    }
