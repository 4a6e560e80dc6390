"""The bodies of requests, as wide as what SDKs send; fields that are not known are ignored."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, StrictInt

Number = Annotated[float, Field(allow_inf_nan=False)]
Stops = str | list[str] | None
# Ids come as JSON numbers, never as text or booleans that happen to look like one.
TokenIds = list[StrictInt]


def _no_null(value: Any) -> Any:
    return [] if value is None else value


class Body(BaseModel):
    """What all requests for text have in common. Sampling values that are null or missing are the model's own."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    model: str | None = None
    stream: StrictBool | None = False
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: StrictInt | None = None
    min_p: Number | None = None


class StreamOptions(BaseModel):
    """Extras of a stream."""

    include_usage: StrictBool | None = False


class OpenAIBody(Body):
    """What chat completions and completions have in common."""

    n: Annotated[StrictInt | None, Field(ge=1)] = 1
    seed: StrictInt | None = None
    stop: Stops = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[StrictInt | None, Field(ge=0)] = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repetition_penalty: Number | None = None
    logit_bias: dict[str, Number] | None = None
    deadline_s: Annotated[Number | None, Field(gt=0, description="Seconds after which the request fails.")] = None
    ignore_eos: StrictBool | None = Field(False, description="Go on behind end tokens until max_tokens.")


class Message(BaseModel):
    """One message; `content` may be text, null, missing, or a list of text parts."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: Any = None


class ResponseFormat(BaseModel):
    """What an answer must be."""

    model_config = ConfigDict(extra="ignore")

    type: str
    json_schema: dict[str, Any] | None = None


class ThinkingSwitch(BaseModel):
    """GLM's own switch, and Anthropic's."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["enabled", "disabled", "adaptive"]


class ChatBody(OpenAIBody):
    """POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: Annotated[StrictInt | None, Field(ge=0)] = None
    logprobs: StrictBool | None = False
    top_logprobs: Annotated[StrictInt | None, Field(ge=0, le=20)] = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[dict[str, Any]], BeforeValidator(_no_null)] = []
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: StrictBool | None = True
    reasoning_effort: str | None = None
    thinking: ThinkingSwitch | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionBody(OpenAIBody):
    """POST /v1/completions."""

    prompt: str | TokenIds | list[str] | list[TokenIds]
    max_tokens: Annotated[StrictInt | None, Field(ge=0)] = 16
    suffix: str | None = None
    echo: StrictBool | None = False
    logprobs: Annotated[StrictInt | None, Field(ge=0, le=20)] = None
    best_of: Annotated[StrictInt | None, Field(ge=1)] = None
    response_format: ResponseFormat | None = None


class ResponsesBody(Body):
    """POST /v1/responses, text only and without stored state."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: Annotated[StrictInt | None, Field(ge=1)] = None
    previous_response_id: str | None = None
    tools: Annotated[list[dict[str, Any]], BeforeValidator(_no_null)] = []
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None


class MessagesBody(Body):
    """POST /v1/messages."""

    messages: list[Message]
    max_tokens: Annotated[StrictInt, Field(ge=1)]
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    tools: Annotated[list[dict[str, Any]], BeforeValidator(_no_null)] = []
    tool_choice: dict[str, Any] | None = None
    thinking: ThinkingSwitch | None = None


class CountBody(BaseModel):
    """POST /v1/messages/count_tokens."""

    messages: list[Message]
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: Annotated[list[dict[str, Any]], BeforeValidator(_no_null)] = []
    thinking: ThinkingSwitch | None = None


class TokenizeBody(BaseModel):
    """POST /tokenize: `prompt` as plain text, or `messages` as a chat's prompt."""

    prompt: str | None = None
    messages: list[Message] | None = None


class DetokenizeBody(BaseModel):
    """POST /detokenize."""

    tokens: TokenIds
