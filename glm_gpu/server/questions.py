"""What requests of every interface come down to: a prompt's ids, how to choose tokens, and how to read them."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from glm_gpu.chat import REPLY_TAGS, ReplyParser, ends_in_reasoning
from glm_gpu.chat.tags import CALL, END_THINK
from glm_gpu.engine import Engine
from glm_gpu.grammar import Constraint, Grammar
from glm_gpu.jobs import Request
from glm_gpu.server.constraints import AfterReasoning, tool_call_grammar
from glm_gpu.server.generation import Reader
from glm_gpu.server.problems import ApiError
from glm_gpu.server.settings import ServerSettings

MAX_STOPS = 4
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


@dataclass(frozen=True)
class Sampling:
    """What a request says of choosing tokens; None is the model's own value.

    Args:
        max_tokens: None or more than there is room for: what there is room for.
        logit_bias: by token id as text, as JSON has it.
        num_logprobs: None for none.
    """

    values: Mapping[str, float | int | None]
    max_tokens: int | None = None
    n: int = 1
    stops: Sequence[str] = ()
    logit_bias: Mapping[str, float] = field(default_factory=dict)
    num_logprobs: int | None = None
    deadline_s: float | None = None
    ignore_eos: bool = False


@dataclass(frozen=True)
class Chat:
    """A conversation, and what its next turn may be.

    Args:
        messages, tools: in OpenAI's shapes.
        tool_choice: "auto", "none", "required", or the name of a tool that is in `tools`.
        schema: what the content must conform to; {} for any JSON object; None for nothing.
        max_calls: of tools.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    tool_choice: str = "auto"
    is_tool_named: bool = False
    schema: dict[str, Any] | None = None
    max_calls: int | None = None
    enable_thinking: bool | None = None
    template_values: Mapping[str, Any] = field(default_factory=dict)


class Asker:
    """Makes requests for the scheduler out of what clients send. Slow for long texts: call it off the loop."""

    def __init__(self, engine: Engine, settings: ServerSettings) -> None:
        assert engine.tokenizer is not None and engine.chat_template is not None
        self._engine, self._settings = engine, settings
        self.tokenizer, self._template = engine.tokenizer, engine.chat_template

    def check_model(self, name: str | None) -> None:
        """Refuse names that are not this model's.

        Raises:
            ApiError: status 404.
        """
        if name is not None and name not in self._settings.names:
            served = self._settings.model_name
            raise ApiError(404, f"model: {name[:200]!r} is not served here, {served!r} is", "model", "model_not_found")

    def render(self, chat: Chat) -> str:
        """The chat's prompt.

        Raises:
            RequestError: malformed messages, or a template that refuses them.
        """
        tools = None if chat.tool_choice == "none" else chat.tools
        values = dict(chat.template_values)
        return self._template.render(chat.messages, tools or None, True, chat.enable_thinking, **values)

    def encode_chat(self, chat: Chat) -> list[int]:
        """The ids of the chat's prompt.

        Raises:
            ApiError, RequestError: malformed tools or messages.
        """
        check_tools(chat)
        return self.tokenizer.encode(self.render(chat))

    def chat(self, chat: Chat, sampling: Sampling) -> list[tuple[Request, Reader]]:
        """The requests for a chat's next turn: one for each of `n`.

        Raises:
            ApiError, RequestError: it cannot be answered.
        """
        check_tools(chat)
        prompt = self.render(chat)
        in_reasoning = ends_in_reasoning(prompt)
        ids = self.tokenizer.encode(prompt)
        tools = chat.tools if chat.tool_choice != "none" else []
        bias = {} if tools else self._without_calls()
        grammar = self._grammar(chat)
        turn_ids = self._engine.turn_ids
        requests = []
        for choice in range(self._num_choices(sampling.n)):
            constraint = None
            if grammar is not None:
                constraint = self._engine.constraint(grammar)
                if in_reasoning:
                    constraint = AfterReasoning(constraint, self.tokenizer.token_id(END_THINK))
            parser = ReplyParser(tools, in_reasoning)
            text = self.tokenizer.stream(keep=REPLY_TAGS)
            reader = Reader(text, _stops(sampling.stops), parser, in_reasoning, chat.max_calls)
            request = self._request(ids, sampling, choice, turn_ids, "messages")
            biases = {**request.logit_bias, **bias}
            request = _constrained(dataclasses.replace(request, logit_bias=biases), constraint)
            requests.append((request, reader))
        return requests

    def completion(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling: Sampling,
        scores_prompt: bool = False,
        schema: dict[str, Any] | None = None,
    ) -> list[tuple[Request, Reader]]:
        """The requests for texts to continue: `n` for each, in order. Control tokens in a text are read as such.

        Raises:
            ApiError, RequestError: one of them cannot be answered.
        """
        if len(prompts) * sampling.n > self._settings.max_choices:
            raise ApiError(
                400, f"prompt: at most {self._settings.max_choices} answers may be asked for at once", "prompt"
            )
        grammar = None if schema is None else Grammar.from_json_schema(schema or {"type": "object"})
        requests = []
        for prompt in prompts:
            ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
            for choice in range(self._num_choices(sampling.n)):
                request = self._request(ids, sampling, choice, self._engine.eos_ids, "prompt")
                constraint = None if grammar is None else self._engine.constraint(grammar)
                request = _constrained(dataclasses.replace(request, scores_prompt=scores_prompt), constraint)
                text = self.tokenizer.stream()
                requests.append((request, Reader(text, _stops(sampling.stops))))
        return requests

    def _num_choices(self, n: int) -> int:
        if n > self._settings.max_choices:
            raise ApiError(400, f"n is {n}, expected at most {self._settings.max_choices}", "n")
        return n

    def _request(self, ids: list[int], sampling: Sampling, choice: int, eos: frozenset[int], field: str) -> Request:
        context = self._engine.context
        room = context - len(ids)
        if room < (0 if sampling.max_tokens == 0 else 1):
            raise ApiError(
                400,
                f"the prompt has {len(ids)} tokens and the model's context holds {context}, one of them for the "
                "answer; shorten the prompt or start the server with a larger --context",
                field,
                "context_length_exceeded",
            )
        values = {name: value for name, value in sampling.values.items() if value is not None}
        params = dataclasses.replace(self._engine.sampling_defaults, **values)
        if choice and params.seed is not None:
            params = dataclasses.replace(params, seed=(params.seed + choice) % 2**63)
        return Request(
            ids,
            params,
            room if sampling.max_tokens is None else min(room, sampling.max_tokens),
            frozenset() if sampling.ignore_eos else eos,
            self._biases(sampling.logit_bias),
            sampling.num_logprobs,
            deadline_s=sampling.deadline_s,
        )

    def _biases(self, given: Mapping[str, float]) -> dict[int, float]:
        biases = {}
        for token, bias in given.items():
            if not re.fullmatch(r"[0-9]{1,9}", token) or int(token) >= self._engine.config.vocab_size:
                raise ApiError(400, f"logit_bias: {token[:50]!r} is no token id of this model", "logit_bias")
            if not -100 <= bias <= 100:
                raise ApiError(400, f"logit_bias: the bias of {token} is {bias:g}, expected -100 to 100", "logit_bias")
            biases[int(token)] = bias
        return biases

    def _without_calls(self) -> dict[int, float]:
        """Keeps a model that was given no tools from calling any."""
        token_id = self.tokenizer.token_id(CALL)
        return {} if token_id is None else {token_id: float("-inf")}

    def _grammar(self, chat: Chat) -> Grammar | None:
        if chat.tools and chat.tool_choice not in ("auto", "none"):
            named = [t for t in chat.tools if not chat.is_tool_named or t["function"]["name"] == chat.tool_choice]
            return tool_call_grammar(named, 1 if chat.is_tool_named else chat.max_calls)
        if chat.schema is None:
            return None
        return Grammar.from_json_schema(chat.schema or {"type": "object"}, "response_format.json_schema")


def check_tools(chat: Chat) -> None:
    """Refuse tools that a model could not call, and choices that name none of them.

    Raises:
        ApiError: naming the field.
    """
    names = []
    for i, tool in enumerate(chat.tools):
        function = tool.get("function")
        if tool.get("type", "function") != "function" or not isinstance(function, dict):
            raise ApiError(400, f"tools[{i}]: expected type 'function' with a function", f"tools[{i}]")
        name, parameters = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
            message = f"tools[{i}].function.name: expected up to 128 letters, digits, '_', '-' or '.'"
            raise ApiError(400, message, f"tools[{i}].function.name")
        if parameters is not None and not isinstance(parameters, dict):
            message = f"tools[{i}].function.parameters: expected a JSON schema"
            raise ApiError(400, message, f"tools[{i}].function.parameters")
        names.append(name)
    if chat.is_tool_named and chat.tool_choice not in names:
        raise ApiError(400, f"tool_choice: {chat.tool_choice[:128]!r} is none of the tools", "tool_choice")
    if not names and chat.tool_choice not in ("auto", "none"):
        raise ApiError(400, "tool_choice: a call is asked for and there are no tools", "tool_choice")


def _constrained(request: Request, constraint: Constraint | AfterReasoning | None) -> Request:
    """The request with a constraint, which then decides where the answer ends."""
    if constraint is None:
        return request
    return dataclasses.replace(request, constraint=constraint, eos_ids=constraint.end_ids)


def _stops(stops: Sequence[str]) -> Sequence[str]:
    if len(stops) > MAX_STOPS:
        raise ApiError(400, f"stop: {len(stops)} strings, expected at most {MAX_STOPS}", "stop")
    return stops
