"""The one thin seam through which kernels are launched.

A kernel is a callable that reads and writes the tensors it is given and returns nothing: its body is device
code, what stands between launches is host code. Eager streams run a launch at once; the tape's stream also
remembers it. What must not, or need not, be captured says so by `outside` and `eager`; only a breakable graph treats
it differently. Knows nothing of what is launched. Invariant: whatever computes, computes through a stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

Kernel = Callable[..., None]
EagerOp = Callable[..., None]
"""op(stream, view, *inputs, *outputs): launches on `stream` what reads inputs and `view` and writes outputs."""
Tensors = tuple[torch.Tensor, ...]


class Stream(Protocol):
    """Where launches go, passed explicitly to everything that computes."""

    @property
    def capturing(self) -> bool:
        """True while launches are recorded into a graph."""
        ...

    def launch(self, kernel: Kernel, /, *args: Any) -> None:
        """Run `kernel(*args)`, now and at each replay if capturing. Non-tensor arguments are frozen."""
        ...

    def outside(self, kernel: Kernel, /, *args: Any) -> None:
        """A launch that works on the host, so that a graph which can be broken is broken for it."""
        ...

    def eager(self, op: EagerOp, view: Any, inputs: Tensors, outputs: Tensors) -> None:
        """Run `op`, whose work depends on the step's real rows: in line here, over all (padded) rows.

        A breakable graph runs it outside, at each replay anew, with `view` and the rows of all tensors narrowed to the
        real ones, and zeroes the rows of `outputs` past them. All tensors have the step's padded rows.
        """
        ...


class EagerStream:
    """Runs every launch at once."""

    __slots__ = ()

    @property
    def capturing(self) -> bool:
        return False

    def launch(self, kernel: Kernel, /, *args: Any) -> None:
        kernel(*args)

    def outside(self, kernel: Kernel, /, *args: Any) -> None:
        self.launch(kernel, *args)

    def eager(self, op: EagerOp, view: Any, inputs: Tensors, outputs: Tensors) -> None:
        op(self, view, *inputs, *outputs)
