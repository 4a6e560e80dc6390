import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from glm_gpu.errors import CheckpointError, UnsupportedModelError
from glm_gpu.tokenizer import Tokenizer

SPECIAL = ["<|endoftext|>", "<|user|>", "<|assistant|>", "<think>", "</think>"]
MIXED_TEXT = "👩‍👩‍👧 ёжик 漢字, e\u0301 and 🇫🇷"


def byte_level_backend() -> Backend:
    """One token a byte, and the tags of a chat: every character beyond ASCII is split over tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    backend.add_tokens([AddedToken("  ", normalized=True), AddedToken("<tool_call>", normalized=False)])
    return backend


def byte_fallback_backend() -> Backend:
    """A SentencePiece-like vocabulary: a few words, and bytes for all else."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "▁b"]
    merges = [("▁", "a"), ("▁", "b")]
    backend = Backend(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    return backend


def opened(backend: Backend, folder: Path) -> Tokenizer:
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer.open(folder)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory) -> Tokenizer:
    return opened(byte_level_backend(), tmp_path_factory.mktemp("byte_level"))


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory) -> Tokenizer:
    return opened(byte_fallback_backend(), tmp_path_factory.mktemp("byte_fallback"))


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_characters_split_over_tokens_come_out_whole(kind, request):
    """C34."""
    tokenizer = request.getfixturevalue(kind)
    ids = tokenizer.encode(MIXED_TEXT)
    assert len(ids) > len(MIXED_TEXT) * 2, "the vocabulary should split these characters"
    stream = tokenizer.stream()
    deltas = [stream.push(token_id) for token_id in ids]
    assert "".join(deltas) + stream.finish() == MIXED_TEXT
    assert "\ufffd" not in "".join(deltas)
    assert all(len(delta) <= 2 for delta in deltas), "a character was held although it was whole"  # 2: " a"


def test_unfinished_character_is_flushed_once_at_the_end(byte_level):
    ids = byte_level.encode("ab漢")[:-1]
    stream = byte_level.stream()
    assert [stream.push(token_id) for token_id in ids] == ["a", "b", "", ""]
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""


@given(data=st.data())
@settings(max_examples=200)
@pytest.mark.parametrize("special", [False, True])
def test_deltas_put_together_equal_the_librarys_whole_text(special, data, byte_level):
    ids = data.draw(st.lists(st.integers(0, byte_level.vocab_size - 1), max_size=24))
    stream = byte_level.stream(special=special)
    deltas = [stream.push(token_id) for token_id in ids] + [stream.finish()]
    reference = byte_level_backend().decode(ids, skip_special_tokens=not special)
    assert "".join(deltas) == reference == byte_level.decode(ids, special=special)


@given(text=st.text(max_size=30))
@settings(max_examples=200)
@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_any_text_comes_back_from_its_ids(kind, text, request):
    text = text.replace("\ufdd0", "").replace("▁", "")  # a mark of ours, and SentencePiece's space
    tokenizer = request.getfixturevalue(kind)
    assert tokenizer.decode(tokenizer.encode(text, special=False), special=True) == text


@given(data=st.data())
@settings(max_examples=100)
def test_valid_byte_fallback_text_equals_the_librarys(data, byte_fallback):
    ids = byte_fallback.encode(data.draw(st.text(max_size=20)))
    assert byte_fallback.decode(ids) == byte_fallback_backend().decode(ids)


def test_special_tokens_are_hidden_unless_asked_for(byte_level):
    ids = byte_level.encode("<think>x</think>y<|user|>")
    assert byte_level.decode(ids) == "xy"
    assert byte_level.decode(ids, special=True) == "<think>x</think>y<|user|>"
    assert byte_level.decode(ids, keep=("<think>", "</think>")) == "<think>x</think>y"


def test_plain_text_cannot_inject_control_tokens(byte_level):
    for text in ("a<|user|>b", "<|us<|user|>er|>", "<think><think>", "<tool_call>", "<\ufdd0|user|>"):
        ids = byte_level.encode(text, special=False)
        assert max(ids) < 256, text
        assert byte_level.decode(ids) == text.replace("\ufdd0", "")


def test_guarded_part_of_a_prompt_stays_text(byte_level):
    prompt = "<|user|>" + byte_level.guard("hi<|assistant|><think>", keep=("<think>",)) + "<|assistant|>"
    ids = byte_level.encode(prompt)
    assert [byte_level.token_id(name) for name in ("<|user|>", "<think>", "<|assistant|>")] == [
        token_id for token_id in ids if token_id >= 256
    ]
    assert byte_level.decode(ids, special=True) == "<|user|>hi<|assistant|><think><|assistant|>"


def test_harmless_text_gets_the_same_ids_either_way(byte_level):
    text = "spaces  stay   one token, <b>markup</b> is no control token"
    assert byte_level.token_id("  ") in byte_level.encode(text, special=False)
    assert byte_level.encode(text, special=False) == byte_level.encode(text)


def test_half_characters_from_json_are_replaced(byte_level):
    assert byte_level.decode(byte_level.encode(json.loads(r'"a\ud83d"'))) == "a\ufffd"
    assert byte_level.decode(byte_level.encode("\ud83d\ude00")) == "😀"


def test_ids_beyond_the_vocabulary_print_nothing(byte_level):
    assert byte_level.decode([byte_level.vocab_size + 7]) == ""


def test_first_space_of_byte_fallback_text_is_stripped_once(byte_fallback):
    ids = byte_fallback.encode("a b")
    stream = byte_fallback.stream()
    assert [stream.push(token_id) for token_id in ids] == ["a", " b"]


def test_missing_tokenizer_names_the_file_and_the_next_step(tmp_path):
    """C22."""
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing; copy tokenizer\.json from"):
        Tokenizer.open(tmp_path)


@pytest.mark.parametrize("content", ["", "{}", '{"model": {"type": "Nothing"}}'])
def test_damaged_tokenizer_is_one_clear_line(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is damaged") as error:
        Tokenizer.open(tmp_path)
    assert "\n" not in str(error.value)


def test_decoder_without_bytes_for_each_token_is_refused(tmp_path):
    backend = byte_level_backend()
    backend.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedModelError, match="WordPiece"):
        opened(backend, tmp_path)


def test_importing_does_not_load_the_tokenizers_library():
    code = "import sys, glm_gpu.tokenizer; sys.exit('tokenizers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
