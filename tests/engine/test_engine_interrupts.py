"""Ctrl-C, or the end of a forgotten stream, at any line of the engine's host code: no request and no page is lost."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Callable
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

import ostinato
from ostinato import LLM, CompletionOutput, SamplingParams

HERE = ostinato.__path__[0]
PROMPTS = [[5, 6, 7] * 12, [5, 6, 7] * 7 + [9], [11] * 20]
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)
TRIES = 150


def press_ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


class Interrupt:
    """Does `act` at the line number `at` of the package that runs within a block; `lines` counts them."""

    def __init__(self, at: int = 0, act: Callable[[], object] = press_ctrl_c) -> None:
        self.at, self.lines, self.act = at, 0, act

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(HERE):
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                sys.settrace(None)
                self.act()
        return self.trace

    @contextmanager
    def __call__(self) -> Any:
        before = sys.gettrace()
        sys.settrace(self.trace)
        try:
            yield
        finally:
            sys.settrace(before)


@pytest.fixture
def small(make_llm: Callable[..., LLM]) -> LLM:
    """A pool that is full of the prompts, so that sequences are retracted and pages evicted."""
    return make_llm(num_pages=9, context_length=100, max_running_requests=3, chunked_prefill_size=32)


def answers(llm: LLM) -> list[tuple[CompletionOutput, ...]]:
    return [output.outputs for output in llm.generate(PROMPTS, PARAMS)]


def test_an_interrupted_call_leaves_nothing_behind(small: LLM) -> None:
    expected = answers(small)
    for _ in range(3):
        assert answers(small) == expected  # until all steps that there are have been captured
    counted = Interrupt()
    with counted():
        answers(small)
    came = 0
    for i in range(TRIES):
        try:
            with Interrupt(1 + i * counted.lines // TRIES)():
                answers(small)
        except KeyboardInterrupt:
            came += 1
        engine = small.engine
        assert not engine.has_work
        assert not engine.scheduler.has_work
        engine.scheduler.check_leaks()
        assert small.stats()["scheduler"]["kv_pages_used"] == 0
    assert came > TRIES // 2
    assert answers(small) == expected


def test_an_interrupted_stream_costs_the_others_nothing(small: LLM) -> None:
    expected = [outputs[0].text for outputs in answers(small)]

    def play(at: int) -> Interrupt:
        first, second = (small.generate_stream(prompt, PARAMS) for prompt in PROMPTS[:2])
        last = next(second)
        interrupt = Interrupt(at)
        try:
            with interrupt():
                for _ in first:
                    pass
        except KeyboardInterrupt:
            pass
        first.close()  # type: ignore[attr-defined]
        for last in second:  # noqa: B007
            pass
        assert (last.outputs[0].text, last.outputs[0].finish_reason) == (expected[1], "length")
        return interrupt

    lines = play(0).lines
    for i in range(0, TRIES, 3):
        play(1 + i * lines // TRIES)


def test_a_forgotten_stream_that_is_collected_amid_a_step(small: LLM) -> None:
    """What lies in a cycle ends when the collector finds it, which may be anywhere in another call."""
    expected = answers(small)

    def play(at: int) -> Interrupt:
        cycle: list[Any] = [small.generate_stream(PROMPTS[2], PARAMS)]
        next(cycle[0])
        cycle.append(cycle)
        del cycle
        interrupt = Interrupt(at, gc.collect)
        with interrupt():
            assert answers(small) == expected
        gc.collect()
        assert not small.engine.has_work
        small.engine.scheduler.check_leaks()
        return interrupt

    lines = play(0).lines
    for i in range(0, TRIES, 2):
        play(1 + i * lines // TRIES)


@pytest.mark.parametrize("step", ["step", "step_deltas"])
def test_what_an_interrupted_step_has_made_comes_with_the_next(
    small: LLM, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Both forms of news, for those who step themselves."""
    engine, advance = small.engine, small.engine._advance
    expected = [list(outputs[0].token_ids) for outputs in answers(small)]

    def play(at: int) -> Interrupt:
        tokens: dict[str, list[int]] = {engine.submit(prompt, PARAMS): [] for prompt in PROMPTS}
        interrupt = Interrupt(at)

        def traced() -> None:
            with interrupt():
                advance()

        monkeypatch.setattr(engine, "_advance", traced)
        while engine.has_work:
            try:
                for news in getattr(engine, step)():
                    if step == "step":
                        tokens[news.request_id] = list(news.outputs[0].token_ids)
                    else:
                        tokens[news.request_id] += news.token_ids
            except KeyboardInterrupt:
                assert at
        assert list(tokens.values()) == expected
        return interrupt

    lines = play(0).lines
    for i in range(0, TRIES, 5):
        play(1 + i * lines // TRIES)
