"""Sending an answer while it is generated: server-sent events straight onto the ASGI channel.

One write for each step and stream: what has come since the last write goes out joined, so a slow reader gets larger
pieces and costs less. Knows nothing of what is in a frame. Invariant: however sending ends, the stream is closed, so
the request is aborted if it still runs.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ostinato.server.api_errors import ApiError, ClientGoneError, mistake, shutting_down
from ostinato.server.frames import Frames, News, error_frame
from ostinato.server.replies import Reply

_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class EventStream(Response):
    """A response that goes on from the `first` news of a stream to its end, or to its deadline (loop time)."""

    media_type = "text/event-stream"

    def __init__(
        self, reply: Reply, frames: Frames, first: News, deadline: float, on_end: Callable[[], None]
    ) -> None:
        super().__init__()
        self._reply = reply
        self._frames = frames
        self._first = first
        self._deadline = deadline
        self._on_end = on_end
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write(data: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        try:
            async with asyncio.timeout_at(self._deadline):
                # Sent within the deadline: a connection whose last answer nobody reads does not take it.
                await send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
                self._started = True
                await self._run(write)
        except ClientGoneError:
            pass
        except TimeoutError:
            await self._fail(write, timed_out())
        except ApiError as problem:
            await self._fail(write, problem)
        except asyncio.CancelledError:  # the server ends, and the time that it leaves to requests is up
            await self._fail(write, shutting_down())
            raise
        except Exception:
            traceback.print_exc()
            await self._fail(write, mistake())
        finally:
            self._on_end()
            self._reply.close()

    async def _run(self, write: Callable[..., Any]) -> None:
        reply, frames = self._reply, self._frames
        news = self._first
        while True:
            data = frames.stream(news)
            if reply.ended:
                await write(data + frames.tail(), more=False)
                return
            if data:
                await write(data)
            news = await reply.take()

    async def _fail(self, write: Callable[..., Any], problem: ApiError) -> None:
        """Tell the client, if it reads; one that does not gets its connection closed when it drains or gives up."""
        self._reply.close()
        if self._started:
            with suppress(TimeoutError, ClientGoneError):
                async with asyncio.timeout(5.0):
                    await write(error_frame(problem), more=False)


def timed_out() -> ApiError:
    return ApiError(
        504, "the request took longer than the server allows; ask for less at once", code="deadline_exceeded"
    )
