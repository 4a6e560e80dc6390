"""Connections whose requests never begin: who opens one and dawdles over the headers is cut off."""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

# Any client sends its headers in one piece.
HEADERS_TIMEOUT_S = 15.0


class Connection(H11Protocol):
    """uvicorn's protocol, which by itself waits for headers for ever; then a few hundred connections fill a server."""

    headers_timeout_s = HEADERS_TIMEOUT_S
    _headers_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch(is_waiting=True)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch(is_waiting=self._has_begun_headers())

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # a request may have begun behind the one that was answered
        self._watch(is_waiting=self._has_begun_headers())

    def connection_lost(self, exc: Exception | None) -> None:
        self._watch(is_waiting=False)
        super().connection_lost(exc)

    def _has_begun_headers(self) -> bool:
        """False between requests, when nothing is awaited: the time for kept-alive connections is for that."""
        return self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])

    def _watch(self, is_waiting: bool) -> None:
        if not is_waiting and self._headers_timer is not None:
            self._headers_timer.cancel()
            self._headers_timer = None
        elif is_waiting and self._headers_timer is None:
            self._headers_timer = self.loop.call_later(self.headers_timeout_s, self.transport.close)
