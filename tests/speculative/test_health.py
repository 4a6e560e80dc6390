"""The multi-token layer, sound and not: checkpoints without it, and layers that guess badly (C06, C07)."""

import dataclasses
import json
import logging

import numpy as np
import pytest
from small_models import open_model, prefill

from glm_gpu.batch import Batch
from glm_gpu.engine import DEMO_MODEL, Engine
from glm_gpu.errors import CheckpointError
from glm_gpu.model.mtp import MtpHead
from glm_gpu.opening import EngineOptions
from glm_gpu.recipe import Recipe
from glm_gpu.sampling import SamplingParams
from glm_gpu.speculative import WidthPolicy
from glm_gpu.tokenizer import Tokenizer

GREEDY = SamplingParams(temperature=0)


@pytest.fixture
def without_mtp(copy_oracle):
    """The oracle's GLM as some converters leave it: no MTP tensors, while config.json still promises them."""
    folder = copy_oracle("tiny_glm")
    index_path = folder / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    index["weight_map"] = {k: v for k, v in index["weight_map"].items() if not k.startswith("model.layers.6.")}
    for path in folder.glob("*.safetensors"):
        drop_tensors(path, "model.layers.6.")
    index["weight_map"] = {k: v for k, v in index["weight_map"].items() if (folder / v).exists()}
    index_path.write_text(json.dumps(index))
    return folder


def drop_tensors(path, prefix: str) -> None:
    """Take tensors out of a shard's header; their bytes go too."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header, body, kept = json.loads(data[8 : 8 + size]), data[8 + size :], {}
    offset, parts = 0, []
    for name, entry in header.items():
        if name == "__metadata__" or name.startswith(prefix):
            continue
        begin, end = entry["data_offsets"]
        parts.append(body[begin:end])
        kept[name] = entry | {"data_offsets": [offset, offset + end - begin]}
        offset += end - begin
    text = json.dumps(kept).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(parts))


def test_a_checkpoint_without_mtp_tensors_runs_without_and_says_so_once(without_mtp, caplog):
    options = EngineOptions(weights="f32", context=64)
    with caplog.at_level(logging.WARNING), Engine.open(without_mtp, options) as engine:
        assert engine.mtp_head is None
        assert len(list(engine.session().generate([5, 6, 7], GREEDY, 6))) == 6
        list(engine.session().generate([5, 6, 7], GREEDY, 2))
    assert [record.message for record in caplog.records if "no MTP head" in record.message] == [
        f"{without_mtp}: no MTP head in this checkpoint; running without its drafts"
    ]


@pytest.mark.parametrize("speculate", ["off", "ngram", "grammar"])
def test_who_does_not_ask_for_mtp_is_told_nothing(without_mtp, caplog, speculate):
    with Engine.open(without_mtp, EngineOptions(weights="f32", context=64, speculate=speculate)):
        assert "MTP" not in caplog.text


def test_asking_for_mtp_then_fails_before_anything_is_loaded(without_mtp, monkeypatch):
    monkeypatch.setattr("glm_gpu.engine.load_weights", lambda *_: pytest.fail("weights were loaded"))
    with pytest.raises(CheckpointError, match="no MTP head in this checkpoint, which --speculate mtp needs"):
        Engine.open(without_mtp, EngineOptions(weights="f32", context=64, speculate="mtp"))


def test_the_layer_is_loaded_only_for_drafts_and_only_where_it_fits(oracle_dir):
    sizes = {}
    for speculate in ("off", "auto"):
        with Engine.open(oracle_dir / "tiny_glm", EngineOptions(context=64, speculate=speculate)) as engine:
            assert (engine.mtp_head is not None) == (speculate == "auto")
            sizes[speculate] = engine.plan.ram_bytes
    assert sizes["off"] < sizes["auto"]
    options = EngineOptions(context=64, ram=(sizes["off"] + sizes["auto"]) // 2)
    with Engine.open(oracle_dir / "tiny_glm", options) as engine:
        assert engine.mtp_head is None


def first_guesses(model, ids: list[int]) -> WidthPolicy:
    """A policy that has seen the layer's first guess behind every token of a text, against the trunk's own choice."""
    output, _, _ = prefill(model, ids)
    choices, head = output.logits.argmax(axis=1).tolist(), MtpHead(model)
    batch = Batch.of([(ids[1:], head.new_cache(len(ids), is_bf16=False))], "prefill", all_logits=True)
    guesses = head.forward(batch, output.hidden[:-1])[0].logits.argmax(axis=1).tolist()
    policy = WidthPolicy()
    for guess, choice in zip(guesses, choices[1:], strict=True):
        policy.acceptance.observe("mtp", [guess], [choice])
    return policy


@pytest.fixture(scope="module")
def demo():
    return open_model(DEMO_MODEL, Recipe.default())


@pytest.fixture(scope="module")
def repetitive_ids():
    """150 tokens of a prompt that says the same again and again."""
    text = "And the LORD spake unto Moses, saying, Speak unto the children of Israel, and say unto them. "
    return Tokenizer.open(DEMO_MODEL).encode(text * 8)[:150]


def test_a_sound_layer_is_right_about_repeated_text_and_raises_no_warning(demo, repetitive_ids):
    policy = first_guesses(demo, repetitive_ids)
    first = policy.acceptance.counts["mtp"][0]
    assert first.tried == 149 and first.right / first.tried > 0.6
    assert policy.warning is None


def test_a_layer_wired_wrongly_is_warned_of(demo, repetitive_ids, monkeypatch):
    """Its projection reads the hidden state where the embedding belongs, as some engines first had it."""
    weights = demo.weights.mtp
    width = demo.config.hidden_size
    swapped = np.roll(np.arange(2 * width), width)
    packed = weights.projection
    projection = dataclasses.replace(packed, data=np.ascontiguousarray(packed.data[:, swapped]))
    broken = dataclasses.replace(demo.weights, mtp=dataclasses.replace(weights, projection=projection))
    monkeypatch.setattr(demo, "weights", broken)
    warning = first_guesses(demo, repetitive_ids).warning
    assert warning is not None and "multi-token (MTP) guesses came true, expected 25 % or more" in warning
