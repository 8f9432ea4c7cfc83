"""Bounds on a request's head hold for every request of a connection."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from ostinato.server import connection
from ostinato.server.connection import BoundedHttp

GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
LIMIT_S = 0.5


@asynccontextmanager
async def connected(app: Any) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to a server of `app`."""
    config = uvicorn.Config(app, http=BoundedHttp, ws="none", lifespan="off", log_config=None)
    config.load()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: BoundedHttp(config, ServerState(), {}), "127.0.0.1", 0)
    async with server:
        yield await asyncio.open_connection(*server.sockets[0].getsockname())


async def answer(scope: Any, receive: Any, send: Any) -> None:
    """Slower than a head may be, so that no limit of the head's bears on the answer."""
    await asyncio.sleep(1.5 * LIMIT_S)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@pytest.mark.parametrize("waiting", [0, 1])
def test_a_request_with_another_in_line_behind_it_learns_that_its_client_has_gone(waiting: int) -> None:
    seen: list[str] = []

    async def long(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        seen.append("asked")
        seen.append((await receive())["type"])

    async def run() -> None:
        async with connected(long) as (_, writer):
            writer.write(GET * (1 + waiting))
            async with asyncio.timeout(20):
                while not seen:
                    await asyncio.sleep(0.01)
                writer.close()
                while len(seen) < 2:
                    await asyncio.sleep(0.01)

    asyncio.run(run())
    assert seen == ["asked", "http.disconnect"]


@pytest.mark.parametrize("answered", [0, 1, 2])
def test_a_head_that_does_not_come_ends_the_connection(
    answered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it is the first of its connection or follows others."""
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", LIMIT_S)

    async def run() -> None:
        async with connected(answer) as (reader, writer):
            for _ in range(answered):
                writer.write(GET)
                assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
            begun = time.monotonic()
            writer.write(GET[:-4])
            async with asyncio.timeout(20):
                assert await reader.read() == b""
            assert time.monotonic() - begun > LIMIT_S / 2
            writer.close()

    asyncio.run(run())
