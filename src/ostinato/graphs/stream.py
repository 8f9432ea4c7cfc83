"""The one thin seam through which kernels are launched.

A kernel is a callable that reads and writes the tensors it is given and returns nothing: its body is device
code, what stands between launches is host code. Eager streams run a launch at once; the tape's stream also
remembers it. Knows nothing of what is launched. Invariant: whatever computes, computes through a launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

Kernel = Callable[..., None]


class Stream(Protocol):
    """Where launches go, passed explicitly to everything that computes."""

    @property
    def capturing(self) -> bool:
        """True while launches are recorded into a graph."""
        ...

    def launch(self, kernel: Kernel, /, *args: Any) -> None:
        """Run `kernel(*args)`, now and at each replay if capturing. Non-tensor arguments are frozen."""
        ...


class EagerStream:
    """Runs every launch at once."""

    __slots__ = ()

    @property
    def capturing(self) -> bool:
        return False

    def launch(self, kernel: Kernel, /, *args: Any) -> None:
        kernel(*args)
