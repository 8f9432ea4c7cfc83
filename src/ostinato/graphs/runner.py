"""One way for every step: choose by key, fill buffers, view, prepare, then capture, replay or run eager.

Eager, captured, warm-up, dummy and idle steps differ in the last word only, so all of them see the same
padded views of the same buffers. A step that goes on with the requests of the last one may `advance` instead: the
buffers are written on the device, and the graph replayed. Knows nothing of models or schedulers. Invariant: a graph
is looked up by the key that its capture used, and replays only under the host values that it was captured with.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Generic, TypeVar

import torch

from ostinato.errors import CaptureError
from ostinato.graphs.backends import Backend, CapturedGraph
from ostinato.graphs.breakable import LiveStep, NarrowingStream, rehearsal
from ostinato.graphs.frozen import FrozenInputs
from ostinato.graphs.registry import GraphBufferRegistry
from ostinato.graphs.slots import FillContext
from ostinato.graphs.stats import GraphStats
from ostinato.graphs.stream import EagerStream, Stream
from ostinato.padding import Buckets, GraphKey, StepShape

B = TypeVar("B")
T = TypeVar("T")

ProxyTensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Entry(Generic[T]):
    graph: CapturedGraph[T]
    frozen: FrozenInputs


@dataclass(slots=True)
class _Served(Generic[B, T]):
    """The last step, if a graph served it: what `advance` goes on from. `writes`: the registry's, after its fill.

    advanced, seconds: steps that went on from it, and what they took; counted in `stats` when somebody looks.
    """

    shape: StepShape
    view: B
    graph: CapturedGraph[T]
    writes: int
    advanced: int = 0
    seconds: float = 0.0


class GraphRunner(Generic[B, T]):
    """Runs `fn(view, stream)` over the registry's buffers, once per step.

    prepare: (view, shape) -> None, the host part of a step (planning into fixed buffers); runs before each.
    capture_on_first_use: the first step of a key is captured. With a backend that runs while it captures
        (tape) that step costs what an eager one does, without a warm-up; others warm up, capture and replay.
    warmup: eager calls before a capture ahead of time; None for the backend's own number.
    rehearse: called with True before the warm-ups of a capture and with False behind it: what runs between is no step,
        and must count in no statistics.
    live: where a breakable backend, made with the same object, learns what step runs. Eager steps narrow by it, too.

    Outputs come at the padded width; callers cut them to the real rows. They are overwritten by the next
    step.
    """

    def __init__(
        self,
        fn: Callable[[B, Stream], T],
        registry: GraphBufferRegistry[B],
        *,
        backend: Backend,
        prepare: Callable[[B, StepShape], None] | None = None,
        capture_on_first_use: bool = False,
        warmup: int | None = None,
        live: LiveStep | None = None,
        rehearse: Callable[[bool], None] | None = None,
    ) -> None:
        self.registry = registry
        self.backend = backend
        self._stats = GraphStats()
        self.capture_on_first_use = capture_on_first_use
        self._fn = fn
        self._prepare = prepare
        self._warmup = backend.warmup if warmup is None else warmup
        self._live = live
        self._rehearse = rehearse
        if live is not None:
            live.rehearse = rehearse
        self._eager = EagerStream() if live is None else NarrowingStream(live)
        self._entries: dict[GraphKey, _Entry[T]] = {}
        self._advances: dict[GraphKey, CapturedGraph[None]] = {}
        self._served: _Served[B, T] | None = None
        self._quarantined: set[GraphKey] = set()

    @property
    def stats(self) -> GraphStats:
        """Accounting of all steps so far."""
        self._count_advances()
        return self._stats

    def _count_advances(self) -> None:
        served = self._served
        if served is not None and served.advanced:
            self._stats.count_advances(served.shape, served.advanced, served.seconds)
            served.advanced, served.seconds = 0, 0.0

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Steps within are no work: `stats` does not hold them."""
        kept, self._stats = self.stats, GraphStats()
        try:
            yield
        finally:
            self._count_advances()
            self._stats = kept

    @property
    def captured(self) -> tuple[GraphKey, ...]:
        """Keys of the graphs that are ready, in order of capture."""
        return tuple(self._entries)

    def graph(self, key: GraphKey) -> CapturedGraph[T]:
        """The captured graph of `key` (for audits). Raises KeyError when there is none."""
        return self._entries[key].graph

    def run(
        self, shape: StepShape, batch: B, *, reject: str = "", pp_proxy_tensors: ProxyTensors | None = None
    ) -> T:
        """Serve one step. `reject` is a reason to run it eager at its width, whatever `shape` says.

        Raises CaptureError when the graph would not repeat what an eager step would do now.
        """
        entry = self._entries.get(shape.key)
        reason = reject or shape.eager_reason or self._no_graph(entry, shape.key)
        if not reason and entry is None:
            return self._first_use(shape, batch, pp_proxy_tensors)
        ctx = FillContext.of(shape, pp_proxy_tensors)
        view = self._fill(shape, batch, ctx)
        if reason or entry is None:
            with torch.no_grad():
                outputs = self._fn(view, self._eager)
            self.stats.count_step(shape, eager_reason=reason)
        else:
            entry.frozen.check(view, self.registry.verdict(ctx))
            start = perf_counter()
            outputs = entry.graph.replay()
            self.stats.count_step(shape, replay_s=perf_counter() - start)
            self._served = _Served(shape, view, entry.graph, self.registry.writes)
        return outputs

    def again(self, shape: StepShape, batch: B) -> T:
        """Run a step that was served already once more, eagerly and at the same width; it counts as no step."""
        view = self._fill(shape, batch, FillContext.of(shape))
        with torch.no_grad():
            return self._fn(view, self._eager)

    def drop(self, key: GraphKey) -> None:
        """Forget the graph of `key`, if there is one; its next step captures anew, or runs eager."""
        self._entries.pop(key, None)
        self._advances.pop(key, None)
        if self._served is not None and self._served.shape.key == key:
            self._count_advances()
            self._served = None

    def keep(self, buckets: Buckets) -> None:
        """Forget the graphs of all sizes but these: no step will ask for them."""
        for key in self.captured:
            if key.size not in buckets.sizes:
                self.drop(key)

    def quarantine(self, key: GraphKey) -> None:
        """Steps of `key` run eager from now on: its graph is not to be trusted."""
        self.drop(key)
        self._quarantined.add(key)
        self.stats.count_quarantine(key)

    def advance(self, shape: StepShape | None = None) -> T | None:
        """Serve the step after the last one: the same requests, each one position further. `shape`: its own, where
        other ranks may have other rows than in the last one; of the same key.

        The caller vouches for that, and that whatever `prepare` plans is advanced too. None when the buffers hold
        another step, or there is no graph: then `run` serves it.
        """
        served = self._served
        if served is None or served.writes != self.registry.writes or not self.registry.can_advance:
            return None
        if shape is not None and shape.num_tokens != served.shape.num_tokens:
            self._count_advances()
            served.shape = shape
        key = served.shape.key
        start = perf_counter()
        graph = self._advances.get(key)
        if graph is not None:
            graph.replay()
        elif self._capture_advance(key, served.view):
            self._advances[key].replay()
        outputs = served.graph.replay()
        served.advanced += 1
        served.seconds += perf_counter() - start
        return outputs

    def _capture_advance(self, key: GraphKey, view: B) -> bool:
        """Capture the registry's `advance` for one width; whether a replay must follow to carry it out."""
        self._advances[key] = self.backend.capture(lambda stream: self.registry.advance(view, stream), 0)
        return not self.backend.runs_while_capturing

    def capture(
        self,
        shapes: Iterable[StepShape],
        make_batch: Callable[[StepShape], B],
        *,
        progress: Callable[[StepShape, int, int], None] | None = None,
    ) -> None:
        """Capture ahead of time, the largest shape first; `make_batch` makes a batch for each.

        progress: called with (shape, number captured, total) after each capture. A key that exists is
        captured anew. Raises CaptureError for a shape that no graph may serve, or with a backend that
        captures nothing.
        """
        ordered = sorted(shapes, key=lambda s: (s.padded_num_tokens, s.padded_bs), reverse=True)
        for done, shape in enumerate(ordered, start=1):
            reason = shape.eager_reason or ("" if self.backend.captures else f"backend {self.backend.name}")
            if reason:
                raise CaptureError(f"{shape.key} cannot be captured: {reason}; leave it out of the list")
            view = self._capture(shape, make_batch(shape), self._warmup, None)
            if self.registry.can_advance:
                self._capture_advance(shape.key, view)
            if progress is not None:
                progress(shape, done, len(ordered))

    def _no_graph(self, entry: _Entry[T] | None, key: GraphKey) -> str:
        """Why there is no graph to use, or an empty string."""
        if key in self._quarantined:
            return "quarantined"
        if not self.backend.captures:
            return f"backend {self.backend.name}"
        if entry is None and not self.capture_on_first_use:
            return "not captured"
        return ""

    def _first_use(self, shape: StepShape, batch: B, proxies: ProxyTensors | None) -> T:
        runs = self.backend.runs_while_capturing
        view = self._capture(shape, batch, 0 if runs else self._warmup, proxies)
        graph = self._entries[shape.key].graph
        outputs = graph.outputs if runs else graph.replay()
        self.stats.count_step(shape)
        self._served = _Served(shape, view, graph, self.registry.writes)
        return outputs

    def _capture(self, shape: StepShape, batch: B, warmup: int, proxies: ProxyTensors | None) -> B:
        ctx = FillContext.of(shape, proxies)
        self.registry.reset_for_capture()
        view = self._fill(shape, batch, ctx)
        verdict: Hashable = self.registry.verdict(ctx)
        frozen = FrozenInputs(verdict)
        watched = frozen.watch(view, self.registry.has_slot)
        with rehearsal(self._rehearse if warmup else None):
            graph = self.backend.capture(lambda stream: self._fn(watched, stream), warmup)
        frozen.seal()
        self._entries[shape.key] = _Entry(graph, frozen)
        self.stats.count_capture(shape.key)
        return view

    def _fill(self, shape: StepShape, batch: B, ctx: FillContext) -> B:
        self.registry.fill_from(batch, ctx)
        view = self.registry.extract_buffer(batch, ctx)
        if self._live is not None:
            real = self.registry.extract_buffer(batch, ctx.real())
            self._live.begin(real, ctx.raw_num_tokens, ctx.padded_num_tokens)
        if self._prepare is not None:
            self._prepare(view, shape)
        return view
