"""The dashboard's routes: the page at `/`, its files below `/dashboard/`, and the data it polls.

The page is open to everybody, since a browser cannot send a key with the address it is given; it holds nothing of the
server. The data is for those who have a key: the server guards `/dashboard/data` as it guards its API. Invariant: only
the files in the table are served, whatever name is asked for, and the page may load from this server alone.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from typing import Annotated

import msgspec
from fastapi import APIRouter, HTTPException, Query, Response

from ostinato.server.dashboard.data import DashboardData

_TYPES = (
    (".html", "text/html; charset=utf-8"),
    (".css", "text/css; charset=utf-8"),
    (".js", "text/javascript; charset=utf-8"),
    (".svg", "image/svg+xml"),
)
_HEADERS = (
    (
        "Content-Security-Policy",
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cache-Control", "no-cache"),
)


def page_files() -> dict[str, tuple[bytes, str]]:
    """Content and media type of each of the page's files, by name."""
    found = {}
    for file in files("ostinato.server.dashboard").joinpath("page").iterdir():
        for ending, media_type in _TYPES:
            if file.name.endswith(ending):
                found[file.name] = (file.read_bytes(), media_type)
    return found


def dashboard_router(data: Callable[[int], DashboardData]) -> APIRouter:
    """Routes of the dashboard. `data` answers a poll: `Recorder.data` with the server's state filled in."""
    router = APIRouter(include_in_schema=False)
    page = page_files()
    encoder = msgspec.json.Encoder()

    def answer(name: str) -> Response:
        if name not in page:
            raise HTTPException(404, f"the dashboard has no file {name!r}")
        content, media_type = page[name]
        return Response(content, media_type=media_type, headers=dict(_HEADERS))

    @router.get("/")
    async def index() -> Response:
        return answer("index.html")

    @router.get("/dashboard/data")
    async def poll(after: Annotated[int, Query(ge=0)] = 0) -> Response:
        encoded = encoder.encode(data(after))
        return Response(encoded, media_type="application/json", headers={"Cache-Control": "no-store"})

    @router.get("/dashboard/{name}")
    async def file(name: str) -> Response:
        return answer(name)

    return router
