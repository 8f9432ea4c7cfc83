"""The outermost layer around every request: its id, key, size and time limits, the access log, the last resort.

Plain ASGI, so that streams pass through untouched. Knows nothing of routes or the engine. Invariants: no byte of a body
beyond the limit is kept, nor more bodies than there is room for; nothing is read from who has no key; a client never
sees a stack trace.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import sys
import time
import traceback
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ostinato.config import ServerConfig
from ostinato.server.api_errors import ApiError, ClientGoneError, mistake, shutting_down

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_EXCHANGE = "ostinato.exchange"
_DISCARD_S = 10.0
_HELD_BODIES = 16
"""Bodies of the largest size that may be in memory at once; smaller ones accordingly more."""
_OPEN_PATHS = ("/", "/health", "/ready", "/version", "/metrics", "/openapi.json")
_CLIENT_CLOSED = 499


@dataclass(slots=True)
class Record:
    """One line of the access log, filled while the request is served."""

    request_id: str
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    finish_reasons: list[str] = field(default_factory=list)
    user: str | None = None


def record_of(scope: Scope) -> Record:
    """The access log's record of a request."""
    return _exchange_of(scope).record


class ErrorResponse(Response):
    """A problem as the answer of a route."""

    def __init__(self, problem: ApiError) -> None:
        super().__init__()
        self._problem = problem

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _exchange_of(scope).refuse(self._problem)


def _exchange_of(scope: Scope) -> _Exchange:
    exchange = scope[_EXCHANGE]
    assert isinstance(exchange, _Exchange)
    return exchange


class Edge:
    """Wraps the application. `counts` gets every answer by (path, status)."""

    def __init__(self, app: ASGIApp, options: ServerConfig, counts: Counter[tuple[str, int]]) -> None:
        self._app = app
        self._keys = [key.encode() for key in options.api_keys]
        self._options = options
        self._limit = options.body_limit
        self._counts = counts
        self._held = 0  # bytes of all bodies in hand
        self._log = options.access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(scope, receive, send, self._release)
        if scope["method"] == "HEAD":  # what GET would answer; uvicorn leaves out the body
            scope = {**scope, "method": "GET"}
        try:
            self._check_key(scope, exchange.headers)
            await self._app(scope, self._bounded(exchange), exchange.send)
        except ClientGoneError:
            exchange.status = exchange.status or _CLIENT_CLOSED
        except ApiError as problem:
            await exchange.refuse(problem)
        except asyncio.CancelledError:
            # The server ends, and the time that it leaves to requests is up; nor is more of a body waited for.
            exchange.body_read = True
            await exchange.refuse(shutting_down())
        except Exception:
            traceback.print_exc()
            await exchange.refuse(mistake())
        finally:
            self._release(exchange)
            self._note(scope, exchange)

    def _check_key(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        """Raises ApiError 401 unless the path is open or the key is right. Takes the same time for every wrong key."""
        path = scope["path"]
        if not self._keys or is_open(path) or scope["method"] == "OPTIONS":
            return
        kind, _, given = headers.get(b"authorization", b"").partition(b" ")
        right = [hmac.compare_digest(given.strip(), key) for key in self._keys]
        if kind.lower() != b"bearer" or not any(right):
            raise ApiError(
                401,
                "the API key is missing or wrong; send it as Authorization: Bearer KEY",
                code="invalid_api_key",
            )

    def _bounded(self, exchange: _Exchange) -> Receive:
        """The request's channel; raises ApiError when the body is too large, or late, or all bodies are too much."""
        end = time.monotonic() + self._options.body_timeout

        async def receive() -> Message:
            if exchange.body_read:
                return await exchange.receive()
            if int(exchange.headers.get(b"content-length", b"0") or 0) > self._limit:
                raise self._too_large()
            try:
                async with asyncio.timeout(max(end - time.monotonic(), 0.0)):
                    message = await exchange.receive()
            except TimeoutError:
                raise ApiError(408, "the body did not arrive in time; send it at once") from None
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            size = len(message.get("body", b""))
            exchange.body_bytes += size
            self._held += size
            if exchange.body_bytes > self._limit:
                raise self._too_large()
            if self._held > _HELD_BODIES * self._limit:
                raise ApiError(429, "too many large requests at once; try again in a moment", retry_after=1)
            exchange.body_read = not message.get("more_body", False)
            return message

        return receive

    def _release(self, exchange: _Exchange) -> None:
        """Nobody needs the request's body any more."""
        self._held -= exchange.body_bytes
        exchange.body_bytes = 0

    def _too_large(self) -> ApiError:
        return ApiError(
            413, f"the body is over {self._limit} bytes; send a shorter one", code="body_too_large"
        )

    def _note(self, scope: Scope, exchange: _Exchange) -> None:
        route = scope.get("route")
        path = getattr(route, "path", None) or "other"
        self._counts[path, exchange.status] += 1
        polled = path == "/dashboard/data" and exchange.status == 200  # by every open page, each second
        if self._log and not polled:
            try:
                sys.stdout.write(exchange.line() + "\n")
                sys.stdout.flush()
            except OSError:  # whoever read the log has gone; requests are served all the same
                self._log = False


def is_open(path: str) -> bool:
    """Whether a path needs no key: what tells of the server's health, and the files of its page."""
    return path in _OPEN_PATHS or (path.startswith("/dashboard/") and path != "/dashboard/data")


class _Exchange:
    """One request and its answer: what was sent so far, and the record for the log."""

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, release: Callable[[_Exchange], None]
    ) -> None:
        self.scope = scope
        self.receive = receive
        self.headers = dict(scope["headers"])
        self.status = 0
        self.body_read = False
        self.body_bytes = 0
        self._send = send
        self._release = release
        self._started = time.perf_counter()
        given = self.headers.get(b"x-request-id", b"").decode("latin-1")
        self.record = Record(given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex)
        scope[_EXCHANGE] = self

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message["headers"], (b"x-request-id", self.record.request_id.encode())]
        await self._send(message)

    async def refuse(self, problem: ApiError) -> None:
        """Answer with a problem, unless an answer has begun. A body that was not read is read off and dropped."""
        self._release(self)
        if self.status:
            return
        headers = problem.headers()
        has_body = self.headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in self.headers
        self.body_read |= not has_body
        if not self.body_read:
            headers.append((b"connection", b"close"))
        await self.send({"type": "http.response.start", "status": problem.status, "headers": headers})
        await self._send({"type": "http.response.body", "body": problem.body(), "more_body": True})
        # A client that is still sending would miss the answer if the connection were closed under it.
        await self._discard_body()
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _discard_body(self) -> None:
        try:
            async with asyncio.timeout(_DISCARD_S):
                while not self.body_read:
                    message = await self.receive()
                    self.body_read = message["type"] == "http.disconnect" or not message.get(
                        "more_body", False
                    )
        except TimeoutError:
            pass

    def line(self) -> str:
        """The access log's line: JSON."""
        record, client = self.record, self.scope.get("client")
        value: dict[str, Any] = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "event": "request",
            "request_id": record.request_id,
            "client": client[0] if client else None,
            "method": self.scope["method"],
            "path": self.scope["path"],
            "status": self.status,
            "duration_ms": round((time.perf_counter() - self._started) * 1000, 3),
        }
        if record.prompt_tokens is not None:
            value |= {"prompt_tokens": record.prompt_tokens, "completion_tokens": record.completion_tokens}
            value["finish_reasons"] = record.finish_reasons
        if record.user is not None:
            value["user"] = record.user
        return msgspec.json.encode(value).decode()
