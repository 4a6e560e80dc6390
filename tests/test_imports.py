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
