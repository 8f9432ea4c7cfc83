"""Faults of graphs and of what ranks send each other; `faults.py` has their table.

Knows nothing of how runs are driven. Invariant: as there, a fault changes one thing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ostinato.graphs.breakable import BreakableGraph, EagerCall
from ostinato.graphs.stream import Stream
from ostinato.verify.seam import Seam
from ostinato.verify.stage import parcels


def weak_reference(seam: Seam, layer: int) -> None:
    """What runs between the segments of a graph holds no memory: the allocator gave it to somebody else."""

    def capture(right: Callable[..., Any], *args: Any) -> Any:
        graph = right(*args)
        if isinstance(graph, BreakableGraph):
            for part in graph.parts:
                attends = isinstance(part, EagerCall) and getattr(part.op, "__self__", None)
                if attends and isinstance(part, EagerCall) and attends.layer.layer_id == layer:
                    object.__setattr__(part, "outputs", tuple(t.clone() for t in part.outputs))
        return graph

    for name, runner in seam.stage.runners.items():
        if name == "prefill-breakable":
            seam.around(runner.backend, "capture", capture)


def frozen_input(seam: Seam, layer: int) -> None:
    """A traced pad of the hidden size made a copy: a replay reads the rows of the capture."""

    def behind(stream: Stream, x: torch.Tensor, live: torch.Tensor | None, out: torch.Tensor) -> None:
        held: list[torch.Tensor] = []

        def read(rows: torch.Tensor) -> None:
            if not held:
                held.append(rows.clone())
            rows.copy_(held[0])

        if stream.capturing:
            stream.launch(read, out)

    seam.feed_forward(layer, behind)


def early_return(seam: Seam, layer: int) -> None:
    """A rank without rows returns at once; the others wait for it within the step."""

    def run(right: Callable[..., Any], shape: Any, batch: Any, **more: Any) -> Any:
        if shape.raw_num_tokens:
            return right(shape, batch, **more)
        return torch.zeros(0, seam.stage.worker.model.config.vocab_size)

    seam.around(seam.stage.worker.decode, "run", run)


def stale_parcel(seam: Seam, layer: int) -> None:
    """A layer takes the last row that its rank's buffer has room for, which no step has filled."""
    (buffers,) = parcels(seam.stage.worker)

    def take(out: torch.Tensor) -> None:
        out[:1] += buffers.results[-1:].to(out.dtype)

    def behind(stream: Stream, x: torch.Tensor, live: torch.Tensor | None, out: torch.Tensor) -> None:
        stream.launch(take, out)

    seam.feed_forward(layer, behind)
