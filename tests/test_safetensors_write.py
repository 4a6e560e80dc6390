"""Files that other readers understand, with data on a page border, visible only when complete."""

import hashlib
import os
import stat

import numpy as np
import pytest
from safetensors.numpy import load_file

from glm_gpu.safetensors_index import read_header
from glm_gpu.safetensors_write import write_safetensors


def entries(**arrays):
    dtypes = {"float32": "F32", "uint8": "U8", "int64": "I64", "float16": "F16"}
    return [(name, dtypes[array.dtype.name], array.shape, array) for name, array in arrays.items()]


def test_the_reference_reader_reads_it_back(tmp_path):
    arrays = {
        "b": np.arange(6, dtype=np.float32).reshape(2, 3),
        "a": np.arange(7, dtype=np.uint8),
        "scalar": np.array(3, np.int64),
        "empty": np.zeros((0, 4), np.float16),
        "имя": np.ones(1, np.float16),
    }
    written = write_safetensors(tmp_path / "x.safetensors", entries(**arrays), metadata={"format": "pt"})
    loaded = load_file(tmp_path / "x.safetensors")
    assert loaded.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(loaded[name], array)
    content = (tmp_path / "x.safetensors").read_bytes()
    assert written.nbytes == len(content)
    assert written.sha256 == hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize("num_tensors", [0, 1, 40, 300])
def test_data_begins_on_a_page_and_lies_in_the_given_order(tmp_path, num_tensors):
    path = tmp_path / "x.safetensors"
    names = [f"tensor.{number}" for number in np.random.default_rng(0).permutation(num_tensors)]
    write_safetensors(path, [(name, "U8", (3,), b"abc") for name in names])
    header, tensors = read_header(path)
    assert (8 + len(header)) % 4096 == 0
    begins = [tensors[name].begin for name in names]
    assert begins == [8 + len(header) + 3 * position for position in range(num_tensors)]


def test_data_may_be_made_when_its_turn_comes(tmp_path):
    alive = []

    def make(value):
        def data():
            alive.append(value)
            return np.full(4, value, np.uint8)

        return data

    path = tmp_path / "x.safetensors"
    write_safetensors(path, [("a", "U8", (4,), make(1)), ("b", "U8", (2, 2), make(2))])
    assert alive == [1, 2]
    assert load_file(path)["b"].tolist() == [[2, 2], [2, 2]]


def test_failure_leaves_neither_the_file_nor_a_temporary_one(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"older")

    def explode():
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_safetensors(path, [("a", "U8", (4,), b"abcd"), ("b", "U8", (4,), explode)])
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.safetensors"]
    assert path.read_bytes() == b"older"


def test_nothing_lies_under_the_final_name_before_the_last_byte(tmp_path):
    path = tmp_path / "x.safetensors"
    seen = []

    def look():
        seen.extend(entry.name for entry in tmp_path.iterdir())
        return b"abcd"

    write_safetensors(path, [("a", "U8", (4,), look)])
    assert seen == ["x.safetensors.partial"]
    assert path.exists()


def test_bytes_are_on_the_disk_before_the_file_gets_its_name_and_the_name_after(tmp_path, monkeypatch):
    path = tmp_path / "x.safetensors"
    events = []
    fsync = os.fsync

    def record(descriptor):
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        events.append(("folder" if is_folder else os.fstat(descriptor).st_size, path.exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    written = write_safetensors(path, [("a", "U8", (4,), b"abcd")])
    assert events == [(written.nbytes, False), ("folder", True)]


def test_data_of_another_size_is_refused(tmp_path):
    with pytest.raises(ValueError, match="'a': 3 bytes of data, expected 8"):
        write_safetensors(tmp_path / "x.safetensors", [("a", "F32", (2,), b"abc")])


def test_name_given_twice_is_refused(tmp_path):
    with pytest.raises(ValueError, match="'a' is given twice"):
        write_safetensors(tmp_path / "x.safetensors", [("a", "U8", (1,), b"a"), ("a", "U8", (1,), b"b")])
