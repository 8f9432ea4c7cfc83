"""The check of pads: nothing that a pad row holds, or that an earlier step left behind, reaches a real row.

    alone on a clean cache ─▶ what must come out
    poison in every static input, all scratch memory, what ranks send; a larger step before ─▶ the same must come out

What it looks at besides: static inputs hold real rows, then benign tails; counts are counts of real rows; pads go to no
expert and count as no load; no page but those of the real rows is written. Invariant: all ranks run the same steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from ostinato.engine.batch import ForwardBatch
from ostinato.graphs.audit import POISONS, first_difference
from ostinato.graphs.slots import FillContext
from ostinato.padding import local_num_token_non_padded
from ostinato.verify.cells import CellId
from ostinato.verify.outcome import Found, Outcome
from ostinato.verify.requests import Span
from ostinato.verify.stage import Counts, Played, Runner, Stage, Way
from ostinato.verify.taps import PARTS

INDEX_SLOTS = ("input_ids", "positions", "out_cache_loc", "req_pool_indices")
LENGTH_SLOTS = ("seq_lens", "seq_lens_cpu")
EXTEND_SLOTS = ("extend_seq_lens", "extend_prefix_lens", "extend_start_loc", "logit_rows")
NOBODY = -1


def pads(stage: Stage, cell: CellId) -> Outcome:
    """Every poison replayed, NaN also eagerly, and one replay in the traces of a larger step."""
    out, counts = Outcome(), stage.counts(cell)
    what = f"expert load was {stage.counted_at_start} before the first request"
    out.that(stage.counted_at_start == 0, "start", Found(what, slot="expert_load"))
    trial = _Trial.of(stage, cell, counts, out)
    way: Way = "replay" if stage.captures(cell.mode) else "eager"
    for poison in POISONS:
        spoil = stage.poisoned(poison)
        if poison is POISONS[0]:
            with stage.watched(cell.bucket):
                trial.run("eager", f"under {poison.name} poison, eager", spoil)
        if way == "replay" or poison is not POISONS[0]:
            trial.run(way, f"under {poison.name} poison, {way}", spoil)
    most = min(cell.bucket, stage.most(cell.mode))
    larger = stage.parts(cell, most, "larger")
    before = stage.play(cell.mode, larger, (most,) * stage.groups, cell.bucket, way)
    stage.kv.restore(before.batch.out_cache_loc)
    trial.run(way, f"after a larger step, {way}", None)
    if stage.tapping:
        trial.blame(way)
    if stage.groups > 1 and cell.mode == "decode":
        idle = stage.beside_idle(cell)
        beside = _Trial.of(stage, cell, idle, trial.out)
        beside.run(way, f"under nan poison beside idle groups, {way}", stage.poisoned(POISONS[0]))
    stage.kv.restore()
    return trial.out


@dataclass(frozen=True, slots=True, eq=False)
class _Trial:
    """One batch of a cell, what it gives alone, and what was noted of its padded runs."""

    stage: Stage
    cell: CellId
    counts: Counts
    parts: list[Span]
    clean: Played
    pages: list[torch.Tensor]
    out: Outcome

    @classmethod
    def of(cls, stage: Stage, cell: CellId, counts: Counts, out: Outcome) -> _Trial:
        parts = stage.parts(cell, counts[stage.group])
        if stage.captures(cell.mode):
            stage.ready(cell.mode, cell.bucket)
        stage.kv.restore()
        clean = stage.play(cell.mode, parts, counts)
        finite = bool(clean.rows.isfinite().all())
        out.that(finite, "finite", Found("real rows are not finite, without any pads"))
        return cls(stage, cell, counts, parts, clean, stage.kv.expect(clean.batch.out_cache_loc), out)

    @property
    def slots(self) -> torch.Tensor:
        """KV slots of the real rows."""
        return self.clean.batch.out_cache_loc

    @property
    def rows(self) -> int:
        return self.counts[self.stage.group]

    def run(self, way: Way, how: str, before: Callable[[Runner], None] | None) -> None:
        """Run the step in its bucket on a clean cache, and look at everything that it left."""
        stage, load = self.stage, self.stage.worker.load
        stage.kv.restore(self.slots)
        counted = None if load is None else load.snapshot().sum(1)
        played = stage.play(self.cell.mode, self.parts, self.counts, self.cell.bucket, way, before=before)
        self._inputs(played, how)
        self._pads(played, how)
        if load is not None and counted is not None:
            self._load(load.snapshot().sum(1) - counted, how)
        differences = list(stage.kv.differences(self.slots, self.pages))
        for found in differences[:1]:
            own = found.page in stage.kv.pages_of(self.slots)
            whose = "which real rows wrote," if own else "which no real row may write,"
            what = f"{found.part} of page {found.page}, {whose} differ {how}"
            self.out.say("kv", Found(what, found.layer, None if own else "out_cache_loc"))
        self.out.checks += 1
        if differences:
            stage.kv.restore()
        self.out.same("rows", self.clean, played, how)

    def _inputs(self, played: Played, how: str) -> None:
        """Static inputs: the batch's rows, tails by the table, and counts."""
        stage, view, shape = self.stage, self.stage.view(self.cell.mode, played), played.shape
        fill = stage.worker.model.attention.seq_len_fill_value if self.cell.mode == "decode" else 0
        tails: Mapping[str, int] = {
            **dict.fromkeys(INDEX_SLOTS, 0),
            **dict.fromkeys(LENGTH_SLOTS, fill),
            **dict.fromkeys(EXTEND_SLOTS, 0),
            "extend_start_loc": shape.raw_num_tokens,
        }
        for name, value in tails.items():
            buffer, source = getattr(view, name), getattr(played.batch, name)
            if buffer is None or source is None:
                continue
            buffer = buffer.cpu()
            raw = len(source)
            real = bool((buffer[:raw] == source).all())
            self.out.that(
                real, f"input {name}", Found(f"real rows of {name} are not the batch's {how}", slot=name)
            )
            wrong = (buffer[raw:] != value).nonzero().flatten().tolist()
            row = raw + wrong[0] if wrong else None
            held = int(buffer[row]) if row is not None else 0
            what = f"the tail of {name} holds {held}, not {value}, {how}"
            self.out.that(not wrong, f"tail {name}", Found(what, slot=name, row=row))
        self._counts(played, view, how)

    def _counts(self, played: Played, view: ForwardBatch, how: str) -> None:
        stage, width = self.stage, played.shape.padded_num_tokens
        topology = stage.engine.world.topology
        sharded = stage.runner(self.cell.mode).registry.verdict(FillContext.of(played.shape)) is True
        local = local_num_token_non_padded(
            self.rows,
            width,
            attn_tp_rank=topology.attn_tp_rank,
            attn_tp_size=topology.attn_tp,
            sharded=sharded,
        )
        counts = {"num_token_non_padded": local, "global_num_token_non_padded": self.rows}
        if played.batch.num_logit_rows is not None:
            counts["num_logit_rows"] = self.rows
        for name, value in counts.items():
            held = getattr(view, name).tolist()
            what = f"{name} is {held[0]}, the step has {value} real rows of {width} here, {how}"
            self.out.that(held == [value], f"count {name}", Found(what, slot=name))

    def _pads(self, played: Played, how: str) -> None:
        """What layers left in pad rows: no expert, zeros; of every layer where they are watched, else of the last."""
        model, rows, width = self.stage.worker.model, self.rows, played.shape.padded_num_tokens
        config, workspace = model.config, model.workspace
        heads = workspace.take("attention", width, config.num_heads * config.head_dim)[rows:]
        last = config.num_layers - 1
        if played.taps is not None:
            for at, part in enumerate(played.taps.parts):
                zero = bool((part[rows:width] == 0).all())
                what = f"what {PARTS[at % 2]} gives pads is not zero {how}"
                self.out.that(zero, "zeros", Found(what, at // 2, "delta"))
        elif config.layers[last].sparse:
            zero = bool((workspace.take("delta", width, config.hidden_size)[rows:] == 0).all())
            self.out.that(
                zero, "experts", Found(f"experts' results of pads are not zero {how}", last, "delta")
            )
        zero = bool((heads == 0).all())
        self.out.that(zero, "attention", Found(f"attention of pads is not zero {how}", last, "attention"))
        sparse = [i for i, layer in enumerate(config.layers) if layer.sparse]
        if config.moe is None or not sparse:
            return
        ids = {sparse[-1]: workspace.take("moe.topk_ids", width, config.moe.top_k)}
        if played.taps is not None and played.taps.ids is not None:
            ids = {layer: played.taps.ids[layer, :width] for layer in sparse}
        for layer, routed in ids.items():
            wrong = (routed[rows:] != NOBODY).any(1).nonzero().flatten().tolist()
            row = rows + wrong[0] if wrong else None
            what = f"pads are routed to experts {how}"
            self.out.that(not wrong, "ids", Found(what, layer, "moe.topk_ids", row))

    def _load(self, counted: torch.Tensor, how: str) -> None:
        """Expert load goes up by real rows times experts of a token, in every sparse layer; of ranks that share rows
        one counts.
        """
        config, load = self.stage.worker.model.config, self.stage.worker.load
        assert config.moe is not None
        assert load is not None
        counting = self.rows * int(load.live)
        for layer, (spec, count) in enumerate(zip(config.layers, counted.tolist(), strict=True)):
            want = counting * config.moe.top_k if spec.sparse else 0
            what = f"expert load went up by {count}, not by {counting} rows x {config.moe.top_k}, {how}"
            self.out.that(count == want, "load", Found(what, layer, "expert_load"))

    def blame(self, way: Way) -> None:
        """Spoil one static input at a time: the one that moves a real row is read where it must not be."""
        self.stage.kv.restore(self.slots)
        nothing = self.stage.play(self.cell.mode, self.parts, self.counts, self.cell.bucket, way)
        blamed = first_difference(self.clean.rows, nothing.rows) is None  # else it is no input's fault
        names = (*self.stage.runner(self.cell.mode).registry.slot_names, "workspace")
        for name in names:
            for poison in POISONS[:2]:
                self.stage.kv.restore(self.slots)
                spoil = self.stage.poisoned(poison, only=name)
                played = self.stage.play(
                    self.cell.mode, self.parts, self.counts, self.cell.bucket, way, before=spoil
                )
                if not blamed:
                    continue
                how = f"when {name} alone holds {poison.name} poison, {way}"
                self.out.same("rows by one input", self.clean, played, how, slot=name)
