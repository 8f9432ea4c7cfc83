"""How routes read a request: JSON parsed once, within bounds, with errors in OpenAI's shape; and what they document.

Knows nothing of single routes.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Final

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.types import Receive

from ostinato.server.answers import ErrorAnswer
from ostinato.server.api_errors import ApiError, ClientGoneError
from ostinato.server.service import Service

PROBLEMS: Final[dict[int | str, dict[str, Any]]] = {
    "4XX": {
        "model": ErrorAnswer,
        "description": "The request cannot be served; `param` names the field at fault",
    },
    "5XX": {"model": ErrorAnswer, "description": "The engine is not there, or has failed"},
}
"""Answers of every route beside success."""


class JsonRequest(Request):
    """A request whose body is JSON of bounded depth (pydantic's parser, in Rust) and valid UTF-8."""

    async def json(self) -> Any:
        try:
            return from_json(await self.body(), allow_inf_nan=True)
        except ValueError as error:
            raise ApiError(400, f"the body is not JSON: {error}") from None


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
