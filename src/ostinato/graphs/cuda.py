"""Capture and replay with `torch.cuda.CUDAGraph`.

All graphs share one memory pool, so capture them from the largest to the smallest: a later one then fits into
what an earlier one has released. Capturing happens on a stream of its own, after warm-ups that let libraries
and the callable build what they build lazily. Knows nothing of buffers or batches. Invariant: outputs are
held as long as their graph, so no other graph of the pool can be given their memory.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Generic, TypeVar

import torch

from ostinato.errors import CaptureError, ConfigError
from ostinato.graphs.backends import CountingStream, kernel_name
from ostinato.graphs.stream import EagerStream, Stream

T = TypeVar("T")


class CudaGraph(Generic[T]):
    """One captured CUDA graph and the outputs it overwrites."""

    __slots__ = ("_graph", "outputs", "trace")

    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: T, trace: tuple[str, ...]) -> None:
        self._graph = graph
        self.outputs = outputs
        self.trace = trace

    @property
    def num_launches(self) -> int:
        return len(self.trace)

    def replay(self) -> T:
        """Launch the graph on the current stream; `outputs` hold the result once that stream has run it."""
        self._graph.replay()
        return self.outputs


class CudaGraphBackend:
    """Captures on one side stream, into one memory pool.

    barrier: called after each device synchronisation of a capture, where ranks that capture together meet.
    after_warmup: called once the warm-ups are done, for attention backends that drop warm-up state.
    """

    name = "cuda"
    captures = True
    runs_while_capturing = False
    warmup = 2

    def __init__(
        self,
        device: torch.device | str = "cuda",
        *,
        barrier: Callable[[], None] | None = None,
        after_warmup: Callable[[], None] | None = None,
    ) -> None:
        if not torch.cuda.is_available():
            raise ConfigError(
                "graph backend 'cuda' needs a CUDA device and torch sees none; use 'tape' or 'eager'"
            )
        self.device = torch.device(device)
        self._barrier = barrier
        self._after_warmup = after_warmup
        self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._anchor = self._hold_pool()

    def _hold_pool(self) -> torch.cuda.CUDAGraph:
        """A graph that lives as long as the backend: torch refuses to capture into a pool whose last graph is gone."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self.device), torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            torch.zeros(1, device=self.device)
        return graph

    def capture(self, fn: Callable[[Stream], T], warmup: int = 2) -> CudaGraph[T]:
        """Call `fn` `warmup` times on the side stream, then capture it there. The capture computes nothing.

        Raises CaptureError when CUDA refuses the capture (a host read, a synchronisation, a foreign
        allocation).
        """
        graph = torch.cuda.CUDAGraph()
        stream = _CapturingStream()
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        # The current stream is entered anew: a capture that fails leaves its own entered.
        with torch.cuda.device(self.device), torch.cuda.stream(current), torch.no_grad(), _frozen_gc():
            with torch.cuda.stream(self._stream):
                for _ in range(warmup):
                    self._meet()
                    fn(EagerStream())
            if self._after_warmup is not None:
                self._after_warmup()
            self._meet()
            try:
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                    outputs = fn(stream)
            except CaptureError:
                raise
            except RuntimeError as error:
                raise CaptureError(
                    f"the callable could not be captured after {stream.names[-1:] or 'its start'}: {error}; "
                    "it must not read device data on the host, synchronise, or use another stream meanwhile"
                ) from error
        current.wait_stream(self._stream)
        return CudaGraph(graph, outputs, tuple(stream.names))

    def warm_up(self, fn: Callable[[], object], times: int) -> None:
        """Call `fn` on the side stream."""
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        with torch.cuda.device(self.device), torch.no_grad(), torch.cuda.stream(self._stream):
            for _ in range(times):
                self._meet()
                fn()
        if self._after_warmup is not None:
            self._after_warmup()
        current.wait_stream(self._stream)
        self._meet()

    def record(self) -> CudaRecording:
        """Begin a segment: a graph of its own in the same pool, replayed after those before it."""
        return CudaRecording(self.device, self._stream, self._pool)

    def _meet(self) -> None:
        torch.cuda.synchronize(self.device)
        if self._barrier is not None:
            self._barrier()


class CudaRecording:
    """A capture that is open on the side stream; what runs between two of them runs on the caller's stream."""

    def __init__(self, device: torch.device, side: torch.cuda.Stream, pool: Any) -> None:
        self.stream = _CapturingStream()
        self._graph = torch.cuda.CUDAGraph()
        self._device, self._side = device, side
        self._current = torch.cuda.current_stream(device)
        side.wait_stream(self._current)
        self._around = ExitStack()
        for context in (torch.cuda.device(device), torch.no_grad(), _paused_gc(), torch.cuda.stream(side)):
            self._around.enter_context(context)
        self._open = True
        self._graph.capture_begin(pool=pool)

    def end(self) -> CudaGraph[None]:
        self._open = False
        try:
            self._graph.capture_end()
        except RuntimeError as error:
            raise CaptureError(
                f"the segment could not be captured after {self.stream.names[-1:] or 'its start'}: {error}; what reads "
                "device data on the host must be launched by `outside`"
            ) from error
        finally:
            self._around.close()
        self._current.wait_stream(self._side)
        return CudaGraph(self._graph, None, tuple(self.stream.names))

    def abort(self) -> None:
        if self._open:
            self._open = False
            with suppress(RuntimeError):
                self._graph.capture_end()
        self._around.close()


class _CapturingStream(CountingStream):
    """Launches go to the stream under capture; only their names are kept."""

    __slots__ = ()

    @property
    def capturing(self) -> bool:
        return True

    def launch(self, kernel: Callable[..., None], /, *args: Any) -> None:
        self.names.append(kernel_name(kernel))
        kernel(*args)


@contextmanager
def _frozen_gc() -> Iterator[None]:
    """No garbage collection while capturing: freeing a tensor of an older graph would break the capture."""
    gc.collect()
    with _paused_gc():
        yield


@contextmanager
def _paused_gc() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
