"""The server's side of the engine: takes requests, hands out news, and keeps an engine process running.

    submit ─▶ Submit ═▶ engine process ═▶ Deltas ─▶ each request's Reply
    crash ─▶ every Reply fails ─▶ restart

Lives on the event loop. Knows nothing of HTTP, text or models. Invariants: a bounded number of sequences is in flight;
when a process ends, every reply that waits on it ends within that turn of the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import fields
from enum import Enum
from itertools import count
from typing import Any

from ostinato.config import EngineConfig, ServerConfig
from ostinato.engine.delta import SequenceDelta
from ostinato.engine.request import SamplingParams
from ostinato.errors import OstinatoError
from ostinato.server.api_errors import ApiError, bad_field, engine_down
from ostinato.server.messages import Abort, Deltas, EngineInfo, Event, Failed, Ready, Refused, Stats, Submit
from ostinato.server.metrics import Metrics
from ostinato.server.replies import Reply
from ostinato.server.supervisor import ENGINE_MODULE, EngineProcess

STEADY_S = 60.0
"""An engine that has served so long starts a new count of restarts in a row."""


class EngineState(Enum):
    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    DOWN = "down"


class EngineClient:
    """Requests in, replies out. `failure` is set, and `over` with it, when the engine is given up."""

    def __init__(
        self,
        config: EngineConfig,
        options: ServerConfig,
        metrics: Metrics,
        engine_module: str = ENGINE_MODULE,
    ) -> None:
        self.state = EngineState.STARTING
        self.info: EngineInfo | None = None
        self.stats: dict[str, Any] = {}
        self.failure: str | None = None
        self.over = asyncio.Event()
        self.restarts = 0
        self.in_flight = 0
        self._config = config
        self._options = options
        self._metrics = metrics
        self._module = engine_module
        self._replies: dict[str, Reply] = {}
        self._names = count()
        self._process: EngineProcess | None = None
        self._engine_started = 0.0
        self._task: asyncio.Task[None] | None = None
        self._readying: asyncio.Task[None] | None = None
        self._on_ready: Callable[[EngineInfo], Awaitable[None]] | None = None

    @property
    def engine_pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    # ---- life ----

    def start(self, on_ready: Callable[[EngineInfo], Awaitable[None]]) -> None:
        """Start the engine and keep it running; each that has loaded serves once `on_ready` has returned."""
        self._on_ready = on_ready
        self._task = asyncio.create_task(self._keep_running())

    async def stop(self) -> None:
        """End the engine; replies that are still open fail."""
        loaded = self.state is EngineState.READY
        self.state = EngineState.STOPPING
        if self._process is not None:
            await self._process.stop(loaded=loaded)
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._fail_all("the server is shutting down")

    async def _keep_running(self) -> None:
        try:
            await self._run_engines()
        except Exception as error:  # whatever it is, nobody may wait for an engine that nobody runs
            self.failure = f"the engine process cannot be run: {error}"
            self._give_up()

    def _give_up(self) -> None:
        self.state = EngineState.DOWN
        self._fail_all("the engine is down")
        self.over.set()

    async def _run_engines(self) -> None:
        in_a_row = 0
        while True:
            self._engine_started = started = time.monotonic()
            self._process = process = EngineProcess(self._on_event, self._module)
            await process.start(self._config)
            status = await process.wait()
            process.close()
            if self.state is EngineState.STOPPING:
                return
            ready, self.state = self.state is EngineState.READY, EngineState.STARTING
            self._fail_all("the engine has crashed; try again in a moment")
            self.stats = without_work(self.stats)
            in_a_row = 0 if ready and time.monotonic() - started > STEADY_S else in_a_row
            if self.failure is None and in_a_row >= self._options.max_restarts:
                self.failure = (
                    f"the engine process ended with status {status} after {in_a_row} restarts in a row"
                )
            if self.failure is not None:
                self._give_up()
                return
            in_a_row += 1
            self.restarts += 1
            print(
                f"ostinato: the engine process ended with status {status}; starting it again", file=sys.stderr
            )

    # ---- requests ----

    def submit(
        self,
        prompts: Sequence[list[int]],
        params: Sequence[SamplingParams],
        *,
        priority: int = 0,
        extra_key: str = "",
    ) -> Reply:
        """Send prompts to the engine. Raises ApiError: 503 without an engine, 429 when too many are in flight."""
        self.check_ready()
        wanted = sum(p.n for p in params)
        assert self.info is not None
        capacity = self.info.max_running_requests + self._options.max_queued_requests
        if wanted > capacity:
            raise bad_field(
                "n", f"{wanted} completions are asked for at once, the server holds {capacity}; lower n"
            )
        if self.in_flight + wanted > capacity:
            raise ApiError(
                429,
                f"{self.in_flight} completions are in flight of at most {capacity}; try again",
                retry_after=1,
            )
        assert self._process is not None
        names = [f"r{next(self._names)}" for _ in prompts]
        reply = Reply(names, wanted, self._close)
        self.in_flight += wanted
        for name, prompt, one in zip(names, prompts, params, strict=True):
            self._replies[name] = reply
            self._process.send(Submit(name, prompt, given_params(one), priority, extra_key))
        self._metrics.prompt_tokens += sum(len(prompt) for prompt in prompts)
        return reply

    def check_ready(self) -> None:
        """Raises ApiError 503 unless requests can be served now."""
        if self.state is EngineState.READY:
            return
        why = {
            EngineState.STARTING: "the engine is being loaded; try again in a moment",
            EngineState.STOPPING: "the server is shutting down",
            EngineState.DOWN: "the engine is down",
        }[self.state]
        raise engine_down(why)

    def _close(self, reply: Reply) -> None:
        self.in_flight -= reply.num_sequences
        if reply.open_ids:
            if self._process is not None:
                self._process.send(Abort(sorted(reply.open_ids)))
            self._metrics.finished("abort", reply.num_sequences - reply.num_ended)
        for name in reply.request_ids:
            self._replies.pop(name, None)

    def _fail_all(self, why: str) -> None:
        for reply in set(self._replies.values()):
            reply.open_ids.clear()  # there is nobody to abort them
            reply.fail(engine_down(why))
        self._replies.clear()

    # ---- events ----

    def _on_event(self, event: Event) -> None:
        if isinstance(event, Deltas):
            self._hand_out(event.items)
        elif isinstance(event, Stats):
            self.stats = event.values
        elif isinstance(event, Ready):
            self._readying = asyncio.create_task(self._become_ready(event.info, self._process))
        elif isinstance(event, Refused):
            reply = self._replies.pop(event.request_id, None)
            if reply is not None:
                reply.open_ids.discard(event.request_id)
                form = event.message.startswith("structured_outputs")
                reply.fail(bad_field("structured_outputs" if form else None, event.message))
        elif isinstance(event, Failed):
            self.failure = event.message

    async def _become_ready(self, info: EngineInfo, process: EngineProcess | None) -> None:
        """`process` has loaded. It may be dead by now: the news may be its last words."""
        try:
            if self._on_ready is not None:
                await self._on_ready(info)
        except OstinatoError as error:
            self.failure = str(error)
            if process is not None:
                process.kill()
            return
        if self._process is process and self.state is EngineState.STARTING:
            self.info, self.state = info, EngineState.READY
            seconds = time.monotonic() - self._engine_started
            print(f"ostinato: ready to answer, {seconds:.1f} s after the engine's start", file=sys.stderr)

    def _hand_out(self, deltas: list[SequenceDelta]) -> None:
        touched: dict[Reply, None] = {}
        now = time.perf_counter()
        for delta in deltas:
            reply = self._replies.get(delta.request_id)
            if reply is None:
                continue  # closed: what was under way has nobody
            reply.put(delta)
            touched[reply] = None
            self._metrics.observe(reply, delta, now)
            if delta.done:
                del self._replies[delta.request_id]
        for reply in touched:
            reply.wake()


def without_work(stats: dict[str, Any]) -> dict[str, Any]:
    """Statistics of an engine that has died: its counts stay until the next one reports, but nothing runs in it."""
    if "scheduler" not in stats:
        return stats
    nothing = dict.fromkeys(("running", "waiting", "kv_pages_used", "kv_pages_cached"), 0)
    return {**stats, "scheduler": {**stats["scheduler"], **nothing}}


def given_params(params: SamplingParams) -> dict[str, Any]:
    """Fields of sampling parameters that differ from the defaults: what has to be sent."""
    values = ((spec.name, getattr(params, spec.name), spec.default) for spec in fields(SamplingParams))
    return {name: value for name, value, default in values if value != default}
