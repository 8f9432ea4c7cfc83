"""What a capture backend is, and the one that captures nothing.

A backend turns a callable over a `Stream` into a `CapturedGraph` that repeats it. The eager backend is a
backend like the others, so every step takes the same way through `GraphRunner`. Knows nothing of buffers or
batches. Invariant: host values that the callable read while it was captured are frozen, and device memory
stays put.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import torch

from ostinato.graphs.stream import EagerStream, Stream

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class CapturedGraph(Protocol[T_co]):
    """A callable that was captured once and can be repeated on what its input buffers hold now."""

    @property
    def outputs(self) -> T_co:
        """What the callable returned when captured: its tensors are overwritten by each replay."""
        ...

    @property
    def num_launches(self) -> int:
        """Kernels launched through the stream in one replay."""
        ...

    @property
    def trace(self) -> tuple[str, ...]:
        """Names of what a replay runs, in order, as far as the backend knows them."""
        ...

    def replay(self) -> T_co:
        """Run it again and return `outputs`."""
        ...


class Backend(Protocol):
    """How a callable is captured."""

    @property
    def name(self) -> str: ...

    @property
    def captures(self) -> bool:
        """False when a replay merely calls again, so there is nothing to be gained from a graph."""
        ...

    @property
    def runs_while_capturing(self) -> bool:
        """True when a capture also computes its outputs; otherwise a replay must follow."""
        ...

    @property
    def warmup(self) -> int:
        """Eager calls before a capture ahead of time; whatever the callable builds lazily is built there."""
        ...

    def capture(self, fn: Callable[[Stream], T], warmup: int) -> CapturedGraph[T]:
        """Call `fn` `warmup` times, then once more to capture it.

        Raises CaptureError for what a replay could not repeat.
        """
        ...


class Recording(Protocol):
    """A capture in progress: what runs through `stream` until `end` becomes one graph. Only one is open at a time."""

    @property
    def stream(self) -> Stream: ...

    def end(self) -> CapturedGraph[None]:
        """Close it. Raises CaptureError for what a replay could not repeat."""
        ...

    def abort(self) -> None:
        """Close it after an error, leaving nothing behind."""
        ...


class SegmentBackend(Backend, Protocol):
    """A backend whose captures can be opened and closed around pieces of a callable."""

    def warm_up(self, fn: Callable[[], object], times: int) -> None:
        """Call `fn` so often, where captures take place."""
        ...

    def record(self) -> Recording:
        """Begin to capture. All recordings share what memory graphs of this backend share."""
        ...


class EagerGraph(Generic[T]):
    """The eager backend's "graph": calls again at each replay."""

    def __init__(self, fn: Callable[[Stream], T]) -> None:
        self._fn = fn
        self._stream = CountingStream()
        self.outputs = self.replay()

    @property
    def num_launches(self) -> int:
        return len(self._stream.names)

    @property
    def trace(self) -> tuple[str, ...]:
        return tuple(self._stream.names)

    def replay(self) -> T:
        self._stream.names.clear()
        with torch.no_grad():
            self.outputs = self._fn(self._stream)
        return self.outputs


class EagerBackend:
    """Runs everything at once; frozen host values do not exist here."""

    name = "eager"
    captures = False
    runs_while_capturing = True
    warmup = 0

    def capture(self, fn: Callable[[Stream], T], warmup: int = 0) -> EagerGraph[T]:
        with torch.no_grad():
            for _ in range(warmup):
                fn(EagerStream())
        return EagerGraph(fn)


class CountingStream(EagerStream):
    """An eager stream that remembers the names of its launches."""

    __slots__ = ("names",)

    def __init__(self) -> None:
        self.names: list[str] = []

    def launch(self, kernel: Callable[..., None], /, *args: object) -> None:
        self.names.append(kernel_name(kernel))
        kernel(*args)


def kernel_name(kernel: Callable[..., None]) -> str:
    """A readable name of a kernel: its qualified name, that of what a partial wraps, or its type."""
    kernel = getattr(kernel, "func", kernel)
    name = getattr(kernel, "__qualname__", None) or getattr(kernel, "__name__", None)
    return name if isinstance(name, str) else type(kernel).__qualname__
