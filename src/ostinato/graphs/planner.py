"""Which buckets to have: the list of least cost for the step sizes that were seen, within a budget. Pure functions.

    histogram of sizes ─▶ plan(…, Costs, Budget) ─▶ sizes        evaluate(sizes, …) ─▶ what a list costs, any list

A padded row costs something, so does a graph, and a step that no bucket serves runs eagerly, which costs something too.
Where padded rows are nearly free (CPU kernels skip them) few buckets are best, where they are computed (GPU) many.
Knows nothing of engines. Invariant: `plan` is exact (dynamic programming over the sizes seen, which are the only ones
worth a bucket) and deterministic, so ranks that saw the same steps plan the same list.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import NamedTuple

from ostinato.errors import ConfigError
from ostinato.padding import Buckets, align_up

Histogram = Mapping[int, int]
"""Steps by their size: rows of a prefill, requests of a decode step."""


@dataclass(frozen=True, slots=True)
class Costs:
    """In one unit, seconds as a rule: of a padded row in a replayed step, of running a step eagerly instead, and of
    having one graph for as long as the histogram covers.

    graph_bytes, capture_s: of one graph, for the budget; `row_bytes` and `row_capture_s` more for each row of its size.
    """

    pad_row: float
    eager: float
    graph: float = 0.0
    graph_bytes: int = 0
    row_bytes: int = 0
    capture_s: float = 0.0
    row_capture_s: float = 0.0

    def bytes_of(self, size: int) -> int:
        return self.graph_bytes + self.row_bytes * size

    def seconds_of(self, size: int) -> float:
        return self.capture_s + self.row_capture_s * size


@dataclass(frozen=True, slots=True)
class Budget:
    """At most that many graphs, bytes of all of them, and seconds to capture them; None for no limit."""

    graphs: int | None = None
    bytes: int | None = None
    capture_s: float | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """What a list must be: sizes are multiples of `alignment`; `cover`, the largest legal step, has a bucket if given.

    max_pad_factor: a bucket of more than that many times the real rows is refused, the step runs eagerly.
    paid: sizes whose graph is there already, so that keeping it costs nothing.
    """

    alignment: int = 1
    cover: int | None = None
    max_pad_factor: int | None = None
    paid: frozenset[int] = frozenset()


class Outcome(NamedTuple):
    """What a list of that many graphs would have done for a histogram. `cost` in the unit of `Costs`."""

    sizes: tuple[int, ...]
    graphs: int
    cost: float
    real_rows: int
    pad_rows: int
    eager_steps: int
    bytes: int
    capture_s: float

    @property
    def pad_share(self) -> float:
        """Padded rows among all rows computed."""
        return self.pad_rows / max(self.real_rows + self.pad_rows, 1)


def evaluate(
    sizes: Iterable[int], histogram: Histogram, costs: Costs, limits: Limits | None = None
) -> Outcome:
    """What `sizes` cost for the steps of `histogram`, by the rules of `decide_shape`."""
    limits = limits or Limits()
    buckets, factor = Buckets(tuple(sorted(sizes))), limits.max_pad_factor
    pads = eager = 0
    for size, steps in histogram.items():
        bucket = buckets.fit(size)
        if bucket is None or (factor is not None and bucket > factor * size):
            eager += steps
        else:
            pads += steps * (bucket - size)
    return Outcome(
        buckets.sizes,
        len(buckets.sizes),
        pads * costs.pad_row
        + eager * costs.eager
        + sum(size not in limits.paid for size in buckets.sizes) * costs.graph,
        sum(size * steps for size, steps in histogram.items()),
        pads,
        eager,
        sum(map(costs.bytes_of, buckets.sizes)),
        sum(map(costs.seconds_of, buckets.sizes)),
    )


class _Label(NamedTuple):
    """A list that ends with some candidate; `key` orders lists of equal cost: fewer graphs, then smaller ones."""

    cost: float
    bytes: int
    seconds: float
    key: tuple[int, tuple[int, ...]]


def used(sizes: Iterable[int], histogram: Histogram) -> tuple[int, ...]:
    """Those of `sizes` that some step of `histogram` falls into: all that a list captured on demand has captured."""
    buckets = Buckets(tuple(sorted(sizes)))
    return tuple(sorted({bucket for size in histogram if (bucket := buckets.fit(size)) is not None}))


def plan(
    histogram: Histogram, costs: Costs, budget: Budget | None = None, limits: Limits | None = None
) -> Outcome:
    """The list of least cost among all lists within the budget; of equal ones that with the fewest graphs.

    Raises ConfigError for sizes below 1, and for a budget that has no room for the bucket of `limits.cover`.
    """
    budget, limits = budget or Budget(), limits or Limits()
    bad = [size for size, steps in histogram.items() if size < 1 or steps < 0]
    if bad:
        raise ConfigError(
            f"the histogram of step sizes holds {bad[:4]}; sizes are at least 1, and steps at least 0"
        )
    segments = _Segments(histogram, costs, limits)
    last = len(segments.candidates)
    # Lists that end with candidate j, by number of graphs where that is limited; 0 stands for the empty list.
    rounds = last if budget.graphs is None else min(budget.graphs, last)
    found = [_Label(0.0, 0, 0.0, (0, ()))] if limits.cover is None or last == 0 else []
    best = [_closed(label, segments, 0, costs) for label in found]
    layers: list[list[_Label]] = [[_Label(0.0, 0, 0.0, (0, ()))], *([] for _ in range(last))]
    counted = budget.graphs is not None
    for _ in range(rounds if counted else 1):
        before, layers = layers, [[] for _ in range(last + 1)]
        if not counted:
            layers[0] = before[0]
        for j in range(1, last + 1):
            source = before if counted else layers
            grown = [_grown(label, segments, i, j, costs, limits) for i in range(j) for label in source[i]]
            layers[j] = _undominated([label for label in grown if _within(label, budget)], budget)
            if limits.cover is None or j == last:
                best += [_closed(label, segments, j, costs) for label in layers[j]]
    if not best:
        raise ConfigError(
            f"the budget ({budget}) has no room for the bucket of {limits.cover} rows, the largest step; raise it"
        )
    return evaluate(min(best, key=lambda label: (label.cost, label.key)).key[1], histogram, costs, limits)


def _grown(label: _Label, segments: _Segments, i: int, j: int, costs: Costs, limits: Limits) -> _Label:
    size = segments.candidates[j - 1]
    graphs, sizes = label.key
    return _Label(
        label.cost + segments.cost(i, j) + (0.0 if size in limits.paid else costs.graph),
        label.bytes + costs.bytes_of(size),
        label.seconds + costs.seconds_of(size),
        (graphs + 1, (*sizes, size)),
    )


def _closed(label: _Label, segments: _Segments, j: int, costs: Costs) -> _Label:
    """With the steps above its last bucket, which run eagerly."""
    return label._replace(cost=label.cost + segments.steps_above(j) * costs.eager)


def _within(label: _Label, budget: Budget) -> bool:
    return label.bytes <= (inf if budget.bytes is None else budget.bytes) and label.seconds <= (
        inf if budget.capture_s is None else budget.capture_s
    )


def _undominated(labels: list[_Label], budget: Budget) -> list[_Label]:
    """Those that no other beats in cost and in all that the budget limits."""
    kept: list[_Label] = []
    for label in sorted(labels, key=lambda one: (one.cost, one.bytes, one.seconds, one.key)):
        if not any(
            (budget.bytes is None or other.bytes <= label.bytes)
            and (budget.capture_s is None or other.seconds <= label.seconds)
            for other in kept
        ):
            kept.append(label)
    return kept


class _Segments:
    """Cost of serving neighbouring sizes by one bucket, in constant time and a bisection.

    candidates: the only sizes worth a bucket, ascending: those seen, aligned, the cover, and those that are paid. Any
    other bucket serves what the candidate below it does, with more padding.
    """

    def __init__(self, histogram: Histogram, costs: Costs, limits: Limits) -> None:
        self._sizes = sorted(size for size, steps in histogram.items() if steps)
        wanted = {align_up(size, limits.alignment) for size in self._sizes}
        if limits.cover is not None:
            wanted.add(align_up(limits.cover, limits.alignment))
        top = inf if limits.cover is None else max(wanted)
        wanted |= {size for size in limits.paid if size <= top and size % limits.alignment == 0}
        self.candidates = sorted(wanted)
        self._costs, self._factor = costs, limits.max_pad_factor
        steps = [histogram[size] for size in self._sizes]
        self._steps = _sums(steps)
        self._rows = _sums([n * size for n, size in zip(steps, self._sizes, strict=True)])
        self._ends = [0, *(bisect_left(self._sizes, size + 1) for size in self.candidates)]

    def cost(self, i: int, j: int) -> float:
        """Of the sizes above candidate i (0: none) up to candidate j, all served by j."""
        size, start, end = self.candidates[j - 1], self._ends[i], self._ends[j]
        served = start
        if self._factor is not None:
            served = min(max(bisect_left(self._sizes, -(-size // self._factor)), start), end)
        pads = (self._steps[end] - self._steps[served]) * size - (self._rows[end] - self._rows[served])
        return pads * self._costs.pad_row + (self._steps[served] - self._steps[start]) * self._costs.eager

    def steps_above(self, j: int) -> int:
        return self._steps[-1] - self._steps[self._ends[j]]


def _sums(values: Sequence[int]) -> list[int]:
    return [0, *accumulate(values)]
