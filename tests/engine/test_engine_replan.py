"""`--buckets auto`: lists change between steps while requests run, old graphs go, and no bit of an answer moves."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from ostinato import ConfigError, EngineConfig, SamplingParams
from ostinato.engine.replan import Replanner
from ostinato.graphs.planner import Costs
from ostinato.padding import Buckets, ShapeRules, StepMode, StepShape, decide_shape

GPU = Costs(pad_row=1e-3, eager=1e-2, graph=1e-3)
CPU = Costs(pad_row=1e-9, eager=1e-2, graph=1e-3)
DEAR = Costs(pad_row=1e-3, eager=1e-2, graph=5e-3)  # graphs
RULES = ShapeRules(Buckets((8, 16)), Buckets((64, 128)), max_extend_bs=16)


def decode(n: int) -> StepShape:
    return StepShape(StepMode.DECODE, (n,), n, 16, 16)


def extend(n: int) -> StepShape:
    return StepShape(StepMode.EXTEND, (n,), 1, 128, 16)


def test_lists_follow_the_steps() -> None:
    planner = Replanner(GPU, every=4)
    for n in (3, 3, 5):
        planner.note(decode(n), RULES)
        assert not planner.due
    planner.note(extend(40), RULES)
    assert planner.due
    found = planner.plan(RULES)
    assert not planner.due
    assert (found.decode.sizes, found.extend.sizes) == ((3, 5, 16), (48, 128))
    assert Replanner(CPU).plan(RULES) == RULES, "nothing was seen"


def test_small_gains_change_nothing_and_the_past_fades() -> None:
    rules = ShapeRules(Buckets((4, 16)), Buckets((64,)))
    free = Replanner(CPU, every=1)
    for _ in range(8):
        free.note(decode(3), rules)
    assert free.plan(rules).decode.sizes == (16,), "pads are free here, and the graph of 16 is there"
    met = StepShape(StepMode.DECODE, (3,), 3, 4, 4)
    planner = Replanner(Costs(pad_row=1.0, eager=99.0, graph=20.0), every=1)
    assert planner.plan(rules) == rules, "nothing was seen"
    for steps, want in ((10, (4, 16)), (200, (3, 16))):
        for _ in range(steps):
            planner.note(met, rules)
        assert planner.plan(rules).decode.sizes == want, "a new graph must be worth its price"
    for _ in range(9):
        planner.plan(rules)
    assert planner.plan(rules) == rules, "what was seen is long ago"
    assert planner.plans == 13


def test_a_list_with_a_graph_out_of_use_stays() -> None:
    """The bucket of a graph that was wrong has been met, and so seems to cost nothing; all would move into it."""
    rules, planner = RULES, Replanner(GPU, every=1)
    for _ in range(8):
        planner.note(decode(3), rules)
        planner.note(extend(40), rules)
    for decode_fails, extend_fails in ((True, True), (True, False), (False, True)):
        again = copy.deepcopy(planner)
        found = again.plan(rules, decode_fails=decode_fails, extend_fails=extend_fails)
        assert (found.decode == rules.decode) == decode_fails
        assert (found.extend == rules.extend) == extend_fails


def play(llm: Any) -> Any:
    """Requests that come one by one, so that steps have all sizes."""
    engine, told = llm.engine, {}
    for i in range(14):
        params = SamplingParams(
            max_tokens=10 + i, temperature=0 if i % 2 else 0.9, seed=i, logprobs=1, ignore_eos=True
        )
        engine.submit([40 + i + j for j in range(3 + 5 * (i % 3))], params)
        for _ in range(2):
            told |= {o.request_id: o.outputs[0] for o in engine.step() if o.finished}
    while engine.has_work:
        told |= {o.request_id: o.outputs[0] for o in engine.step() if o.finished}
    return [
        (o.token_ids, o.logprobs)
        for _, o in sorted(told.items(), key=lambda item: int(item[0].split("-")[1]))
    ]


@pytest.mark.parametrize("costs", [GPU, DEAR], ids=["many", "few"])
def test_answers_do_not_move_while_lists_change(make_llm: Any, costs: Costs) -> None:
    fixed, auto = make_llm(), make_llm(buckets="auto")
    replanner = auto.engine.worker.options.replanner
    replanner.costs, replanner.every = costs, 7
    assert play(auto) == play(fixed)
    stats = auto.stats()
    assert stats["buckets"]["plans"] >= 4
    assert stats["buckets"]["changes"] >= 1
    decode = auto.engine.worker.decode
    assert {key.size for key in decode.captured} <= set(stats["buckets"]["decode"])
    assert set(stats["graph"]["decode"]["eager_reasons"]) == set(), (
        "every step had a graph, captured when it was met"
    )
    assert (fixed.stats()["buckets"]["plans"], fixed.stats()["buckets"]["decode"][-1]) == (0, 32)


def test_auto_and_exact_sizes_do_not_go_together() -> None:
    with pytest.raises(ConfigError, match="buckets 'auto' plans few"):
        EngineConfig(buckets="auto", disable_padding=True)


def test_lists_that_cost_nothing_stay() -> None:
    rules = ShapeRules(Buckets((1, 2, 4, 16)), Buckets((64,)))
    planner = Replanner(GPU, every=1)
    for _ in range(100):
        planner.note(StepShape(StepMode.DECODE, (1,), 1, 1, 1), rules)
    assert planner.plan(rules) == rules


@pytest.mark.parametrize("sizes", [(5, 14), (3, 7, 30), (2, 64)])
def test_a_planned_list_takes_every_prefill_that_was_seen(sizes: tuple[int, ...]) -> None:
    """A bucket more than twice as wide as a step is refused, so few rows need few more."""
    rules = ShapeRules(Buckets((16,)), Buckets((4, 8, 16, 32, 64, 128)))
    planner = Replanner(GPU, every=1)
    for _ in range(200):
        for n in sizes:
            planner.note(decide_shape(StepMode.EXTEND, (n,), 1, rules), rules)
    found = planner.plan(rules)
    assert found != rules
    for n in sizes:
        assert not decide_shape(StepMode.EXTEND, (n,), 1, found).eager_reason, (n, found.extend)


def test_what_was_refused_is_planned_for() -> None:
    """Also where another rank's rows chose the bucket."""
    rules = ShapeRules(Buckets((16,)), Buckets((512, 1024)))
    planner = Replanner(GPU, every=1)
    refused = StepShape(StepMode.EXTEND, (512, 12), 1, 512, 16, eager_reason="too much padding")
    for _ in range(200):
        planner.note(refused, rules)
    assert planner.plan(rules).extend.sizes[0] == 12
