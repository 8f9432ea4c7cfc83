"""A request's way back: what was put is taken once and in order, failures come after it, closing aborts what runs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ostinato.engine.delta import SequenceDelta
from ostinato.server.api_errors import ApiError, ClientGoneError, engine_down
from ostinato.server.replies import Reply


def delta(name: str, text: str, *, done: bool = False) -> SequenceDelta:
    return SequenceDelta(name, 0, text, [1], "length" if done else None, done)


def stream(*names: str) -> tuple[Reply, list[Reply]]:
    closed: list[Reply] = []
    return Reply(list(names), len(names), closed.append), closed


def test_news_come_once_and_in_order() -> None:
    async def run() -> None:
        one, closed = stream("a", "b")
        one.put(delta("a", "1"))
        one.put(delta("b", "2", done=True))
        one.wake()
        assert [(place, d.text) for place, d in await one.take()] == [(0, "1"), (1, "2")]
        assert not one.ended
        waiting = asyncio.create_task(one.take())
        await asyncio.sleep(0)
        one.put(delta("a", "3", done=True))
        one.wake()
        assert [d.text for _, d in await waiting] == ["3"]
        assert one.ended
        one.close()
        one.close()
        assert closed == [one]
        assert not one.open_ids

    asyncio.run(run())


def test_what_is_not_read_piles_up_and_is_read_together() -> None:
    async def run() -> None:
        one, _ = stream("a")
        for place in range(100):
            one.put(delta("a", str(place), done=place == 99))
            one.wake()
        assert "".join(d.text for _, d in await one.take_all()) == "".join(map(str, range(100)))

    asyncio.run(run())


def test_a_failure_comes_after_the_news_and_is_no_end() -> None:
    """An engine that dies between two news: the stream does not look finished, though nothing more will come."""

    async def run() -> None:
        one, _ = stream("a")
        one.put(delta("a", "1"))
        one.open_ids.clear()
        one.fail(engine_down("gone"))
        assert [d.text for _, d in await one.take()] == ["1"]
        assert not one.ended
        with pytest.raises(ApiError, match="gone"):
            await one.take()

    asyncio.run(run())


def test_a_failure_wakes_who_waits() -> None:
    async def run() -> None:
        one, _ = stream("a")
        waiting = asyncio.create_task(one.take())
        await asyncio.sleep(0)
        one.fail(engine_down("gone"))
        with pytest.raises(ApiError):
            await waiting

    asyncio.run(run())


def test_a_disconnect_is_seen_while_nothing_is_sent() -> None:
    async def run() -> None:
        messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        one, closed = stream("a")
        one.watch(messages.get)
        waiting = asyncio.create_task(one.take())
        messages.put_nowait({"type": "http.request", "body": b"", "more_body": False})
        messages.put_nowait({"type": "http.disconnect"})
        with pytest.raises(ClientGoneError):
            await waiting
        one.close()
        assert closed[0].open_ids == {"a"}

    asyncio.run(run())
