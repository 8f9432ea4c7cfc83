"""One rank's part of a verification: runs steps of given widths over a launched worker, and looks at what they leave.

    cell ─▶ counts of all groups ─▶ own batch ─▶ GraphRunner: alone | eager | replay ─▶ Played: rows, shape, taps

All ranks hold a stage each and run the same steps in the same order. Knows nothing of checks. Invariant: what a rank
runs is a function of the cell and the seed, never of what it found, so ranks never fall out of step.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import torch

from ostinato.engine.batch import ForwardBatch
from ostinato.engine.engine import Engine
from ostinato.engine.prefill_graph import PrefillGraph
from ostinato.engine.worker import Worker
from ostinato.graphs.audit import Poison, poison_registry, poison_workspace
from ostinato.graphs.runner import GraphRunner
from ostinato.graphs.slots import FillContext
from ostinato.graphs.stream import EagerStream
from ostinato.moe.all_to_all import AllToAllDispatcher
from ostinato.moe.gathered import GatheredDispatcher
from ostinato.moe.layer import MoELayer
from ostinato.moe.pairs import PairBuffers
from ostinato.padding import StepMode, StepShape
from ostinato.verify.cells import CellId
from ostinato.verify.kv import LiveKV
from ostinato.verify.requests import Requests, Sizes, Span
from ostinato.verify.taps import Tapped, Taps

Way = Literal["alone", "eager", "replay"]
Runner = GraphRunner[ForwardBatch, torch.Tensor]
Counts = tuple[int, ...]
"""Real rows of every group that steps together."""


@dataclass(frozen=True, slots=True, eq=False)
class Played:
    """One step: `rows`, outputs of the own real rows (logits of a decode step, hidden states of a prefill), and how."""

    rows: torch.Tensor
    batch: ForwardBatch
    shape: StepShape
    taps: Tapped | None


class Stage:
    """Everything that checks need of one rank. Raises ConfigError when there is no room to verify in."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine, self.worker, self.seed = engine, engine.worker, seed
        worker, topology = engine.worker, engine.world.topology
        self.rank, self.pool = topology.rank, worker.pool
        self.together = worker.coordinator.depends and topology.dp > 1
        self.groups = topology.dp if self.together else 1
        self.group = topology.attn_dp_rank if self.together else 0
        self.counted_at_start = 0 if worker.load is None else int(worker.load.snapshot().sum())
        # Every width is tried, also those that serving would refuse as too much padding.
        self.rules = replace(worker.rules, max_pad_factor=10**6)
        options, config = worker.options, worker.model.config
        sizes = Sizes(
            options.max_bs,
            options.max_num_tokens,
            options.context_length,
            self.rules.extend.largest,
            config.vocab_size,
        )
        allocator = engine.scheduler.kv.allocator
        self.requests = Requests(self.pool, allocator, sizes, seed, topology.attn_dp_rank)
        self.kv = LiveKV(self.pool, self.requests.pages)
        self.runners = self._runners()
        self._parcels = parcels(worker)
        self._captured: set[tuple[str, int]] = set()
        self._taps: Taps | None = None
        self.cache_contexts()

    def cache_contexts(self) -> None:
        """Prefill what requests have behind them; with all ranks that step together."""
        self.kv.clear()
        requests = self.requests
        todo = [(r, 0, requests.lengths[r]) for r in requests.free]
        todo += [(r, 0, requests.shared) for r in range(len(requests.free) + 1, len(requests))]
        most = self.worker.options.max_num_tokens
        while todo:
            spans, left = [], most
            while todo and left:
                request, first, count = todo.pop(0)
                spans.append((request, first, min(count, left)))
                if count > left:
                    todo.insert(0, (request, first + left, count - left))
                left -= min(count, left)
            self.play("prefill", spans, (sum(count for _, _, count in spans),) * self.groups)
        self.kv.save()

    def gathered(self, rows: int) -> Counts:
        """Rows of every group, where only each knows its own."""
        if self.groups == 1:
            return (rows,)
        world, topology = self.engine.world.world, self.engine.world.topology
        gathered = torch.zeros(world.size, 1, dtype=torch.int64)
        world.all_gather(torch.tensor([rows], dtype=torch.int64), gathered)
        return tuple(int(gathered[leader]) for leader in topology.leaders)

    @property
    def others_page(self) -> int:
        """A KV page of some request."""
        return self.requests.pages[0]

    # ---- modes ----

    def _runners(self) -> dict[str, Runner]:
        """By mode: decode, the deployment's own prefill mode, and the others that it could capture in."""
        worker, own = self.worker, self.worker.coordinator.prefill.mode
        runners = {"decode": worker.decode, f"prefill-{own.value}": worker.prefill}
        full = worker.model.attention.can_capture(StepMode.EXTEND)
        for mode in (PrefillGraph.FULL, PrefillGraph.BREAKABLE) if worker.decode.backend.captures else ():
            if mode is not own and (full or mode is PrefillGraph.BREAKABLE):
                runners[f"prefill-{mode.value}"] = worker.prefill_runner(mode)
        return runners

    @property
    def modes(self) -> tuple[str, ...]:
        """Kinds of steps to verify."""
        return tuple(self.runners)

    def buckets(self, mode: str) -> tuple[int, ...]:
        return (self.rules.decode if mode == "decode" else self.rules.extend).sizes

    def most(self, mode: str) -> int:
        """Real rows that a step can have here."""
        return len(self.requests) if mode == "decode" else self.requests.room

    def runner(self, mode: str) -> Runner:
        return self.worker.prefill if mode == "prefill" else self.runners[mode]

    # ---- steps ----

    def counts(self, cell: CellId, salt: str = "") -> Counts:
        """Rows of every group: the cell's in the one that leads, any number in the others."""
        lead = self.lead(cell)
        others = sorted(
            {1, cell.n, min(cell.bucket, self.most(cell.mode))} | ({0} if cell.mode == "decode" else set())
        )
        salt = f"{self.seed} {cell} {salt}"
        return tuple(
            cell.n if group == lead else others[_pick(f"{salt} {group}", len(others))]
            for group in range(self.groups)
        )

    def beside_idle(self, cell: CellId) -> Counts:
        """The cell's rows in the group that leads, nothing in the others."""
        return tuple(cell.n if group == self.lead(cell) else 0 for group in range(self.groups))

    def lead(self, cell: CellId) -> int:
        """The group whose rows the cell speaks of."""
        return _pick(f"{self.seed} {cell}", self.groups)

    def parts(self, cell: CellId, count: int, salt: str = "") -> list[Span]:
        """`count` rows of this group's requests."""
        seed = f"{self.seed} {cell} {salt}"
        return self.requests.ends(count, seed) if cell.mode == "decode" else self.requests.spans(count, seed)

    def play(
        self,
        mode: str,
        parts: Sequence[Span],
        counts: Counts,
        bucket: int = 0,
        way: Way = "alone",
        *,
        before: Callable[[Runner], None] | None = None,
        ids: torch.Tensor | None = None,
        wanted: Sequence[int] | None = None,
    ) -> Played:
        """Run one step: alone, which is eager and as narrow as can be; or as wide as the bucket, eager or replayed.

        before: called with the runner when nothing but the step itself is left to do. ids: other tokens. wanted: rows
        of a prefill that come out, before zeros; all when None.
        """
        if way == "replay":
            self.ready(mode, bucket)
        runner, batch = self.runner(mode), self.requests.batch(_step(mode), parts, ids=ids, wanted=wanted)
        shape = self._shape(mode, counts, len(parts), bucket, way)
        if before is not None:
            before(runner)
        eager = shape.eager_reason or ("" if way == "replay" else "verify")
        return self._played(runner.run(shape, batch, reject=eager), batch, shape)

    def play_captured(self, mode: str, parts: Sequence[Span], counts: Counts, bucket: int) -> Played:
        """Capture the bucket's graph anew over these rows; what that step gave, or the graph's first replay."""
        runner, batch = self.runner(mode), self.requests.batch(_step(mode), parts)
        shape = self._shape(mode, counts, len(parts), bucket, "replay")
        if shape.eager_reason or not runner.backend.captures:
            return self.play(mode, parts, counts, bucket, "eager")
        self._captured.add((mode, bucket))
        runner.capture([shape], lambda _: batch)
        if not runner.backend.runs_while_capturing:
            return self.play(mode, parts, counts, bucket, "replay")
        return self._played(runner.graph(shape.key).outputs, batch, shape)

    def advance(self, before: Played, counts: Counts, bucket: int) -> Played | None:
        """The decode step after `before`, which was the last and replayed, from inputs made on the device.

        None where there is no such step: this rank has no rows, and takes part in that of others; or attention has to
        plan on the host.
        """
        if not self.worker.decode.registry.can_advance:
            return None  # on no rank
        shape = self._shape("decode", counts, before.batch.batch_size, bucket, "replay")
        if not counts[self.group]:
            self.worker.decode.run(shape, before.batch)
            return None
        outputs = self.worker.decode.advance(shape)
        return None if outputs is None else self._played(outputs, before.batch, shape)

    def _played(self, outputs: torch.Tensor, batch: ForwardBatch, shape: StepShape) -> Played:
        taps = None if self._taps is None else self._taps.read(shape.padded_num_tokens)
        return Played(outputs[: shape.raw_num_tokens].clone(), batch, shape, taps)

    def _shape(self, mode: str, counts: Counts, bs: int, bucket: int, way: Way) -> StepShape:
        rules = self.rules
        if way != "alone":
            only = replace(rules.decode if mode == "decode" else rules.extend, sizes=(bucket,))
            rules = replace(rules, decode=only) if mode == "decode" else replace(rules, extend=only)
        step = StepMode.DECODE if mode == "decode" else StepMode.EXTEND
        reject = "alone" if way == "alone" else ""
        return self.worker.coordinator.settle(
            step, counts, bs, reject=reject, dp_rank=self.group, rules=rules
        )

    def ready(self, mode: str, bucket: int) -> None:
        """Make the graph of a bucket, over rows of its own, unless it is there."""
        if (mode, bucket) not in self._captured:
            self._captured.add((mode, bucket))
            most = min(bucket, self.most(mode))
            self.capture(mode, bucket, self.parts(CellId(mode, bucket, most), most, "capture"))

    def capture(self, mode: str, bucket: int, parts: Sequence[Span]) -> None:
        """Make the graph of a bucket anew, over these rows on every group. What they wrote is put back."""
        count = sum(count for _, _, count in parts)
        batch = self.requests.batch(_step(mode), parts)
        shape = self._shape(mode, (count,) * self.groups, len(parts), bucket, "replay")
        if not shape.eager_reason and self.runner(mode).backend.captures:
            self.runner(mode).capture([shape], lambda _: batch)
        self.kv.restore(batch.out_cache_loc)

    def captures(self, mode: str) -> bool:
        """Whether steps of this mode are captured at all."""
        return self.runner(mode).backend.captures

    def view(self, mode: str, played: Played) -> ForwardBatch:
        """The static inputs as the last step left them, at its padded widths."""
        registry = self.runner(mode).registry
        return registry.extract_buffer(played.batch, FillContext.of(played.shape))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [n, vocab] of hidden rows, by the head alone."""
        model, parts, step = self.worker.model, [], self.worker.options.max_bs
        for first in range(0, len(hidden), step):
            with torch.no_grad():
                parts.append(model.logits(hidden[first : first + step], EagerStream()).clone())
        return (
            torch.cat(parts) if parts else hidden.new_zeros(0, model.config.vocab_size, dtype=torch.float32)
        )

    def recover(self) -> None:
        """After a step that raised: nothing that it left is used again."""
        self._captured.clear()
        self.kv.restore()

    # ---- poison and taps ----

    @property
    def tapping(self) -> bool:
        """Whether steps copy what every layer gives."""
        return self._taps is not None

    def poisoned(self, poison: Poison, *, only: str | None = None) -> Callable[[Runner], None]:
        """What spoils everything that a step must not read, just before it runs; `only`: one slot, or "workspace"."""

        def spoil(runner: Runner) -> None:
            if only != "workspace":
                poison_registry(runner.registry, poison, only=only)
            if only in (None, "workspace"):
                poison_workspace(self.worker.model.workspace, poison)
                for buffers in self._parcels:
                    _spoil_parcels(buffers, poison)

        return spoil

    @contextmanager
    def tapped(self, rows: int) -> Iterator[None]:
        """Steps copy what every layer gives, for up to so many rows; graphs are made anew, before and behind."""
        with self.watched(rows):
            self._captured.clear()
            yield
        self._captured.clear()

    @contextmanager
    def watched(self, rows: int) -> Iterator[None]:
        """As `tapped`, for eager steps alone: graphs stay. Nothing changes where steps are tapped already."""
        if self.tapping:
            yield
            return
        plain = self.worker.model
        self._taps = Taps(plain, rows)
        self.worker.model = self._taps.model()
        try:
            yield
        finally:
            self.worker.model = plain
            self._taps = None


def parcels(worker: Worker) -> list[PairBuffers]:
    """What dispatchers send and receive in, each once."""
    found = {}
    for layer in worker.model.layers:
        dispatcher = layer.ffn.dispatcher if isinstance(layer.ffn, MoELayer) else None
        if isinstance(dispatcher, GatheredDispatcher | AllToAllDispatcher):
            found[id(dispatcher.home.buffers)] = dispatcher.home.buffers
    return list(found.values())


def _spoil_parcels(buffers: PairBuffers, poison: Poison) -> None:
    for tensor in (buffers.results, buffers.home, buffers.staged):
        poison.into(tensor)
    for parcel in (buffers.send, buffers.gathered, buffers.pairs):
        poison.into(parcel.x)
        poison.into(parcel.ids)
        poison.into(parcel.weights)


def _step(mode: str) -> StepMode:
    return StepMode.DECODE if mode == "decode" else StepMode.EXTEND


def _pick(words: str, among: int) -> int:
    """A number below `among`, equal on all ranks."""
    return zlib.crc32(words.encode()) % among
