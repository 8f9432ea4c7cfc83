"""Where faults are put in: between the parts of one rank's worker, never into the parts themselves.

    inputs      after each fill of a mode's static inputs, over the view that the step will read
    plans       around the host part of a step, attention's planning
    layers      around a layer's feed-forward or attention: other arguments, or a launch behind it
    graphs      around what a runner captures

Methods of single objects are replaced and put back by `undo`; classes and modules stay as they are, and the product has
no branch for any of it. Knows no fault. Invariant: after `undo` the worker is what it was before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import torch

from ostinato.engine.batch import ForwardBatch
from ostinato.engine.worker import Worker
from ostinato.graphs.slots import FillContext
from ostinato.graphs.stream import Stream
from ostinato.models.decoder import CausalLM
from ostinato.models.parts import KeptRows
from ostinato.verify.stage import Runner

Filled = Callable[[ForwardBatch, ForwardBatch | None, FillContext], None]
"""(view after the fill, copies of what it held before, ctx): writes the view's buffers."""
Planned = Callable[[Callable[..., None], Any, Any], None]
"""(the right plan, view, shape): plans in its place."""
Behind = Callable[[Stream, torch.Tensor, torch.Tensor | None, torch.Tensor], None]
"""(stream, input [T, H], device count, result [T, H] of a part): launches behind the part."""


class Breakable(Protocol):
    """What a seam needs of one rank: a `Stage`, or an engine that `Serves`."""

    @property
    def worker(self) -> Worker: ...

    @property
    def runners(self) -> Mapping[str, Runner]:
        """By mode: "decode", "prefill-full", …"""
        ...

    @property
    def others_page(self) -> int:
        """A KV page of some request."""
        ...

    def recover(self) -> None:
        """After faults were taken out: nothing that they left is used again."""


@dataclass(frozen=True, slots=True, eq=False)
class Serves:
    """A rank whose engine serves, before its first request; a fault in it stays."""

    worker: Worker
    others_page: int = 1  # the first that is given to a request

    @property
    def runners(self) -> dict[str, Runner]:
        worker = self.worker
        return {"decode": worker.decode, f"prefill-{worker.coordinator.prefill.mode.value}": worker.prefill}

    def recover(self) -> None:
        for runner in self.runners.values():
            assert not runner.captured, "graphs hold the fault"


class Seam:
    """Of one rank."""

    def __init__(self, stage: Breakable) -> None:
        self.stage = stage
        self._undo: list[Callable[[], None]] = []

    def undo(self) -> None:
        """Take all faults out again."""
        while self._undo:
            self._undo.pop()()
        self.stage.recover()

    def around(self, target: object, name: str, wrapper: Callable[..., Any]) -> None:
        """Calls of target.name(*args) become wrapper(the right one, *args)."""
        right = getattr(target, name)
        own = name in vars(target)
        setattr(target, name, lambda *args, **more: wrapper(right, *args, **more))
        self._undo.append((lambda: setattr(target, name, right)) if own else (lambda: delattr(target, name)))

    def inputs(self, fault: Filled, *, remember: bool = False) -> None:
        """`fault` after every fill, in every mode; remember: with copies of what the view held before it."""
        for runner in self.stage.runners.values():
            self._inputs(runner, fault, remember)

    def _inputs(self, runner: Runner, fault: Filled, remember: bool) -> None:
        registry = runner.registry

        def fill(right: Callable[..., None], batch: ForwardBatch, ctx: FillContext) -> None:
            before = _copied(registry.extract_buffer(batch, ctx)) if remember else None
            right(batch, ctx)
            fault(registry.extract_buffer(batch, ctx), before, ctx)

        self.around(registry, "fill_from", fill)

    def plans(self, fault: Planned) -> None:
        """`fault` in place of attention's planning, in every mode."""
        for runner in self.stage.runners.values():
            self.around(runner, "_prepare", fault)

    def feed_forward(self, layer: int, behind: Behind | None = None, *, count: bool = True) -> None:
        """`behind` after a layer's feed-forward; without `count` the part is not told which rows are real."""
        self._layer(layer, ffn=_FeedForward(self._model.layers[layer].ffn, behind, count))

    def attention(self, layer: int, behind: Behind) -> None:
        """`behind` after a layer's attention and its output projection."""
        self._layer(layer, attention=cast("Any", _Attention(self._model.layers[layer].attention, behind)))

    @property
    def _model(self) -> CausalLM:
        return self.stage.worker.model

    def _layer(self, index: int, **parts: Any) -> None:
        worker, right = self.stage.worker, self.stage.worker.model
        layers = list(right.layers)
        layers[index] = replace(layers[index], **parts)
        worker.model = replace(right, layers=tuple(layers))
        self._undo.append(lambda: setattr(worker, "model", right))


def _copied(view: ForwardBatch) -> ForwardBatch:
    names = ("input_ids", "positions", "out_cache_loc", "req_pool_indices", "seq_lens", "seq_lens_cpu")
    fields = {name: getattr(view, name) for name in names}
    return replace(view, **{name: value.clone() for name, value in fields.items() if value is not None})


@dataclass(frozen=True, slots=True, eq=False)
class _FeedForward:
    inner: Any
    behind: Behind | None
    count: bool

    def forward(self, stream: Stream, x: torch.Tensor, live: torch.Tensor | None, out: torch.Tensor) -> None:
        self.inner.forward(stream, x, live if self.count else None, out)
        if self.behind is not None:
            self.behind(stream, x, live, out)


@dataclass(frozen=True, slots=True, eq=False)
class _Attention:
    inner: Any
    behind: Behind

    def forward(
        self, stream: Stream, x: torch.Tensor, view: Any, out: torch.Tensor, kept: KeptRows | None = None
    ) -> None:
        self.inner.forward(stream, x, view, out, kept)
        self.behind(stream, x, view.num_token_non_padded if kept is None else kept.count, out)
