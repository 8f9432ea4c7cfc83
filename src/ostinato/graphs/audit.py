"""Proof that pads and graphs change nothing: poison, shadow runs, replay traces.

For tests, `verify` and the sampled checks of a server; never on the way of other steps. Knows nothing of what
buffers mean. Invariant: poison goes where `fill_from` promises to write, so a run that changes under it has read a
stale row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from ostinato.graphs.registry import GraphBufferRegistry
from ostinato.graphs.runner import GraphRunner
from ostinato.graphs.slots import FillContext, PaddingPolicy
from ostinato.graphs.tape import tensors_of
from ostinato.graphs.workspace import Workspace
from ostinato.padding import StepShape

B = TypeVar("B")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Poison:
    """A value that shows when it is read: `number` for floating point, `index` for integers."""

    name: str
    number: float
    index: int

    def into(self, tensor: torch.Tensor) -> None:
        """Overwrite `tensor`; what does not fit its type becomes the nearest value that does."""
        if tensor.dtype is torch.bool:
            tensor.fill_(True)
        elif tensor.is_floating_point():
            limit = torch.finfo(tensor.dtype).max
            tensor.fill_(min(self.number, limit) if math.isfinite(self.number) else self.number)
        else:
            info = torch.iinfo(tensor.dtype)
            tensor.fill_(max(min(self.index, info.max), info.min))


POISONS = (
    Poison("nan", math.nan, 99),
    Poison("inf", math.inf, 2**31 - 1),
    Poison("1e30", 1e30, 2**62),
    Poison("zero", 0.0, -1),
)


def poison_registry(
    registry: GraphBufferRegistry[Any], poison: Poison, *, keep: Iterable[str] = (), only: str | None = None
) -> None:
    """Overwrite the static buffers, whole, as the worst earlier step would have left them.

    Slots that are filled only once keep their value, as does what `keep` names; `only`: no other slot than that.
    """
    kept = frozenset(keep)
    for slot in registry.slots():
        if only is not None and slot.name != only:
            continue
        if slot.padding_policy is not PaddingPolicy.FILL_ONCE and slot.name not in kept:
            poison.into(registry.buffer(slot.name))


def poison_workspace(workspace: Workspace, poison: Poison) -> None:
    """Overwrite all scratch memory: a kernel may rely on nothing but what this step wrote."""
    workspace.fill(poison.number)


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two runs of one step differ: which tensor of the outputs, its first row, and by how much."""

    tensor: int
    row: int
    max_abs: float


def first_difference(a: Any, b: Any, *, rows: int | None = None) -> Difference | None:
    """Compare nested outputs bit for bit (NaN equals NaN), in their first `rows` rows; None when equal.

    Raises ValueError when they do not even have the same structure.
    """
    left, right = list(tensors_of(a)), list(tensors_of(b))
    if [(t.shape, t.dtype) for t in left] != [(t.shape, t.dtype) for t in right]:
        raise ValueError("the two outputs differ in structure, shape or dtype")
    for i, (x, y) in enumerate(zip(left, right, strict=True)):
        x, y = (t if rows is None or t.dim() == 0 else t[:rows] for t in (x, y))
        same = (_bits(x) == _bits(y)) | ((x != x) & (y != y))
        if not bool(same.all()):
            row = int((~same).reshape(same.shape[0] if same.dim() else 1, -1).any(1).nonzero()[0])
            gap = (x.double() - y.double()).abs().nan_to_num(math.inf)
            return Difference(i, row, float(gap.max()))
    return None


def snapshot(registry: GraphBufferRegistry[Any], shape: StepShape) -> dict[str, torch.Tensor]:
    """Copies of the static buffers as a step of `shape` reads them: their padded rows, by slot name."""
    ctx = FillContext.of(shape)
    return {
        slot.name: slot.head(registry.buffer(slot.name), ctx.rows(slot.axis)[1]).clone()
        for slot in registry.slots()
    }


def shadow_run(runner: GraphRunner[B, T], shape: StepShape, batch: B, *, rows: int) -> Difference | None:
    """Run one step eager and through its graph, at the same width, and compare the first `rows` rows.

    Both runs write the same memory (the second over the first), as a repeated step would.
    """
    expected = [t.clone() for t in tensors_of(runner.run(shape, batch, reject="shadow run"))]
    return first_difference(expected, list(tensors_of(runner.run(shape, batch))), rows=rows)


def replay_trace(runner: GraphRunner[B, T], shape: StepShape) -> tuple[str, ...]:
    """Names of what a replay of this shape runs, in order. Raises KeyError when it was not captured."""
    return runner.graph(shape.key).trace


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory read as integers, so that 0.0 and -0.0 differ."""
    if not tensor.is_floating_point():
        return tensor
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(widths[tensor.element_size()])
