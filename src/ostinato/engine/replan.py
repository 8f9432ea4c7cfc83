"""Bucket lists that follow the traffic: planned anew, between steps, from the sizes of the steps that were seen.

    every step's size ─▶ note ─▶ every N steps: plan ─▶ other lists, if they are clearly better, from the next step on

Knows nothing of graphs: a bucket's graph is captured when a step first needs it, so no step waits for more than one.
Invariant: what is planned follows from the steps alone, and ranks that step together see the same ones, so all of them
change their lists at the same step without a word.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from ostinato.graphs.planner import Costs, Limits, evaluate, plan, used
from ostinato.padding import Buckets, ShapeRules, StepShape, align_up

EVERY = 1000
"""Steps between two plans."""
CLEARLY = 0.9
"""A new list must cost at most that share of the present one."""

SERVING_COSTS: Mapping[str, Costs] = MappingProxyType(
    {
        # Seconds. Kernels on CPU skip pads, whose rows are little more than cleared, and a capture is a step that also
        # writes its launches down. `ostinato bench buckets` measures all three: a padded row cost 1 to 6 us with the
        # demo model and 40 to 100 us with a 1.7B MoE, a graph 1000 to 12000 times as much.
        "tape": Costs(pad_row=5e-6, eager=1e-3, graph=1e-2),
        # A GPU computes padded rows; a capture takes two warm-ups and the capture itself, some steps' time.
        "cuda": Costs(pad_row=5e-5, eager=5e-3, graph=0.2),
    }
)


class Replanner:
    """`note` each step; when `due`, `plan` gives the rules to go on with. costs: for both kinds of steps."""

    def __init__(self, costs: Costs, *, every: int = EVERY) -> None:
        self.costs = costs
        self.every = every
        self.due = False
        self.plans = 0
        self.changes = 0
        self._steps = 0
        self._seen: dict[bool, Counter[int]] = {False: Counter(), True: Counter()}
        self._met: dict[bool, set[int]] = {
            False: set(),
            True: set(),
        }  # sizes of which a graph has been captured

    def note(self, shape: StepShape, rules: ShapeRules) -> None:
        """A step is about to run, on all ranks that run it together."""
        extends = shape.mode.is_extend
        refused = extends and bool(shape.eager_reason)
        per_row = 1 if extends else rules.tokens_per_request
        # A prefill that ran eagerly counts with the exact rows of each rank: any of them may be too few for the bucket,
        # by a row. Of other steps the widest rank says what they were padded to.
        for size in {*shape.num_tokens} if refused else {max(shape.num_tokens)}:
            if size:
                rows = -(-size // per_row)
                self._seen[extends][rows if refused else _coarse(rows, extends)] += 1
        if not shape.eager_reason:
            self._met[extends].add(shape.key.size)
        self._steps += 1
        self.due = self.due or self._steps % self.every == 0

    def plan(
        self, rules: ShapeRules, *, decode_fails: bool = False, extend_fails: bool = False
    ) -> ShapeRules:
        """The rules with the lists that serve what was seen best, or as they are where that gains little.

        decode_fails, extend_fails: a graph of the kind is out of use, as its replays were wrong. Its bucket is met, but
        serves nothing: a plan could move everything into it, so the list stays as it is.
        """
        self.due = False
        self.plans += 1
        decode, extend = rules.decode, rules.extend
        if not decode_fails:
            decode = self._better(decode, False, rules.attn_tp_size, None)
        if not extend_fails:
            extend = self._better(extend, True, rules.attn_tp_size, rules.max_pad_factor)
        for seen in self._seen.values():  # what was long ago counts less and less
            for size in list(seen):
                seen[size] //= 2
        found = replace(rules, decode=decode, extend=extend)
        self.changes += found != rules
        return found

    def _better(self, buckets: Buckets, extends: bool, alignment: int, factor: int | None) -> Buckets:
        met = frozenset(self._met[extends])
        limits = Limits(alignment, buckets.largest, factor, met)
        seen = {
            size: steps for size, steps in self._seen[extends].items() if steps and size <= buckets.largest
        }
        if not seen:
            return buckets
        now = evaluate(used(buckets.sizes, seen), seen, self.costs, limits)
        found = plan(seen, self.costs, limits=limits)
        # The bucket of the largest step is part of every plan, and captured when such a step comes.
        cost = found.cost - (
            self.costs.graph if buckets.largest not in {*met, *used(found.sizes, seen)} else 0.0
        )
        if cost >= now.cost or cost > CLEARLY * now.cost:
            return buckets
        self._met[extends] &= set(found.sizes)
        return Buckets(found.sizes)


def buckets_as_dict(rules: ShapeRules, replanner: Replanner | None) -> dict[str, Any]:
    """Plain values for `stats()`: the lists in use, and how often they were planned and changed."""
    lists = {"decode": list(rules.decode.sizes), "prefill": list(rules.extend.sizes)}
    plans, changes = (0, 0) if replanner is None else (replanner.plans, replanner.changes)
    return lists | {"plans": plans, "changes": changes}


def _coarse(size: int, extends: bool) -> int:
    """Few different sizes, so that a plan takes milliseconds: prefills count by 16 rows, long ones by 64, and those of
    few rows each, to which another bucket may be too wide.
    """
    if not extends:
        return size if size <= 64 else align_up(size, 8)
    if size <= 32:
        return size
    return align_up(size, 16 if size <= 512 else 64)
