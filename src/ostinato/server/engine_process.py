"""The engine's own process: `python -m ostinato.server.engine_process`, started by the server, never by a person.

    stdin: one JSON line (Launch), then silence; its end means that the server is gone
    loop:  take commands ─▶ step ─▶ send the step's news

Knows nothing of HTTP. Invariants: it never outlives the server; commands that came before a step are carried out before
it, so an aborted request's pages are free one step later at most.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields

import msgspec
import torch
import zmq

from ostinato import __version__
from ostinato.config import EngineConfig
from ostinato.engine.engine import Engine
from ostinato.engine.front import open_engine
from ostinato.engine.progress import bars
from ostinato.engine.request import SamplingParams
from ostinato.engine.trace import checkpoint_identity
from ostinato.errors import OstinatoError, ParallelError, RequestError
from ostinato.server.messages import (
    LAUNCH_REFUSED,
    Abort,
    Command,
    Deltas,
    EngineInfo,
    Event,
    Failed,
    Launch,
    Ready,
    Refused,
    Stats,
    Submit,
    command_decoder,
)
from ostinato.text.grammar import StructuredOutputs

Send = Callable[[Event], None]

STATS_INTERVAL_S = 1.0
IDLE_CHECK_MS = 1000
CRASHED = 1
_COMPILED = "inproc://compiled"
_PR_SET_PDEATHSIG = 1


def main(opened: Callable[[Engine], None] | None = None) -> int:
    """Run one engine until told to stop; the exit status. opened: called with it before the first request."""
    _die_with_parent()
    launch = msgspec.json.decode(sys.stdin.buffer.readline(), type=Launch)
    threading.Thread(target=_exit_at_end_of_stdin, daemon=True).start()
    context = zmq.Context()
    commands = context.socket(zmq.PULL)
    events = context.socket(zmq.PUSH)
    for socket, address in ((commands, launch.commands), (events, launch.events)):
        socket.set_hwm(0)
        socket.connect(address)
    encoder = msgspec.msgpack.Encoder()

    def send(event: Event) -> None:
        events.send(encoder.encode(event))

    try:
        engine = _launch(launch, send)
        if engine is None:
            return LAUNCH_REFUSED
        gc.freeze()  # what is here stays; to look through it for garbage holds up a step by some 90 ms
        if opened is not None:
            opened(engine)
        try:
            _Loop(engine, commands, send).run()
        finally:
            engine.close()
        return 0
    except ParallelError as error:  # says which rank, which is more than where this one waited
        print(f"ostinato: {error}", file=sys.stderr, flush=True)
        os._exit(CRASHED)
    except Exception:
        traceback.print_exc()
        os._exit(CRASHED)  # at once: the server tells every client when this process is gone
    finally:
        context.destroy(linger=1000)


def _launch(launch: Launch, send: Send) -> Engine | None:
    """The loaded engine, announced to the server; None when it cannot be launched, which is announced as well."""
    known = {spec.name for spec in fields(EngineConfig)}
    config = EngineConfig(**{name: value for name, value in launch.config.items() if name in known})
    try:
        with bars(shown=config.progress) as report:
            engine = open_engine(config, report)
    except OstinatoError as error:
        send(Failed(str(error)))
        return None
    send(Ready(_info(engine)))
    return engine


def _info(engine: Engine) -> EngineInfo:
    model, limits, stats = engine.model_config, engine.scheduler.limits, engine.stats()
    return EngineInfo(
        directory=str(engine.directory),
        family=model.family.name,
        dtype=str(model.dtype).removeprefix("torch."),
        layers=model.num_layers,
        experts=None if model.moe is None else model.moe.num_experts,
        vocab_size=model.vocab_size,
        context_length=limits.context_length,
        total_tokens=limits.total_tokens,
        page_size=limits.page_size,
        max_running_requests=engine.config.max_running_requests * engine.config.dp_size,
        backend=stats["backend"],
        ops=stats["ops"],
        threads=stats["threads"],
        chat=bool(engine.chat_template),
        fingerprint=_fingerprint(engine, stats["ops"]),
    )


def _fingerprint(engine: Engine, ops: str) -> str:
    """Equal for engines that give the same bits: the same checkpoint, number format, kernels and versions.

    Of a layout only slices of experts bear on bits.
    """
    config, slices = engine.config, engine.world.topology.moe_tp
    kernels = ops, torch.backends.cpu.get_cpu_capability(), config.attention_backend, config.gpu_products
    formats = engine.model_config.dtype, config.quantization
    parts = __version__, torch.__version__, checkpoint_identity(engine.directory), slices, *kernels, *formats
    return "fp_" + hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:12]


class _Loop:
    """Takes commands and steps the engine for as long as there is work; waits, without spinning, when there is none."""

    def __init__(self, engine: Engine, commands: zmq.Socket[bytes], send: Send) -> None:
        self._engine = engine
        self._commands = commands
        self._send = send
        self._decoder = command_decoder()
        self._next_stats = 0.0
        self._stopped = False
        # A rank that fails while nothing is asked of it is heard of before the next request, which another group takes.
        self._patience_ms = IDLE_CHECK_MS if engine.world.topology.tp > 1 else None
        self._compiling: dict[str, Submit] = {}
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="ostinato-grammar")
        self._compiled = commands.context.socket(zmq.PULL)
        self._compiled.bind(_COMPILED)
        self._report = commands.context.socket(zmq.PUSH)  # the compiler's thread only, once connected
        self._report.connect(_COMPILED)

    def run(self) -> None:
        self._send(Stats(self._engine.stats()))
        waiting = zmq.Poller()
        for socket in (self._commands, self._compiled):
            waiting.register(socket, zmq.POLLIN)
        try:
            while not self._stopped:
                if not self._engine.has_work:
                    self._send(Stats(self._engine.stats()))
                    while not waiting.poll(self._patience_ms):
                        self._engine.check()
                self._take_all()
                if self._engine.has_work and not self._stopped:
                    self._step()
        finally:
            self._compiler.shutdown(cancel_futures=True)

    def _take_all(self) -> None:
        while int(self._commands.get(zmq.EVENTS)) & zmq.POLLIN:
            self._carry_out(self._decoder.decode(self._commands.recv()))
        while int(self._compiled.get(zmq.EVENTS)) & zmq.POLLIN:
            ready = self._compiling.pop(self._compiled.recv().decode(), None)
            if ready is not None:  # not aborted meanwhile
                self._submit(ready)

    def _carry_out(self, command: Command) -> None:
        if isinstance(command, Submit):
            try:
                form = SamplingParams(**command.params).form
            except RequestError as error:
                self._send(Refused(command.request_id, str(error)))
                return
            if form is None or self._engine.grammars.known(form):
                self._submit(command)
            else:
                self._compiling[command.request_id] = command
                self._compiler.submit(self._compile, command.request_id, form)
        elif isinstance(command, Abort):
            for request_id in command.request_ids:
                self._compiling.pop(request_id, None)
                self._engine.abort(request_id)
        else:
            self._stopped = True

    def _compile(self, request_id: str, form: StructuredOutputs) -> None:
        """On the compiler's thread, so that no step waits for a grammar. What fails is told by `submit`."""
        try:
            self._engine.grammars.compile(form)
        except Exception as error:
            if not isinstance(error, RequestError):
                traceback.print_exc()
        finally:
            self._report.send(request_id.encode())

    def _submit(self, command: Submit) -> None:
        try:
            self._engine.submit(
                command.prompt_token_ids,
                SamplingParams(**command.params),
                request_id=command.request_id,
                priority=command.priority,
                extra_key=command.extra_key,
            )
        except RequestError as error:
            self._send(Refused(command.request_id, str(error)))
        except ParallelError:
            raise
        except Exception:  # one request that cannot be taken, for whatever reason, ends no other
            traceback.print_exc()
            self._send(
                Refused(command.request_id, "the engine could not take this request; its log tells more")
            )

    def _step(self) -> None:
        try:
            deltas = self._engine.step_deltas()
        except ParallelError:
            raise  # there is no next step
        except Exception:
            # The step's requests have ended with reason "error", and their owners hear of it now. An engine that cannot
            # go on at all raises again, and with it this process ends.
            traceback.print_exc()
            deltas = self._engine.step_deltas()
        if deltas:
            self._send(Deltas(deltas))
        now = time.monotonic()
        if now >= self._next_stats:
            self._next_stats = now + STATS_INTERVAL_S
            self._send(Stats(self._engine.stats()))


def _die_with_parent() -> None:
    """Ask the kernel to kill this process when the server dies, where it can (Linux: prctl(2))."""
    # Ctrl-C, and the SIGTERM that a service manager sends to all of a service's processes, are for the server, which
    # then stops us in order. Ranks inherit it.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _exit_at_end_of_stdin() -> None:
    """The same for every platform: the server holds the other end of our stdin for as long as it lives."""
    while os.read(0, 4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
