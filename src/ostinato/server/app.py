"""The application: routes, error shapes, the background tasks of a server's life.

Knows nothing of sockets or signals (`run.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import traceback
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from ostinato import __version__
from ostinato.config import EngineConfig, ServerConfig
from ostinato.server import routes_generate, routes_info
from ostinato.server.api_errors import ApiError, ClientGoneError, from_validation, mistake
from ostinato.server.dashboard.routes import dashboard_router
from ostinato.server.edge import Edge, ErrorResponse, is_open
from ostinato.server.exposition import Exposition
from ostinato.server.service import Service
from ostinato.server.supervisor import ENGINE_MODULE

_CLIENT_CLOSED = 499
_SAMPLE_S = 1.0


def build_app(
    config: EngineConfig, options: ServerConfig, engine_module: str = ENGINE_MODULE
) -> tuple[ASGIApp, Service]:
    """The whole application, and the service behind it."""
    service = Service(config, options, engine_module)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.start()
        sampler = asyncio.create_task(_sample(service))
        try:
            yield
        finally:
            sampler.cancel()
            await service.stop()

    app = FastAPI(
        title="ostinato",
        summary="OpenAI-compatible API of an LLM engine whose answers repeat exactly.",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    if options.api_keys:
        _tell_of_keys(app)
    app.state.service, app.state.exposition = service, Exposition(service)
    app.include_router(routes_generate.router)
    app.include_router(routes_info.router)
    app.include_router(dashboard_router(service.dashboard))
    _handle_errors(app)
    guarded: ASGIApp = Edge(app, options, service.metrics.http)
    if options.cors_origins:
        guarded = CORSMiddleware(
            guarded,
            allow_origins=list(options.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id"],
        )
    return guarded, service


def _tell_of_keys(app: FastAPI) -> None:
    """Puts into the OpenAPI schema that all but a few paths need a key."""
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        schema = plain()
        schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        for path, methods in schema["paths"].items():
            for operation in methods.values():
                operation["security"] = [] if is_open(path) else [{"key": []}]
        return schema

    app.openapi = openapi  # type: ignore[method-assign]


async def _sample(service: Service) -> None:
    while True:
        await asyncio.sleep(_SAMPLE_S)
        if service.client.stats:
            try:
                service.metrics.recorder.sample(service.client.stats)
            except Exception:  # one bad sample must not end all later ones
                traceback.print_exc()


def _handle_errors(app: FastAPI) -> None:
    """Every error in OpenAI's shape."""
    paths = frozenset(
        getattr(route, "path", "") for route in (*routes_generate.router.routes, *routes_info.router.routes)
    )

    async def problem(_: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return ErrorResponse(error)

    async def invalid(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return ErrorResponse(from_validation(error.errors(), error.body))

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        what = f"{request.method} {request.url.path}"
        hint = "; the API's paths begin with /v1" if f"/v1{request.url.path}" in paths else ""
        allow = (error.headers or {}).get("Allow")
        message = {
            404: f"there is no {what} here{hint}",
            405: f"{what} is not allowed; use {allow}",
        }.get(error.status_code)
        return ErrorResponse(ApiError(error.status_code, message or str(error.detail), allow=allow))

    async def gone(_: Request, __: Exception) -> Response:
        return Response(status_code=_CLIENT_CLOSED)

    async def bug(_: Request, __: Exception) -> Response:
        return ErrorResponse(mistake())

    app.add_exception_handler(ApiError, problem)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(ClientGoneError, gone)
    app.add_exception_handler(Exception, bug)
