"""Results of benches: a JSON file each in bench/results, stamped with the machine, the command and the revision."""

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

from glm_gpu import __version__
from glm_gpu.kernels import cpu
from glm_gpu.machine import read_machine

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench/results"


def stamp() -> dict:
    """What a figure depends on besides the code that is measured."""
    machine = read_machine()
    return {
        "version": __version__,
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "python": sys.version.split()[0],
        "cpu": machine.cpu_name,
        "cores": machine.num_physical_cores,
        "memory_bytes": machine.memory.total,
        "kernels": cpu.implementation(),
        "threads": cpu.get_threads(),
        "load_before": round(os.getloadavg()[0], 2),
    }


def save(name: str, found: dict, command: str | None = None) -> Path:
    """Write bench/results/NAME.json: the stamp, the command that measured it (default: this process's), and `found`."""
    command = command or "python " + shlex.join([_relative(sys.argv[0]), *sys.argv[1:]])
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    document = {"bench": name, "command": command, "machine": stamp(), **found}
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return path


def load(name: str) -> dict | None:
    """What `save` wrote under this name; None when nothing was."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _relative(path: str) -> str:
    resolved = Path(path).resolve()
    return str(resolved.relative_to(ROOT)) if resolved.is_relative_to(ROOT) else resolved.name


def _commit() -> str | None:
    """The revision measured, with a plus where the tree differs from it; None outside a checkout."""
    git = ["git", "-C", str(ROOT)]
    try:
        found = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        changes = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip() + ("+" if changes.stdout.strip() else "")
