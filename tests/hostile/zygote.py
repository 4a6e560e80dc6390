"""Runs many commands of the program, each in a process of its own, without starting an interpreter for each.

    python zygote.py FOLDER

reads lines of {"args": [...], "fault": [seam, at, what], "limits": {name: value}} and for each
writes a line {"code": exit code or -signal, "out": ..., "err": ..., "counts": {...}}.
"""

import json
import os
import resource
import sys
from pathlib import Path

from faults import Faults


def warm_up(folder):
    """Import what commands import, and run one, so that children begin with everything loaded."""
    from glm_gpu import cli, engine, repl, report, score  # noqa: F401
    from glm_gpu.convert import convert  # noqa: F401
    from glm_gpu.kernels import cpu

    cpu.set_threads(1)
    for package in ("jinja2.sandbox", "jinja2.ext", "tokenizers", "llguidance"):
        __import__(package)


def child(folder, asked):
    for number, name in ((1, "out"), (2, "err")):
        descriptor = os.open(folder / name, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        os.dup2(descriptor, number)
        os.close(descriptor)
    from glm_gpu import cli

    faults = Faults(*asked.get("fault") or ())
    code = 99
    try:
        for name, value in (asked.get("limits") or {}).items():
            resource.setrlimit(getattr(resource, name), (value, value))
        faults.install()
        cli.main(asked["args"])
    except SystemExit as leaving:
        code = leaving.code or 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        (folder / "counts").write_text(json.dumps(faults.counts))
        os._exit(code)


def main():
    folder = Path(sys.argv[1])
    warm_up(folder)
    for line in sys.stdin:
        asked = json.loads(line)
        for name in ("out", "err", "counts"):
            (folder / name).write_text("{}" if name == "counts" else "")
        number = os.fork()
        if number == 0:
            child(folder, asked)
        code = os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])
        out, err = ((folder / name).read_text(errors="replace") for name in ("out", "err"))
        answer = {"code": code, "out": out, "err": err, "counts": json.loads((folder / "counts").read_text())}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
