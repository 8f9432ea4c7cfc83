"""Runs steps: one rank's model, KV pool, static buffers and graph runners.

    plan ─▶ ForwardBatch ─▶ StepShape ─▶ GraphRunner (fill, prepare, capture | replay | eager) ─▶ logits of real rows

Decode graphs hold body, head and greedy choice. Prefill graphs hold the body; the head runs eagerly on the few rows
whose logits are wanted. A decode step of the last one's requests goes on from what the buffers hold: no host arrays are
made for it. Knows nothing of requests' text, queues or sampling. Invariant: every forward goes through a `GraphRunner`.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as TokenIds
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec
import torch

from ostinato.attention.backend import AttentionBackend
from ostinato.engine.batch import (
    ForwardBatch,
    capture_batch,
    capture_shapes,
    decode_rows,
    extend_batch,
    idle_batch,
)
from ostinato.engine.chooser import Chooser
from ostinato.engine.coordinator import Coordinator
from ostinato.engine.plan import ScheduledSequence, StepPlan
from ostinato.engine.prefill_graph import ExtendFacts, PrefillGraph, can_replay_locally, prefill_backend
from ostinato.engine.progress import Report
from ostinato.engine.registries import RegistryOptions, build_decode_registry, build_prefill_registry
from ostinato.engine.replan import Replanner, buckets_as_dict
from ostinato.engine.sequence import Sequence
from ostinato.engine.shadow import CheckOptions, StepChecks
from ostinato.graphs import (
    Backend,
    EagerBackend,
    EagerStream,
    GraphBufferRegistry,
    GraphRunner,
    LiveStep,
    SegmentBackend,
    Stream,
)
from ostinato.kv.pool import KVPool
from ostinato.models.decoder import CausalLM
from ostinato.models.sharding import dispatch_stats
from ostinato.moe.load import ExpertLoad
from ostinato.moe.pairs import StepWidths
from ostinato.moe.rebalance import Rebalancer
from ostinato.padding import ShapeRules, StepMode, StepShape
from ostinato.parallel.rendezvous import single_world


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Sizes of the static buffers and how graphs are made."""

    max_bs: int
    max_num_tokens: int
    context_length: int
    capture_on_first_use: bool
    checks: CheckOptions = field(default_factory=CheckOptions)
    replanner: Replanner | None = None


class StepResult(msgspec.Struct, frozen=True):
    """`logits` fp32 [len(sampling) or more, vocab]: of the rows that choose a token; `tokens`: what the step chose.

    Logits are overwritten by the next step.
    """

    logits: torch.Tensor
    tokens: list[int]
    sampling: tuple[ScheduledSequence, ...]


Ints = TokenIds[int]
PromptLogits = Callable[[Sequence, int, torch.Tensor], None]
"""Takes (sequence, position of the first row, logits fp32 [rows, vocab]) of a prompt being prefilled."""


class Worker:
    """One rank. `execute` runs a scheduled step and returns logits."""

    def __init__(
        self,
        model: CausalLM,
        attention: AttentionBackend,
        pool: KVPool,
        backend: SegmentBackend | EagerBackend,
        rules: ShapeRules,
        options: WorkerOptions,
        load: ExpertLoad | None,
        coordinator: Coordinator | None = None,
        rebalancer: Rebalancer | None = None,
    ) -> None:
        self.model = model
        self.pool = pool
        self.load = load
        self.rules = rules
        self.coordinator = coordinator or Coordinator.of(single_world(), rules, StepWidths(), depends=False)
        self.rebalancer = rebalancer
        self.options = options
        alone = self.coordinator.world.topology.tp == 1
        self.checks = StepChecks(options.checks, self.coordinator.objectors, load, pool, alone=alone)
        self._attention = attention
        self._eager = EagerStream()
        self._chooser = Chooser(options.max_bs, model.ops, pool.device)
        # What the decode buffers hold: the rows of the last step and their tokens, if no other step came since.
        self._held: tuple[ScheduledSequence, ...] = ()
        self._held_tokens: Ints = ()
        self._held_shape: StepShape | None = None
        registry_options = RegistryOptions(
            request_slots=True, seq_len_fill_value=attention.seq_len_fill_value
        )
        sizes = options.max_bs, options.max_num_tokens
        attention.init_graph_state(*sizes)
        advance = None if attention.planned_lens is None else self._advance
        decode = build_decode_registry(
            options.max_bs, options.max_bs, registry_options, device=pool.device, advance=advance
        )
        self._prefill_registry = partial(build_prefill_registry, *sizes, registry_options, device=pool.device)
        over = backend if attention.can_capture(StepMode.DECODE) else EagerBackend()
        self.decode = self._runner(self._decode_step, decode, over)
        self._graph_backend = backend
        self.prefill = self.prefill_runner(self.coordinator.prefill.mode)
        if load is not None:
            load.set_live(True)

    def _runner(
        self,
        fn: Callable[[ForwardBatch, Stream], torch.Tensor],
        registry: GraphBufferRegistry[ForwardBatch],
        backend: Backend,
        live: LiveStep | None = None,
    ) -> GraphRunner[ForwardBatch, torch.Tensor]:
        return GraphRunner(
            fn,
            registry,
            backend=backend,
            prepare=self._attention.plan,
            capture_on_first_use=self.options.capture_on_first_use,
            live=live,
            rehearse=None if self.load is None else self.load.rehearse,
        )

    def prefill_runner(self, mode: PrefillGraph) -> GraphRunner[ForwardBatch, torch.Tensor]:
        """A runner of prefill steps in this mode, over buffers of its own; `verify` tries others than the worker's."""
        live = LiveStep()
        over = prefill_backend(mode, self._graph_backend, live)
        broken = live if mode is PrefillGraph.BREAKABLE else None
        return self._runner(self._prefill_step, self._prefill_registry(), over, broken)

    def _decode_step(self, view: ForwardBatch, stream: Stream) -> torch.Tensor:
        live = view.num_token_non_padded
        logits = self.model.logits(self.model.forward(view, stream), stream, live)
        self._chooser.greedy(logits, live, stream)
        return logits

    def _advance(self, view: ForwardBatch, stream: Stream) -> None:
        """The chosen tokens are the next inputs, each one position on; attention's plan follows."""
        assert view.input_ids is not None
        rows, planned = view.input_ids.shape[0], self._attention.planned_lens
        assert planned is not None, "this attention is planned by the host alone"
        lengths = (view.seq_lens, view.seq_lens_cpu, planned[:rows], self._chooser.positions[:rows])
        stream.launch(
            self.model.ops.advance,
            self._chooser.tokens[:rows],
            view.input_ids,
            view.positions,
            view.out_cache_loc,
            view.req_pool_indices,
            self.pool.page_table,
            self.pool.page_size,
            # A graph of a device cannot reach the host's lengths, which only a plan reads, and a plan writes them anew.
            tuple(x for x in lengths if x.device == view.positions.device),
            view.num_token_non_padded,
        )

    def _prefill_step(self, view: ForwardBatch, stream: Stream) -> torch.Tensor:
        return self.model.forward(view, stream)

    @property
    def chooser(self) -> Chooser:
        """Where the tokens of the last step are."""
        return self._chooser

    # ---- capture ahead of time ----

    def capture(self, report: Report) -> None:
        """Capture every bucket now, the largest first. Dummy steps count in no statistics."""
        if self.load is not None:
            self.load.set_live(False)
        prefill = self.coordinator.prefill
        for mode, runner in ((StepMode.EXTEND, self.prefill), (StepMode.DECODE, self.decode)):
            if not runner.backend.captures:
                continue
            variants = prefill.variants if mode.is_extend else ("",)
            shapes = capture_shapes(
                mode, self.rules, context_len=self.options.context_length, variants=variants
            )
            stage = f"Capturing {mode.value} steps"
            runner.capture(shapes, self._capture_batch, progress=_progress(report, stage))
        if self.load is not None:
            self.load.set_live(True)

    def _capture_batch(self, shape: StepShape) -> ForwardBatch:
        self.coordinator.dummy(shape.padded_num_tokens)
        return capture_batch(shape)

    # ---- serving ----

    def execute(self, plan: StepPlan, prompt_logits: PromptLogits) -> StepResult:
        """Run a step. Logits of prompts that asked for them go to `prompt_logits`, some rows at a time."""
        if self.options.replanner is not None:
            self._replan(self.options.replanner)
        rows, held = plan.rows, self._held_shape
        goes_on = held is not None and plan.mode is StepMode.DECODE and self._goes_on(rows)
        shape = held if goes_on and self.coordinator.repeats() else self.coordinator.decide(plan)
        assert shape is not None, "this rank has rows"
        if self.options.replanner is not None:
            self.options.replanner.note(shape, self.rules)
        decodes = shape.mode is StepMode.DECODE
        # Another rank may need another width for the same requests: then the buffers are filled anew.
        goes_on = goes_on and held is not None and shape.key == held.key
        self._held, self._held_shape = (), None
        checked = self.checks.on and self.checks.due(self.decode if decodes else self.prefill, shape)
        logits = self.decode.advance(shape) if goes_on else None
        if logits is None or checked:
            # Beside ranks that prefill, decode rows run as extends of one; the plan keeps the mode it was made with.
            batch = self._batch(msgspec.structs.replace(plan, mode=shape.mode))
            if not decodes:
                return self._prefill(plan, shape, batch, prompt_logits, checked)
            logits = self.decode.run(shape, batch) if logits is None else logits
            if checked:
                logits = self.checks.again(self.decode, shape, batch, logits, self._chooser.tokens)
            self._chooser.begin([row.sequence for row in rows], [row.start for row in rows], logits)
        tokens = self._chooser.take(len(rows))
        self._held, self._held_tokens, self._held_shape = rows, tokens, shape
        return StepResult(logits, tokens, rows)

    def _replan(self, replanner: Replanner) -> None:
        """Between two steps: go on with other bucket lists, if it is time, and drop graphs of no use in them."""
        rules = self.rules
        if replanner.due:
            failed = [bool(runner.stats.quarantined) for runner in (self.decode, self.prefill)]
            rules = replanner.plan(rules, decode_fails=failed[0], extend_fails=failed[1])
        if rules != self.rules:
            self.rules, self.coordinator = rules, replace(self.coordinator, rules=rules)
            self._held, self._held_shape = (), None
            self.decode.keep(rules.decode)
            self.prefill.keep(rules.extend)

    def relay(self, tokens: Ints) -> None:
        """Tokens of all rows of the decode step that has just run, where some are not its own choice."""
        if self._held:
            self._chooser.relay(tokens)
            self._held_tokens = tokens

    def _goes_on(self, rows: tuple[ScheduledSequence, ...]) -> bool:
        """Whether these are the sequences of the last step, each with the token it chose and no more."""
        if len(rows) != len(self._held):
            return False
        for now, before, token in zip(rows, self._held, self._held_tokens, strict=True):
            sequence = now.sequence
            if sequence is not before.sequence or now.start != before.start + 1:
                return False
            if sequence.output_token_ids[-1] != token:
                return False
        return True

    def idle(self) -> None:
        """Take part in a step of other ranks, if there is one, without rows of the own."""
        replanner = self.options.replanner
        if replanner is not None:
            self._replan(replanner)
        shape = self.coordinator.decide(None)
        if shape is not None:
            if replanner is not None:
                replanner.note(shape, self.rules)
            self._held, self._held_shape = (), None
            runner = self.decode if shape.mode is StepMode.DECODE else self.prefill
            checked = self.checks.due(runner, shape)
            batch = idle_batch(shape.mode)
            outputs = runner.run(shape, batch)
            if checked:
                self.checks.again(runner, shape, batch, outputs)

    def _prefill(
        self,
        plan: StepPlan,
        shape: StepShape,
        batch: ForwardBatch,
        prompt_logits: PromptLogits,
        checked: bool,
    ) -> StepResult:
        asks = any(row.asks_prompt_logits for row in plan.rows)
        facts = ExtendFacts.of_batch(batch, prompt_logits=asks)
        against = can_replay_locally(facts, self.coordinator.rules, self.coordinator.prefill)
        hidden = self.prefill.run(shape, batch, reject=shape.eager_reason or against)
        if checked:
            hidden = self.checks.again(self.prefill, shape, batch, hidden)
        last: list[int] = []
        sampling: list[ScheduledSequence] = []
        end = 0  # of its rows among those that came out
        for row in plan.rows:
            if row.asks_prompt_logits:
                self._prompt_rows(row, end, hidden, prompt_logits)
            end += row.num_logit_rows
            if row.chooses:
                last.append(end - 1)
                sampling.append(row)
        logits = self._head(hidden, last)
        if last:
            self._chooser.greedy(logits, None, self._eager)
            self._chooser.begin(
                [row.sequence for row in sampling],
                [row.start + row.num_tokens - 1 for row in sampling],
                logits,
            )
        return StepResult(logits, self._chooser.take(len(last)) if last else [], tuple(sampling))

    def _prompt_rows(
        self, row: ScheduledSequence, offset: int, hidden: torch.Tensor, prompt_logits: PromptLogits
    ) -> None:
        step = self.options.max_bs
        for first in range(0, row.num_tokens, step):
            count = min(step, row.num_tokens - first)
            rows = list(range(offset + first, offset + first + count))
            prompt_logits(row.sequence, row.start + first, self._head(hidden, rows))

    def _head(self, hidden: torch.Tensor, rows: list[int]) -> torch.Tensor:
        """Logits of some rows of the body's output, launched eagerly."""
        if not rows:
            return hidden.new_zeros(0, self.model.config.vocab_size, dtype=torch.float32)
        with torch.no_grad():
            picked = self.model.select_rows(hidden, torch.tensor(rows, device=hidden.device), self._eager)
            return self.model.logits(picked, self._eager)

    def _batch(self, plan: StepPlan) -> ForwardBatch:
        pool, rows = self.pool, plan.rows
        page_rows = [row.sequence.row for row in rows]
        if plan.mode is StepMode.DECODE:
            ids = [row.sequence.output_token_ids[-1] for row in rows]
            lens = [row.start + 1 for row in rows]
            slots = [row.sequence.slot(row.start) for row in rows]
            return decode_rows(ids, lens, page_rows, slots)
        ids = []
        for row in rows:
            ids += row.sequence.tokens(row.start, row.start + row.num_tokens)
        spans = [torch.arange(row.start, row.start + row.num_tokens) for row in rows]
        parts = [pool.slots(row.sequence.row, span) for row, span in zip(rows, spans, strict=True)]
        return extend_batch(
            ids,
            [row.num_tokens for row in rows],
            [row.start for row in rows],
            page_rows,
            torch.cat(parts),
            mode=plan.mode,
            logit_rows=plan.logit_rows,
        )

    @property
    def attention_name(self) -> str:
        return self._attention.name

    @property
    def chosen(self) -> torch.Tensor:
        """The greedy choice of each row of the last decode step, int64 [max_bs]; overwritten by the next."""
        return self._chooser.tokens

    def stats(self) -> dict[str, Any]:
        """Graph accounting by kind of step, and expert load [layers][experts] (None for dense models)."""
        return {
            "prefill_graph": self.coordinator.prefill.mode.value,
            "graph": {"decode": self.decode.stats.as_dict(), "prefill": self.prefill.stats.as_dict()},
            "checks": self.checks.as_dict(),
            "buckets": buckets_as_dict(self.rules, self.options.replanner),
            "expert_load": self._expert_load(),
            "dispatch": dispatch_stats(self.model),
            "placement": None if self.rebalancer is None else self.rebalancer.stats(),
        }

    def _expert_load(self) -> list[list[int]] | None:
        """By expert of the model, wherever its replicas are."""
        if self.load is None:
            return None
        counts = self.load.snapshot() if self.rebalancer is None else self.rebalancer.expert_load()
        rows: list[list[int]] = counts.tolist()
        return rows


def _progress(report: Report, stage: str) -> Callable[[StepShape, int, int], None]:
    return lambda shape, done, total: report(stage, done, total)
