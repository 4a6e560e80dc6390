"""Shards found, checked, and refused: broken headers, missing files, stray files, contradictions."""

import json
import logging
import os
from functools import partial

import numpy as np
import pytest
from peak_memory import peak_bytes

from glm_gpu.errors import CheckpointError
from glm_gpu.safetensors_index import INDEX_FILE, index_shards, read_header
from glm_gpu.safetensors_write import write_safetensors


def raw_shard(path, header, data=b"", length=None):
    """A file with any header: a dict, or bytes taken as they are."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(dtype="U8", shape=(4,), begin=0, end=4):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def write_index(folder, weight_map):
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def write_numbered(folder, write_shard, total=5):
    """`total` shards of one tensor each, with their index."""
    names = [f"model-{number:05d}-of-{total:05d}.safetensors" for number in range(1, total + 1)]
    for number, name in enumerate(names):
        write_shard(folder / name, {f"t{number}": np.full(4, number, np.float32)})
    write_index(folder, {f"t{number}": name for number, name in enumerate(names)})
    return names


def test_every_tensor_is_found_with_its_range(tmp_path, write_shard):
    names = write_numbered(tmp_path, write_shard)
    index = index_shards(tmp_path)
    assert [shard.name for shard in index.shards] == names
    info = index.tensors["t3"]
    assert (info.dtype, info.shape, info.shard, info.nbytes) == ("F32", (4,), tmp_path / names[3], 16)
    assert info.shard.read_bytes()[info.begin : info.end] == np.full(4, 3, np.float32).tobytes()


def test_scalars_empty_tensors_and_holes_are_accepted(tmp_path):
    header = {"__metadata__": {"format": "pt"}, "s": entry(shape=(), end=1), "e": entry(shape=(0, 7), begin=5, end=5)}
    shard = raw_shard(tmp_path / "x.safetensors", header | {"late": entry(begin=9, end=13)}, b"." * 13)
    _, tensors = read_header(shard)
    assert tensors.keys() == {"s", "e", "late"}
    assert tensors["late"].end == shard.stat().st_size


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ({"a": entry(begin=3, end=1)}, "data_offsets are"),
        ({"a": entry(begin=-4, end=0)}, "data_offsets are"),
        ({"a": entry(begin=0.0, end=4)}, "data_offsets are"),
        ({"a": entry(begin=False, end=4)}, "data_offsets are"),
        ({"a": entry(end=100)}, "span 100 bytes"),
        ({"a": entry(shape=(100,), end=100)}, r"80 bytes, expected 172 \(end of tensor 'a'\)"),
        ({"a": entry(shape=(5,))}, r"span 4 bytes, expected 5 for U8 \[5\]"),
        ({"a": entry(dtype="F32")}, r"span 4 bytes, expected 16 for F32 \[4\]"),
        ({"a": entry(dtype="F99")}, "header entry"),
        ({"a": entry(dtype=["U8"])}, "header entry"),
        ({"a": entry(shape=(-4,))}, "shape is"),
        ({"a": entry(shape=(-2, -2))}, "shape is"),
        ({"a": entry(shape=(4.0,))}, "shape is"),
        ({"a": entry(shape=(True, 4))}, "shape is"),
        ({"a": entry(shape=(1,) * 9 + (4,))}, "shape is"),
        ({"a": entry(shape=(2**62, 2**62))}, "span 4 bytes"),
        ({"a": entry(shape=(2**64 + 4,))}, "shape is"),
        ({"a": entry(shape=(10**4000, 10**4000))}, "shape is"),
        ({"a": entry(end=10**4299)}, "data_offsets are"),
        ({"a": {**entry(), "shape": 4}}, "shape is"),
        ({"a": {"dtype": "U8", "shape": [4]}}, "header entry"),
        ({"a": {**entry(), "data_offsets": [0, 2, 4]}}, "header entry"),
        ({"a": {**entry(), "data_offsets": 4}}, "header entry"),
        ({"a": None}, "header entry"),
        ({"a": "text"}, "header entry"),
        ({"b": entry(), "a": entry(begin=2, end=6)}, "inside 'b'"),
        ({"b": entry(), "a": entry()}, "inside"),
    ],
    ids=lambda value: str(value)[:80],
)
def test_hostile_entry_is_refused_with_file_and_tensor(tmp_path, header, expected):
    shard = raw_shard(tmp_path / "x.safetensors", header, b"\0" * 8)
    with pytest.raises(CheckpointError, match=expected) as refusal:
        read_header(shard)
    assert str(shard) in str(refusal.value)
    assert "'a'" in str(refusal.value)
    assert len(str(refusal.value)) < 600


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (b"", "not valid JSON"),
        (b"[1, 2]", "expected a JSON object, found list"),
        (b'"text"', "expected a JSON object"),
        (b'{"a": {"dtype": "U8"', "not valid JSON"),
        (b"\xff\xff", "not valid JSON"),
        (b"{" + b'"a":[' * 50_000, "nested too deeply|not valid JSON|may take"),
        (
            b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}',
            "'a' given twice",
        ),
        (b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4],"data_offsets":[0,4]}}', "'data_offsets' given twice"),
    ],
    ids=["empty", "list", "text", "cut", "binary", "deep", "name twice", "key twice"],
)
def test_header_that_is_no_proper_object_is_refused(tmp_path, header, expected):
    shard = raw_shard(tmp_path / "x.safetensors", header, b"abcd")
    with pytest.raises(CheckpointError, match=expected) as refusal:
        read_header(shard)
    assert str(shard) in str(refusal.value)


@pytest.mark.parametrize(
    ("length", "file_bytes", "expected"),
    [
        (2**64 - 1, 100, "header length"),
        (10**12, 100, "header length"),
        (100_000_001, 200_000_000, "header length 100000001, expected at most 100000000"),
        (5000, 100, "100 bytes, expected at least 5008 for its header"),
    ],
)
def test_header_length_beyond_file_or_limit_allocates_nothing(tmp_path, length, file_bytes, expected):
    shard = raw_shard(tmp_path / "x.safetensors", {"a": entry()}, b"abcd", length)
    os.truncate(shard, file_bytes)

    def refuse():
        with pytest.raises(CheckpointError, match=expected):
            read_header(shard)

    assert peak_bytes(refuse, 100_000) < 100_000


@pytest.mark.parametrize("cut", [1, 0.5, 7, 0], ids=["one byte less", "half", "7 bytes", "empty"])
def test_truncated_shard_names_both_sizes_and_how_to_fetch_it(copy_oracle, cut):
    """C11."""
    folder = copy_oracle("tiny_glm")
    shard = folder / "model-00002-of-00003.safetensors"
    full = shard.stat().st_size
    size = {1: full - 1, 0.5: full // 2}.get(cut, cut)
    os.truncate(shard, size)
    with pytest.raises(CheckpointError) as refusal:
        index_shards(folder)
    message = str(refusal.value)
    assert str(shard) in message
    assert f"{size} bytes, expected" in message
    assert "fetch this one file again: hf download" in message
    if size > 100_000:
        assert f"expected {full}" in message


def test_bytes_behind_the_last_tensor_are_refused(tmp_path):
    shard = raw_shard(tmp_path / "x.safetensors", {"a": entry()}, b"abcdX")
    with pytest.raises(CheckpointError, match=r"bytes, expected \d+ \(end of tensor 'a'\)"):
        read_header(shard)


def mutate(rng, shard):
    """One random damage to a shard's bytes: flipped, overwritten, removed, inserted, or a number made huge."""
    content = bytearray(shard)
    header_end = 8 + int.from_bytes(content[:8], "little")
    where = int(rng.integers(0, header_end))
    kind = rng.integers(0, 6)
    if kind == 0:
        content[where] ^= 1 << int(rng.integers(0, 8))
    elif kind == 1:
        content[where : where + 4] = rng.bytes(4)
    elif kind == 2:
        del content[where : where + int(rng.integers(1, 50))]
    elif kind == 3:
        content[where:where] = bytes(rng.choice([b"9" * 20, b"-", b"[", b'"', b"{}", b"\0", b"null", b",,"]))
    elif kind == 4:
        content[: int(rng.integers(1, 9))] = rng.bytes(int(rng.integers(1, 9)))
    else:
        digits = [i for i in range(8, header_end) if 48 <= content[i] <= 57]
        content[digits[int(rng.integers(len(digits)))]] = int(rng.integers(48, 58))
    return bytes(content)


def test_500_mutated_headers_give_typed_errors_and_bounded_memory(tmp_path, oracle_dir):
    """C15."""
    original = (oracle_dir / "tiny_olmoe" / "model-00001-of-00002.safetensors").read_bytes()
    shard = tmp_path / "x.safetensors"
    rng = np.random.default_rng(7)
    refusals: set[int] = set()

    def read(number: int, num_bytes: int) -> None:
        try:
            _, tensors = read_header(shard)
            for info in tensors.values():
                assert 8 < info.begin <= info.end <= num_bytes
        except CheckpointError as error:
            refusals.add(number)
            assert str(shard) in str(error)
            assert "\n" not in str(error)
            assert len(str(error)) < 1000

    for number in range(500):
        content = mutate(rng, original)
        shard.write_bytes(content)
        bound = 2 * len(content)
        assert peak_bytes(partial(read, number, len(content)), bound) < bound
    assert 300 < len(refusals) < 500  # some damage only renames a tensor


def test_missing_shards_are_all_listed(tmp_path, write_shard):
    """C12."""
    names = write_numbered(tmp_path, write_shard)
    (tmp_path / names[2]).unlink()
    (tmp_path / names[4]).unlink()
    (tmp_path / f"{names[2]}.incomplete").write_bytes(b"part")
    with pytest.raises(CheckpointError) as refusal:
        index_shards(tmp_path)
    message = str(refusal.value)
    assert "2 shards named by model.safetensors.index.json are not there" in message
    assert f"{names[2]} (an .incomplete download lies beside it), {names[4]}" in message
    assert f"hf download REPOSITORY {names[2]}" in message


def test_missing_shard_is_noticed_without_an_index_file(tmp_path, write_shard):
    names = write_numbered(tmp_path, write_shard)
    (tmp_path / INDEX_FILE).unlink()
    assert len(index_shards(tmp_path).tensors) == 5
    (tmp_path / names[2]).unlink()
    with pytest.raises(CheckpointError, match=f"1 shards named by the numbering of the others.*{names[2]}"):
        index_shards(tmp_path)


def test_stray_shard_is_warned_about_and_not_used(tmp_path, write_shard, caplog):
    """C13."""
    write_numbered(tmp_path, write_shard)
    stray = write_shard(
        tmp_path / "stray-4bit.safetensors", {"t0": np.zeros(99, np.uint8), "t9": np.zeros(1, np.uint8)}
    )
    with caplog.at_level(logging.WARNING):
        index = index_shards(tmp_path)
    assert index.unused == (stray,)
    assert index.tensors["t0"].dtype == "F32"
    assert "t9" not in index.tensors
    assert "stray-4bit.safetensors" in caplog.text


def test_broken_stray_shard_does_not_matter(tmp_path, write_shard, caplog):
    write_numbered(tmp_path, write_shard)
    (tmp_path / "stray.safetensors").write_bytes(b"garbage")
    assert len(index_shards(tmp_path).tensors) == 5


@pytest.mark.parametrize("has_index", [True, False])
def test_same_tensor_in_two_shards_must_have_the_same_bytes(tmp_path, write_shard, has_index):
    big = np.arange(600_000, dtype=np.float32)  # more than one block of the comparison
    one = write_shard(tmp_path / "a.safetensors", {"x": big, "only a": np.zeros(1, np.uint8)})
    two = write_shard(tmp_path / "b.safetensors", {"only b": np.zeros(1, np.uint8), "x": big})
    if has_index:
        write_index(tmp_path, {"only a": one.name, "only b": two.name, "x": two.name})
    assert index_shards(tmp_path).tensors["x"].shard == (two if has_index else one)
    big[-1] = -1
    write_shard(tmp_path / "b.safetensors", {"only b": np.zeros(1, np.uint8), "x": big})
    with pytest.raises(
        CheckpointError, match=r"tensor 'x' is in a\.safetensors and, with other bytes, in b\.safetensors"
    ):
        index_shards(tmp_path)


@pytest.mark.parametrize("other", [np.zeros((2, 2), np.float32), np.zeros(16, np.uint8)], ids=["shape", "type"])
def test_same_tensor_with_another_shape_or_type_is_refused(tmp_path, write_shard, other):
    write_shard(tmp_path / "a.safetensors", {"x": np.zeros(4, np.float32)})
    write_shard(tmp_path / "b.safetensors", {"x": other})
    with pytest.raises(CheckpointError, match="with other bytes"):
        index_shards(tmp_path)


def test_index_that_names_the_wrong_shard_is_refused(tmp_path, write_shard):
    names = write_numbered(tmp_path, write_shard)
    write_index(tmp_path, {f"t{number}": name for number, name in enumerate(names)} | {"t0": names[1], "t7": names[0]})
    with pytest.raises(CheckpointError, match=f"2 tensors are not in the shard it names, first 't0' in {names[1]}"):
        index_shards(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "../secret.safetensors",
        "/etc/passwd",
        "a/b.safetensors",
        "..",
        "a\0b",
        "",
        "a" * 300,
        "\ud800.safetensors",
        "a\\b",
    ],
)
def test_index_may_only_name_files_of_its_folder(tmp_path, write_shard, name):
    write_numbered(tmp_path, write_shard)
    write_index(tmp_path, {"t0": name})
    with pytest.raises(CheckpointError, match="no plain file name"):
        index_shards(tmp_path)


@pytest.mark.parametrize(
    "text", ["{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"a": 1}}', "[", "[]"]
)
def test_broken_index_file_is_refused_by_path(tmp_path, write_shard, text):
    write_numbered(tmp_path, write_shard)
    (tmp_path / INDEX_FILE).write_text(text)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json: "):
        index_shards(tmp_path)


def test_empty_folder_and_no_folder_are_told_apart(tmp_path):
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors file"):
        index_shards(tmp_path)
    with pytest.raises(CheckpointError, match="no such folder"):
        index_shards(tmp_path / "nowhere")


def test_shard_that_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "folder.safetensors").mkdir()
    for name in ("folder.safetensors", "pipe.safetensors"):
        with pytest.raises(CheckpointError, match=name):
            read_header(tmp_path / name)


def test_hub_cache_of_links_works_and_a_dangling_link_names_its_target(tmp_path, write_shard):
    """C23."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number in (1, 2):
        write_shard(blobs / f"hash{number}", {f"t{number}": np.zeros(2, np.float32)})
        (snapshot / f"model-0000{number}-of-00002.safetensors").symlink_to(f"../../blobs/hash{number}")
    for weight_map in ({"t1": "model-00001-of-00002.safetensors", "t2": "model-00002-of-00002.safetensors"}, None):
        if weight_map:
            write_index(snapshot, weight_map)
        assert len(index_shards(snapshot).tensors) == 2
        (blobs / "hash2").rename(blobs / "away")
        with pytest.raises(CheckpointError, match=r"model-00002-of-00002.*link to \.\./\.\./blobs/hash2"):
            index_shards(snapshot)
        (blobs / "away").rename(blobs / "hash2")
        (snapshot / INDEX_FILE).unlink(missing_ok=True)


def test_digest_depends_on_names_and_shapes_and_not_on_bytes(tmp_path, write_shard):
    def digest(tensors):
        write_shard(tmp_path / "model.safetensors", tensors)
        return index_shards(tmp_path).digest

    one = digest({"a": np.zeros(4, np.float32)})
    assert one == digest({"a": np.ones(4, np.float32)})
    assert len({one, digest({"b": np.zeros(4, np.float32)}), digest({"a": np.zeros((2, 2), np.float32)})}) == 3


def test_hundred_twenty_thousand_tensors_are_indexed(tmp_path):
    weight_map = {}
    for shard in range(144):
        name = f"model-{shard + 1:05d}-of-00144.safetensors"
        names = [f"model.layers.{shard % 78}.mlp.experts.{number}.gate_proj.weight.{shard}" for number in range(834)]
        write_safetensors(tmp_path / name, [(tensor, "F8_E4M3", (2, 1), b"ab") for tensor in names])
        weight_map |= dict.fromkeys(names, name)
    write_index(tmp_path, weight_map)
    assert len(index_shards(tmp_path).tensors) == len(weight_map) > 120_000
