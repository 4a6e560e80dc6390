"""A client of our own server that costs next to nothing: one connection a question, over the standard library."""

import http.client
import json
import time
from collections.abc import Iterator

from glm_gpu.errors import GlmGpuError

Address = tuple[str, int]


class Refused(GlmGpuError):
    """The server has no room for this request; later it may."""


def ask(address: Address, body: dict) -> Iterator[tuple[float, str]]:
    """A completion's pieces of text, each with the time it came; leaving the iteration closes the connection.

    Raises:
        Refused: the server is full.
        GlmGpuError: it failed.
    """
    connection = http.client.HTTPConnection(*address, timeout=600)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps({**body, "stream": True}), headers)
        response = connection.getresponse()
        if response.status != 200:
            said = response.read().decode(errors="replace")
            raise (Refused if response.status in (429, 503) else GlmGpuError)(f"the server answers {said}")
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise GlmGpuError(f"the server failed: {event['error']['message']}")
            yield time.perf_counter(), event["choices"][0]["text"]
    finally:
        connection.close()


def status(address: Address) -> dict:
    """What the server tells of itself."""
    connection = http.client.HTTPConnection(*address, timeout=60)
    try:
        connection.request("GET", "/status")
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()
