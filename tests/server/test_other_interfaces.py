"""/v1/messages through Anthropic's client, /v1/responses through OpenAI's, and what the server tells of itself."""

import pytest
from waiting import LONG_S

anthropic = pytest.importorskip("anthropic", reason="needs the extra 'test'")
parser = pytest.importorskip("prometheus_client.parser", reason="needs the extra 'test'")

TOOL = {
    "name": "get_weather",
    "description": "Weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>"


@pytest.fixture
def client(served):
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0, timeout=LONG_S) as client:
        yield client


@pytest.fixture
def fields():
    return {
        "model": "demo",
        "max_tokens": 60,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
        "extra_body": {"temperature": 0},
    }


def blocks(message):
    return [block.model_dump(exclude={"id"}, exclude_none=True) for block in message.content]


@pytest.mark.parametrize(
    ("says", "more", "reason"),
    [
        ("Peace be with you.", {}, "end_turn"),
        ("a long answer that is cut", {"max_tokens": 3}, "max_tokens"),
        ("one, two, three", {"stop_sequences": ["two"]}, "stop_sequence"),
        ("let me think</think>so be it", {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "end_turn"),
        ("I look." + CALL, {"tools": [TOOL]}, "tool_use"),
        ("never mind", {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "get_weather"}}, None),
        ("never mind", {"tools": [TOOL], "tool_choice": {"type": "any"}, "max_tokens": 12}, "max_tokens"),
    ],
)
def test_a_streamed_message_is_the_plain_one(served, client, fields, says, more, reason):
    served.says = says
    fields |= more
    plain = client.messages.create(**fields)
    with client.messages.stream(**fields) as stream:
        streamed = stream.get_final_message()
    assert blocks(streamed) == blocks(plain)
    assert (streamed.stop_reason, streamed.stop_sequence) == (plain.stop_reason, plain.stop_sequence)
    assert reason is None or plain.stop_reason == reason
    assert plain.usage.output_tokens == streamed.usage.output_tokens > 0


def test_a_message_holds_thinking_text_and_calls_in_blocks(served, client, fields):
    served.says = f"hm</think>I look.{CALL}"
    message = client.messages.create(**fields, tools=[TOOL], thinking={"type": "enabled", "budget_tokens": 1024})
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    assert message.content[2].input == {"city": "Paris"} and message.stop_reason == "tool_use"
    result = [
        {"type": "tool_result", "tool_use_id": message.content[2].id, "content": [{"type": "text", "text": "sun"}]}
    ]
    fields["messages"] += [{"role": "assistant", "content": message.content}, {"role": "user", "content": result}]
    served.says = "It is sunny."
    message = client.messages.create(**fields, tools=[TOOL], system=[{"type": "text", "text": "Be brief."}])
    assert message.content[0].text == "It is sunny."
    prompt = served.engine.tokenizer.decode(served._prompts[-1], special=True)
    assert "Be brief." in prompt and "<tool_response>\nsun\n</tool_response>" in prompt
    count = client.messages.count_tokens(model="demo", messages=fields["messages"][:1])
    assert count.input_tokens > 5


def test_errors_have_anthropic_s_shape(client, fields):
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    with pytest.raises(anthropic.BadRequestError, match="image"):
        client.messages.create(**fields | {"messages": [{"role": "user", "content": [image]}]})
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.messages.create(**fields | {"model": "client"})
    assert caught.value.body["error"]["type"] == "not_found_error"


def test_responses_streamed_and_whole(served, openai):
    served.says = "because</think>In the beginning."
    fields = {"model": "demo", "input": "tell me", "instructions": "be brief", "reasoning": {"effort": "high"}}
    plain = openai.responses.create(**fields)
    assert plain.output_text == "In the beginning." and plain.status == "completed"
    with openai.responses.stream(**fields) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_text == plain.output_text
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    items = [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]
    short = openai.responses.create(model="demo", input=items, max_output_tokens=2)
    assert short.status == "incomplete" and short.usage.output_tokens == 2


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"input": [{"type": "function_call_output"}]}, "input[0].type"),
        ({"text": {"format": {"type": "odd"}}}, "text.format"),
    ],
)
def test_what_responses_cannot_do_is_said(http, more, param):
    answer = http.post("/v1/responses", json={"input": "x", **more})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


def test_metrics_are_prometheus_and_add_up(served, http, ask):
    def read():
        families = parser.text_string_to_metric_families(http.get("/metrics").text)
        return {(s.name, *sorted(s.labels.items())): s.value for family in families for s in family.samples}

    served.says = "four words of text"
    before, completion, after = read(), ask(), read()
    num_tokens = completion.usage.completion_tokens
    assert after[("glm_gpu_completion_tokens_total",)] - before[("glm_gpu_completion_tokens_total",)] == num_tokens
    assert (
        after[("glm_gpu_requests_total", ("finish", "stop"))]
        == before[("glm_gpu_requests_total", ("finish", "stop"))] + 1
    )
    assert (
        after[("glm_gpu_first_token_seconds_bucket", ("le", "+Inf"))] == after[("glm_gpu_first_token_seconds_count",)]
    )
    assert after[("glm_gpu_connections",)] == 1
    assert after[("glm_gpu_experts", ("tier", "disk"))] + after[("glm_gpu_experts", ("tier", "ram"))] > 0


def test_status_and_the_map_of_experts_are_those_of_the_store(served, http):
    status = http.get("/status").json()
    assert status["model"]["name"] == "demo" and status["requests"]["running"] == 0
    assert status["cache"]["pages"] == served.scheduler.pool.num_pages
    assert sum(tier["num_experts"] for tier in status["tiers"]) == 64 * len(served.engine.store.tier_map())
    found = http.get("/experts").json()
    places = served.engine.store.tier_map()
    assert [row["layer"] for row in found["layers"]] == sorted(places)
    for row in found["layers"]:
        names = [("disk", "ram", "locked")[code] for code in places[row["layer"]]]
        assert [found["names"][int(digit)] for digit in row["tiers"]] == names
        assert len(row["heat"]) == found["experts"] == 64
    assert http.get("/health").json() == {"status": "ok"}


def test_special_tokens_are_told_as_texts_that_encode_to_themselves(served, http):
    told = http.get("/tokenizer_info").json()
    ids = http.post("/tokenize", json={"prompt": told["eos_token"]}).json()["tokens"]
    assert len(ids) == 1 and ids[0] in served.engine.eos_ids and told["bos_token"] is None


def test_the_schema_lists_every_interface(http):
    paths = http.get("/openapi.json").json()["paths"]
    expected = {"/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/responses", "/v1/messages", "/health",
                "/metrics", "/status", "/tokenize", "/detokenize", "/tokenizer_info"}  # fmt: skip
    assert expected <= set(paths)
    assert http.get("/docs").status_code == 200
