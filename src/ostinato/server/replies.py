"""One HTTP request's way back: news of its sequences, put by the engine's receiver, taken by the request's handler.

Lives on the event loop, without locks. Knows nothing of HTTP but that a client may be gone. Invariants: `put` never
waits, so a slow reader holds up nobody; what waits to be read is bounded by what the request may generate at all; a
reply that is closed before its end is aborted, one that has ended is not.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from ostinato.engine.delta import SequenceDelta
from ostinato.server.api_errors import ClientGoneError

Receive = Callable[[], Any]


class Reply:
    """News of one or more engine requests (`request_ids`: one for each prompt) of one HTTP request.

    `take` waits for news and returns all there are, as (prompt index, delta). Raises what `fail` was given.
    """

    def __init__(self, request_ids: list[str], num_sequences: int, on_close: Callable[[Reply], None]) -> None:
        self.request_ids = request_ids
        self.num_sequences = num_sequences
        self.open_ids = set(request_ids)
        self.num_ended = 0  # sequences that came to their own end
        self.created = time.time()
        self.started = time.perf_counter()
        self.last_news: dict[tuple[str, int], float] = {}
        self._places = {name: place for place, name in enumerate(request_ids)}
        self._pending: list[tuple[int, SequenceDelta]] = []
        self._failure: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._on_close = on_close
        self._closed = False

    @property
    def ended(self) -> bool:
        """Whether it came to its own end and all news were taken. One that has failed does not: `take` raises."""
        return not self.open_ids and not self._pending and self._failure is None

    def put(self, delta: SequenceDelta) -> None:
        """Add news; `wake` tells the reader."""
        self._pending.append((self._places[delta.request_id], delta))
        self.num_ended += delta.finish_reason is not None
        if delta.done:
            self.open_ids.discard(delta.request_id)

    def fail(self, error: BaseException) -> None:
        """End the reply with an error, which comes after the news that are already here."""
        if self._failure is None:
            self._failure = error
        self.wake()

    def wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def take(self) -> list[tuple[int, SequenceDelta]]:
        """All news since the last call, at least one."""
        while not self._pending:
            if self._failure is not None:
                raise self._failure
            assert self.open_ids, "nothing will come any more"
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        news, self._pending = self._pending, []
        return news

    async def take_all(self) -> list[tuple[int, SequenceDelta]]:
        """All news to the end."""
        news: list[tuple[int, SequenceDelta]] = []
        while not self.ended:
            news += await self.take()
        return news

    def watch(self, receive: Receive) -> None:
        """End the reply when the client disconnects. `receive` is the ASGI channel, its body read already."""
        self._watcher = asyncio.create_task(self._wait_for_disconnect(receive))

    async def _wait_for_disconnect(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._pending.clear()
        self.fail(ClientGoneError())

    def close(self) -> None:
        """The handler has finished with it; aborts what still runs. May be called again."""
        if self._closed:
            return
        self._closed = True
        if self._watcher is not None:
            self._watcher.cancel()
        self._on_close(self)
