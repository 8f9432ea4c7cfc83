"""What this rank runs next, agreed upon with the others: the step's mode and shape, before every forward.

    own plan ─▶ StepVote ─▶ sync ─▶ GroupStep ─▶ mode, StepShape, rows of every rank (for dispatch)

Knows nothing of requests' tokens or of models. Invariants: ranks that depend on each other come here once for every
step that any of them takes, also with nothing to run; ranks that do not depend on each other exchange nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ostinato.engine.plan import StepPlan
from ostinato.engine.prefill_graph import (
    ExtendFacts,
    PrefillAbility,
    PrefillGraph,
    can_replay_locally,
    prefix_variant,
)
from ostinato.moe.pairs import StepWidths
from ostinato.padding import ShapeRules, StepMode, StepShape, decide_shape, gathered_rows
from ostinato.parallel.rendezvous import World
from ostinato.parallel.step_sync import StepSync, StepVote

_FULL = PrefillAbility(PrefillGraph.FULL)


def _nothing() -> None:
    return


@dataclass(slots=True)
class Turn:
    """decode: the next step is left to decode rows on all ranks, since the last one kept some of them waiting.

    It follows from the votes of the last step alone, so every rank knows it before it schedules; and a step of decode
    rows never leads to another such turn, so a prompt waits for one step at a time.
    """

    decode: bool = False


@dataclass(frozen=True, slots=True)
class Coordinator:
    """Decides steps. `depends`: experts are spread over ranks, so that all must take part in each other's steps.

    before_step: called on all of them before each step that they take together. prefill: what prefill graphs can do.
    """

    world: World
    rules: ShapeRules
    widths: StepWidths
    sync: StepSync
    depends: bool
    before_step: Callable[[], None] = _nothing
    prefill: PrefillAbility = _FULL
    turn: Turn = field(default_factory=Turn)

    @classmethod
    def of(
        cls,
        world: World,
        rules: ShapeRules,
        widths: StepWidths,
        *,
        depends: bool,
        before_step: Callable[[], None] | None = None,
        prefill: PrefillAbility = _FULL,
    ) -> Coordinator:
        sync = StepSync(world.topology, world.world)
        return cls(world, rules, widths, sync, depends, before_step or _nothing, prefill)

    def decide(self, plan: StepPlan | None) -> StepShape | None:
        """The shape to run `plan` in; None when no rank has anything to run. Sets the widths that dispatch goes by."""
        topology = self.world.topology
        bs = 0 if plan is None else len(plan.rows)
        facts = None if plan is None else ExtendFacts.of_plan(plan)
        against = "" if facts is None else can_replay_locally(facts, self.rules, self.prefill)
        if self.depends:
            step = self.sync.gather(self._vote(plan, prefill_graph=not against))
            self.turn.decode = step.decode_next and topology.dp > 1  # one group alone takes turns by itself
            if step.idle:
                return None
            self.before_step()
            own = StepMode.IDLE if plan is None else plan.mode
            mode, counts, reject, rank = step.mode(own), step.num_tokens, step.reject, topology.attn_dp_rank
        elif plan is None:
            return None
        else:
            mode, counts, reject, rank = plan.mode, (plan.num_tokens,), "", 0
        variant = ""
        if mode.is_extend:
            # The own reason says more than that this rank voted against; both mean the same step for all ranks.
            reject = against or reject
            variant = "" if facts is None else prefix_variant(facts, self.prefill)
        return self.settle(mode, counts, bs, reject=reject, dp_rank=rank, variant=variant)

    def settle(
        self,
        mode: StepMode,
        counts: tuple[int, ...],
        bs: int,
        *,
        reject: str = "",
        dp_rank: int = 0,
        variant: str = "",
        rules: ShapeRules | None = None,
    ) -> StepShape:
        """The shape of a step about which all ranks know everything; rules: instead of the own, on all of them."""
        rules = rules or self.rules
        shape = decide_shape(mode, counts, bs, rules, dp_rank=dp_rank, variant=variant, reject=reject)
        if self.world.topology.tp > 1:
            self.widths.rows = gathered_rows(shape, rules).padded
        return shape

    def repeats(self) -> bool:
        """Whether the last step's shape holds for its rows' next step without asking: no other group has a say.

        Stands in for `decide` then, for what must be done before each step too.
        """
        if self.world.topology.dp > 1:
            return False
        if self.depends:
            self.before_step()
        return True

    def exchange(self, words: int) -> Callable[[list[int]], list[list[int]]]:
        """Gathers rows of `words` whole numbers from all ranks, and gives back those of the leaders."""
        group, leaders = self.world.world, self.world.topology.leaders
        gathered = torch.zeros(group.size, words, dtype=torch.int64)

        def gather(row: list[int]) -> list[list[int]]:
            group.all_gather(torch.tensor(row, dtype=torch.int64), gathered)
            rows: list[list[int]] = gathered.tolist()
            return [rows[leader] for leader in leaders]

        return gather

    def objectors(self, objects: bool) -> tuple[int, ...]:
        """Ranks that object to the step that all of them have just taken together; each comes here then."""
        group = self.world.world if self.depends else self.world.attn
        ranks = range(group.size) if self.depends else self.world.topology.attn_tp_ranks
        gathered = torch.zeros(group.size, 1, dtype=torch.int64)
        group.all_gather(torch.tensor([int(objects)]), gathered)
        return tuple(rank for rank, (found,) in zip(ranks, gathered.tolist(), strict=True) if found)

    def dummy(self, rows: int) -> tuple[int, ...]:
        """All ranks run `rows` rows: what a capture ahead of time does."""
        self.widths.rows = (rows,) * self.world.topology.dp
        return self.widths.rows

    def _vote(self, plan: StepPlan | None, *, prefill_graph: bool) -> StepVote:
        """What only this rank knows of a step is said here, so that `decide_shape` finds the same on all ranks."""
        if plan is None:
            return StepVote()
        logits = sum(row.samples for row in plan.rows)
        return StepVote(plan.mode, plan.num_tokens, logits, prefill_graph=prefill_graph, held=plan.held)
