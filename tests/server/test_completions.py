"""/v1/completions, /tokenize and /detokenize."""

import math

import numpy as np
import openai as sdk
import pytest


@pytest.fixture
def complete(openai):
    """complete(prompt, **fields) -> a completion."""

    def call(prompt, **fields):
        fields = {"model": "demo", "temperature": 0, "max_tokens": 20, **fields}
        return openai.completions.create(prompt=prompt, **fields)

    return call


@pytest.mark.parametrize(
    "fields",
    [{}, {"stop": ["brown", "qu"]}, {"echo": True}, {"echo": True, "logprobs": 2}, {"logprobs": 0}, {"max_tokens": 2}],
)
def test_a_stream_joined_is_the_plain_answer(served, complete, fields):
    served.says = "the quick brown fox – ёж"
    plain = complete("once", **fields).choices[0]
    chunks = [c for chunk in complete("once", stream=True, **fields) for c in chunk.choices]
    assert "".join(c.text for c in chunks) == plain.text
    assert chunks[-1].finish_reason == plain.finish_reason
    if plain.logprobs:
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [x for c in chunks if c.logprobs for x in getattr(c.logprobs, name)] == getattr(plain.logprobs, name)


@pytest.mark.parametrize("end", ["", "whole words after it"])
def test_characters_split_over_tokens_arrive_whole(served, complete, end):
    """C34. One byte a token, and an answer that ends inside a character."""
    tokenizer = served.engine.tokenizer
    one_byte = {tokenizer.token_bytes(i): i for i in range(2000) if len(tokenizer.token_bytes(i)) == 1}
    text = "👩‍👩‍👧 ёжик 漢字"
    served.says = [one_byte[bytes([byte])] for byte in text.encode() + b"\xe6\xbc"]
    pieces = [c.text for chunk in complete("x", stream=True, max_tokens=99) for c in chunk.choices]
    assert "".join(pieces) == text + "\ufffd" == complete("x", max_tokens=99).choices[0].text
    assert not any("\ufffd" in piece for piece in pieces[:-1])


def test_only_the_checkpoint_s_own_end_tokens_end_a_raw_text(served, complete):
    """C37."""
    tokenizer = served.engine.tokenizer
    system = tokenizer.token_id("<|system|>")
    assert system in served.engine.turn_ids
    served.says = [*tokenizer.encode("one"), system, *tokenizer.encode(" two<|endoftext|>three")]
    completion = complete("x", max_tokens=40)
    assert completion.choices[0].text == "one two" and completion.choices[0].finish_reason == "stop"


def test_many_prompts_and_answers_come_in_order(served, complete):
    prompts = [[5, 6, 7], [8, 9]]
    completion = complete(prompts, n=2, max_tokens=4)
    assert [choice.index for choice in completion.choices] == [0, 1, 2, 3]
    assert completion.choices[0].text == completion.choices[1].text != completion.choices[2].text
    assert completion.usage.prompt_tokens == 5 and completion.usage.completion_tokens == 16
    expected = served.model.answer(prompts[1], 4)
    assert completion.choices[2].text == served.engine.tokenizer.decode(expected)


def test_a_prompt_s_scores_are_those_a_scorer_expects(served, complete):
    """C47. As lm_eval asks: echo, one token, and the last entry left off."""
    ids = served.engine.tokenizer.encode("In the beginning God created")
    for says in (None, ""):  # an answer of one token, and one that ends at once
        served.says = says
        scores = complete(ids, echo=True, logprobs=1, max_tokens=1).choices[0].logprobs
        assert len(scores.token_logprobs) == len(ids) + 1 and scores.token_logprobs[0] is None
        for n, (value, top) in enumerate(zip(scores.token_logprobs[1:-1], scores.top_logprobs[1:-1], strict=True), 1):
            logits = served.model._logits(np.array(ids[:n])).astype(np.float64)
            assert value == pytest.approx(logits[ids[n]] - math.log(np.exp(logits).sum()))
            assert max(top.values()) == pytest.approx(logits.max() - math.log(np.exp(logits).sum()))
    scored = complete(ids, echo=True, logprobs=0, max_tokens=0).choices[0]
    assert scored.text == "In the beginning God created" and len(scored.logprobs.tokens) == len(ids)
    assert scored.logprobs.text_offset[1] == len(scored.logprobs.tokens[0])


@pytest.mark.parametrize(
    ("prompt", "fields", "param"),
    [
        ("x", {"suffix": "y"}, "suffix"),
        ("x", {"best_of": 3}, "best_of"),
        ("x", {"max_tokens": 0}, "max_tokens"),
        ("x", {"logprobs": 50}, "logprobs"),
        ([], {}, "prompt"),
        ([[1, 2], [99999]], {}, None),
        ([[1], []], {}, None),
        (["x"] * 200, {}, "prompt"),
    ],
)
def test_a_bad_field_is_named(complete, prompt, fields, param):
    with pytest.raises(sdk.BadRequestError) as caught:
        complete(prompt, **fields)
    assert caught.value.param == param and str(caught.value)


def test_text_to_tokens_and_back(served, http):
    found = http.post("/tokenize", json={"prompt": "And it came to pass"}).json()
    assert found["tokens"] == served.engine.tokenizer.encode("And it came to pass")
    assert found["count"] == len(found["tokens"]) and found["max_model_len"] == served.engine.context
    assert http.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": "And it came to pass"}
    chat = http.post("/tokenize", json={"messages": [{"role": "user", "content": "<|user|>"}]}).json()
    assert chat["tokens"].count(served.engine.tokenizer.token_id("<|user|>")) == 1
    assert http.post("/tokenize", json={}).status_code == 400
    assert http.post("/detokenize", json={"tokens": [10**9]}).json()["error"]["param"] == "tokens"
