"""The engine process's loop, over a fake engine: commands before steps, errors told, nothing but a stop ends it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import msgspec
import pytest
import zmq

from ostinato.engine.delta import SequenceDelta
from ostinato.engine.engine import Engine
from ostinato.engine.request import SamplingParams
from ostinato.errors import ParallelError, RequestError
from ostinato.parallel.rendezvous import single_world
from ostinato.server.engine_process import _Loop
from ostinato.server.messages import Abort, Command, Deltas, Event, Refused, Stats, Stop, Submit


class FakeEngine:
    """Every step gives each live request one token. `script` holds what happens in each step, in order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.live: list[str] = []
        self.script: list[Any] = []
        self.world = single_world()

    @property
    def has_work(self) -> bool:
        return bool(self.live)

    def submit(self, prompt: list[int], params: SamplingParams, *, request_id: str, **_: Any) -> None:
        if not prompt:
            raise RequestError("the prompt has no tokens; give at least one")
        self.log.append(f"submit {request_id} {params.max_tokens}")
        self.live.append(request_id)

    def abort(self, request_id: str) -> None:
        self.log.append(f"abort {request_id}")
        if request_id in self.live:
            self.live.remove(request_id)

    def step_deltas(self) -> list[SequenceDelta]:
        self.log.append("step")
        if self.script:
            self.script.pop(0)()
        return [SequenceDelta(name, 0, "x", [1]) for name in self.live]

    def stats(self) -> dict[str, Any]:
        return {"live": len(self.live)}


class Bench:
    """The loop between a socket that the test writes to and a list of what it has sent."""

    def __init__(self, context: zmq.Context[Any]) -> None:
        self.engine = FakeEngine()
        self.sent: list[Event] = []
        self.writer = context.socket(zmq.PUSH)
        reader = context.socket(zmq.PULL)
        reader.bind("inproc://commands")
        self.writer.connect("inproc://commands")
        self.loop = _Loop(cast("Engine", self.engine), reader, self.sent.append)

    def tell(self, *commands: Command) -> None:
        for command in commands:
            self.writer.send(msgspec.msgpack.encode(command))

    def of(self, kind: type[Event]) -> list[Any]:
        return [event for event in self.sent if isinstance(event, kind)]


@pytest.fixture
def bench() -> Iterator[Bench]:
    context = zmq.Context()
    try:
        yield Bench(context)
    finally:
        # Also when a bench cannot be made: a context that is collected with open sockets waits for them for ever.
        context.destroy(linger=0)


def test_an_abort_is_carried_out_before_the_next_step(bench: Bench) -> None:
    bench.engine.script = [lambda: None, lambda: bench.tell(Abort(["a", "gone"]), Stop())]
    bench.tell(Submit("a", [1, 2], {"max_tokens": 5}))
    bench.loop.run()
    assert bench.engine.log == ["submit a 5", "step", "step", "abort a", "abort gone"]
    assert [len(event.items) for event in bench.of(Deltas)] == [1, 1]


def test_one_message_holds_a_step(bench: Bench) -> None:
    bench.engine.script = [lambda: bench.tell(Stop())]
    bench.tell(*(Submit(str(i), [1], {}) for i in range(50)))
    bench.loop.run()
    assert bench.engine.log[-1] == "step"
    assert [len(event.items) for event in bench.of(Deltas)] == [50]


def test_a_refused_request_is_told_and_nothing_else_happens(bench: Bench) -> None:
    bench.tell(Submit("a", [], {}), Submit("b", [1], {"temperature": -1.0}), Stop())
    bench.loop.run()
    refused = bench.of(Refused)
    assert [event.request_id for event in refused] == ["a", "b"]
    assert "temperature" in refused[1].message
    assert bench.engine.log == []


def fail(error: Exception) -> None:
    raise error


def test_a_step_that_fails_is_not_the_end(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.engine.script = [lambda: fail(ValueError("a bad step")), lambda: bench.tell(Stop())]
    bench.tell(Submit("a", [1], {}))
    bench.loop.run()
    assert "a bad step" in capsys.readouterr().err
    assert len(bench.of(Deltas)) == 1


@pytest.mark.filterwarnings("ignore")
def test_an_engine_that_cannot_go_on_ends_the_loop(bench: Bench) -> None:
    bench.engine.script = [lambda: fail(ParallelError("rank 1 has died"))]
    bench.tell(Submit("a", [1], {}))
    with pytest.raises(ParallelError, match="rank 1 has died"):
        bench.loop.run()


def test_an_idle_engine_tells_its_state_and_waits(bench: Bench) -> None:
    bench.tell(Stop())
    bench.loop.run()
    assert bench.engine.log == []
    assert [event.values for event in bench.of(Stats)] == [{"live": 0}, {"live": 0}]
