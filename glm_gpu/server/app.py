"""The application: every route, and how a request goes through it."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from anyio import to_thread
from fastapi import FastAPI
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response

from glm_gpu import __version__
from glm_gpu.engine import Engine
from glm_gpu.errors import GlmGpuError
from glm_gpu.jobs import Request
from glm_gpu.scheduler import Scheduler
from glm_gpu.server import metrics, schemas, sse
from glm_gpu.server.chat_completions import ChatAnswer, chat_of, plain
from glm_gpu.server.completions import CompletionAnswer, completion_of
from glm_gpu.server.generation import Deliveries, Generation, Reader
from glm_gpu.server.guard import ActiveRequests, Guard
from glm_gpu.server.live import Live
from glm_gpu.server.messages import MessageAnswer, counted_chat, message_of
from glm_gpu.server.page import page_routes
from glm_gpu.server.problems import ApiError, respond
from glm_gpu.server.questions import Asker, Chat
from glm_gpu.server.responses import ResponseAnswer, response_of
from glm_gpu.server.settings import ServerSettings

_MAX_THREADS = 4


def create_app(
    engine: Engine, scheduler: Scheduler, settings: ServerSettings, on_ready: Callable[[], None] = lambda: None
) -> FastAPI:
    """An application that answers from a scheduler that has been started.

    Args:
        engine: has a tokenizer.
        on_ready: called once, when requests can be answered.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        # What runs there is Python for the most part: more threads would only take the interpreter from each other.
        to_thread.current_default_thread_limiter().total_tokens = _MAX_THREADS
        on_ready()
        yield

    app = FastAPI(title="glm-gpu", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    active = ActiveRequests()
    app.add_middleware(Guard, settings=settings, active=active)
    for kind in (ApiError, RequestValidationError, HTTPException, GlmGpuError, OSError, MemoryError, Exception):
        app.add_exception_handler(kind, respond)
    deliveries = Deliveries()
    scheduler.after_step = deliveries.send
    server = _Server(engine, scheduler, settings, Asker(engine, settings), deliveries)
    _add_openai(app, server)
    _add_anthropic(app, server)
    _add_tokens(app, server)
    _add_state(app, server, active)
    app.router.routes.extend(page_routes())
    return app


@dataclass(frozen=True)
class _Server:
    engine: Engine
    scheduler: Scheduler
    settings: ServerSettings
    asker: Asker
    deliveries: Deliveries

    async def start(
        self, model: str | None, ask: Callable[..., list[tuple[Request, Reader]]], *given: Any
    ) -> Generation:
        """Make requests off the loop, for long prompts take a while to render and encode, and submit them."""
        self.asker.check_model(model)
        requests = await run_in_threadpool(ask, *given)
        return Generation.start(self.scheduler, self.deliveries, requests)

    async def send(
        self,
        http: HttpRequest,
        generation: Generation,
        answer: sse.Answer,
        is_stream: bool,
        error_event: str | None = None,
    ) -> Response:
        """The answer, streamed or whole. However it ends, the generation ends with it."""
        if is_stream:
            return sse.Stream(http, generation, answer, self.settings.keep_alive_s, error_event)
        return JSONResponse(await sse.unless_disconnected(http, generation, answer.whole()))


def _add_openai(app: FastAPI, server: _Server) -> None:
    name, engine = server.settings.model_name, server.engine

    @app.post("/v1/chat/completions", tags=["OpenAI"])
    async def chat_completions(body: schemas.ChatBody, http: HttpRequest) -> Response:
        """OpenAI's chat: streams, tools, JSON schemas, log-probabilities, reasoning."""
        chat, sampling = chat_of(body)
        generation = await server.start(body.model, server.asker.chat, chat, sampling)
        shows_usage = bool(body.stream_options and body.stream_options.include_usage)
        answer = ChatAnswer(generation, engine.tokenizer, name, bool(body.logprobs), shows_usage)
        return await server.send(http, generation, answer, bool(body.stream))

    @app.post("/v1/completions", tags=["OpenAI"])
    async def completions(body: schemas.CompletionBody, http: HttpRequest) -> Response:
        """OpenAI's completions: texts or token ids continued, and scored with echo."""
        prompts, sampling, schema = completion_of(body)
        scores_prompt = bool(body.echo) and body.logprobs is not None
        generation = await server.start(body.model, server.asker.completion, prompts, sampling, scores_prompt, schema)
        shows_usage = bool(body.stream_options and body.stream_options.include_usage)
        has_logprobs = body.logprobs is not None
        answer = CompletionAnswer(generation, engine.tokenizer, name, bool(body.echo), has_logprobs, shows_usage)
        return await server.send(http, generation, answer, bool(body.stream))

    @app.post("/v1/responses", tags=["OpenAI"])
    async def responses(body: schemas.ResponsesBody, http: HttpRequest) -> Response:
        """OpenAI's responses, text only and without stored state."""
        generation = await server.start(body.model, server.asker.chat, *response_of(body))
        return await server.send(http, generation, ResponseAnswer(generation, name, body), bool(body.stream), "error")

    def model(id_: str) -> dict[str, Any]:
        return {"id": id_, "object": "model", "created": 0, "owned_by": "glm-gpu", "max_model_len": engine.context}

    @app.get("/v1/models", tags=["OpenAI"])
    async def models() -> dict[str, Any]:
        """The model, by its name and its further ones."""
        return {"object": "list", "data": [model(id_) for id_ in (name, *sorted(server.settings.aliases))]}

    @app.get("/v1/models/{model_id:path}", tags=["OpenAI"])
    async def one_model(model_id: str) -> dict[str, Any]:
        """The model, if this is a name of it."""
        server.asker.check_model(model_id)
        return model(model_id)


def _add_anthropic(app: FastAPI, server: _Server) -> None:
    @app.post("/v1/messages", tags=["Anthropic"])
    async def messages(body: schemas.MessagesBody, http: HttpRequest) -> Response:
        """Anthropic's messages: streams, tools, thinking."""
        generation = await server.start(body.model, server.asker.chat, *message_of(body))
        answer = MessageAnswer(generation, server.settings.model_name)
        return await server.send(http, generation, answer, bool(body.stream), "error")

    @app.post("/v1/messages/count_tokens", tags=["Anthropic"])
    async def count_tokens(body: schemas.CountBody) -> dict[str, int]:
        """How many tokens a prompt of messages has."""
        chat = counted_chat(body)
        server.asker.check_model(body.model)
        return {"input_tokens": len(await run_in_threadpool(server.asker.encode_chat, chat))}


def _add_tokens(app: FastAPI, server: _Server) -> None:
    @app.post("/tokenize", tags=["tokens"])
    async def tokenize(body: schemas.TokenizeBody) -> dict[str, Any]:
        """Token ids of a text, or of a chat's prompt."""
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "prompt: give either prompt or messages", "prompt")
        if body.messages is not None:
            tokens = await run_in_threadpool(server.asker.encode_chat, Chat(plain(body.messages)))
        else:
            tokens = await run_in_threadpool(server.asker.tokenizer.encode, body.prompt)
        return {"tokens": tokens, "count": len(tokens), "max_model_len": server.engine.context}

    @app.get("/tokenizer_info", tags=["tokens"])
    async def tokenizer_info() -> dict[str, str | None]:
        """The special tokens' texts, as vLLM tells them; lm_eval then needs no tokenizer of its own."""
        eos = min(server.engine.eos_ids, default=None)
        text = None if eos is None else server.asker.tokenizer.decode([eos], special=True)
        return {"eos_token": text, "bos_token": None, "pad_token": None}

    @app.post("/detokenize", tags=["tokens"])
    async def detokenize(body: schemas.DetokenizeBody) -> dict[str, str]:
        """The text of token ids."""
        vocab_size = server.engine.config.vocab_size
        bad = next((token for token in body.tokens if not 0 <= token < vocab_size), None)
        if bad is not None:
            raise ApiError(400, f"tokens: {bad} is outside the vocabulary of {vocab_size}", "tokens")
        return {"prompt": await run_in_threadpool(server.asker.tokenizer.decode, body.tokens, True)}


def _add_state(app: FastAPI, server: _Server, active: ActiveRequests) -> None:
    live = Live(server.engine, server.scheduler, server.settings.model_name)

    @app.get("/health", tags=["state"])
    async def health() -> dict[str, str]:
        """Whether the server answers."""
        return {"status": "ok"}

    @app.get("/status", tags=["state"])
    async def status() -> dict[str, Any]:
        """Model, queue, cache, tiers, speed."""
        return live.status(active.count)

    @app.get("/experts", tags=["state"])
    async def experts() -> dict[str, Any]:
        """Where every expert is, and how hot."""
        return live.experts()

    @app.get("/metrics", tags=["state"], response_class=PlainTextResponse)
    async def prometheus() -> Response:
        """Counts and histograms in Prometheus' text format."""
        text = metrics.render(server.scheduler, server.engine.store, server.engine.speculation, active.count)
        return Response(text, headers={"Content-Type": metrics.CONTENT_TYPE})
