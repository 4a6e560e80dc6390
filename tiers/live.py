"""What an engine is doing now, for other processes: a small file in the state folder, replaced whole.

One file for each engine, `live/PID.json`: a JSON object with `version`, `pid`, `started` (what tells this process from
a later one of the same number), `at` (seconds since 1970) and what `snapshot` gave.
"""

import json
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from glm_gpu.errors import CheckpointError
from glm_gpu.json_file import parse_json_object
from glm_gpu.machine import process_start
from glm_gpu.state import replace_file

log = logging.getLogger(__name__)

LIVE_VERSION = 1
# Twice a second is as fast as one reads; a snapshot of GLM-5.2 takes 3 ms.
INTERVAL_S = 0.5
_MAX_BYTES = 1 << 22
_STALE_S = 60.0


class StatusPublisher:
    """Publishes an engine's state while it runs; a context manager. Never fails, and never slows a pass by a lock.

    Args:
        folder: the state folder, or None for nowhere.
        snapshot: the state as a JSON object; called on a thread of this object's own.
    """

    def __init__(self, folder: Path | None, snapshot: Callable[[], dict]) -> None:
        self._path = None if folder is None else folder / "live" / f"{os.getpid()}.json"
        self._snapshot = snapshot
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="glm-gpu-status", daemon=True)

    def __enter__(self) -> "StatusPublisher":
        if self._path is not None:
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        if self._path is not None:
            self._thread.join()
            try:
                self._path.unlink(missing_ok=True)
            except OSError:
                log.debug("%s: not removed", self._path, exc_info=True)

    def _run(self) -> None:
        head = {"version": LIVE_VERSION, "pid": os.getpid(), "started": process_start(os.getpid())}
        while True:
            document = head | {"at": time.time()} | self._snapshot()
            try:
                replace_file(self._path, json.dumps(document).encode(), is_synced=False)
            except OSError as error:
                log.warning("%s: status is not published (%s)", self._path, error.strerror)
                return
            if self._stop.wait(INTERVAL_S):
                return


def live_engines(folder: Path | None, fingerprint: str | None = None) -> list[dict]:
    """What running engines published last, the newest first; of one model if its fingerprint is given.

    Files of processes that are gone are removed once they are a minute old; younger ones may be those of a container
    that shares the folder and not the process numbers.
    """
    if folder is None:
        return []
    found = []
    for path in sorted((folder / "live").glob("*.json")):
        document = _read(path)
        if document is None:
            continue
        if not _is_running(document):
            if time.time() - document["at"] > _STALE_S:
                _remove(path)
        elif fingerprint in (None, document.get("fingerprint")):
            found.append(document)
    return sorted(found, key=lambda document: -document["at"])


def _read(path: Path) -> dict | None:
    try:
        with path.open("rb") as file:
            document = parse_json_object(file.read(_MAX_BYTES), str(path))
    except (OSError, CheckpointError):
        return None
    is_known = document.get("version") == LIVE_VERSION and type(document.get("pid")) is int and document["pid"] > 0
    at = document.get("at")
    return document if is_known and type(at) in (int, float) and 0 <= at < 1e12 else None


def _is_running(document: dict) -> bool:
    return process_start(document["pid"]) == document.get("started") is not None


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        log.debug("%s: not removed", path, exc_info=True)
