"""deploy/: the unit is one systemd takes, the settings are options, the script changes nothing unless told to."""

import configparser
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from glm_gpu import cli

DEPLOY = Path(__file__).resolve().parent.parent.parent / "deploy"
UNIT = DEPLOY / "glm-gpu.service"
SCRIPT = DEPLOY / "provision.sh"


def unit() -> dict[str, list[tuple[str, str]]]:
    """Sections of the unit, each its settings in order."""
    found: dict[str, list[tuple[str, str]]] = {}
    for line in UNIT.read_text().splitlines():
        if line.startswith("["):
            found[line.strip("[]")] = section = []
        elif line and not line.startswith("#"):
            name, _, value = line.partition("=")
            section.append((name, value))
    return found


def provision(*words, **environment) -> subprocess.CompletedProcess:
    return subprocess.run(["bash", SCRIPT, *map(str, words)], capture_output=True, text=True)


def test_the_unit_locks_memory_and_does_not_repeat_a_misuse():
    assert unit().keys() == {"Unit", "Service", "Install"}
    service = dict(unit()["Service"])
    assert (service["LimitMEMLOCK"], service["RestartPreventExitStatus"]) == ("infinity", "2")
    assert int(service["LimitNOFILE"]) >= 4096
    # an answer may go on for --drain seconds, 30 by default
    assert service["TimeoutStopSec"] == "2min" and service["Restart"] == "on-failure"


def test_the_units_state_folder_is_the_one_that_the_program_uses():
    from glm_gpu.state import state_folder

    service = dict(unit()["Service"])
    environment = dict(word.split("=") for word in service["Environment"].split())
    assert state_folder(environment, "linux") == Path("/var/lib") / service["StateDirectory"]


def test_the_units_commands_exist():
    names = {command.callback.__name__ for command in cli.app.registered_commands}
    service = dict(unit()["Service"])
    for setting in ("ExecStart", "ExecStartPre"):
        program, command = service[setting].split()
        assert program == "/opt/glm-gpu/bin/glm-gpu" and command in names


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not there")
def test_systemd_takes_the_unit(tmp_path):
    copy = tmp_path / "glm-gpu.service"
    copy.write_text(UNIT.read_text().replace("/opt/glm-gpu/bin/glm-gpu", sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", copy], capture_output=True, text=True)
    said = [line for line in done.stderr.splitlines() if "glm-gpu.service" in line]
    assert (done.returncode, said) == (0, [])


def test_every_setting_is_the_twin_of_an_option_of_serve(invoke):
    parser = configparser.ConfigParser()
    parser.optionxform = str
    text = re.sub(r"^# (?=GLM_GPU_)", "", (DEPLOY / "glm-gpu.env").read_text(), flags=re.MULTILINE)
    parser.read_string("[settings]\n" + text)
    options = set(re.findall(r"--[\w-]+", invoke("serve", "--help")[1]))
    names = [*parser["settings"]]
    assert len(names) > 3
    assert {"--" + name.removeprefix("GLM_GPU_").lower().replace("_", "-") for name in names} <= options


def test_the_script_alone_changes_nothing_and_runs_the_doctors_checks(tmp_path):
    installed = tmp_path / "bin"
    installed.mkdir()
    (installed / "python").symlink_to(sys.executable)
    (installed / "glm-gpu").write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\nexit 1\n')
    (installed / "glm-gpu").chmod(0o755)
    done = provision("--prefix", tmp_path, "--disk", tmp_path)
    assert done.returncode == 1 and done.stdout.startswith("what --apply would do:")
    assert (tmp_path / "asked").read_text() == f"doctor --disk {tmp_path}\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["asked", "bin"]
    assert sorted(path.name for path in installed.iterdir()) == ["glm-gpu", "python"]


@pytest.mark.parametrize("words", [("--what",), ("--disk",), ("--variant", "rocm")])
def test_a_misused_script_says_how_it_is_used(words):
    done = provision(*words)
    assert done.returncode == 2 and "--variant cpu|cuda12|cuda13" in done.stderr and done.stdout == ""


def test_the_image_installs_extras_that_exist_and_ends_in_the_program():
    import tomllib

    text = (DEPLOY / "Dockerfile").read_text()
    extras = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = set(re.findall(r"cuda\d+", re.search(r"\n      (cuda.*?)\)", text)[1])) | {"serve", "hub"}
    assert named <= extras.keys() and {"cuda12", "cuda13"} <= named
    assert 'ENTRYPOINT ["glm-gpu"]' in text and "\nUSER glm\n" in text
    # what is built in one stage and used in the other has one path, or its scripts would not start
    assert "COPY --from=build /opt/glm-gpu /opt/glm-gpu" in text
