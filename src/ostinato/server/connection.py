"""Connections with bounds on a request's head, which uvicorn leaves open: its size, and the time until it is there.

Knows nothing of what is asked. Invariant: before a head is complete, a client costs one connection, at most
`MAX_HEAD_BYTES` and one read of memory, for at most `HEAD_TIMEOUT_S`.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MAX_HEAD_BYTES = 64 * 1024
HEAD_TIMEOUT_S = 60.0


class BoundedHttp(HttpToolsProtocol):
    """uvicorn's protocol; a head that is too long is answered 400, one that does not come closes the connection."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._head_bytes = 0
        self._in_head = True
        self._head_timer: asyncio.TimerHandle | None = None
        self._answered: RequestResponseCycle | None = None  # the request that is being answered

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = (
                True  # uvicorn tells the latest request alone, which may wait behind this one
            )
            self._answered.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The head of the request is over {MAX_HEAD_BYTES} bytes.")

    def on_message_begin(self) -> None:
        self._in_head = True
        self._head_bytes = 0
        self._start_timer()  # a connection that has had an answer may send the next head as slowly as a new one
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_timer()
        super().on_headers_complete()
        if not self.pipeline:
            self._answered = self.cycle
        elif len(self.pipeline) == 1:
            self.flow.resume_reading()  # else nobody would see that the client has gone
        # A client with two requests in line is not read until the first is answered.

    def on_response_complete(self) -> None:
        following = self.pipeline[-1][0] if self.pipeline else None
        super().on_response_complete()
        if following is not None:
            self._answered = following

    def _start_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
