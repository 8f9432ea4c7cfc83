"""The engine process's life: start it, hear of its end at once, stop it in order.

    spawn ─▶ running ──exit──▶ told to the owner          stop: Stop command ─▶ a few seconds ─▶ kill

One `EngineProcess` is one life: its sockets lie in a private directory of their own and go with it, so news of a dead
engine never mix with its successor's. Knows nothing of requests. Invariant: no life leaves a process or a file behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from ostinato.config import EngineConfig
from ostinato.server.messages import LAUNCH_REFUSED, Command, Event, Launch, Stop, event_decoder

ENGINE_MODULE = "ostinato.server.engine_process"
"""What an engine process runs; tests have one of their own, with a fault in it."""

STOP_TIMEOUT_S = 10.0
LAST_WORDS_S = 0.2


class EngineProcess:
    """A running engine process. `on_event` is called on the event loop for every event, in order."""

    def __init__(self, on_event: Callable[[Event], None], module: str = ENGINE_MODULE) -> None:
        self._on_event = on_event
        self._module = module
        self._directory = Path(tempfile.mkdtemp(prefix="ostinato-"))  # mode 0700
        self._context = zmq.Context()
        self._commands = self._context.socket(zmq.PUSH)
        self._events = self._context.socket(zmq.PULL)
        self._descriptor = int(self._events.fd)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = event_decoder()
        self._process: asyncio.subprocess.Process | None = None
        self._closed = False

    async def start(self, config: EngineConfig) -> None:
        """Spawn the process and listen to it."""
        addresses = {name: f"ipc://{self._directory}/{name}" for name in ("commands", "events")}
        for socket, name in ((self._commands, "commands"), (self._events, "events")):
            socket.set_hwm(0)
            socket.bind(addresses[name])
        asyncio.get_running_loop().add_reader(self._descriptor, self._receive)
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            self._module,
            stdin=asyncio.subprocess.PIPE,
            stdout=sys.stderr.fileno(),  # our stdout belongs to the access log
            start_new_session=True,  # Ctrl-C reaches the server alone
        )
        assert self._process.stdin is not None
        launch = Launch(dataclasses.asdict(config), addresses["commands"], addresses["events"])
        with contextlib.suppress(ConnectionError):  # it has died already: `wait` will tell
            self._process.stdin.write(msgspec.json.encode(launch) + b"\n")
            await self._process.stdin.drain()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def send(self, command: Command) -> None:
        """Queue a command; it is lost when the process is dead, which `wait` reports."""
        if not self._closed:
            with contextlib.suppress(zmq.Again):  # nobody is connected
                self._commands.send(self._encoder.encode(command), zmq.NOBLOCK)

    async def wait(self) -> int:
        """Its exit status, once it has ended (negative: minus the signal)."""
        assert self._process is not None
        status = await self._process.wait()
        if status == LAUNCH_REFUSED:
            await asyncio.sleep(LAST_WORDS_S)  # it has said why; that may still be on its way
        if not self._closed:
            self._receive()  # its last words may still be in the socket
        return status

    async def stop(self, *, loaded: bool = True) -> None:
        """Ask it to exit, kill it when it does not (or is not `loaded`, so would not hear); returns when it is gone."""
        if self._process is not None and self._process.returncode is None:
            self.send(Stop())
            if not loaded:
                self.kill()
            try:
                await asyncio.wait_for(self._process.wait(), STOP_TIMEOUT_S)
            except TimeoutError:
                self.kill()
                await self._process.wait()
        self.close()

    def kill(self) -> None:
        """Kill it now."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    def close(self) -> None:
        """Give back sockets and files. The process is dead, or dies now: its stdin ends."""
        if self._closed:
            return
        self._closed = True
        asyncio.get_running_loop().remove_reader(self._descriptor)
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
        self._context.destroy(linger=0)
        shutil.rmtree(self._directory, ignore_errors=True)

    def _receive(self) -> None:
        # The descriptor tells of changes only, so everything that is there is read now.
        while not self._closed and int(self._events.get(zmq.EVENTS)) & zmq.POLLIN:
            self._on_event(self._decoder.decode(self._events.recv(zmq.NOBLOCK)))
