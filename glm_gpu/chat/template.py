"""Messages to the text of a prompt, by the checkpoint's own Jinja template or by GLM's layout."""

import json
import traceback
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from glm_gpu.chat.messages import prepare_messages, prepare_tools
from glm_gpu.chat.sandbox import Budget, LimitError, check_size, compile_template
from glm_gpu.errors import CheckpointError, RequestError
from glm_gpu.json_file import read_json_object
from glm_gpu.tokenizer import Tokenizer

_MAX_MESSAGE_CHARS = 500

# What a checkpoint without a template gets. Reasoning of turns before the last user's is left out, as GLM does.
DEFAULT_TEMPLATE = r"""[gMASK]<sop>
{%- if tools %}
{{- "<|system|>\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n" }}
{{- "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n" }}
{%- for tool in tools %}{{ tool | tojson ~ "\n" }}{% endfor %}
{{- "</tools>\n\nFor each function call, output the function name and arguments within the following XML format:\n" }}
{{- "<tool_call>{function-name}\n<arg_key>{arg-key}</arg_key>\n<arg_value>{arg-value}</arg_value>\n...\n</tool_call>" }}
{%- endif %}
{%- set last = namespace(user=-1) %}
{%- for message in messages %}{% if message.role == "user" %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- if message.role == "assistant" %}
{{- "<|assistant|>\n<think>" }}
{%- if loop.index0 > last.user %}{{ (message.reasoning_content or "") | trim }}{% endif %}
{{- "</think>" }}
{%- if message.content | trim %}{{ "\n" ~ message.content | trim }}{% endif %}
{%- for call in message.tool_calls or [] %}
{{- "\n<tool_call>" ~ call.function.name ~ "\n" }}
{%- for key, value in call.function.arguments.items() %}
{{- "<arg_key>" ~ key ~ "</arg_key>\n<arg_value>" }}
{{- value if value is string else value | tojson }}
{{- "</arg_value>\n" }}
{%- endfor %}
{{- "</tool_call>" }}
{%- endfor %}
{%- elif message.role == "tool" %}
{%- if loop.first or loop.previtem.role != "tool" %}{{ "<|observation|>" }}{% endif %}
{{- "\n<tool_response>\n" ~ message.content ~ "\n</tool_response>" }}
{%- else %}
{{- "<|" ~ message.role ~ "|>\n" ~ message.content }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- "<|assistant|>\n<think>" }}
{%- if enable_thinking is defined and not enable_thinking %}{{ "</think>\n" }}{% endif %}
{%- endif %}"""


class ChatTemplate:
    """Renders messages; `source` says where the template comes from.

    The template runs in Jinja's immutable sandbox, its time and memory bounded, see `sandbox`.

    Args:
        sources: template text by name; "default" must be there, "tool_use" serves when tools are given.
        tokenizer: guards what comes from outside.
        source: where the templates come from, for messages.
        special_tokens: what the template may name, such as `bos_token`.

    Raises:
        CheckpointError: a template has a syntax error.
    """

    def __init__(
        self, sources: Mapping[str, str], tokenizer: Tokenizer, source: str, special_tokens: Mapping[str, str]
    ) -> None:
        self.source = source
        self._guard = tokenizer.guard
        self._special_tokens = dict(special_tokens)
        self._templates = {name: _compile(text, source) for name, text in sources.items()}

    @classmethod
    def open(cls, model_dir: Path, tokenizer: Tokenizer) -> "ChatTemplate":
        """The template of a model folder: chat_template.jinja, else tokenizer_config.json's, else GLM's layout.

        Raises:
            CheckpointError: a file is damaged or a template has a syntax error.
        """
        config_path = model_dir / "tokenizer_config.json"
        config = read_json_object(config_path) if config_path.exists() else {}
        special_tokens = {name: text for name in config if name.endswith("_token") and (text := _token(config[name]))}
        path = model_dir / "chat_template.jinja"
        if path.exists():
            try:
                sources, source = {"default": path.read_text(encoding="utf-8")}, str(path)
            except (OSError, UnicodeDecodeError) as error:
                raise CheckpointError(f"{path} cannot be read ({error}); fetch this file again") from None
        elif config.get("chat_template"):
            sources, source = _named_templates(config["chat_template"], config_path), str(config_path)
        else:
            sources, source = {"default": DEFAULT_TEMPLATE}, "GLM's layout (the checkpoint has no chat template)"
        return cls(sources, tokenizer, source, special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        enable_thinking: bool | None = None,
        **extra: Any,
    ) -> str:
        """The prompt, for `Tokenizer.encode`: control tokens in what the caller wrote are guarded and stay text.

        Args:
            messages: as OpenAI's API has them, see `prepare_messages`.
            tools: function definitions, likewise.
            add_generation_prompt: end where the assistant's turn begins.
            enable_thinking: None leaves it to the template.
            extra: further variables of the template, such as `reasoning_effort`.

        Raises:
            RequestError: the messages are malformed, or the template refuses them or fails on them.
            CheckpointError: the template leaves its bounds.
        """
        try:
            variables = {
                **self._special_tokens,
                **extra,
                "messages": prepare_messages(messages, self._guard),
                "tools": prepare_tools(tools, self._guard),
                "add_generation_prompt": add_generation_prompt,
            }
        except RecursionError:
            raise RequestError("messages or tools are nested too deeply to be rendered") from None
        if enable_thinking is not None:
            variables["enable_thinking"] = enable_thinking
        template = self._templates["default"]
        if variables["tools"]:
            template = self._templates.get("tool_use", template)
        return self._run(template, variables)

    def _run(self, template: Any, variables: dict[str, Any]) -> str:
        from jinja2.exceptions import SecurityError

        pieces, num_chars = [], 0
        try:
            with Budget(variables):
                for piece in template.generate(variables):
                    num_chars += len(piece)
                    check_size(num_chars)
                    pieces.append(piece)
        except _RefusedError as error:
            raise RequestError(f"the chat template refuses these messages: {_one_line(error)}") from None
        except (SecurityError, LimitError) as error:
            raise CheckpointError(
                f"{self.source}: the chat template was stopped{_at_line(error)}: {_one_line(error)}; use the one from "
                "the model's own repository"
            ) from None
        except Exception as error:  # a template may raise anything
            raise RequestError(
                f"{self.source}: the chat template failed on these messages{_at_line(error)}: "
                f"{type(error).__name__}: {_one_line(error)}"
            ) from None
        return "".join(pieces)


class _RefusedError(Exception):
    """The template called raise_exception."""


def _compile(text: str, source: str) -> Any:
    from jinja2 import TemplateSyntaxError

    functions = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    try:
        return compile_template(text, {"tojson": _to_json}, functions)
    except TemplateSyntaxError as error:
        raise CheckpointError(
            f"{source}: line {error.lineno} of the chat template: {_one_line(error)}; fetch this file again"
        ) from None
    except LimitError as error:
        raise CheckpointError(f"{source}: the chat template has {error}; fetch this file again") from None
    except RecursionError:
        raise CheckpointError(f"{source}: the chat template is nested too deeply; fetch this file again") from None


def _named_templates(value: Any, path: Path) -> dict[str, str]:
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list) and all(isinstance(entry, dict) for entry in value):
        named = {entry.get("name"): entry.get("template") for entry in value}
        if "default" in named and all(isinstance(text, str) for text in (*named, *named.values())):
            return named
    raise CheckpointError(f'{path}: chat_template is neither text nor a list of named texts with one named "default"')


def _token(value: Any) -> str | None:
    """A special token's text; older files hold an object with its flags instead."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as Hugging Face's templates expect it: nothing escaped for HTML, keys in their own order."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: Any) -> None:
    raise _RefusedError(message)


def _strftime_now(format: str) -> str:
    if len(format) > 200 or any(letter.isdigit() for letter in format):  # some C libraries read "%99999Y" as a width
        raise LimitError("a date's format of more than 200 characters, or with a width")
    return datetime.now().strftime(format)


def _at_line(error: BaseException) -> str:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"]
    return f" at line {lines[-1]}" if lines else ""


def _one_line(error: BaseException) -> str:
    return " ".join(str(error)[:_MAX_MESSAGE_CHARS].split())
