"""README.md says what the program does: its reference is the program's own help, its commands exist."""

import re
import runpy
import shlex
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_reference_is_the_programs_own_help():
    updated = runpy.run_path(str(ROOT / "tools/update_readme.py"))["updated"]
    assert updated(README) == README, "run PYTHONPATH=. python tools/update_readme.py"


def test_every_command_shown_is_understood():
    commands = re.findall(r"^(?:pip install \. && )?glm-gpu ([^#<\n]*?)(?:   .*| <.*)?$", README, re.MULTILINE)
    assert len(commands) > 5
    known = runpy.run_path(str(ROOT / "tools/update_readme.py"))["COMMANDS"]
    words = [shlex.split(command) for command in commands]
    assert all(any(shown[: len(name.split())] == name.split() for name in known) for shown in words), words


def test_files_it_names_exist():
    paths = re.findall(r"`((?:glm_gpu|kernels|tiers|tests|tools|bench|deploy|\.ci)/[\w./]*)`", README)
    assert len(paths) > 5
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_python_example_runs(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})
    assert len(capsys.readouterr().out) > 20
