"""A live server on loopback whose model says what a test tells it to, at microseconds a token."""

import asyncio
import contextlib
import threading

import pytest
from toy_model import LAYOUT, ToyModel
from waiting import LONG_S, wait_until

from glm_gpu.pages import PagePool
from glm_gpu.scheduler import Scheduler

pytest.importorskip("fastapi", reason="needs the extra 'serve'")
uvicorn = pytest.importorskip("uvicorn", reason="needs the extra 'serve'")

CONTEXT = 2048


class Served:
    """A running server, and what its model says.

    Attributes:
        url: where it answers.
        says: text, or token ids, that every answer consists of, an end token behind it; None leaves it to the model.
    """

    def __init__(self, engine, model, scheduler, url):
        self.engine, self.model, self.scheduler, self.url = engine, model, scheduler, url
        self._script = None
        self._prompts = []
        self._submit, scheduler.submit = scheduler.submit, self._noting_submit
        if isinstance(model, ToyModel):
            model.choose = self._choose

    @property
    def says(self):
        return self._said

    @says.setter
    def says(self, said):
        self._said = said
        self._script = self.engine.tokenizer.encode(said) if isinstance(said, str) else said

    def _noting_submit(self, request, listener):
        self._prompts = [*self._prompts[-40:], list(request.prompt_ids)]
        return self._submit(request, listener)

    def _choose(self, ids):
        script = self._script
        at = max((len(p) for p in self._prompts if ids[: len(p)] == p), default=None)
        if script is None or at is None:
            return sum(ids[-3:]) % 1900 + 3
        return [*script, self.engine.tokenizer.token_id("<|user|>")][min(len(ids) - at, len(script))]

    def idle(self):
        """Waits until nothing runs or waits any more."""
        return wait_until(lambda: not self.scheduler.num_running and not self.scheduler.num_queued)


@contextlib.contextmanager
def serve(engine, model=None, num_pages=256, options=None, layout=LAYOUT, protocol=None, idle_s=5, **settings):
    from glm_gpu.server.app import create_app
    from glm_gpu.server.connections import Connection
    from glm_gpu.server.settings import ServerSettings

    protocol = protocol or Connection
    model = model or ToyModel(engine.config.vocab_size)
    pool = PagePool(layout, num_pages * PagePool(layout, 1).page_tokens)
    with Scheduler(model, pool, CONTEXT, **(options or {})) as scheduler:
        app = create_app(engine, scheduler, ServerSettings("demo", **settings))
        server = uvicorn.Server(
            uvicorn.Config(
                app, http=protocol, host="127.0.0.1", port=0, log_config=None, lifespan="on", timeout_keep_alive=idle_s
            )
        )
        server.install_signal_handlers = lambda: None
        thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
        thread.start()
        wait_until(lambda: server.started or not thread.is_alive())
        assert server.started
        port = server.servers[0].sockets[0].getsockname()[1]
        try:
            yield Served(engine, model, scheduler, f"http://127.0.0.1:{port}")
        finally:
            server.should_exit = True
            thread.join(LONG_S)
            assert not thread.is_alive()
    scheduler.tree.clear()
    assert pool.num_free == pool.num_pages
    pool.close()
