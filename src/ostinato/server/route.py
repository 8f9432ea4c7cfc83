"""How routes read a request: JSON parsed once, within bounds, with errors in OpenAI's shape; and what they document.

Knows nothing of single routes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import ValidationError
from pydantic_core import from_json
from starlette.types import Receive

from ostinato.server.answers import ErrorAnswer
from ostinato.server.api_errors import ApiError, ClientGoneError
from ostinato.server.protocol import ChatMessage
from ostinato.server.service import Service

PROBLEMS: Final[dict[int | str, dict[str, Any]]] = {
    "4XX": {
        "model": ErrorAnswer,
        "description": "The request cannot be served; `param` names the field at fault",
    },
    "5XX": {"model": ErrorAnswer, "description": "The engine is not there, or has failed"},
}
"""Answers of every route beside success."""

_LARGE = 1 << 16
"""Bytes from which on a body is read on a thread of its own."""


class JsonRequest(Request):
    """A request whose body is JSON of bounded depth (pydantic's parser, in Rust) and valid UTF-8."""

    async def json(self) -> Any:
        body = await self.body()
        return _parsed(body) if len(body) < _LARGE else await asyncio.to_thread(_prepared, body)


def _parsed(body: bytes) -> Any:
    try:
        return from_json(body, allow_inf_nan=True)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None


def _prepared(body: bytes) -> Any:
    """What a body says, with the messages of a conversation checked one by one: other threads run between two of them,
    while a check of the whole body lets none run. A bad message stays as it is, to be refused with its place.
    """
    value = _parsed(body)
    messages = value.get("messages") if isinstance(value, dict) else None
    if isinstance(messages, list):
        for i, message in enumerate(messages):
            try:
                messages[i] = ChatMessage.model_validate(message)
            except ValidationError:
                break
    return value


class JsonRoute(APIRoute):
    """A route that reads its body as `JsonRequest` does."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            receive: Receive = request.receive
            try:
                return await handler(JsonRequest(request.scope, receive))
            except Exception as error:
                cause = error.__cause__
                if isinstance(
                    cause, ApiError | ClientGoneError
                ):  # the framework has wrapped what reading has raised
                    raise cause from None
                raise

        return handle


def service_of(request: Request) -> Service:
    """The server that a request has come to."""
    service = request.app.state.service
    assert isinstance(service, Service)
    return service
