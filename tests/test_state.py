"""State files: whole or not at all, and never trusted blindly."""

import logging
import os
from pathlib import Path

import numpy as np
import pytest

from glm_gpu.state import read_state, replace_file, state_folder, write_state

ARRAYS = {"a": np.arange(12, dtype=np.int64).reshape(3, 4), "b": np.array([0.5, -1.5]), "none": np.zeros((0, 3))}


@pytest.fixture
def path(tmp_path) -> Path:
    path = tmp_path / "deep" / "er" / "x.state"
    write_state(path, "kind", 3, {"name": "é"}, ARRAYS)
    return path


def test_what_was_written_is_read(path):
    header, arrays = read_state(path, "kind", 3)
    assert header == {"name": "é"}
    assert list(arrays) == list(ARRAYS)
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(arrays[name], array)
        assert arrays[name].dtype == array.dtype and arrays[name].flags.writeable


def test_every_damaged_byte_is_noticed(path, caplog):
    good = path.read_bytes()
    for place in range(0, len(good), 3):
        path.write_bytes(good[:place] + bytes([good[place] ^ 0x41]) + good[place + 1 :])
        caplog.clear()
        assert read_state(path, "kind", 3) is None, place
        assert len(caplog.records) == 1 and "\n" not in caplog.records[0].getMessage()


def test_every_torn_file_is_noticed(path):
    good = path.read_bytes()
    for length in range(len(good)):
        path.write_bytes(good[:length])
        assert read_state(path, "kind", 3) is None, length


@pytest.mark.parametrize(
    ("kind", "version", "reason"), [("other", 3, "holds 'kind'"), ("kind", 2, "format 3, this version reads 2")]
)
def test_other_kinds_and_versions_are_left_alone_with_one_warning(path, caplog, kind, version, reason):
    before = path.read_bytes()
    assert read_state(path, kind, version) is None
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert reason in caplog.text
    assert path.read_bytes() == before


def test_no_file_is_no_warning(tmp_path, caplog):
    assert read_state(tmp_path / "absent", "kind", 3) is None
    assert not caplog.records


def test_a_failed_write_leaves_the_old_file_and_no_other(path, monkeypatch):
    before = path.read_bytes()

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        replace_file(path, b"new", is_synced=True)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_content_is_on_disk_before_the_name_moves(path, monkeypatch):
    steps = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: steps.append("sync"))
    replace = Path.replace
    monkeypatch.setattr(Path, "replace", lambda source, target: steps.append("rename") or replace(source, target))
    replace_file(path, b"new", is_synced=True)
    assert steps == ["sync", "rename", "sync"]


@pytest.mark.parametrize(
    ("environment", "platform", "expected"),
    [
        ({"HOME": "/home/me"}, "linux", "/home/me/.local/state/glm-gpu"),
        ({"HOME": "/home/me", "XDG_STATE_HOME": "/s"}, "linux", "/s/glm-gpu"),
        ({"HOME": "/home/me", "XDG_STATE_HOME": "relative"}, "linux", "/home/me/.local/state/glm-gpu"),
        ({"HOME": "/Users/me"}, "darwin", "/Users/me/Library/Application Support/glm-gpu"),
        ({}, "linux", None),
        ({"HOME": ""}, "linux", None),
        ({}, "win32", None),
    ],
)
def test_state_folder_follows_the_platform(environment, platform, expected):
    found = state_folder(environment, platform)
    assert found == (None if expected is None else Path(expected))
