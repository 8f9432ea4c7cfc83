"""One request and what became of it: streamed over HTTP, each piece of text stamped when it arrived.

The clock is given, so that tests can turn it themselves. aiohttp, because it takes a third to a half of httpx' CPU time
for each streamed piece, and the generator shares its machine with the server it measures. Invariant: `run` raises
nothing for what a server does; every fault is an outcome with a kind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec

from ostinato.errors import OstinatoError
from ostinato.loadgen.workload import Job

Clock = Callable[[], float]


class TargetError(OstinatoError):
    """The server cannot be measured at all: it is not there, or lists no model."""


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def is_news(self) -> bool:
        """Whether it shows that a token was made: text, or a completion's empty piece before its last."""
        if self.delta is not None:
            return bool(self.delta.content or self.delta.reasoning_content or self.delta.tool_calls)
        return self.text is not None and bool(self.text or self.finish_reason is None)


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    choices: list[_Choice] = msgspec.field(default_factory=list)
    usage: _Usage | None = None
    error: Any = None


class _FailedError(Exception):
    """A request that failed: its kind (few, counted) and the words."""

    def __init__(self, kind: str, words: str) -> None:
        super().__init__(words)
        self.kind = kind


@dataclass(slots=True)
class Outcome:
    """What became of a request. Times are the clock's; `pieces` are those of arrivals of text.

    `start` is when it was due, so that a generator that lags cannot flatter the server. `error` is the kind of a fault,
    `message` its words; the rest is then as far as it got. Token counts are the server's own; without them
    `output_tokens` counts pieces.
    """

    start: float
    end: float = 0.0
    pieces: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None
    message: str = ""


class Client:
    """Sends jobs to one server. Use as `async with`.

    url: the server, with or without `/v1`. key: its API key. timeout: seconds that a request may take in all.
    """

    def __init__(
        self, url: str, *, model: str | None, key: str | None = None, timeout: float = 600.0, clock: Clock
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.model = model
        self._clock = clock
        # Times are those of the server's own pieces, so nothing is to be compressed on the way.
        headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._session = aiohttp.ClientSession(
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=timeout),
            connector=aiohttp.TCPConnector(limit=0),
            auto_decompress=False,
        )
        self._decode = msgspec.json.Decoder(_Event).decode

    async def __aenter__(self) -> Self:
        try:
            if self.model is None:
                self.model = await self._first_model()
        except BaseException:
            await self._session.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def _first_model(self) -> str:
        try:
            async with self._session.get(f"{self.url}/v1/models") as response:
                if response.status != 200:
                    raise TargetError(f"{self.url}/v1/models answered {response.status}; is --api-key right?")
                models = msgspec.json.decode(await response.read())["data"]
                return str(models[0]["id"])
        except (aiohttp.ClientError, TimeoutError, OSError):
            raise TargetError(f"no server answers at {self.url}; start one, or give its address") from None
        except (msgspec.DecodeError, LookupError, TypeError):
            raise TargetError(f"{self.url}/v1/models lists no model; name one with --model") from None

    async def run(self, job: Job, due: float | None = None) -> Outcome:
        """Send one job now; `due` is when it should have been sent, if not now."""
        outcome = Outcome(self._clock() if due is None else due)
        try:
            await self._stream(job, outcome)
        except _FailedError as fault:
            outcome.error, outcome.message = fault.kind, str(fault)
        except TimeoutError:
            outcome.error, outcome.message = "timeout", "the request took longer than --timeout"
        except aiohttp.ClientConnectorError as error:
            outcome.error, outcome.message = "no connection", str(error)
        except (aiohttp.ClientError, OSError) as error:
            outcome.error, outcome.message = "disconnected", str(error) or type(error).__name__
        except asyncio.CancelledError:
            outcome.error, outcome.message = "cancelled", "the generator was stopped"
            raise
        finally:
            outcome.end = self._clock()
        if not outcome.output_tokens:
            outcome.output_tokens = len(outcome.pieces)
        return outcome

    async def _stream(self, job: Job, outcome: Outcome) -> None:
        path = "/v1/chat/completions" if job.chat else "/v1/completions"
        options = {"model": self.model, "stream_options": {"include_usage": True}}
        # Recorded bodies may say that they were not streamed; what is measured here is a stream.
        body: Mapping[str, Any] = options | dict(job.body) | {"stream": True}
        async with self._session.post(self.url + path, json=body) as response:
            if response.status != 200:
                raise _FailedError(f"HTTP {response.status}", _words(await response.read()))
            rest = b""
            async for data in response.content.iter_any():
                now = self._clock()
                *frames, rest = (rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
                for frame in frames:
                    if self._take(frame, now, outcome):
                        return
        raise _FailedError("cut short", "the stream ended without [DONE]")

    def _take(self, frame: bytes, now: float, outcome: Outcome) -> bool:
        """One frame of the stream; whether it was the last one."""
        lines = [line[5:].strip() for line in frame.split(b"\n") if line.startswith(b"data:")]
        if not lines:
            return False  # a comment that keeps the connection open
        data = b"\n".join(lines)
        if data == b"[DONE]":
            return True
        try:
            event = self._decode(data)
        except msgspec.DecodeError as error:
            raise _FailedError("not understood", f"{error}: {data[:200]!r}") from None
        if event.error is not None:
            raise _FailedError("error in the stream", _words(data))
        if any(choice.is_news for choice in event.choices):
            outcome.pieces.append(now)
        if event.usage is not None:
            outcome.prompt_tokens = event.usage.prompt_tokens
            outcome.output_tokens = event.usage.completion_tokens
        return False


def _words(body: bytes) -> str:
    """The message of an error's body."""
    try:
        found = msgspec.json.decode(body)
        return str(found["error"]["message"])
    except (msgspec.DecodeError, LookupError, TypeError):
        return body[:200].decode(errors="replace")
