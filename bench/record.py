"""Results of benches: a JSON file each in bench/results, stamped with the machine, the command and the revision."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

from glm_gpu.bench.measurement import stamp

ROOT = Path(__file__).resolve().parent.parent
# bench/all.py sets the variable for what it runs.
RESULTS = Path(os.environ.get("BENCH_RESULTS", ROOT / "bench/results"))


def save(name: str, found: dict, command: str | None = None) -> Path:
    """Write NAME.json: the command that measured it (default: this process's), `found`, and the machine."""
    command = command or "python " + shlex.join([_relative(sys.argv[0]), *map(_shown, sys.argv[1:])])
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    machine = {**stamp(), "commit": _commit(), **found.get("machine", {})}
    document = {"bench": name, "command": command, **found, "machine": machine}
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return path


def load(name: str) -> dict | None:
    """What `save` wrote under this name; None when nothing was."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _relative(path: str) -> str:
    resolved = Path(path).resolve()
    return str(resolved.relative_to(ROOT)) if resolved.is_relative_to(ROOT) else resolved.name


def _shown(word: str) -> str:
    """A word of a command as others would type it: of a path on this machine, its name."""
    return Path(word).name if word.startswith("/") else word


def _commit() -> str | None:
    """The revision measured, with a plus where the tree differs from it; None outside a checkout."""
    git = ["git", "-C", str(ROOT)]
    try:
        found = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        changes = subprocess.run(
            [*git, "status", "--porcelain", "-uno", "--", ".", ":!bench/results", ":!README.md"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip() + ("+" if changes.stdout.strip() else "")
