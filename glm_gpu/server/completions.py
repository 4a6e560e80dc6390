"""OpenAI's completions: texts or token ids continued, with the prompt's own scores where they are asked for."""

import time
import uuid
from typing import Any

from glm_gpu.jobs import Token
from glm_gpu.server import sse
from glm_gpu.server.chat_completions import logprob, sampling_of, schema_of, usage
from glm_gpu.server.generation import Ended, Event, Generation, Piece
from glm_gpu.server.problems import ApiError
from glm_gpu.server.questions import Sampling
from glm_gpu.server.schemas import CompletionBody
from glm_gpu.tokenizer import Tokenizer

Prompts = list[str] | list[list[int]]


def completion_of(body: CompletionBody) -> tuple[Prompts, Sampling, dict[str, Any] | None]:
    """The prompts of a body, what it says of choosing tokens, and the schema of answers.

    Raises:
        ApiError: fields that this server does not have, or that contradict each other.
    """
    prompt: Any = body.prompt
    if not isinstance(prompt, list) or (prompt and isinstance(prompt[0], int)):
        prompt = [prompt]
    if not prompt:
        raise ApiError(400, "prompt: expected at least one", "prompt")
    if body.suffix:
        raise ApiError(400, "suffix: this model only continues text", "suffix")
    if body.best_of not in (None, body.n or 1):
        raise ApiError(400, "best_of: expected the same number as n", "best_of")
    if body.max_tokens == 0 and not body.echo:
        raise ApiError(400, "max_tokens: 0 needs echo to be true", "max_tokens")
    return prompt, sampling_of(body, body.max_tokens, body.logprobs), schema_of(body.response_format)


class CompletionAnswer:
    """Completions' events in the shapes of OpenAI's interface, streamed or whole.

    Args:
        echo: give the prompt before its answer.
    """

    def __init__(
        self,
        generation: Generation,
        tokenizer: Tokenizer,
        model: str,
        echo: bool,
        has_logprobs: bool,
        shows_usage: bool = False,
    ) -> None:
        self._generation, self._tokenizer = generation, tokenizer
        self._echo, self._has_logprobs, self._shows_usage = echo, has_logprobs, shows_usage
        self._offsets = [0] * generation.num_left
        self._is_begun = [False] * generation.num_left
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    def opening(self) -> list[str]:
        """Nothing; the head of the response is sent even so."""
        return []

    def encode(self, index: int, event: Event) -> list[str]:
        """The chunks of an event."""
        return [sse.data({**self._head, "choices": [choice]}) for choice in self._choices(index, event)]

    def closing(self) -> list[str]:
        """What ends a stream."""
        total = {**self._head, "choices": [], "usage": usage(self._generation)}
        return [*([sse.data(total)] if self._shows_usage else []), "data: [DONE]\n\n"]

    async def whole(self) -> dict[str, Any]:
        """All answers as one object.

        Raises:
            Exception: what a request failed with.
        """
        choices: list[dict[str, Any]] = [{} for _ in self._offsets]
        while not self._generation.is_done:
            index, event = await self._generation.next()
            for part in self._choices(index, event) if isinstance(event, Piece | Ended) else []:
                whole = choices[index]
                if not whole:
                    whole.update(part)
                    continue
                whole["text"] += part["text"]
                whole["finish_reason"] = part["finish_reason"]
                if part["logprobs"]:
                    for name, values in part["logprobs"].items():
                        whole["logprobs"][name] += values
        return {**self._head, "choices": choices, "usage": usage(self._generation)}

    def _choices(self, index: int, event: Event) -> list[dict[str, Any]]:
        """The parts of a choice that an event adds, the echoed prompt before its first."""
        assert isinstance(event, Piece | Ended)
        text = "".join([delta.text for delta in event.deltas])
        if isinstance(event, Piece):
            tokens, reason = [event.token], None
        else:
            # The end token has no text, but it has a score, and it is the token that a scorer leaves off.
            tokens, reason = [event.result.end_token] if event.result.end_token else [], event.finish_reason
        if self._echo and not self._is_begun[index]:
            result = self._generation.jobs[index].result
            request = self._generation.jobs[index].request
            prompt = result.prompt or [Token(token_id) for token_id in request.prompt_ids]
            text = self._text(list(request.prompt_ids)) + text
            tokens = [*prompt, *tokens]
        self._is_begun[index] = True
        logprobs = self._logprobs(index, tokens) if self._has_logprobs else None
        return [{"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}]

    def _text(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, special=True)

    def _logprobs(self, index: int, tokens: list[Token]) -> dict[str, list]:
        offsets = []
        for token in tokens:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(self._spelled(token.id))
        return {
            "tokens": [self._spelled(token.id) for token in tokens],
            "token_logprobs": [logprob(token.logprob) for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens],
            "text_offset": offsets,
        }

    def _top(self, token: Token) -> dict[str, float | None] | None:
        """The best alternatives and the token itself, by their text; None for a prompt's first token."""
        if token.logprob is None:
            return None
        return {self._spelled(token_id): logprob(value) for token_id, value in (*token.top, (token.id, token.logprob))}

    def _spelled(self, token_id: int) -> str:
        """A token's text, or its bytes where they are no whole characters."""
        spelled = self._tokenizer.token_bytes(token_id)
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)
