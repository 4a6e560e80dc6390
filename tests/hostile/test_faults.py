"""A fault at every step of a command: the right answer or one line of error, and nothing lost afterwards."""

import hashlib
import json
import os
import subprocess
import sys

import pytest
import zygote

TIMES = int(os.environ.get("GLM_GPU_FUZZ", "1"))
PROMPT = "And it came to pass"
FAULTS = {
    "read": ["eio", "short", "gone", "einval", "slow", "kill"],
    "open": ["emfile", "eio", "kill"],
    "write": ["enospc", "kill", "term"],
    "sync": ["eio", "kill"],
    "rename": ["enospc", "kill", "term"],
    "allocate": ["memory", "kill"],
    "clock": ["jump", "term"],
}


class Commands:
    """Runs commands under faults, in a folder of their own."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "answers").mkdir(parents=True)
        path = os.pathsep.join(filter(None, sys.path))
        environment = {**os.environ, "XDG_STATE_HOME": str(folder / "state"), "PYTHONPATH": path}
        command = [sys.executable, zygote.__file__, str(folder / "answers")]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=folder
        )

    def __call__(self, *args, fault=None, limits=None):
        asked = {"args": [str(arg) for arg in args], "fault": fault, "limits": limits}
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self):
        self.process.stdin.close()
        self.process.stdout.close()
        assert self.process.wait() == 0


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    opened = Commands(tmp_path_factory.mktemp("faults"))
    yield opened
    opened.close()


def moments(count, num_tried):
    """So many of 1 .. count: the first ones, the last, and some between."""
    if count <= num_tried:
        return list(range(1, count + 1))
    return sorted({1, 2, count, *(1 + count * n // num_tried for n in range(num_tried - 2))})


def is_plain(answer):
    """Whether a command ended as the README promises: nothing but one line where it failed."""
    assert "Traceback" not in answer["err"] and "internal error" not in answer["err"], answer["err"]
    if answer["code"] in (1, 2):
        # notes and warnings may precede the error
        last = answer["err"].strip().splitlines()[-1]
        assert last.startswith("glm-gpu: ") and "[Errno" not in last, answer["err"]
    assert answer["code"] in (0, 1, 2, -9, -15), answer
    return True


@pytest.mark.parametrize(("seam", "what"), [(seam, what) for seam, kinds in FAULTS.items() for what in kinds])
def test_run_gives_its_answer_or_one_line_and_loses_nothing(commands, seam, what):
    kept = commands.folder / f"{seam}-{what}"
    given = ["run", "--expert-slots", "40", "--read", "buffered", "--read-threads", "1", "--prefetch", "off",
             "--temperature", "0", "--max-tokens", "3", "--threads", "1"]  # fmt: skip
    first = commands(*given, PROMPT, "--save", kept)
    assert first["code"] == 0, first
    saved = kept.read_bytes()
    more = [*given, "--resume", kept, "--save", kept]
    sound = commands(*more)
    assert sound["code"] == 0 and sound["counts"][seam] > 0, sound
    saved_later = kept.read_bytes()
    for at in moments(sound["counts"][seam], 3 * TIMES):
        kept.write_bytes(saved)
        answer = commands(*more, fault=[seam, at, what])
        assert is_plain(answer)
        if answer["code"] == 0:
            assert answer["out"] == sound["out"]
        assert kept.read_bytes() in (saved, saved_later)
    kept.write_bytes(saved)
    afterwards = commands(*more)
    assert afterwards["code"] == 0 and afterwards["out"] == sound["out"] and "not used" not in afterwards["err"]


@pytest.mark.parametrize(("seam", "what"), [("read", "eio"), ("read", "short"), ("write", "enospc"), ("write", "kill"),
                                            ("sync", "eio"), ("sync", "kill"), ("rename", "kill"), ("rename", "term"),
                                            ("allocate", "memory"), ("open", "emfile")])  # fmt: skip
def test_convert_goes_on_behind_any_fault_to_the_same_bytes(commands, oracle_dir, seam, what):
    def convert(name, fault=None):
        args = ["convert", oracle_dir / "tiny_olmoe", "--out", commands.folder / name, "--rounding", "rtn"]
        return commands(*args, "--threads", "1", fault=fault)

    def digest(name):
        found = hashlib.sha256()
        for path in sorted((commands.folder / name).iterdir()):
            found.update(path.name.encode() + path.read_bytes())
        return found.digest()

    sound = convert(f"{seam}-{what}-sound")
    assert sound["code"] == 0 and sound["counts"][seam] > 0, sound
    for at in moments(sound["counts"][seam], 3 * TIMES):
        name = f"{seam}-{what}-{at}"
        assert is_plain(convert(name, [seam, at, what]))
        afterwards = convert(name)
        assert afterwards["code"] == 0, afterwards["err"]
        assert digest(name) == digest(f"{seam}-{what}-sound")


def test_any_function_can_be_a_seam():
    from faults import Faults

    faults = Faults("register", 2, "memory")
    register = faults.wrap("register", lambda size: size)
    assert register(1) == 1
    with pytest.raises(MemoryError):
        register(2)
    assert register(3) == 3 and faults.counts["register"] == 3


def test_what_a_killed_process_left_is_removed_an_hour_later(tmp_path):
    from glm_gpu.state import replace_file

    old, new, other = (tmp_path / name for name in (".x.aaa.tmp", ".x.bbb.tmp", ".y.aaa.tmp"))
    for path in (old, new, other):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    os.utime(other, (0, 0))
    replace_file(tmp_path / "x", b"whole", is_synced=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".x.bbb.tmp", ".y.aaa.tmp", "x"]
