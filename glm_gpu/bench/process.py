"""This program again, in a process of its own: a clean slate for peak memory and bytes read."""

import json
import os
import subprocess
import sys
from pathlib import Path

import glm_gpu
from glm_gpu.errors import DeviceError


def own_command(*words: str) -> list[str]:
    """The command line that runs this very program."""
    return [sys.executable, "-m", "glm_gpu", *words]


def own_environment(**changes: str) -> dict[str, str]:
    """The environment in which `own_command` finds the package, installed or in a checkout."""
    source, found = str(Path(glm_gpu.__file__).parent.parent), os.environ.get("PYTHONPATH")
    return os.environ | {"PYTHONPATH": os.pathsep.join([source, found] if found else [source])} | changes


def own_document(*words: str) -> dict:
    """The JSON document that a command of this program prints; what it says beside it goes to stderr.

    Raises:
        DeviceError: the command failed.
    """
    done = subprocess.run(own_command(*words), env=own_environment(), capture_output=True, text=True)
    if done.returncode == -2 or done.returncode == 130:
        raise KeyboardInterrupt
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise DeviceError(said[-1].removeprefix("glm-gpu: "))
    return json.loads(done.stdout)
