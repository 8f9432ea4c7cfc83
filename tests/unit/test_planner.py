"""The bucket planner against every list there is, on small histograms; what it makes of both kinds of machine."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.errors import ConfigError
from ostinato.graphs.planner import Budget, Costs, Limits, Outcome, evaluate, plan, used
from ostinato.padding import Buckets, ShapeRules, StepMode, align_up, decide_shape

HISTOGRAMS = st.dictionaries(st.integers(1, 14), st.integers(1, 9), max_size=6)
COSTS = st.builds(
    Costs,
    pad_row=st.integers(0, 5),
    eager=st.integers(0, 40),
    graph=st.integers(0, 30),
    graph_bytes=st.integers(0, 3),
    row_bytes=st.integers(0, 2),
    capture_s=st.integers(0, 3),
    row_capture_s=st.integers(0, 2),
)
LIMITS = st.builds(
    Limits,
    alignment=st.sampled_from([1, 2, 4]),
    cover=st.none() | st.integers(14, 17),
    max_pad_factor=st.none() | st.integers(1, 3),
    paid=st.frozensets(st.integers(1, 16), max_size=3),
)
BUDGETS = st.builds(
    Budget,
    graphs=st.none() | st.integers(0, 4),
    bytes=st.none() | st.integers(0, 60),
    capture_s=st.none() | st.integers(0, 60),
)


def every_list(histogram: dict[int, int], costs: Costs, budget: Budget, limits: Limits) -> list[Outcome]:
    """All lists of aligned sizes within the budget, also of sizes that were never seen."""
    top = max([*histogram, 1, *limits.paid]) if limits.cover is None else limits.cover
    sizes = range(limits.alignment, align_up(top, limits.alignment) + 1, limits.alignment)
    most = len(sizes) if budget.graphs is None else budget.graphs
    lists = [chosen for count in range(min(most, len(sizes)) + 1) for chosen in combinations(sizes, count)]
    if limits.cover is not None:
        lists = [chosen for chosen in lists if align_up(limits.cover, limits.alignment) in chosen]
    found = [evaluate(chosen, histogram, costs, limits) for chosen in lists]
    return [
        one
        for one in found
        if (budget.bytes is None or one.bytes <= budget.bytes)
        and (budget.capture_s is None or one.capture_s <= budget.capture_s)
    ]


@settings(max_examples=60, deadline=None)
@given(HISTOGRAMS, COSTS, BUDGETS, LIMITS.filter(lambda limits: limits.alignment > 1 or limits.cover is None))
def test_no_list_is_better(histogram: dict[int, int], costs: Costs, budget: Budget, limits: Limits) -> None:
    every = every_list(histogram, costs, budget, limits)
    if not every:
        with pytest.raises(ConfigError, match="has no room"):
            plan(histogram, costs, budget, limits)
        return
    found = plan(histogram, costs, budget, limits)
    least = min(one.cost for one in every)
    assert found.cost == least
    assert len(found.sizes) == min(len(one.sizes) for one in every if one.cost == least)
    assert any(one == found for one in every)
    assert plan(dict(reversed(histogram.items())), costs, budget, limits) == found


@settings(max_examples=40, deadline=None)
@given(HISTOGRAMS, st.sets(st.integers(1, 16), min_size=1, max_size=5), st.booleans())
def test_a_list_is_judged_by_the_rules_that_serve(
    histogram: dict[int, int], sizes: set[int], extends: bool
) -> None:
    """`evaluate` and `decide_shape` agree on every step."""
    costs, buckets = Costs(1.0, 100.0), Buckets(tuple(sorted(sizes)))
    rules = ShapeRules(buckets, buckets, max_pad_factor=2)
    mode = StepMode.EXTEND if extends else StepMode.DECODE
    pads = eager = 0
    for size, steps in histogram.items():
        shape = decide_shape(mode, [size], size, rules)
        eager += steps * bool(shape.eager_reason)
        pads += steps * (shape.padded_num_tokens - size)
    found = evaluate(sizes, histogram, costs, Limits(max_pad_factor=2 if extends else None))
    assert (found.pad_rows, found.eager_steps, found.cost) == (pads, eager, pads + 100.0 * eager)


def test_free_pads_want_few_graphs_and_costly_ones_many() -> None:
    histogram = {1: 100, 3: 50, 8: 20, 20: 10}
    cpu, gpu = Costs(pad_row=1e-8, eager=1e-3, graph=2e-3), Costs(pad_row=1e-3, eager=1e-3, graph=2e-3)
    assert plan(histogram, cpu, limits=Limits(cover=32)).sizes == (32,)
    assert plan(histogram, gpu, limits=Limits(cover=32)).sizes == (1, 3, 8, 20, 32)
    found = plan(histogram, gpu, Budget(graphs=2), Limits(cover=32))
    assert len(found.sizes) == 2
    assert found.pad_share < evaluate((32,), histogram, gpu).pad_share


def test_graphs_that_are_there_are_kept_and_those_never_met_are_not_counted() -> None:
    histogram, costs = {3: 10, 7: 10}, Costs(pad_row=1.0, eager=50.0, graph=15.0)
    assert plan(histogram, costs, limits=Limits(cover=8)).sizes == (3, 8)
    assert plan(histogram, costs, limits=Limits(cover=8, paid=frozenset({4, 8}))).sizes == (4, 8)
    assert used((2, 4, 6, 8, 16), histogram) == (4, 8)
    assert used((2,), histogram) == ()


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"holds \[0\]"):
        plan({0: 1}, Costs(1, 1))
    with pytest.raises(ConfigError, match="no room for the bucket of 8 rows"):
        plan({3: 1}, Costs(1, 1), Budget(graphs=0), Limits(cover=8))
    assert plan({}, Costs(1, 1)).sizes == ()
