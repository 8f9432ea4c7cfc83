"""Streams side by side, aborts, and steps that fail: nothing hangs, no page is lost, the engine goes on."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest

import ostinato.engine.engine
from ostinato import LLM, RequestOutput, SamplingParams
from ostinato.engine.engine import Engine
from ostinato.engine.output import OutputStream
from ostinato.engine.plan import StepPlan
from ostinato.engine.scheduler import Scheduler
from ostinato.engine.worker import PromptLogits, StepResult, Worker

PROMPTS = ["It is a truth universally acknowledged, that", "And the Lord said unto", "To be, or not"]
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def texts(llm: LLM, prompts: list[str] = PROMPTS) -> list[str]:
    return [output.outputs[0].text for output in llm.generate(prompts, PARAMS)]


@pytest.fixture(scope="module")
def answers(shared_llm: LLM) -> list[str]:
    """What each prompt is answered alone."""
    return [texts(shared_llm, [prompt])[0] for prompt in PROMPTS]


def test_interleaved_streams_and_a_call_between_them(llm: LLM, answers: list[str]) -> None:
    """Streams share steps: each still sees all of its own text, once, in order."""
    streams = [llm.generate_stream(prompt, PARAMS) for prompt in PROMPTS]
    found = [next(stream).outputs[0].delta for stream in streams]
    assert texts(llm) == answers
    left = {0, 1, 2}
    while left:
        for i in sorted(left):
            output = next(streams[i], None)
            if output is None:
                left.remove(i)
            else:
                found[i] += output.outputs[0].delta
                assert output.outputs[0].text == found[i]
    assert found == answers


def test_a_stream_starts_when_it_is_first_read(llm: LLM) -> None:
    stream = llm.generate_stream(PROMPTS[0], PARAMS)
    assert not llm.engine.has_work
    stream.close()  # type: ignore[attr-defined]


def test_closing_a_stream_frees_its_pages_at_once(llm: LLM) -> None:
    stream = llm.generate_stream(PROMPTS[0], PARAMS)
    next(stream)
    next(stream)
    assert llm.stats()["scheduler"]["kv_pages_used"] > 0
    stream.close()  # type: ignore[attr-defined]
    assert llm.stats()["scheduler"]["kv_pages_used"] == 0
    assert not llm.engine.has_work


def test_a_cancelled_turn_then_the_next(llm: LLM) -> None:
    """The conversation goes on from where it was cut (F49), as if each turn had been asked afresh."""
    prompt = tuple(llm.tokenizer.encode(PROMPTS[0]))
    for _ in range(3):
        stream = llm.generate_stream(list(prompt), PARAMS)
        next(stream)
        cut = next(stream).outputs[0]
        stream.close()  # type: ignore[attr-defined]
        llm.engine.scheduler.check_leaks()
        prompt += cut.token_ids
    (onward,) = llm.generate(list(prompt), PARAMS)
    (whole,) = llm.generate(
        PROMPTS[0], SamplingParams(temperature=0, max_tokens=6 + PARAMS.max_tokens, ignore_eos=True)
    )
    assert whole.prompt_token_ids + whole.outputs[0].token_ids == prompt + onward.outputs[0].token_ids


def test_aborting_returns_what_there_is(llm: LLM, answers: list[str]) -> None:
    engine = llm.engine
    names = [engine.submit(prompt, PARAMS) for prompt in PROMPTS]
    waiting = engine.abort(names[1])
    assert waiting is not None
    assert (waiting.finished, waiting.outputs[0].token_ids) == (True, ())
    assert waiting.outputs[0].finish_reason == "abort"
    for _ in range(3):
        engine.step()
    running = engine.abort(names[0])
    assert running is not None
    assert len(running.outputs[0].token_ids) == 3
    assert answers[0].startswith(running.outputs[0].text)
    assert engine.abort(names[0]) is None
    assert engine.abort("nobody") is None
    last = [engine.step() for _ in range(3)][-1]
    assert [(output.request_id, output.finished, output.outputs[0].text) for output in last] == [
        (names[2], True, answers[2])
    ]


def test_aborting_between_chunks(make_llm: Any) -> None:
    llm = make_llm(chunked_prefill_size=16, num_pages=17)
    engine = llm.engine
    name = engine.submit(list(range(10, 110)), PARAMS)
    engine.step()
    engine.step()
    assert engine.scheduler.chunked is not None
    assert engine.abort(name) is not None
    engine.scheduler.check_leaks()
    assert engine.scheduler.chunked is None
    (again,) = llm.generate(list(range(10, 110)), PARAMS)
    assert again.num_cached_tokens == 32  # the chunks that were computed are still good


def test_a_stream_whose_request_was_aborted_ends(llm: LLM) -> None:
    """By somebody who uses the engine below: the stream must not wait for ever."""
    stream = llm.generate_stream(PROMPTS[0], PARAMS)
    output = next(stream)
    assert llm.engine.abort(output.request_id) is not None
    assert next(stream, None) is None


@pytest.mark.parametrize("steps", [0, 3])
def test_generate_ends_when_a_request_is_aborted(
    llm: LLM, answers: list[str], steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By somebody who uses the engine below, before its first step or behind some: the others are answered."""
    engine, real, ticks = llm.engine, llm.engine.step, count()

    def stepped() -> Any:
        tick = next(ticks)
        assert tick < 100, "it would step for ever"
        if tick == steps:
            engine.abort(list(engine._live)[1])
        return real()

    monkeypatch.setattr(engine, "step", stepped)
    first, aborted, last = llm.generate(list(PROMPTS), PARAMS)
    assert (first.outputs[0].text, last.outputs[0].text) == (answers[0], answers[2])
    assert aborted.finished
    assert aborted.prompt == PROMPTS[1]
    assert aborted.prompt_token_ids == tuple(llm.tokenizer.encode(PROMPTS[1]))
    (output,) = aborted.outputs
    assert (output.finish_reason, len(output.token_ids)) == ("abort", steps)
    assert answers[1].startswith(output.text)


def test_a_name_in_use_is_refused(llm: LLM) -> None:
    llm.engine.submit("a", PARAMS, request_id="mine")
    with pytest.raises(ValueError, match="request id 'mine' is in use; choose another"):
        llm.engine.submit("b", PARAMS, request_id="mine")
    llm.engine.abort("mine")
    llm.engine.submit("b", PARAMS, request_id="mine")
    llm.engine.abort("mine")


def test_names_of_callers_are_in_nobodys_way(llm: LLM, answers: list[str]) -> None:
    """Whoever chose none gets a name that is free, also where callers use names like the engine's own."""
    engine = llm.engine
    number = int(engine.submit("a", PARAMS).removeprefix("request-"))
    taken = [f"request-{number + i}" for i in (1, 2, 4)]
    for name in taken:
        engine.submit("a", PARAMS, request_id=name)
    assert texts(llm) == answers
    for name in (f"request-{number}", *taken):
        engine.abort(name)


def test_lower_priority_numbers_run_first(make_llm: Any) -> None:
    llm = make_llm(max_running_requests=1)
    engine = llm.engine
    for name, priority in (("late", 5), ("soon", 1), ("soon too", 1), ("now", 0)):
        engine.submit("a", SamplingParams(temperature=0, max_tokens=2), request_id=name, priority=priority)
    ended = []
    while engine.has_work:
        ended += [output.request_id for output in engine.step() if output.finished]
    assert ended == ["now", "soon", "soon too", "late"]


# ---- failures ----


class FailingWorker:
    """A worker whose `fail_at`-th step fails, before or after it ran."""

    def __init__(self, worker: Worker, fail_at: int, *, after: bool, error: type[BaseException]) -> None:
        self._worker, self._left, self._after, self._error = worker, fail_at, after, error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)

    def execute(self, plan: StepPlan, prompt_logits: PromptLogits) -> StepResult:
        self._left -= 1
        if self._left == 0 and not self._after:
            raise self._error("injected")
        result = self._worker.execute(plan, prompt_logits)
        if self._left == 0:
            raise self._error("injected")
        return result


Inject = Callable[[pytest.MonkeyPatch, LLM], type[BaseException]]


def _in_worker(fail_at: int, *, after: bool, error: type[BaseException] = RuntimeError) -> Inject:
    def inject(patch: pytest.MonkeyPatch, llm: LLM) -> type[BaseException]:
        worker = FailingWorker(llm.engine.worker, fail_at, after=after, error=error)
        patch.setattr(llm.engine, "worker", worker)
        return error

    return inject


def _in_call(owner: Any, name: str, fail_at: int, *, after: bool = False) -> Inject:
    def inject(patch: pytest.MonkeyPatch, llm: LLM) -> type[BaseException]:
        real, calls = getattr(owner, name), []

        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            if len(calls) != fail_at:
                return real(*args, **kwargs)
            if after:
                real(*args, **kwargs)
            raise RuntimeError("injected")

        patch.setattr(owner, name, call)
        return RuntimeError

    return inject


def _until_idle(engine: Engine) -> Iterator[RequestOutput]:
    while engine.has_work:
        yield from engine.step()


FAULTS: dict[str, Inject] = {
    "before prefill": _in_worker(1, after=False),
    "after prefill": _in_worker(1, after=True),
    "before decode": _in_worker(3, after=False),
    "after decode": _in_worker(3, after=True),
    "interrupt": _in_worker(2, after=True, error=KeyboardInterrupt),
    "sampling": _in_call(ostinato.engine.engine, "choose", 2),
    "commit": _in_call(Scheduler, "commit", 2),
    "after the last commit": _in_call(Scheduler, "commit", 6, after=True),
    "first text": _in_call(OutputStream, "push", 1),
    "text": _in_call(OutputStream, "push", 5),
    "last text": _in_call(OutputStream, "push", 17),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failed_step_costs_its_own_requests_only(
    llm: LLM, answers: list[str], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Every request of the step ends with reason "error", once; no page is lost; the next requests are right."""
    engine = llm.engine
    with monkeypatch.context() as patch:
        error = FAULTS[fault](patch, llm)
        names = [engine.submit(prompt, PARAMS) for prompt in PROMPTS]
        outputs: list[RequestOutput] = []
        with pytest.raises(error, match="injected"):
            outputs.extend(_until_idle(engine))
        engine.scheduler.check_leaks()
        outputs += engine.step()
    ends = {output.request_id: output.outputs[0].finish_reason for output in outputs if output.finished}
    assert ends == dict.fromkeys(names, "error")
    assert [output.finished for output in outputs].count(True) == 3
    assert not engine.has_work
    assert texts(llm) == answers


@pytest.mark.parametrize("fault", ["before prefill", "after decode", "interrupt", "text"])
def test_a_failed_step_does_not_leave_other_streams_waiting(
    llm: LLM, answers: list[str], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    first, second = (llm.generate_stream(prompt, PARAMS) for prompt in PROMPTS[:2])
    next(first)
    next(second)
    with monkeypatch.context() as patch:
        error = FAULTS[fault](patch, llm)
        with pytest.raises(error, match="injected"):
            list(first)
        *_, last = second
    assert last.finished
    assert last.outputs[0].finish_reason == "error"
    assert texts(llm) == answers


def test_generate_raises_and_takes_its_requests_along(
    llm: LLM, answers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        _in_worker(2, after=False)(patch, llm)
        with pytest.raises(RuntimeError, match="injected"):
            llm.generate(PROMPTS * 20, PARAMS)
    assert not llm.engine.has_work
    assert texts(llm) == answers


def test_a_capture_that_fails_is_made_again(
    make_llm: Any, answers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model fails amid the first capture: nothing half captured is ever replayed."""
    llm = make_llm(num_pages=32)
    model = llm.engine.worker.model
    for name in ("forward", "logits"):
        with monkeypatch.context() as patch:
            _in_call(type(model), name, 1, after=True)(patch, llm)
            with pytest.raises(RuntimeError, match="injected"):
                llm.generate(PROMPTS[0], PARAMS)
    assert llm.stats()["graph"]["decode"]["captures"] == 0
    assert texts(llm) == answers
    assert llm.stats()["graph"]["decode"]["captures"] > 0


def test_calls_of_several_threads(make_llm: Any, answers: list[str]) -> None:
    """Calls and streams of many threads at once: each gets its own answers, and nothing is left."""
    llm = make_llm(num_pages=24, context_length=64)
    wrong: list[Any] = []

    def call(first: int) -> None:
        try:
            for i in range(first, first + 4):
                one, other = i % 3, (i + 1) % 3
                *_, last = llm.generate_stream(PROMPTS[one], PARAMS)
                found = [last.outputs[0].text, *texts(llm, [PROMPTS[other], PROMPTS[one]])]
                if not last.finished or found != [answers[one], answers[other], answers[one]]:
                    wrong.append(found)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(6)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # as if there were many more
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert wrong == []
    assert llm._mail == {}


def test_a_closed_llm_says_so(make_llm: Any) -> None:
    llm = LLM(threads=1, progress=False, num_pages=4)
    stream = llm.generate_stream("a", PARAMS)
    next(stream)
    llm.close()
    llm.close()
    for call in (lambda: next(stream), lambda: llm.generate("a"), llm.stats):
        with pytest.raises(ValueError, match="this LLM is closed; make a new one"):
            call()
