"""Breakable graphs over any backend: segments and eager ops in turn, live rows, strong references, errors.

Each test runs over the tape and over a backend that behaves as CUDA graphs do: a capture computes nothing, and memory
that no tensor holds any more is given to others.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from ostinato.errors import CaptureError
from ostinato.graphs import (
    BreakableBackend,
    EagerBackend,
    GraphBufferRegistry,
    GraphRunner,
    GraphSlot,
    LiveStep,
    PaddingPolicy,
    Stream,
    TapeBackend,
    Workspace,
    breakable,
)
from ostinato.graphs.backends import CountingStream
from ostinato.padding import Buckets, ShapeRules, StepMode, decide_shape

RULES = ShapeRules(Buckets(()), Buckets((4, 8)), max_pad_factor=100)


class FakeStream(CountingStream):
    """Notes launches instead of running them."""

    capturing = True

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def launch(self, kernel: Any, /, *args: Any) -> None:
        self.names.append(kernel.__name__)
        self.calls.append((kernel, args))


class FakeRecording:
    def __init__(self, backend: FakeDevice) -> None:
        assert not backend.open, "one capture at a time"
        backend.open = True
        self.backend, self.stream = backend, FakeStream()

    def end(self) -> Any:
        self.backend.open = False
        self.backend.ended += 1
        return FakeGraph(self.stream)

    def abort(self) -> None:
        self.backend.open = False


class FakeGraph:
    outputs = None

    def __init__(self, stream: FakeStream) -> None:
        self._calls, self.trace = stream.calls, tuple(stream.names)
        self.num_launches = len(self.trace)

    def replay(self) -> None:
        for kernel, args in self._calls:
            kernel(*args)


class FakeDevice:
    """`SegmentBackend` whose captures compute nothing."""

    name, captures, runs_while_capturing, warmup = "fake", True, False, 2

    def __init__(self) -> None:
        self.open, self.ended, self.warmed = False, 0, 0

    def capture(self, fn: Any, warmup: int) -> Any:
        raise AssertionError("the wrapper captures in segments")

    def warm_up(self, fn: Callable[[], object], times: int) -> None:
        for _ in range(times):
            self.warmed += 1
            fn()

    def record(self) -> FakeRecording:
        return FakeRecording(self)


@dataclass(frozen=True, slots=True)
class Batch:
    mode: StepMode
    batch_size: int
    x: torch.Tensor
    extra: torch.Tensor


def _double(x: torch.Tensor, out: torch.Tensor) -> None:
    torch.mul(x, 2, out=out)


def _add(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    torch.add(a, b, out=out)


class Rig:
    """out = 2x + op(2x, extra), the op being a sum over the real rows, which pads would change."""

    def __init__(self, inner: Any, *, lazily: bool = True) -> None:
        self.seen: list[dict[str, int]] = []
        self.workspace = Workspace()
        for name in ("twice", "mixed", "out"):
            self.workspace.reserve(name, (8, 3), torch.float32)
        slots = [
            GraphSlot(name, lambda bs, n: (n, 3), torch.float32, "tokens", padding_policy=PaddingPolicy.ZERO)
            for name in ("x", "extra")
        ]
        registry: GraphBufferRegistry[Batch] = GraphBufferRegistry(8, 8)
        for slot in slots:
            registry.register_slot(slot)
        live = LiveStep()
        self.backend = BreakableBackend(inner, live)
        self.runner: GraphRunner[Batch, torch.Tensor] = GraphRunner(
            self._step, registry, backend=self.backend, capture_on_first_use=lazily, live=live
        )

    def _step(self, view: Batch, stream: Stream) -> torch.Tensor:
        rows = len(view.x)
        twice, mixed, out = (self.workspace.take(name, rows, 3) for name in ("twice", "mixed", "out"))
        stream.launch(_double, view.x, twice)
        stream.eager(self._mix, view, (twice,), (mixed,))
        stream.launch(_add, twice, mixed, out)
        return out

    def _mix(self, stream: Stream, view: Batch, twice: torch.Tensor, mixed: torch.Tensor) -> None:
        rows = {"twice": len(twice), "mixed": len(mixed), "x": len(view.x), "extra": len(view.extra)}
        self.seen.append(rows)
        stream.launch(lambda: mixed.copy_(twice.sum(0) + view.extra))

    def run(self, n: int, bucket: int, reject: str = "") -> tuple[torch.Tensor, torch.Tensor]:
        """Output and what is right, for other values each time."""
        x, extra = torch.randn(n, 3), torch.randn(n, 3)
        rules = replace(RULES, extend=Buckets((bucket,)))
        shape = decide_shape(StepMode.EXTEND, (n,), 1, rules)
        for name in ("mixed", "twice", "out"):
            self.workspace.take(name, 8, 3).fill_(torch.nan)
        out = self.runner.run(shape, Batch(StepMode.EXTEND, 1, x, extra), reject=reject).clone()
        want = torch.zeros(bucket, 3)
        want[:n] = 2 * x + (2 * x).sum(0) + extra
        return out, want


INNERS = pytest.mark.parametrize("inner", [TapeBackend, FakeDevice])


def right(rig: Rig, steps: list[tuple[int, int]]) -> bool:
    return all(torch.allclose(*rig.run(n, bucket)) for n, bucket in steps)


MIXED_STEPS = [(3, 4), (8, 8), (1, 8), (5, 8), (4, 4), (0, 4), (2, 8)]


@INNERS
def test_replays_follow_the_real_rows(inner: Any) -> None:
    """Captured on some rows, replayed on fewer, more and none: rows past the real ones are zero, whatever was there."""
    rig = Rig(inner())
    assert right(rig, MIXED_STEPS)
    assert rig.runner.stats.captures == 2
    assert rig.runner.stats.replays == len(MIXED_STEPS) - 2
    for n, bucket in MIXED_STEPS:
        out, want = rig.run(n, bucket, reject="eager")
        assert torch.allclose(out, want), "an eager step narrows as a replay does"
    assert all(len(set(rows.values())) == 1 for rows in rig.seen), "all row fields narrow together"
    assert {rows["x"] for rows in rig.seen} >= {0, 1, 3, 5, 8}


@INNERS
def test_what_a_graph_says_of_itself(inner: Any) -> None:
    rig = Rig(inner())
    rig.run(4, 4)
    graph = rig.runner.graph(rig.runner.captured[0])
    assert graph.trace == ("_double", "eager Rig._mix", "_add")
    assert graph.num_launches == 3
    assert graph.num_segments == 2


def test_a_device_that_computes_nothing_while_it_captures_is_warmed_up() -> None:
    device = FakeDevice()
    rig = Rig(device)
    assert right(rig, [(4, 4), (2, 4)])
    assert (device.warmed, device.ended) == (2, 2)
    assert len(rig.seen) == 2 + 1 + 1, "warm-ups, the capture, a replay"


def test_ranks_meet_at_each_break() -> None:
    met: list[None] = []
    rig = Rig(TapeBackend())
    backend = BreakableBackend(TapeBackend(), rig.backend.live, barrier=lambda: met.append(None))
    rig.runner.backend = backend
    rig.run(4, 4)
    assert len(met) == 2


@INNERS
def test_a_host_launch_runs_outside_and_anew(inner: Any) -> None:
    x, out, reads = torch.zeros(4), torch.zeros(4), []

    def on_host() -> None:
        reads.append(x.tolist())

    def step(stream: Stream) -> torch.Tensor:
        stream.launch(_double, x, out)
        stream.outside(on_host)
        stream.launch(_double, out, out)
        return out

    graph = BreakableBackend(inner(), LiveStep()).capture(step, 0)
    for value in (1.0, 2.0):
        x.fill_(value)
        assert graph.replay().tolist() == [4 * value] * 4
        assert reads[-1] == [value] * 4
    assert graph.trace == ("_double", f"outside {on_host.__qualname__}", "_double")


@INNERS
def test_a_tensor_without_the_steps_rows_is_refused(inner: Any) -> None:
    """F11: of tensors that narrow together, one that cannot."""
    rig = Rig(inner())

    def step(view: Batch, stream: Stream) -> torch.Tensor:
        mixed = rig.workspace.take("mixed", len(view.x), 3)
        stream.eager(rig._mix, view, (rig.workspace.take("twice", 2, 3),), (mixed,))
        return mixed

    runner = GraphRunner(
        step, rig.runner.registry, backend=rig.backend, capture_on_first_use=True, live=rig.backend.live
    )
    rig.runner = runner
    with pytest.raises(CaptureError, match="tensor of 2 rows in a step of 4"):
        rig.run(3, 4)


@INNERS
def test_an_error_leaves_no_capture_open(inner: Any) -> None:
    """In an op, and in a segment: the next capture is none the worse."""
    device = inner()
    backend = BreakableBackend(device, LiveStep())

    def fails(stream: Stream) -> None:
        raise RuntimeError("oh")

    def fails_outside(stream: Stream) -> None:
        stream.outside(fails, stream)

    for broken in (fails, fails_outside):
        with pytest.raises(RuntimeError, match="oh"):
            backend.capture(broken, 0)
    x, out = torch.ones(2), torch.ones(2)
    graph = backend.capture(lambda stream: stream.launch(_double, x, out), 0)
    x.fill_(3)
    graph.replay()
    assert out.tolist() == [6, 6]
    assert float(x[0]) == 3, "the host may read again"


def test_over_a_backend_without_graphs_everything_is_eager() -> None:
    live = LiveStep()
    backend = BreakableBackend(EagerBackend(), live)
    assert not backend.captures
    rig = Rig(TapeBackend())
    rig.runner = GraphRunner(rig._step, rig.runner.registry, backend=backend, live=live)
    assert right(rig, MIXED_STEPS)
    assert rig.runner.stats.eager_reasons == {"backend breakable": len(MIXED_STEPS)}


# --- strong references --------------------------------------------------------------------------------------


def captured_tensors(inner: Any) -> list[weakref.ref[torch.Tensor]]:
    """A graph whose op alone knows its tensors, made here and forgotten but for the graph; what is alive of them."""
    live = LiveStep()
    live.begin(None, 4, 4)
    seen: list[weakref.ref[torch.Tensor]] = []

    def op(stream: Stream, view: Any, a: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(a + 1)

    def step(stream: Stream) -> None:
        a, out = torch.zeros(4), torch.zeros(4)
        seen.extend(map(weakref.ref, (a, out)))
        stream.eager(op, None, (a,), (out,))

    graph = BreakableBackend(inner, live).capture(step, 0)
    gc.collect()
    alive = [ref for ref in seen if ref() is not None]
    graph.replay()
    return alive


@INNERS
def test_a_graph_holds_the_tensors_of_its_ops(inner: Any) -> None:
    assert len(captured_tensors(inner())) == 2


class WeakCall:
    """The fault: an op that knows its tensors by weak references, so that a pool may give their memory away."""

    names = ("eager weak",)

    def __init__(self, op: Any, inputs: Any, outputs: Any, live: LiveStep) -> None:
        self.op, self.live = op, live
        self.tensors = [tuple(map(weakref.ref, tensors)) for tensors in (inputs, outputs)]

    def __call__(self) -> None:
        inputs, outputs = ([ref() for ref in refs] for refs in self.tensors)
        if all(t is not None for t in (*inputs, *outputs)):
            self.op(None, self.live.view, *inputs, *outputs)


def test_weak_references_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breakable, "EagerCall", WeakCall)
    assert captured_tensors(FakeDevice()) == []


# --- faults -------------------------------------------------------------------------------------------------


def skip_zeros(rig: Rig, patch: pytest.MonkeyPatch) -> None:
    call = breakable.EagerCall.__call__

    def kept(self: breakable.EagerCall) -> None:
        saved = [t[self.live.rows :].clone() for t in self.outputs]
        call(self)
        for tensor, old in zip(self.outputs, saved, strict=True):
            tensor[self.live.rows :] = old

    patch.setattr(breakable.EagerCall, "__call__", kept)


def freeze_count(rig: Rig, patch: pytest.MonkeyPatch) -> None:
    """The count of the first step stays."""
    begin = LiveStep.begin

    def first(self: LiveStep, view: Any, rows: int, padded: int) -> None:
        begin(self, view, rows if self.view is None else min(self.rows, padded), padded)

    patch.setattr(LiveStep, "begin", first)


def keep_padded(rig: Rig, patch: pytest.MonkeyPatch) -> None:
    """The view keeps its padded rows."""
    begin = LiveStep.begin

    def padded_view(self: LiveStep, view: Any, rows: int, padded: int) -> None:
        begin(self, replace(view, extra=rig.runner.registry.buffer("extra")[:padded]), rows, padded)

    patch.setattr(LiveStep, "begin", padded_view)


@INNERS
@pytest.mark.parametrize("fault", [skip_zeros, freeze_count, keep_padded])
def test_faults_show(inner: Any, fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(inner())
    fault(rig, monkeypatch)
    assert shows(rig)


def shows(rig: Rig) -> bool:
    """Wrong values, or tensors of different rows that meet."""
    try:
        return not right(rig, MIXED_STEPS)
    except RuntimeError as error:
        return "size" in str(error)
