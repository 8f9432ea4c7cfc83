"""Deltas, joined, are what `step` gives: text, tokens, log-probabilities, reasons, each once and in order."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from ostinato import LLM, RequestOutput, SamplingParams
from ostinato.engine.delta import SequenceDelta
from ostinato.engine.output import as_rows

PROMPT = "It is a truth universally acknowledged, that"

CASES: dict[str, dict[str, Any]] = {
    "plain": {"max_tokens": 20},
    "several": {"n": 3, "max_tokens": 12, "seed": 2},
    "logprobs": {"n": 2, "max_tokens": 8, "seed": 2, "logprobs": 3},
    "prompt logprobs": {"n": 2, "max_tokens": 4, "prompt_logprobs": 2, "logprobs": 0},
    "score only": {"max_tokens": 0, "prompt_logprobs": 1},
    "broken characters": {"max_tokens": 200, "temperature": 100.0, "seed": 5, "ignore_eos": True},
    "stop string": {"n": 2, "max_tokens": 200, "seed": 1, "stop": ["the", " and"]},
    "stop kept": {"max_tokens": 200, "seed": 1, "stop": [" the"], "include_stop_str_in_output": True},
    "end of sequence": {"max_tokens": 8, "logit_bias": {1: 100.0}},
}


def whole(llm: LLM, params: SamplingParams) -> RequestOutput:
    return llm.generate(PROMPT, params)[0]


def deltas(llm: LLM, params: SamplingParams) -> list[SequenceDelta]:
    name = llm.engine.submit(PROMPT, params)
    found: list[SequenceDelta] = []
    while llm.engine.is_live(name):
        found += llm.engine.step_deltas()
    return found


@pytest.mark.parametrize("case", CASES)
def test_joined_deltas_are_the_output(llm: LLM, case: str) -> None:
    params = SamplingParams(**CASES[case])
    output = whole(llm, params)
    found = deltas(llm, params)
    assert [delta.done for delta in found] == [False] * (len(found) - 1) + [True]
    by_index: dict[int, list[SequenceDelta]] = defaultdict(list)
    for delta in found:
        by_index[delta.index].append(delta)
    assert sorted(by_index) == list(range(params.n))
    for choice in output.outputs:
        own = by_index[choice.index]
        assert "".join(delta.text for delta in own) == choice.text
        assert [token for delta in own for token in delta.token_ids] == list(choice.token_ids)
        assert [delta.finish_reason for delta in own] == [None] * (len(own) - 1) + [choice.finish_reason]
        assert own[-1].stop_reason == choice.stop_reason
        if choice.logprobs is not None:
            rows = [row for delta in own for row in delta.logprobs or []]
            assert rows == [as_rows(position) for position in choice.logprobs]
    prompt = [delta.prompt_logprobs for delta in found if delta.prompt_logprobs is not None]
    if output.prompt_logprobs is None:
        assert prompt == []
    else:
        assert prompt == [[None if p is None else as_rows(p) for p in output.prompt_logprobs]]
        assert found[0].prompt_logprobs is not None


def test_a_cached_prompt_is_told_once(llm: LLM) -> None:
    text = "She looked at him, and at the letter in his hand, and said nothing for a long while. " * 2
    names = [llm.engine.submit(text, SamplingParams(max_tokens=4))]
    while llm.engine.has_work:
        llm.engine.step_deltas()
    names.append(llm.engine.submit(text, SamplingParams(max_tokens=4, n=2)))
    found = []
    while llm.engine.has_work:
        found += llm.engine.step_deltas()
    cached = [delta.num_cached_tokens for delta in found if delta.num_cached_tokens]
    assert len(cached) == 1
    assert cached[0] % llm.config.page_size == 0


def test_an_aborted_request_says_nothing_more(llm: LLM) -> None:
    name = llm.engine.submit(PROMPT, SamplingParams(max_tokens=50))
    llm.engine.step_deltas()
    llm.engine.abort(name)
    assert llm.engine.step_deltas() == []
