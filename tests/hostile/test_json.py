"""JSON of a stranger: what parsing may take is known before it is parsed."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peak_memory import peak_bytes

from glm_gpu.errors import CheckpointError
from glm_gpu.json_file import json_memory_bytes, parse_json_object
from glm_gpu.safetensors_index import index_shards, read_header

COUNT = 20_000
# Text that takes many times its size, each of about 100 KB.
DENSE = {
    "empty lists": "[" + "[]," * COUNT + "[]]",
    "empty objects": "[" + "{}," * COUNT + "{}]",
    "small objects": "[" + '{"a":0},' * COUNT + "0]",
    "objects of other keys": "[" + ",".join(f'{{"{i:x}":0}}' for i in range(COUNT)) + "]",
    "keys": "{" + ",".join(f'"{i:x}":0' for i in range(COUNT)) + "}",
    "keys, just after a table grew": "{" + ",".join(f'"{i:x}":0' for i in range(2**14 * 2 // 3 + 2)) + "}",
    "keys of wide letters": "{" + ",".join(f'"{i:x}€":0' for i in range(COUNT)) + "}",
    "short texts": "[" + ",".join(f'"{i:x}"' for i in range(COUNT)) + "]",
    "numbers": "[" + ",".join(str(i + 257) for i in range(COUNT)) + "]",
    "floats": "[" + "1e9," * COUNT + "0]",
    "nested lists": "[" + ("[" * 90 + "]" * 90 + ",") * (COUNT // 50) + "0]",
    "escapes": '["' + "\\n" * COUNT + '"]',
    "one wide letter in much text": '["' + "a" * COUNT * 5 + '\U0001f600"]',
    "one escaped wide letter": '["' + "a" * COUNT * 5 + '\\ud83d\\ude00"]',
    "wide letters": "[" + '"€",' * COUNT + "0]",
    "short texts beside a wide letter": '["😀",' + '"ab",' * COUNT + "0]",
}
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=12), inner, max_size=20),
    max_leaves=200,
)


def takes_no_more_than_told(text: bytes, check_keys: bool) -> bool:
    told = json_memory_bytes(text)
    return peak_bytes(lambda: parse_json_object(text, "x", check_keys, max_memory_bytes=1 << 40), told) <= told


@pytest.mark.parametrize("check_keys", [True, False])
@pytest.mark.parametrize("name", DENSE)
def test_dense_text_takes_no_more_than_was_told(name, check_keys):
    text = ('{"x": ' + DENSE[name] + "}").encode()
    assert takes_no_more_than_told(text, check_keys)


@given(VALUES, st.booleans(), st.booleans())
@settings(max_examples=60)
def test_any_text_takes_no_more_than_was_told(value, is_ascii, check_keys):
    text = json.dumps({"x": [value] * 20}, ensure_ascii=is_ascii).encode("utf-8", "replace")
    assert takes_no_more_than_told(text, check_keys)


@pytest.mark.parametrize("name", ["empty lists", "empty objects", "small objects", "nested lists"])
def test_a_header_of_many_small_values_is_refused_before_it_is_parsed(tmp_path, name):
    text = ('{"a": ' + "[" + ",".join([DENSE[name]] * 20) + "]}").encode()
    shard = tmp_path / "x.safetensors"
    shard.write_bytes(len(text).to_bytes(8, "little") + text)

    def refuse():
        with pytest.raises(CheckpointError, match=r"x\.safetensors: header: .* may take .* to parse, expected at most"):
            read_header(shard)

    bound = 2 * shard.stat().st_size
    assert peak_bytes(refuse, bound) < bound


def test_an_index_file_of_many_small_values_is_refused_before_it_is_parsed(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": [' + "[]," * 1_000_000 + "0]}")
    with pytest.raises(CheckpointError, match=r"index\.json: .* may take"):
        index_shards(tmp_path)


def test_long_texts_of_any_letters_are_read():
    for text in ("ё" * 1_000_000, "👩‍👩‍👧\n" * 300_000, "a\n" * 1_000_000 + "👩"):
        for is_ascii in (True, False):
            data = json.dumps({"note": text}, ensure_ascii=is_ascii).encode()
            assert parse_json_object(data, "x") == {"note": text}


def test_files_of_the_largest_models_are_far_from_the_bounds():
    names = [f"model.layers.{i % 78}.mlp.experts.{i // 78}.gate_proj.weight" for i in range(60_000)]
    index = {"weight_map": {name: f"model-{i % 144:05d}-of-00144.safetensors" for i, name in enumerate(names)}}
    assert len(parse_json_object(json.dumps(index).encode(), "x")["weight_map"]) == 60_000
    entries = {
        name: {"dtype": "U8", "shape": [2048, 3072], "data_offsets": [i * 6291456, (i + 1) * 6291456]}
        for i, name in enumerate(names[:3000])
    }
    text = json.dumps(entries).encode()
    assert json_memory_bytes(text) < 3000 * 6291456 // 100
