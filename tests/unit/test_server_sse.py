"""A stream tells its end, whatever ends it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from ostinato.engine.delta import SequenceDelta
from ostinato.server.api_errors import engine_down
from ostinato.server.frames import AnswerHead, Frames
from ostinato.server.replies import Reply
from ostinato.server.shapes import ChatShape
from ostinato.server.sse import EventStream


class Faulty:
    """Reads the first piece of an answer and fails on the next."""

    def __init__(self) -> None:
        self._read = False

    def push(self, text: str) -> list[dict[str, Any]]:
        if self._read:
            raise ValueError("a reader's own mistake")
        self._read = True
        return [{"content": text}]

    def finish(self) -> list[dict[str, Any]]:
        return []

    def message(self) -> dict[str, Any]:
        return {}

    def finish_reason(self, reason: str) -> str:
        return reason


@pytest.mark.parametrize(
    ("cause", "status"), [("mistake", "server_error"), ("crash", "service_unavailable_error")]
)
def test_what_goes_wrong_is_the_last_event(
    cause: str, status: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also a mistake of the server's own, which its log tells of; the request is aborted either way."""
    sent: list[dict[str, Any]] = []
    closed: list[Reply] = []
    noted: list[bool] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def run() -> None:
        reply = Reply(["r0"], 1, closed.append)
        shape = ChatShape(None, top_logprobs=None, new_parser=Faulty)  # type: ignore[arg-type]
        frames = Frames(AnswerHead("id", 1, "m", 1, 1, 1), shape)
        first = [(0, SequenceDelta("r0", 0, "a", [1]))]
        if cause == "mistake":
            reply.put(SequenceDelta("r0", 0, "b", [1]))
        else:
            reply.fail(engine_down("gone"))
        end = asyncio.get_running_loop().time() + 10
        await EventStream(reply, frames, first, end, lambda: noted.append(True))({}, None, send)  # type: ignore[arg-type]

    asyncio.run(run())
    events = b"".join(message.get("body", b"") for message in sent).decode().split("\n\n")
    assert events[-1] == ""
    assert json.loads(events[-2].removeprefix("data: "))["error"]["type"] == status
    assert sent[-1]["more_body"] is False
    assert len(closed) == len(noted) == 1
    assert ("a reader's own mistake" in capsys.readouterr().err) == (cause == "mistake")


def test_a_head_that_nobody_takes_ends_at_the_deadline() -> None:
    """As on a connection whose last answer was never read: the request is aborted, and what it held is free."""
    closed: list[Reply] = []

    async def send(message: dict[str, Any]) -> None:
        await asyncio.Event().wait()

    async def run() -> None:
        reply = Reply(["r0"], 1, closed.append)
        shape = ChatShape(None, top_logprobs=None, new_parser=None)
        frames = Frames(AnswerHead("id", 1, "m", 1, 1, 1), shape)
        end = asyncio.get_running_loop().time() + 0.05
        stream = EventStream(reply, frames, [(0, SequenceDelta("r0", 0, "a", [1]))], end, lambda: None)
        async with asyncio.timeout(20):
            await stream({}, None, send)  # type: ignore[arg-type]

    asyncio.run(run())
    assert len(closed) == 1
