"""What an engine tells other processes: whole documents, of processes that run, and never at the cost of a run."""

import json
import os
import subprocess
import sys
import threading
import time

import pytest
from waiting import LONG_S, wait_until

from glm_gpu.machine import process_start
from glm_gpu.tiers.live import StatusPublisher, live_engines


def publish(folder, **document):
    """A file as an engine leaves it."""
    document = {"version": 1, "pid": os.getpid(), "started": process_start(os.getpid()), "at": time.time()} | document
    (folder / "live").mkdir(exist_ok=True)
    path = folder / "live" / f"{document['pid']}.json"
    path.write_text(json.dumps(document))
    return path


@pytest.fixture
def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_state_is_there_while_the_engine_runs_and_gone_afterwards(tmp_path):
    numbers = iter(range(1000))
    with StatusPublisher(tmp_path, lambda: {"fingerprint": "f00d", "number": next(numbers)}):
        first = wait_until(lambda: live_engines(tmp_path))[0]
        assert (first["pid"], first["fingerprint"]) == (os.getpid(), "f00d")
        wait_until(lambda: live_engines(tmp_path)[0]["number"] > first["number"])
        assert [path.suffix for path in (tmp_path / "live").iterdir()] == [".json"]
    assert live_engines(tmp_path) == []
    assert not list((tmp_path / "live").iterdir())


def test_readers_never_see_half_a_document(tmp_path):
    stop, seen = threading.Event(), set()

    def read():
        while not stop.is_set():
            seen.update((document["at"], len(document["filler"])) for document in live_engines(tmp_path))

    reader = threading.Thread(target=read)
    with StatusPublisher(tmp_path, lambda: {"filler": "x" * 200_000}):
        wait_until(lambda: live_engines(tmp_path))
        reader.start()
        try:
            wait_until(lambda: len(seen) > 2)  # two replacements
        finally:
            stop.set()
            reader.join()
    assert {num_chars for _, num_chars in seen} == {200_000}


def test_engines_that_died_are_not_shown_and_swept_once_they_are_old(tmp_path, dead_pid):
    path = publish(tmp_path, pid=dead_pid, started="12345")
    assert live_engines(tmp_path) == []
    assert path.exists()
    publish(tmp_path, pid=dead_pid, started="12345", at=time.time() - 3600)
    assert live_engines(tmp_path) == []
    assert not path.exists()


def test_a_process_that_got_the_number_of_a_dead_engine_is_not_taken_for_it(tmp_path):
    publish(tmp_path, started="1")
    assert live_engines(tmp_path) == []
    publish(tmp_path)
    assert len(live_engines(tmp_path)) == 1


def test_engines_of_other_models_are_left_out(tmp_path):
    publish(tmp_path, fingerprint="f00d")
    assert live_engines(tmp_path, "beef") == []
    assert len(live_engines(tmp_path, "f00d")) == 1


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"version": 2, "pid": 1, "at": 0}', b'{"version": 1}', b"\xff"]
)
def test_files_that_are_no_status_are_passed_over(tmp_path, content):
    (tmp_path / "live").mkdir()
    (tmp_path / "live" / "1.json").write_bytes(content)
    assert live_engines(tmp_path) == []


def test_nowhere_to_publish_is_no_trouble(tmp_path, caplog):
    with StatusPublisher(None, dict):
        pass
    assert live_engines(None) == [] and live_engines(tmp_path / "absent") == []
    assert not caplog.records


def test_a_folder_that_cannot_be_written_is_one_warning(tmp_path, caplog):
    (tmp_path / "live").write_text("a file where the folder should be")
    with StatusPublisher(tmp_path, dict) as publisher:
        publisher._thread.join(LONG_S)
    assert len(caplog.records) == 1 and "not published" in caplog.text


def test_process_start_reads_behind_any_name_and_leaves_zombies_out(tmp_path):
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "stat").touch()
    fields = " ".join(str(n) for n in range(4, 53))
    for pid, state in ((7, "S"), (8, "Z")):
        (tmp_path / "proc" / str(pid)).mkdir()
        (tmp_path / "proc" / str(pid) / "stat").write_text(f"{pid} (a) b) c) {state} {fields}\n")
    assert process_start(7, tmp_path) == "22"  # field 22 of proc(5)
    assert process_start(8, tmp_path) is None
    assert process_start(9, tmp_path) is None
