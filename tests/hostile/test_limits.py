"""The command line on a poor machine: every limit, folder, locale and mask a process may be given, on the demo.

Each test runs the program as a process. It gives its answer, the same as ever, or one line that says what is missing.
"""

import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from glm_gpu.engine import DEMO_MODEL

SOURCE = Path(__file__).parents[2]
PROMPT = "And it came to pass"
RUN = ("run", PROMPT, "--max-tokens", "4", "--temperature", "0", "--context", "128")
BUFFERED, UNBUFFERED = {"PYTHONUNBUFFERED": ""}, {"PYTHONUNBUFFERED": "1"}
IS_ROOT = hasattr(os, "geteuid") and os.geteuid() == 0

can_mount = pytest.mark.skipif(
    not IS_ROOT or shutil.which("unshare") is None
    or subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode != 0,
    reason="needs root and mount namespaces",
)  # fmt: skip


@pytest.fixture
def call(tmp_path):
    """call("run", ..., limits={"RLIMIT_NOFILE": 64}, prefix=[...]) -> the finished process, its state in a folder.

    An environment variable given as None is removed.
    """

    def run(*args, limits=None, prefix=(), variables=None, **options):
        environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state"), **(variables or {})}
        environment = {name: value for name, value in environment.items() if value is not None}

        def lower():
            for name, value in limits.items():
                resource.setrlimit(getattr(resource, name), (value, value))

        command = [*prefix, sys.executable, "-m", "glm_gpu", *map(str, args)]
        options = {"cwd": SOURCE, "capture_output": True, **options}
        return subprocess.run(command, env=environment, preexec_fn=lower if limits else None, timeout=300, **options)

    return run


@pytest.fixture(scope="module")
def answer():
    command = [sys.executable, "-m", "glm_gpu", *RUN]
    return subprocess.run(command, cwd=SOURCE, capture_output=True, check=True).stdout


@pytest.fixture
def pipe_without_reader():
    reading, writing = os.pipe()
    os.close(reading)
    yield writing
    os.close(writing)


def refuses_in_one_line(done, *words):
    """Whether it failed as the README says; warnings may precede the line."""
    last = done.stderr.decode(errors="replace").strip().splitlines()[-1]
    assert done.returncode in (1, 2) and b"Traceback" not in done.stderr, done.stderr
    assert last.startswith("glm-gpu: ") and "[Errno" not in last and all(word in last for word in words), last
    return True


@pytest.mark.parametrize("limits", [
    {"RLIMIT_MEMLOCK": 0}, {"RLIMIT_MEMLOCK": 65536}, {"RLIMIT_NOFILE": 24}, {"RLIMIT_AS": 4 << 30}, {"RLIMIT_CORE": 0},
    {"RLIMIT_STACK": 1 << 20},
], ids=str)  # fmt: skip
def test_low_limits_leave_the_answer(call, answer, limits):
    """C28 where it is about locked memory."""
    done = call(*RUN, limits=limits)
    assert done.returncode == 0 and done.stdout == answer, done.stderr


# Below some 500 MiB NumPy's BLAS may end the process while it is loaded, with a line of its own.
@pytest.mark.parametrize("limits", [{"RLIMIT_AS": 700 << 20}, {"RLIMIT_NOFILE": 9}], ids=str)
def test_too_low_limits_are_told_in_one_line(call, answer, limits):
    done = call(*RUN, limits=limits, variables={"OPENBLAS_NUM_THREADS": "1"})
    assert (done.returncode == 0 and done.stdout == answer) or refuses_in_one_line(done)


def test_a_file_larger_than_allowed_is_told_and_not_left_half(call, tmp_path):
    done = call(*RUN, "--save", tmp_path / "kept", limits={"RLIMIT_FSIZE": 1000})
    assert refuses_in_one_line(done, "kept")
    assert list(tmp_path.glob("*kept*")) == []


@pytest.mark.parametrize("cpus", ["0", "0-1"])
@pytest.mark.skipif(shutil.which("taskset") is None, reason="needs taskset")
def test_one_core_or_two_give_the_same_answer(call, answer, cpus):
    """C33: the threads stay inside the mask."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("has one core")
    assert call(*RUN, prefix=["taskset", "-c", cpus]).stdout == answer
    report = json.loads(call("doctor", "--json", prefix=["taskset", "-c", cpus]).stdout)
    assert f"{len(cpus.split('-'))} " in json.dumps(report)


@pytest.mark.parametrize("variables", [
    {"HOME": None, "XDG_STATE_HOME": None}, {"HOME": "/nonexistent", "XDG_STATE_HOME": None}, {"HOME": ""},
    {"XDG_STATE_HOME": "/dev/null/x"}, {"XDG_STATE_HOME": "relative"}, {"TMPDIR": "/nonexistent"}, {"PATH": ""},
    {"TERM": None}, {"COLUMNS": "0"},
], ids=str)  # fmt: skip
def test_no_home_and_no_state_folder_leave_the_answer(call, answer, variables):
    done = call(*RUN, variables=variables)
    assert done.returncode == 0 and done.stdout == answer, done.stderr


@pytest.mark.parametrize("variables", [
    {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, {"LC_ALL": "POSIX"}, {"PYTHONIOENCODING": "ascii"},
    {"PYTHONIOENCODING": "latin-1"}, {"LC_ALL": "no_SUCH.locale"},
], ids=str)  # fmt: skip
def test_any_locale_and_any_letters_in_a_path(call, answer, tmp_path, variables):
    """C23."""
    model = tmp_path / "модель 模型 é x"
    shutil.copytree(DEMO_MODEL, model)
    done = call(*RUN, "--model", model, variables=variables)
    assert done.returncode == 0 and done.stdout == answer, done.stderr
    done = call("status", "--model", model, variables=variables)
    assert done.returncode == 0 and b"Traceback" not in done.stderr, done.stderr
    done = call("run", "ёжик 漢字 👩‍👩‍👧", "--max-tokens", "2", "--model", model / "нет", variables=variables)
    assert refuses_in_one_line(done)


def test_messages_hold_nothing_that_a_terminal_obeys(call, tmp_path):
    done = call(*RUN, "--model", tmp_path / "\x1b]0;title\x07\n\x9bred")
    assert refuses_in_one_line(done, "no such folder") and not any(letter in done.stderr for letter in b"\x1b\x07\x9b")


@pytest.mark.parametrize(
    ("command", "redirection", "variables"),
    [
        (RUN, ">/dev/full", BUFFERED), (RUN, ">/dev/full", UNBUFFERED), (RUN, ">&-", BUFFERED),
        (("doctor",), ">/dev/full", BUFFERED), (("--help",), ">/dev/full", BUFFERED), (("--help",), ">&-", BUFFERED),
    ],
    ids=["run, full", "run, full and unbuffered", "run, closed", "doctor, full", "help, full", "help, closed"],
)  # fmt: skip
def test_results_that_cannot_be_written_are_told_in_one_line(call, command, redirection, variables):
    done = call(*command, prefix=["sh", "-c", f'exec "$@" {redirection}', "sh"], variables=variables)
    assert refuses_in_one_line(done) and done.returncode == 1 and done.stderr.count(b"\n") == 1


@pytest.mark.parametrize("variables", [BUFFERED, UNBUFFERED], ids=["buffered", "unbuffered"])
def test_results_of_which_only_a_part_can_be_written_are_told_in_one_line(call, tmp_path, variables):
    out, limits = tmp_path / "out", {"RLIMIT_FSIZE": 1000}
    with out.open("wb") as file:
        options = {"stdout": file, "stderr": subprocess.PIPE, "capture_output": False}
        done = call("doctor", "--json", limits=limits, variables=variables, **options)
    assert refuses_in_one_line(done, "standard output", "too large") and out.stat().st_size == 1000


@pytest.mark.parametrize("command", [RUN, ("--help",), ("doctor",)], ids=["run", "help", "doctor"])
def test_results_that_nobody_reads_end_a_command_without_a_word(call, pipe_without_reader, command):
    done = call(*command, stdout=pipe_without_reader, stderr=subprocess.PIPE, capture_output=False, variables=BUFFERED)
    assert done.returncode == 1 and done.stderr == b""


@pytest.mark.parametrize("redirection", ["2>/dev/full", "2>&-"])
def test_messages_that_cannot_be_written_leave_the_answer(call, answer, redirection):
    done = call(*RUN, prefix=["sh", "-c", f'exec "$@" {redirection}', "sh"], variables=BUFFERED)
    assert done.returncode == 0 and done.stdout == answer


def test_messages_that_nobody_reads_leave_the_answer(call, answer, pipe_without_reader):
    done = call(*RUN, stdout=subprocess.PIPE, stderr=pipe_without_reader, capture_output=False, variables=BUFFERED)
    assert done.returncode == 0 and done.stdout == answer


def test_a_working_folder_that_is_gone_leaves_the_answer(call, answer, tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    script = 'cd "$1" && rmdir "$1" && shift && exec "$@"'
    path = os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    done = call(*RUN, prefix=["sh", "-c", script, "sh", str(gone)], variables={"PYTHONPATH": path})
    assert done.returncode == 0 and done.stdout == answer, done.stderr


def test_links_to_caches_and_to_the_state_folder_are_followed(call, answer, tmp_path):
    """C23: the layout of the hub's cache, and a state folder that lies elsewhere."""
    blobs, snapshot, elsewhere = tmp_path / "blobs", tmp_path / "snapshots" / "abc", tmp_path / "elsewhere"
    shutil.copytree(DEMO_MODEL, blobs)
    snapshot.mkdir(parents=True)
    elsewhere.mkdir()
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    (tmp_path / "state").symlink_to("elsewhere")
    done = call(*RUN, "--model", snapshot)
    assert done.returncode == 0 and done.stdout == answer, done.stderr
    assert list(elsewhere.rglob("*.heat"))


@can_mount
def test_read_only_model_and_state_folders_leave_the_answer(call, answer, tmp_path, oracle_dir):
    """C23."""
    model, state = tmp_path / "model", tmp_path / "state"
    shutil.copytree(DEMO_MODEL, model)
    state.mkdir()
    script = (
        f'for d in "{model}" "{state}"; do mount --bind "$d" "$d" && mount -o remount,ro,bind "$d"; done; exec "$@"'
    )
    prefix = ["unshare", "-m", "sh", "-c", script, "sh"]
    done = call(*RUN, "--model", model, prefix=prefix)
    assert done.returncode == 0 and done.stdout == answer, done.stderr
    assert b"heat is not kept (Read-only file system)" in done.stderr
    assert refuses_in_one_line(call(*RUN, "--save", state / "kept", prefix=prefix), "kept", "Read-only")
    done = call("convert", oracle_dir / "tiny_olmoe", "--out", state / "out", prefix=prefix)
    assert refuses_in_one_line(done, "out", "Read-only")


@can_mount
def test_a_full_disk_is_told_and_leaves_no_half_file(call, answer, tmp_path):
    """C21 for everything but containers, which tests/convert/test_space.py is about."""
    full = tmp_path / "state"
    full.mkdir()
    script = f'mount -t tmpfs -o size=4k none "{full}"; "$@"; code=$?; ls -A "{full}"; exit $code'
    prefix = ["unshare", "-m", "sh", "-c", script, "sh"]
    done = call(*RUN, "--save", full / "kept", prefix=prefix)
    assert refuses_in_one_line(done, "kept", "No space left")
    assert b"kept" not in done.stdout.removeprefix(answer)


@pytest.mark.skipif(not IS_ROOT, reason="needs root, to become nobody")
def test_a_user_who_may_write_nowhere_gets_the_answer(call, answer, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, model)
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_mode & 0o5 != 0o5:
            if not folder.is_relative_to("/tmp/pytest-of-root"):
                pytest.skip(f"{folder} is not open to others")
            folder.chmod(0o755)
    try:
        done = call(*RUN, "--model", model, user=65534, group=65534, variables={"HOME": "/"})
    except PermissionError:
        pytest.skip("the interpreter is not open to others")
    assert done.returncode == 0 and done.stdout == answer, done.stderr


@contextlib.contextmanager
def control_group(**values):
    """A real control group with these limits, of version 2 or 1; the paths of its folders."""
    name = f"glm-gpu-test-{os.getpid()}"
    base = Path("/sys/fs/cgroup")
    if (base / "cgroup.controllers").exists():
        folders = [base / name]
        files = {"memory": ("memory.max", "{}"), "cpu": ("cpu.max", "{} 100000")}
    else:
        folders = [base / controller / name for controller in values]
        files = {"memory": ("memory.limit_in_bytes", "{}"), "cpu": ("cpu.cfs_quota_us", "{}")}
    made = []
    try:
        try:
            for folder in folders:
                folder.mkdir()
                made.append(folder)
            for controller, value in values.items():
                file, text = files[controller]
                folder = next(f for f in folders if (f / file).exists())
                (folder / file).write_text(text.format(value))
        except (OSError, StopIteration) as error:
            pytest.skip(f"control groups cannot be made here: {error}")
        yield folders
    finally:
        for folder in made:
            folder.rmdir()


@pytest.mark.skipif(not IS_ROOT, reason="needs root")
def test_a_real_control_group_bounds_memory_and_threads(call, answer):
    """C27."""
    with control_group(memory=400 << 20, cpu=100_000) as folders:
        script = "".join(f"echo $$ > {folder}/cgroup.procs; " for folder in folders) + 'exec "$@"'
        prefix = ["sh", "-c", script, "sh"]
        done = call(*RUN, prefix=prefix)
        assert done.returncode == 0 and done.stdout == answer, done.stderr
        plan = json.loads(call("plan", "--json", prefix=prefix).stdout)
        assert 0 < plan["budget"]["ram_bytes"] < 400 << 20, plan["budget"]
        report = call("doctor", prefix=prefix).stdout.decode()
        assert "control group" in report
