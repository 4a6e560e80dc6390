"""Every file the program writes, after a power cut at any moment: the old content or the new, nothing between."""

import hashlib
import os

import numpy as np
import pytest
from crashes import Recorder, lay_out, some_states, states
from toy_model import LAYOUT, ToyModel

from glm_gpu.batch import Batch
from glm_gpu.cache import KVCache
from glm_gpu.conversations import load_conversation, save_conversation
from glm_gpu.convert.convert import convert
from glm_gpu.convert.settings import ConvertSettings
from glm_gpu.convert.source import LocalSource
from glm_gpu.errors import CheckpointError, RequestError
from glm_gpu.score import logits_writer
from glm_gpu.state import read_state, write_state
from glm_gpu.tiers.trace import TraceHeader, TraceWriter, read_trace

TIMES = int(os.environ.get("GLM_GPU_FUZZ", "1"))


def test_a_recorder_sees_what_a_careless_writer_loses(tmp_path):
    """The model itself: a file renamed before it was synced may be empty; one synced first is whole or absent."""
    folder = tmp_path / "careless"
    folder.mkdir()
    (folder / "x").write_bytes(b"old")
    with Recorder(folder) as recorder:
        with (folder / "x.new").open("wb") as file:
            file.write(b"new content")
        (folder / "x.new").rename(folder / "x")
        recorder.returned()
    found = {files.get("x") for files, _ in states(recorder.before, recorder.operations)}
    assert found >= {b"old", b"new content", b"", b"new c", bytes(11)}


def test_a_state_file_is_the_old_or_the_new_one(tmp_path):
    folder = tmp_path / "state"
    write_state(folder / "x", "kind", 1, {"n": 1}, {"a": np.arange(100)})
    with Recorder(folder) as recorder:
        write_state(folder / "x", "kind", 1, {"n": 2}, {"a": np.arange(200)})
        recorder.returned()
    assert ("sync folder",) in recorder.operations
    tried = states(recorder.before, recorder.operations)
    for files, has_returned in tried:
        lay_out(tmp_path / "after", files)
        header, arrays = read_state(tmp_path / "after" / "x", "kind", 1)
        assert header["n"] == 2 or (header["n"] == 1 and not has_returned)
        np.testing.assert_array_equal(arrays["a"], np.arange(100 * header["n"]))
    assert len(tried) > 5


def saved(path, ids):
    model = ToyModel()
    cache = model.new_cache(32)
    model.forward(Batch.of([(ids, cache)], "prefill"))
    save_conversation(path, "identity", ids, cache, len(ids))


def test_a_conversation_is_the_old_or_the_new_one(tmp_path):
    folder = tmp_path / "kept"
    saved(folder / "x", [1, 2, 3])
    with Recorder(folder) as recorder:
        saved(folder / "x", [1, 2, 3, 4, 5, 6])
        recorder.returned()
    tried = states(recorder.before, recorder.operations)
    for files, has_returned in tried:
        lay_out(tmp_path / "after", files)
        found, cache = load_conversation(
            tmp_path / "after" / "x", "identity", lambda length: KVCache(LAYOUT, max(1, length))
        )
        assert found.ids == [1, 2, 3, 4, 5, 6] or (found.ids == [1, 2, 3] and not has_returned)
        assert cache.length == len(found.ids)
    assert len(tried) > 5


def test_a_file_of_logits_is_whole_or_absent(tmp_path):
    folder = tmp_path / "logits"
    folder.mkdir()
    rows = np.arange(12, dtype=np.float32).reshape(3, 4)
    with Recorder(folder) as recorder, logits_writer(folder / "x.npy", 3, 4) as write:
        write(rows[:2])
        write(rows[2:])
    recorder.returned()
    for files, has_returned in states(recorder.before, recorder.operations):
        if "x.npy" in files:
            lay_out(tmp_path / "after", files)
            np.testing.assert_array_equal(np.load(tmp_path / "after" / "x.npy"), rows)
        assert "x.npy" in files or not has_returned


def test_a_trace_is_good_up_to_where_it_was_written(tmp_path):
    folder = tmp_path / "traces"
    folder.mkdir()
    ids = np.arange(8).reshape(4, 2)
    with Recorder(folder) as recorder, TraceWriter(folder / "x", TraceHeader("f", 2, 8, 2, (0, 64))) as writer:
        for _ in range(3):
            writer.record(1, ids, len(ids))
            writer.flush()
    seen = set()
    for files, _ in states(recorder.before, recorder.operations):
        lay_out(tmp_path / "after", files)
        try:
            found = read_trace(tmp_path / "after" / "x")
        except RequestError:  # not even its first lines, or no file
            continue
        assert all(np.array_equal(routing.ids, ids) for routing in found.routings)
        seen.add(len(found.routings))
    assert seen == {0, 1, 2, 3}


@pytest.fixture(scope="module")
def conversion(oracle_dir, tmp_path_factory):
    """A recorded conversion: (its recorder, the hash of what it made)."""
    out = tmp_path_factory.mktemp("conversion") / "out"
    out.mkdir()
    with Recorder(out) as recorder:
        converted(oracle_dir, out)
        recorder.returned()
    return recorder, folder_hash(out)


def converted(oracle_dir, out):
    with LocalSource(oracle_dir / "tiny_glm_fp8") as source:
        convert(source, out, ConvertSettings(rounding="rtn", shard_bytes=800 << 10), threads=1)


def folder_hash(folder):
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        digest.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def goes_on(oracle_dir, after, files, expected):
    """Whether a conversion run again on what the disk holds ends in the same bytes."""
    lay_out(after, files)
    try:
        converted(oracle_dir, after)
    except (CheckpointError, RequestError):
        return False
    return folder_hash(after) == expected


def test_a_conversion_goes_on_after_a_power_cut_to_the_same_bytes(oracle_dir, tmp_path, conversion):
    """C19 without its mercy: not the process but the disk stops."""
    recorder, expected = conversion
    drawn = some_states(recorder.before, recorder.operations, 12 * TIMES, seed=TIMES)
    for number, (files, has_returned) in enumerate(drawn):
        sizes = {name: len(content) for name, content in files.items()}
        assert goes_on(oracle_dir, tmp_path / str(number), files, expected), sizes
        if has_returned:
            lay_out(tmp_path / "returned", files)
            assert folder_hash(tmp_path / "returned") == expected


def test_without_its_syncs_a_conversion_would_lose_shards(oracle_dir, tmp_path, conversion):
    """So the test above can fail."""
    recorder, expected = conversion
    unsynced = [operation for operation in recorder.operations if operation[0] not in ("sync", "sync folder")]
    drawn = some_states(recorder.before, unsynced, 50)
    assert not all(goes_on(oracle_dir, tmp_path / str(n), files, expected) for n, (files, _) in enumerate(drawn))
