"""Graphs in segments: what cannot be captured, or would do needless work on pads, runs between them at each replay.

    capture:  segment ─ end ─▶ op, once, on the real rows ─ begin ─▶ segment …      replay:  segment, op, segment, …

A wrapper over any backend that can open and close a capture; the callable marks the ops through its stream. Knows
nothing of what they do. Invariants: an op sees this step's real rows, all tensors and the view narrowed together, and
the rows past them are zeroed here; every tensor that an op was given stays alive as long as its graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

from ostinato.errors import CaptureError
from ostinato.graphs.backends import CapturedGraph, EagerGraph, SegmentBackend, kernel_name
from ostinato.graphs.stream import EagerOp, EagerStream, Kernel, Tensors

T = TypeVar("T")


class LiveStep:
    """The step that runs now, for what runs outside graphs. Written by the `GraphRunner` at each fill.

    view: the step's view with all row fields narrowed to the `rows` real ones of `padded`. rehearse: that of the
    runner, for warm-ups that a capture makes within a step.
    """

    __slots__ = ("padded", "rehearse", "rows", "view")

    def __init__(self) -> None:
        self.rows = self.padded = 0
        self.view: Any = None
        self.rehearse: Callable[[bool], None] | None = None

    def begin(self, view: Any, rows: int, padded: int) -> None:
        """A step of `rows` real rows in `padded` begins."""
        self.view, self.rows, self.padded = view, rows, padded


@contextmanager
def rehearsal(rehearse: Callable[[bool], None] | None) -> Iterator[None]:
    """What runs within is no step; `rehearse` is told so."""
    if rehearse is None:
        yield
        return
    rehearse(True)
    try:
        yield
    finally:
        rehearse(False)


class NarrowingStream(EagerStream):
    """Runs everything at once, and ops on real rows as between the segments of a graph."""

    __slots__ = ("_live",)

    def __init__(self, live: LiveStep) -> None:
        self._live = live

    def eager(self, op: EagerOp, view: Any, inputs: Tensors, outputs: Tensors) -> None:
        EagerCall(op, inputs, outputs, self._live)()


class _Part(Protocol):
    """What a replay runs."""

    @property
    def names(self) -> tuple[str, ...]: ...

    def __call__(self) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class EagerCall:
    """One op between two segments. Holds its tensors: a pool that saw them die would give their memory to others."""

    op: EagerOp
    inputs: Tensors
    outputs: Tensors
    live: LiveStep

    @property
    def names(self) -> tuple[str, ...]:
        return (f"eager {kernel_name(self.op)}",)

    def __call__(self) -> None:
        live = self.live
        rows = live.rows
        for tensor in (*self.inputs, *self.outputs):
            if tensor.shape[0] != live.padded:
                raise CaptureError(
                    f"{kernel_name(self.op)} got a tensor of {tensor.shape[0]} rows in a step of {live.padded}; all "
                    "rows of an eager op narrow together; give it the whole step, and what has no rows as its own"
                )
        inputs, outputs = ([t[:rows] for t in tensors] for tensors in (self.inputs, self.outputs))
        self.op(_EAGER, live.view, *inputs, *outputs)
        if rows < live.padded:
            for tensor in self.outputs:
                tensor[rows:].zero_()


@dataclass(frozen=True, slots=True, eq=False)
class OutsideCall:
    """One launch between two segments, on the arguments of the capture. Holds them, as `EagerCall` does."""

    kernel: Kernel
    args: tuple[Any, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return (f"outside {kernel_name(self.kernel)}",)

    def __call__(self) -> None:
        self.kernel(*self.args)


@dataclass(frozen=True, slots=True, eq=False)
class _Segment:
    graph: CapturedGraph[None]

    @property
    def names(self) -> tuple[str, ...]:
        return self.graph.trace

    def __call__(self) -> None:
        self.graph.replay()


_EAGER = EagerStream()


class BreakableGraph(Generic[T]):
    """Segments and the calls between them, in order; `outputs` are overwritten by each replay."""

    __slots__ = ("num_launches", "outputs", "parts", "trace")

    def __init__(self, outputs: T, parts: Sequence[_Part]) -> None:
        self.outputs = outputs
        self.parts = tuple(parts)
        self.num_launches = sum(
            part.graph.num_launches if isinstance(part, _Segment) else 1 for part in self.parts
        )
        self.trace = tuple(name for part in self.parts for name in part.names)

    @property
    def num_segments(self) -> int:
        return sum(isinstance(part, _Segment) for part in self.parts)

    def replay(self) -> T:
        """Run segments and calls in turn, for the step that `LiveStep` says."""
        with torch.no_grad():
            for part in self.parts:
                part()
        return self.outputs


class BreakableBackend:
    """Captures in segments of `inner`, for the steps of one `GraphRunner`, which writes `live`.

    barrier: called at each break of a capture, where ranks that capture together meet.
    """

    name = "breakable"
    runs_while_capturing = True

    def __init__(
        self, inner: SegmentBackend, live: LiveStep, *, barrier: Callable[[], None] | None = None
    ) -> None:
        self.inner = inner
        self.live = live
        self._barrier = barrier

    @property
    def captures(self) -> bool:
        return self.inner.captures

    @property
    def warmup(self) -> int:
        return self.inner.warmup

    def capture(self, fn: Callable[..., T], warmup: int) -> BreakableGraph[T] | EagerGraph[T]:
        """Call `fn` `warmup` times, then once more, capturing between its eager ops and running these.

        Segments are run as soon as they are captured, so the ops see true values, and the capture computes the step.
        """
        self._warm_up(fn, warmup)
        stream = _BreakingStream(self.inner, self.live, self._barrier)
        try:
            outputs = fn(stream)
        except BaseException:
            stream.abort()
            raise
        stream.end_segment()
        return BreakableGraph(outputs, stream.parts)

    def _warm_up(self, fn: Callable[..., T], times: int) -> None:
        narrowing = NarrowingStream(self.live)
        needed = 0 if self.inner.runs_while_capturing else self.inner.warmup
        # On first use a capture computes a step, which counts: not so the warm-ups that it needs even then.
        with rehearsal(self.live.rehearse if needed and not times else None):
            self.inner.warm_up(lambda: fn(narrowing), max(times, needed))


class _BreakingStream:
    """Launches go into the open segment; ops close it, run, and open the next."""

    __slots__ = ("_barrier", "_inner", "_live", "_open", "parts")

    def __init__(self, inner: SegmentBackend, live: LiveStep, barrier: Callable[[], None] | None) -> None:
        self.parts: list[_Part] = []
        self._inner, self._live, self._barrier = inner, live, barrier
        self._open = inner.record()

    @property
    def capturing(self) -> bool:
        return True

    def launch(self, kernel: Kernel, /, *args: Any) -> None:
        self._open.stream.launch(kernel, *args)

    def outside(self, kernel: Kernel, /, *args: Any) -> None:
        self._break(OutsideCall(kernel, args))

    def eager(self, op: EagerOp, view: Any, inputs: Tensors, outputs: Tensors) -> None:
        self._break(EagerCall(op, inputs, outputs, self._live))

    def _break(self, call: EagerCall | OutsideCall) -> None:
        self.end_segment()
        with torch.no_grad():
            call()
        self.parts.append(call)
        self._open = self._inner.record()

    def end_segment(self) -> None:
        segment = _Segment(self._open.end())
        if self._barrier is not None:
            self._barrier()
        if not self._inner.runs_while_capturing:
            segment()
        self.parts.append(segment)

    def abort(self) -> None:
        self._open.abort()
