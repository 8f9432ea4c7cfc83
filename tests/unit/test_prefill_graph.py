"""Which prefill graph mode there is, and when a graph may serve a step: pure functions, the same for plan and batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.attention import CaptureLimits
from ostinato.config import EngineConfig
from ostinato.engine.batch import capture_batch, capture_shapes, extend_batch
from ostinato.engine.plan import ScheduledSequence, StepPlan
from ostinato.engine.prefill_graph import (
    ExtendFacts,
    PrefillAbility,
    PrefillGraph,
    can_replay_locally,
    choose_prefill_graph,
    default_prefill_graph,
    prefill_backend,
    prefill_slots,
    prefix_variant,
)
from ostinato.errors import ConfigError
from ostinato.graphs import BreakableBackend, EagerBackend, LiveStep, TapeBackend
from ostinato.padding import Buckets, ShapeRules, StepMode, decide_shape

RULES = ShapeRules(Buckets(()), Buckets((8, 16, 64)), max_extend_bs=4)
FULL, BREAKABLE, EAGER = PrefillGraph.FULL, PrefillGraph.BREAKABLE, PrefillGraph.EAGER
CHUNKED = PrefillAbility(FULL, CaptureLimits(prefix_chunks=(1, 2, 4), max_context=500), chunk_tokens=100)
FACTS = ExtendFacts(StepMode.EXTEND, 12, 2, 40, 30, False)


def verdict(rules: ShapeRules = RULES, ability: PrefillAbility = PrefillAbility(FULL), **facts: Any) -> str:  # noqa: B008
    return can_replay_locally(replace(FACTS, **facts), rules, ability)


def test_reasons() -> None:
    assert verdict() == ""
    assert verdict(num_tokens=0, bs=0) == "", "an idle rank has no objection"
    assert verdict(num_tokens=64) == ""
    assert verdict(num_tokens=65) == "above the largest bucket"
    assert verdict(num_tokens=17) == "too much padding"
    assert verdict(bs=5) == "too many requests"
    assert verdict(replace(RULES, extend=Buckets(()))) == "no buckets"
    assert verdict(replace(RULES, padding=False)) == "no exact bucket"
    assert verdict(mode=StepMode.MIXED) == ""
    assert verdict(replace(RULES, mixed_eager=True), mode=StepMode.MIXED) == "mixed batch"
    assert verdict(ability=PrefillAbility(EAGER)) == "prefill graphs are off"
    assert verdict(prompt_logits=True) == ""
    assert verdict(ability=PrefillAbility(FULL, eager_tail=False), prompt_logits=True) == "prompt logits"
    assert verdict(ability=CHUNKED, longest_context=500) == ""
    assert verdict(ability=CHUNKED, longest_context=501) == "context above the limit of captured attention"
    assert verdict(ability=CHUNKED, longest_prefix=400) == ""
    assert verdict(ability=CHUNKED, longest_prefix=401) == "too many prefix chunks"


def test_prefix_variants() -> None:
    found = {n: prefix_variant(replace(FACTS, longest_prefix=n), CHUNKED) for n in (0, 1, 100, 101, 201, 400)}
    assert found == {0: "", 1: "prefix1", 100: "prefix1", 101: "prefix2", 201: "prefix4", 400: "prefix4"}
    assert CHUNKED.variants == ("", "prefix1", "prefix2", "prefix4")
    assert prefix_variant(FACTS, PrefillAbility(FULL)) == "", "a plan that is read at replay needs none"


def test_each_bucket_and_variant_is_captured_and_dummies_have_no_prefix() -> None:
    """No KV stands behind a capture's dummy: attention that is captured for a prefix must tolerate none."""
    shapes = capture_shapes(StepMode.EXTEND, RULES, context_len=100, variants=CHUNKED.variants)
    assert len({shape.key for shape in shapes}) == 3 * 4
    assert all(int(capture_batch(shape).extend_prefix_lens.max()) == 0 for shape in shapes)


def test_defaults_come_from_device_and_layout() -> None:
    assert default_prefill_graph("cpu", dp_attention=False) is FULL
    assert default_prefill_graph("cuda", dp_attention=False) is BREAKABLE
    assert {default_prefill_graph(d, dp_attention=True) for d in ("cpu", "cuda")} == {BREAKABLE}


class Attention:
    name = "odd"

    def __init__(self, captures: bool) -> None:
        self.captures = captures

    def can_capture(self, mode: StepMode) -> bool:
        return self.captures


def test_the_option_and_what_attention_can_do() -> None:
    def choose(asked: str, captures: bool, backend: Any) -> PrefillGraph:
        return choose_prefill_graph(asked, cast(Any, Attention(captures)), backend, "cpu", dp_attention=False)

    tape = TapeBackend()
    assert [choose(asked, True, tape) for asked in ("auto", "full", "breakable", "eager")] == [
        FULL,
        FULL,
        BREAKABLE,
        EAGER,
    ]
    assert choose("auto", False, tape) is BREAKABLE
    assert choose("auto", True, EagerBackend()) is EAGER
    with pytest.raises(ConfigError, match=r"'full' cannot capture odd attention; use 'breakable'"):
        choose("full", False, tape)


def test_backends() -> None:
    tape, live = TapeBackend(), LiveStep()
    assert prefill_backend(FULL, tape, live) is tape
    broken = prefill_backend(BREAKABLE, tape, live)
    assert isinstance(broken, BreakableBackend)
    assert (broken.inner, broken.live) == (tape, live)
    assert isinstance(prefill_backend(EAGER, tape, live), EagerBackend)
    assert isinstance(prefill_backend(BREAKABLE, EagerBackend(), live), EagerBackend)


def test_request_slots() -> None:
    """Few where attention works for each of them; as many as there can be requests where it does not."""
    costly, free = CaptureLimits(request_slots=True), CaptureLimits()
    assert prefill_slots(None, FULL, costly, 32, 4096) == 8
    assert prefill_slots(None, FULL, costly, 32, 100) == 1
    assert prefill_slots(None, FULL, costly, 4, 4096) == 4
    assert prefill_slots(None, FULL, free, 32, 4096) == 32
    assert prefill_slots(5, FULL, free, 32, 4096) == 5
    assert prefill_slots(5, BREAKABLE, costly, 32, 4096) == 32, "attention outside the graph has no slots"


def test_eager_steps_have_no_graphs_to_break() -> None:
    with pytest.raises(ConfigError, match="graph 'eager' captures nothing, prefill_graph is 'full'"):
        EngineConfig(graph="eager", prefill_graph="full")


# --- plan and batch -----------------------------------------------------------------------------------------


@dataclass
class Sequence:
    prompt_len: int
    wants_prompt_logits: bool


SPANS = st.lists(
    st.tuples(st.integers(0, 450), st.integers(1, 30), st.booleans(), st.booleans()), min_size=1, max_size=6
)
ABILITIES = st.sampled_from(
    [PrefillAbility(FULL), PrefillAbility(FULL, eager_tail=False), PrefillAbility(BREAKABLE), CHUNKED]
)


@settings(max_examples=150, deadline=None)
@given(SPANS, st.booleans(), ABILITIES)
def test_plan_and_batch_never_disagree(
    spans: list[tuple[int, int, bool, bool]], mixed: bool, ability: PrefillAbility
) -> None:
    """The vote before a step and the forward see the same facts; so does `decide_shape`, of what is its own."""
    mode = StepMode.MIXED if mixed else StepMode.EXTEND
    rows = [
        ScheduledSequence(
            cast(Any, Sequence(start + count if whole else start, asks)), start, count, prefill=True
        )
        for start, count, whole, asks in spans
    ]
    plan = StepPlan(mode, tuple(rows))
    counts, starts = [row.num_tokens for row in rows], [row.start for row in rows]
    zeros = [0] * sum(counts)
    batch = extend_batch(zeros, counts, starts, [0] * len(rows), zeros, mode=mode)
    planned = ExtendFacts.of_plan(plan)
    assert ExtendFacts.of_batch(batch, prompt_logits=planned.prompt_logits) == planned
    reason = can_replay_locally(planned, RULES, ability)
    shape = decide_shape(mode, (plan.num_tokens,), len(rows), RULES, variant=prefix_variant(planned, ability))
    if not reason:
        assert shape.eager_reason == ""
        assert shape.key.variant in ability.variants
        assert shape.padded_bs == 4
    elif shape.eager_reason:
        assert reason in (
            shape.eager_reason,
            "prompt logits",
            "too many prefix chunks",
            "context above the limit of captured attention",
        )
