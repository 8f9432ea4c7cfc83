"""Live checks: a sampled step that a graph served is run again, eagerly, in the same buffers, and compared bit for bit.

    step served by a graph ─▶ its real rows kept ─▶ the same step from the host, eager ─▶ compared ─▶ eager's are served

Which steps is a function of their number, so ranks that step together check the same ones and stay together; they tell
each other what they found. Knows nothing of requests. Invariant: what a checked step gives out is the eager result, and
a graph that differed once, on any rank, serves nothing any more, on none of them; nor does KV that it may have written.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from ostinato.engine.batch import ForwardBatch
from ostinato.graphs import GraphRunner
from ostinato.graphs.audit import Difference, first_difference, snapshot
from ostinato.graphs.stats import spell_key
from ostinato.kv.pool import KVPool
from ostinato.moe.load import ExpertLoad
from ostinato.ops.choice import uniform
from ostinato.padding import StepShape

_SEED = 0x05714A70

Runner = GraphRunner[ForwardBatch, torch.Tensor]
Named = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class CheckedStep:
    """All that is known of a step that ran twice. Tensors are copies, of real rows only but for the inputs.

    seen, expected: outputs of the graph and of the eager run, by name, and the pages of KV that they wrote into.
    read, filled: the static buffers [padded rows] that each of them read.
    """

    number: int
    shape: StepShape
    batch: ForwardBatch
    seen: Named
    expected: Named
    read: Named
    filled: Named
    difference: Difference | None


class Recorder(Protocol):
    """Writes a step down; the file, or None when there is no room for it."""

    def __call__(self, step: CheckedStep) -> Path | None: ...


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """rate: share of the steps to check. trace_steps: how many to write down from the first on, whatever they give.

    record: how a step is written down, None for not at all.
    """

    rate: float = 0.0
    trace_steps: int = 0
    record: Recorder | None = None


class StepChecks:
    """`due` for every step, then `again` for those that are.

    agree: (this rank's step differs) -> the ranks where it does, of all that took it together. alone: there are none.
    on: whether any step can be due.
    """

    def __init__(
        self,
        options: CheckOptions,
        agree: Callable[[bool], tuple[int, ...]],
        load: ExpertLoad | None,
        pool: KVPool,
        *,
        alone: bool = True,
    ) -> None:
        self.options = options
        self._pool = pool
        self.steps = 0
        self._alone = alone
        self.traces: list[str] = []
        self._wrong = False
        self.on = options.rate > 0 or options.trace_steps > 0
        self._to_record = options.trace_steps
        self._agree = agree
        self._load = load

    def due(self, runner: Runner, shape: StepShape) -> bool:
        """Count a step that is about to run; whether it may be served by a graph, and is to be checked.

        Ranks that step together must answer alike, so there only counts what all of them know: not whether the graph
        is here already, which may differ (a prefill has variants by what its requests have cached).
        """
        if not self.on:
            return False
        self.steps += 1
        sampled = self._to_record > 0 or uniform(_SEED, self.steps) < self.options.rate
        if not sampled or shape.eager_reason or not runner.backend.captures:
            return False
        return not self._alone or shape.key in runner.captured

    def again(
        self,
        runner: Runner,
        shape: StepShape,
        batch: ForwardBatch,
        outputs: torch.Tensor,
        tokens: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the step that has just given `outputs` [padded rows, …] and chosen `tokens` [at least as many] again.

        The eager outputs, which are also what `tokens` follow from afterwards. `batch`: the step as the host knows it.
        """
        rows = shape.raw_num_tokens
        seen, read = self._given(batch, outputs, tokens, rows), snapshot(runner.registry, shape)
        outputs = self._uncounted(runner, shape, batch)
        expected, filled = self._given(batch, outputs, tokens, rows), snapshot(runner.registry, shape)
        found = first_difference(list(seen.values()), list(expected.values()))
        step = CheckedStep(self.steps, shape, batch, seen, expected, read, filled, found)
        wrong = self._agree(found is not None)
        runner.stats.count_check(shape.key, differs=bool(wrong))
        recorded = self._record(step) if found is not None or self._to_record > 0 else "not here"
        self._to_record = max(self._to_record - 1, 0)
        if wrong:
            self._wrong = True
            runner.quarantine(shape.key)
            if found is not None:
                _tell(step, wrong, recorded)
        return outputs

    def _given(
        self, batch: ForwardBatch, outputs: torch.Tensor, tokens: torch.Tensor | None, rows: int
    ) -> Named:
        return real_outputs(outputs, tokens, rows) | written_pages(self._pool, batch)

    def take_wrong(self) -> bool:
        """Whether a graph turned out wrong since the last call, on any rank; which of its steps were is not known."""
        wrong, self._wrong = self._wrong, False
        return wrong

    def _uncounted(self, runner: Runner, shape: StepShape, batch: ForwardBatch) -> torch.Tensor:
        if self._load is None:
            return runner.again(shape, batch)
        self._load.set_live(False)
        try:
            return runner.again(shape, batch)
        finally:
            self._load.set_live(True)

    def _record(self, step: CheckedStep) -> str:
        if self.options.record is None:
            return "none"
        try:
            path = self.options.record(step)
        except OSError as error:  # a full disk must end no request
            return f"none ({error.strerror})"
        if path is None:
            return "none (the directory holds as many as it may)"
        self.traces.append(str(path))
        return str(path)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for `stats()`."""
        return {"rate": self.options.rate, "steps": self.steps, "traces": list(self.traces)}


def real_outputs(outputs: torch.Tensor, tokens: torch.Tensor | None, rows: int) -> Named:
    """Copies of what a step gave to its first `rows` rows, by name."""
    named = {"outputs": outputs[:rows].clone()}
    if tokens is not None:
        named["tokens"] = tokens[:rows].clone()
    return named


def written_pages(pool: KVPool, batch: ForwardBatch) -> Named:
    """Copies of the pages of KV that a step writes into, by layer: what it leaves to the steps behind it. A chunk of a
    prompt that wants no logits gives nothing else.
    """
    # In the order in which rows come to them, which is the same whatever the pages are called.
    pages = list(dict.fromkeys((batch.out_cache_loc // pool.page_size).tolist()))
    return {
        f"{name}_pages.{layer}": memory.view(pool.num_pages, pool.page_size, *memory.shape[1:])[pages]
        for layer, pair in enumerate(zip(pool.k, pool.v, strict=True))
        for name, memory in zip(("k", "v"), pair, strict=True)
    }


def differing_inputs(step: CheckedStep) -> list[str]:
    """Which static inputs of the graph's run were not what the host knows of the step, in real rows, for people."""
    found = []
    for name, filled in step.filled.items():
        batch_rows = getattr(step.batch, name, None)
        if not isinstance(batch_rows, torch.Tensor):
            continue
        rows = batch_rows.shape[0]
        difference = first_difference(step.read[name][:rows], filled[:rows])
        if difference is not None:
            row = difference.row
            read, should = step.read[name][row].tolist(), filled[row].tolist()
            found.append(f"{name}[{row}] was {read}, the host says {should}")
    return found


def where(step: CheckedStep) -> str:
    """What differs first, for people."""
    if step.difference is None:
        return "nothing differs"
    return told(step.difference, list(step.seen))


def told(difference: Difference, names: list[str]) -> str:
    """A difference between outputs of these names, for people."""
    name, _, layer = names[difference.tensor].partition("_pages.")
    what = f"{name} of layer {layer} in the step's page" if layer else f"{name} differ from row"
    told = f"{what} {difference.row}" + (" differ" if layer else " on")
    return f"{told}, by {difference.max_abs:g} at most"


def _tell(step: CheckedStep, wrong: tuple[int, ...], recorded: str) -> None:
    shape, kind = step.shape, "prefill" if step.shape.mode.is_extend else "decode"
    ranks = f" (on rank {', '.join(map(str, wrong))})" if len(shape.num_tokens) > 1 or wrong != (0,) else ""
    inputs = differing_inputs(step)
    print(
        f"ostinato: step {step.number}, a {kind} of {shape.raw_num_tokens} rows in bucket {spell_key(shape.key)}: "
        f"graph and eager run differ{ranks}: {'; '.join([where(step), *inputs])}. The eager result was served, "
        f"the bucket runs eagerly from now on, and all KV is computed anew. Replay trace: {recorded}",
        file=sys.stderr,
        flush=True,
    )
