"""A server from a model folder's engine to a socket, until it is told to stop."""

import gc
import ipaddress
import json
import logging
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from glm_gpu.conversations import ConversationStore
from glm_gpu.engine import Engine
from glm_gpu.errors import RequestError
from glm_gpu.model.transformer import cache_layout
from glm_gpu.pages import PagePool
from glm_gpu.scheduler import Scheduler
from glm_gpu.server.settings import ServerSettings
from glm_gpu.session import PREFILL_CHUNK

log = logging.getLogger(__name__)

LOOPBACK_NAMES = frozenset({"127.0.0.1", "localhost", "[::1]"})


@dataclass(frozen=True)
class Limits:
    """What a server takes on.

    Args:
        num_contexts: full contexts that the cache has room for, shared by all sequences.
        max_running, max_queued: requests in passes, and waiting.
        drain_s: how long requests may go on once the server is told to stop.
        keep_bytes: of conversations kept on disk from one run to the next; 0 for none.
    """

    num_contexts: int
    max_running: int
    max_queued: int
    drain_s: float
    keep_bytes: int = 0


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens there."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_exposure(host: str, api_key: str | None) -> None:
    """Refuse to listen where others can reach without asking them for a key.

    Raises:
        RequestError: say how to go on.
    """
    if api_key is not None and (len(api_key) < 8 or not api_key.strip()):
        raise RequestError("--api-key is shorter than 8 characters; take a longer one, as from: openssl rand -hex 16")
    if not is_loopback(host) and api_key is None:
        raise RequestError(
            f"--host {host} can be reached from other machines; give an --api-key too (or GLM_GPU_API_KEY), or leave "
            "--host at 127.0.0.1"
        )


def allowed_hosts(host: str, given: frozenset[str]) -> frozenset[str]:
    """What a Host header may name: loopback's names there; elsewhere all unless some are given."""
    names = frozenset(name.lower() for name in given)
    return names | LOOPBACK_NAMES | {host.lower()} if is_loopback(host) or names else names


def listen(host: str, port: int) -> socket.socket:
    """A socket that clients can connect to.

    Raises:
        RequestError: the address is taken or not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=512)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RequestError(f"cannot listen on {host}:{port}: {reason}; choose another --port or --host") from None


def serve(
    engine: Engine,
    is_kv_bf16: bool,
    listening: socket.socket,
    settings: ServerSettings,
    limits: Limits,
    folder: Path | None,
    on_ready: Callable[[], None],
) -> None:
    """Answer requests until SIGTERM or Ctrl-C; then take no more, let those that run end, and return.

    Args:
        folder: for conversations; None keeps none.

    Raises:
        KeyboardInterrupt: it was Ctrl-C.
    """
    import uvicorn

    from glm_gpu.server.app import create_app
    from glm_gpu.server.connections import Connection

    pool = PagePool(cache_layout(engine.config, is_kv_bf16), limits.num_contexts * engine.context)
    conversations = None
    if folder is not None and limits.keep_bytes:
        conversations = ConversationStore(folder, engine.row_identity, limits.keep_bytes)
    # Each sequence of a pass takes a full context's room on the devices.
    max_running = min(limits.max_running, limits.num_contexts) if engine.devices else limits.max_running
    max_rows = PREFILL_CHUNK - max_running
    make_speculator = None if engine.speculate == "off" else engine.speculator
    scheduler = Scheduler(
        engine.model,
        pool,
        engine.context,
        max_running,
        limits.max_queued,
        max_rows,
        conversations,
        make_speculator,
    )
    scheduler.start()
    app = create_app(engine, scheduler, settings, on_ready)
    config = uvicorn.Config(
        app,
        http=Connection,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=max(1, round(limits.drain_s)),
        # The guard answers before it comes to this; it is for connections that send nothing.
        limit_concurrency=2 * settings.max_connections,
    )
    server = uvicorn.Server(config)
    # What was imported stays: to look through it for garbage again and again holds every thread for 25 to 45 ms.
    gc.collect()
    gc.freeze()
    # Once it has stopped, uvicorn raises the signal again for whoever handled it before: SIGTERM has done its work.
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        server.run(sockets=[listening])
    finally:
        signal.signal(signal.SIGTERM, before)
        scheduler.close()
        if conversations is not None:
            _keep(scheduler, limits.keep_bytes)
        scheduler.tree.clear()
        pool.close()


def _keep(scheduler: Scheduler, max_bytes: int) -> None:
    began = time.perf_counter()
    try:
        num_saved = scheduler.beginnings.keep(max_bytes)
    except OSError as error:
        log.warning("conversations are not kept: %s", error)
        return
    log.info("%d conversations kept in %.1f s", num_saved, time.perf_counter() - began)


class JsonLines(logging.Formatter):
    """One JSON object a line; what is logged as JSON already stays as it is."""

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        if record.name == "glm_gpu.access":
            return message
        entry = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created)),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": message,
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry)
