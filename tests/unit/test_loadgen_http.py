"""The load generator against a server in the same process, both on a loop whose time is set by hand.

Time passes only when everybody waits for it, so that a server that sleeps a quarter of a second makes a time to first
token of a quarter of a second, to the bit.
"""

from __future__ import annotations

import asyncio
import json
import selectors
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from ostinato.loadgen.client import Client, Outcome, TargetError
from ostinato.loadgen.drive import closed_loop, open_loop
from ostinato.loadgen.workload import Job

GRACE_S = 0.001  # real time for a byte to cross the loopback before time is moved on


class _Selector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    """Moves the loop's time on instead of waiting."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        events = super().select(0 if timeout == 0 else GRACE_S)
        if not events and timeout is None:
            return super().select(None)
        if not events and timeout:
            self.now += timeout
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that tells its own time."""

    def __init__(self) -> None:
        self.selector = _Selector()
        super().__init__(self.selector)

    def time(self) -> float:
        return self.selector.now


def virtually(main: Callable[[], Awaitable[Any]]) -> Any:
    async def call() -> Any:
        return await main()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(call())


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def text(piece: str, finish: str | None = None) -> bytes:
    return event(choices=[{"index": 0, "text": piece, "finish_reason": finish}])


def chat(piece: str | None) -> bytes:
    return event(choices=[{"index": 0, "delta": {} if piece is None else {"content": piece}}])


USAGE = event(choices=[], usage={"prompt_tokens": 7, "completion_tokens": 5})
DONE = b"data: [DONE]\n\n"

Script = Sequence[float | bytes | None]
"""What a fake answer does: seconds to wait, bytes to send, None to hang up."""


class FakeServer:
    """Answers each request with the script of its turn, the last one again and again; compressed for who takes that."""

    def __init__(self, *scripts: Script, status: int = 200) -> None:
        self.scripts = scripts
        self.status = status
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.keys: list[str | None] = []
        self.arrivals: list[float] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.arrivals.append(asyncio.get_running_loop().time())
        self.bodies.append(await request.json())
        self.paths.append(request.path)
        self.keys.append(request.headers.get("Authorization"))
        if self.status != 200:
            return web.json_response({"error": {"message": "too many requests"}}, status=self.status)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        response.enable_compression()
        await response.prepare(request)
        for act in self.scripts[min(len(self.bodies), len(self.scripts)) - 1]:
            if act is None:
                assert request.transport is not None
                request.transport.abort()
                return response
            if isinstance(act, bytes):
                await response.write(act)
            else:
                await asyncio.sleep(act)
        return response

    async def models(self, _: web.Request) -> web.Response:
        response = web.json_response({"data": [{"id": "fake"}]})
        response.enable_compression()
        return response

    @asynccontextmanager
    async def running(self, **options: Any) -> AsyncIterator[Client]:
        """The server on a free port, and a client of it."""
        app = web.Application()
        app.router.add_post("/v1/completions", self.answer)
        app.router.add_post("/v1/chat/completions", self.answer)
        app.router.add_get("/v1/models", self.models)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        loop = asyncio.get_running_loop()
        try:
            url = f"http://127.0.0.1:{port}/v1/"
            async with Client(url, model=None, clock=loop.time, **options) as client:
                yield client
        finally:
            await runner.cleanup()


def one(*script: float | bytes | None, job: Job | None = None, status: int = 200, **options: Any) -> Outcome:
    """The outcome of one request to a server that does `script`."""

    async def main() -> Outcome:
        async with FakeServer(script, status=status).running(**options) as client:
            return await client.run(job or Job({"prompt": "x"}))

    outcome: Outcome = virtually(main)
    return outcome


def test_times_are_those_of_the_server() -> None:
    outcome = one(0.25, text("a"), 0.5, text("b"), 1.0, text("c", "stop"), 0.125, USAGE, DONE)
    assert outcome.error is None
    assert [piece - outcome.start for piece in outcome.pieces] == [0.25, 0.75, 1.75]
    assert outcome.end - outcome.start == 1.875
    assert (outcome.prompt_tokens, outcome.output_tokens) == (7, 5)


def test_frames_may_come_in_any_pieces() -> None:
    frames = b": a comment\n\n" + text("a") + text("é").replace(b"\n\n", b"\r\n\r\n") + USAGE + DONE
    whole = one(0.5, frames)
    bytewise = one(*(act for n in range(len(frames)) for act in (frames[n : n + 1], 0.125)))
    for outcome in (whole, bytewise):
        assert outcome.error is None
        assert (len(outcome.pieces), outcome.output_tokens) == (2, 5)
    assert [piece - whole.start for piece in whole.pieces] == [0.5, 0.5]


def test_what_holds_no_text_is_no_piece() -> None:
    opening = event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])
    outcome = one(opening, 1.0, chat("a"), 1.0, chat("b"), chat(None), DONE, job=Job({"messages": []}, True))
    assert [piece - outcome.start for piece in outcome.pieces] == [1.0, 2.0]
    assert outcome.output_tokens == 2, "without the server's count, pieces count"
    outcome = one(1.0, text(""), 1.0, text("é"), text("", "stop"), DONE)
    assert [p - outcome.start for p in outcome.pieces] == [1.0, 2.0], (
        "half a character is a token all the same"
    )


def test_the_body_and_the_key_are_sent() -> None:
    server = FakeServer((text("a"), DONE))

    async def main() -> None:
        async with server.running(key="k") as client:
            await client.run(Job({"prompt": "x", "max_tokens": 3}))
            await client.run(Job({"messages": [], "stream_options": {}, "stream": False}, chat=True))

    virtually(main)
    assert server.paths == ["/v1/completions", "/v1/chat/completions"]
    assert server.keys == ["Bearer k", "Bearer k"]
    streaming = {"model": "fake", "stream": True, "stream_options": {"include_usage": True}}
    assert server.bodies[0] == streaming | {"prompt": "x", "max_tokens": 3}
    assert server.bodies[1]["stream_options"] == {}, "a job's own fields win"
    assert server.bodies[1]["stream"], "but for what is measured: a recorded answer came in one piece"


@pytest.mark.parametrize(
    ("script", "kind", "words"),
    [
        ((text("a"), 1.0, None), "disconnected", ""),
        ((text("a"), 1.0), "cut short", "without [DONE]"),
        ((text("a"), b"data: {nonsense\n\n"), "not understood", "nonsense"),
        (
            (text("a"), event(error={"message": "the engine is lost"}), DONE),
            "error in the stream",
            "engine is lost",
        ),
        ((text("a"), 100.0, DONE), "timeout", "--timeout"),
    ],
)
def test_faults_have_kinds(script: Script, kind: str, words: str) -> None:
    outcome = one(*script, timeout=10.0)
    assert outcome.error == kind
    assert words in outcome.message
    assert len(outcome.pieces) == 1


def test_a_refusal_is_its_status() -> None:
    outcome = one(status=429)
    assert (outcome.error, outcome.message) == ("HTTP 429", "too many requests")


def test_a_server_that_is_gone_is_an_outcome_too() -> None:
    async def main() -> Outcome:
        async with FakeServer((DONE,)).running() as client:
            client.url = "http://127.0.0.1:9"
            return await client.run(Job({"prompt": "x"}))

    assert virtually(main).error == "no connection"


def test_no_server_to_begin_with_is_an_error_of_the_user() -> None:
    async def main() -> None:
        async with Client("http://127.0.0.1:9", model=None, clock=lambda: 0.0):
            pass

    with pytest.raises(TargetError, match="no server answers at"):
        virtually(main)


def test_open_loop_does_not_wait_for_answers() -> None:
    server = FakeServer((8.0, text("a"), DONE))

    async def main() -> list[Outcome]:
        async with server.running() as client:
            clock = asyncio.get_running_loop().time
            moments = [0.5, 1.0, 4.0]
            jobs = [Job({"prompt": str(n)}) for n in range(3)]
            return await open_loop(client, jobs, moments, clock=clock, done=lambda _: None)

    outcomes = virtually(main)
    assert server.arrivals == [0.5, 1.0, 4.0]
    assert [o.start for o in outcomes] == [0.5, 1.0, 4.0]
    assert [o.end for o in outcomes] == [8.5, 9.0, 12.0]


def test_closed_loop_keeps_a_number_in_flight() -> None:
    server = FakeServer((1.0, text("a"), DONE), (3.0, text("a"), DONE), (1.0, text("a"), DONE))
    ended: list[int] = []

    async def main() -> list[Outcome]:
        async with server.running() as client:
            jobs = [Job({"prompt": str(n)}) for n in range(5)]
            return await closed_loop(client, jobs, 2, done=ended.append)

    outcomes = virtually(main)
    assert server.arrivals == [0.0, 0.0, 1.0, 2.0, 3.0]
    assert [o.end for o in outcomes] == [1.0, 2.0, 3.0, 3.0, 4.0]
    assert ended == [1, 2, 3, 4, 5]
