"""Admission arithmetic: the one KV formula, budgets, the new-token ratio, the order of retraction."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ostinato.engine.admission import (
    CLIP,
    NewTokenRatio,
    PoolLimits,
    StepBudget,
    expected_growth,
    fits_by_simulation,
    reserved_tokens,
    retraction_order,
)
from ostinato.engine.request import Request
from ostinato.engine.sequence import Sequence
from ostinato.errors import RequestError
from ostinato.padding import align_up


def _sequence(name: str, out: int, prompt: int, max_new: int, *, page: int = 1, pages: int = 0) -> Sequence:
    sequence = Sequence(Request(name, (1,) * prompt), 0, 0, 0, page, max_new, frozenset())
    sequence.output_token_ids = [2] * out
    sequence.pages = list(range(pages))
    return sequence


# ---- what fits at all ----


def test_the_one_formula() -> None:
    limits = PoolLimits(total_tokens=160, page_size=16, context_length=1000)
    # 160 - ceil_page(20) - page - 1
    assert limits.max_new_tokens(20) == 160 - 32 - 16 - 1
    assert limits.clamp(20, 50) == 50
    assert limits.clamp(20, 111) == 111
    assert limits.clamp(20, None) == 111
    with pytest.raises(
        RequestError, match=r"of 20 tokens and 112 to generate need 161 .* pool holds 160; lower"
    ):
        limits.clamp(20, 112)


def test_a_request_that_can_never_fit() -> None:
    """F44: refused at once, with the numbers, instead of preempting itself for ever."""
    limits = PoolLimits(total_tokens=100, page_size=1, context_length=4096)
    with pytest.raises(RequestError, match=r"prompt of 90 tokens and 50 to generate need 142 .* holds 100"):
        limits.clamp(90, 50)
    with pytest.raises(RequestError, match=r"prompt of 200 tokens and 1 to generate need 203 .* holds 100"):
        limits.clamp(200, None)


@pytest.mark.parametrize(
    ("prompt", "wanted", "granted"),
    [(56, 20, 8), (63, 20, 1), (63, None, 1), (60, 2, 2), (64, 0, 0), (10, 0, 0)],
)
def test_an_answer_is_cut_to_the_context(prompt: int, wanted: int | None, granted: int) -> None:
    assert PoolLimits(4096, 16, 64).clamp(prompt, wanted) == granted


@pytest.mark.parametrize(("prompt", "wanted"), [(64, None), (64, 1), (65, 1), (65, 0), (1000, 5)])
def test_a_prompt_longer_than_the_context(prompt: int, wanted: int | None) -> None:
    """F54: refused with both numbers, never cut."""
    with pytest.raises(RequestError, match=f"the prompt has {prompt} tokens, the context holds 64"):
        PoolLimits(4096, 16, 64).clamp(prompt, wanted)


@settings(deadline=None, max_examples=300)
@given(
    pages=st.integers(1, 40),
    page=st.integers(1, 20),
    context=st.integers(2, 400),
    prompt=st.integers(1, 420),
    wanted=st.one_of(st.none(), st.integers(0, 400)),
    done=st.floats(0, 1),
)
def test_what_intake_accepts_fits_an_empty_pool(
    pages: int, page: int, context: int, prompt: int, wanted: int | None, done: float
) -> None:
    """Also after a retraction, and by both ways of looking at it (#25126)."""
    total = pages * page
    try:
        limit = PoolLimits(total, page, context).clamp(prompt, wanted)
    except RequestError:
        assume(False)
    assert prompt + limit <= context
    out = int(done * limit)
    sequence = _sequence("s", out, prompt, limit, page=page)
    extend = sequence.num_tokens
    assert reserved_tokens(extend, sequence.remaining_new, page) < total
    assert fits_by_simulation(total - page, extend, sequence, [])
    assert align_up(prompt + limit, page) <= total  # what it will really hold at its end


# ---- growth ----


def test_reserved_tokens_are_clipped() -> None:
    assert reserved_tokens(100, 50, 16) == 166
    assert reserved_tokens(100, 10**6, 16) == 100 + CLIP + 16


def test_expected_growth() -> None:
    a = _sequence("a", 10, 100, 30, pages=110)  # 20 to come
    b = _sequence("b", 0, 40, 10**6, page=4, pages=8)  # clipped; 8 prompt tokens have no page yet
    assert expected_growth([a], 0.5) == 10
    assert expected_growth([b], 0.5) == CLIP * 0.5 + 8
    assert expected_growth([a, b], 1.0) == 20 + CLIP + 8
    assert expected_growth([], 1.0) == 0


def test_simulation_plays_the_frees_in_order() -> None:
    """A request that surely runs to its length fits when others end in time, and not when they do not."""
    candidate = _sequence("c", 0, 10, 50)
    ends_soon = _sequence("r", 5, 60, 10, pages=65)  # 5 to come, holds 65
    # 15 free: 10 to extend, then 5 steps of 2 tokens each would need 10.
    assert not fits_by_simulation(15, 10, candidate, [ends_soon])
    assert fits_by_simulation(20, 10, candidate, [ends_soon])  # its 65 then carry the 50
    endless = _sequence("e", 0, 60, 100, pages=60)
    assert not fits_by_simulation(20, 10, candidate, [endless])
    assert not fits_by_simulation(9, 10, candidate, [])


@settings(deadline=None, max_examples=200)
@given(
    st.integers(0, 120),
    st.integers(1, 20),
    st.integers(1, 30),
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 20)), max_size=5),
)
def test_simulation_against_playing_it_token_by_token(
    free: int, prompt: int, max_new: int, others: list[tuple[int, int]]
) -> None:
    running = [_sequence(f"r{i}", 0, held, left, pages=held) for i, (held, left) in enumerate(others)]
    candidate = _sequence("c", 0, prompt, max_new)
    pool = free - prompt
    alive = [[s.remaining_new, s.num_tokens] for s in [*running, candidate]]
    fits = pool >= 0
    while alive and fits:
        for gone in [s for s in alive if s[0] == 0]:
            pool += gone[1]
            alive.remove(gone)
        pool -= len(alive)
        for s in alive:
            s[0] -= 1
            s[1] += 1
        fits = pool >= 0
    assert fits_by_simulation(free, prompt, candidate, running) == fits


def test_new_token_ratio_numbers() -> None:
    ratio = NewTokenRatio()
    assert ratio.value == ratio.initial == 0.7
    assert ratio.minimum == pytest.approx(0.098)
    ratio.decay()
    assert ratio.value == pytest.approx(0.7 - (0.7 - 0.098) / 600)
    for _ in range(700):
        ratio.decay()
    assert ratio.value == ratio.minimum
    ratio.reset()
    assert ratio.value == 0.7


@pytest.mark.parametrize(("conservativeness", "initial"), [(0.5, 0.35), (1.0, 0.7), (2.0, 1.0), (9.0, 1.0)])
def test_conservativeness(conservativeness: float, initial: float) -> None:
    ratio = NewTokenRatio(conservativeness)
    assert ratio.value == pytest.approx(initial)
    assert ratio.minimum == pytest.approx(initial * 0.14)


def test_estimate_after_a_retraction() -> None:
    ratio = NewTokenRatio()
    ratio.after_retraction([_sequence("a", 10, 5, 100), _sequence("b", 30, 5, 100)])
    assert ratio.value == 80 / 201
    ratio.after_retraction([_sequence("a", 10, 5, 12)])
    assert ratio.value == 1.0


def test_retraction_order() -> None:
    """Shortest output first, ties longest prompt first; the first to go stands last."""
    a, b, c = _sequence("A", 10, 100, 99), _sequence("B", 3, 50, 99), _sequence("C", 3, 80, 99)
    for running in ([a, b, c], [c, b, a], [b, c, a]):
        order = retraction_order(running)
        assert [order.pop() for _ in range(3)] == [c, b, a]


# ---- budgets of a step ----


def test_chunks_are_whole_pages() -> None:
    budget = StepBudget(page_size=16, input_tokens=4096, chunk_tokens=64)
    assert budget.extend_for(100) == 64
    budget.take(20)  # charged as two pages
    assert budget.chunk_tokens == 32
    assert budget.extend_for(100) == 32
    assert budget.extend_for(31) == 31
    budget.take(32)
    assert budget.extend_for(1) == 0


def test_decode_rows_come_off_the_budget() -> None:
    budget = StepBudget(page_size=16, input_tokens=4096 - 5, chunk_tokens=64 - 5)
    assert budget.extend_for(100) == 48
    assert budget.extend_for(59) == 59


def test_the_input_cap_limits_chunks_too() -> None:
    assert StepBudget(page_size=8, input_tokens=20, chunk_tokens=64).extend_for(50) == 16


def test_without_chunks_the_first_always_passes() -> None:
    budget = StepBudget(page_size=16, input_tokens=64, chunk_tokens=None)
    assert budget.extend_for(1000) == 1000
    budget.take(40)
    assert budget.extend_for(16) == 16
    assert budget.extend_for(17) == 0
    assert budget.extend_for(1000) == 0
