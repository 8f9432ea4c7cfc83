"""Where a completion ends and what text a caller sees: stop strings and ids, end-of-sequence, lengths, streams."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ostinato import LLM, CompletionOutput, SamplingParams
from ostinato.engine.launch import locate_model

PROMPT = "It is a truth universally acknowledged, that"
FREE: dict[str, Any] = {"temperature": 1.0, "seed": 2, "max_tokens": 24, "ignore_eos": True}
"""Sampled, so that the text repeats itself less than a greedy one."""


def complete(llm: LLM, **params: Any) -> CompletionOutput:
    return llm.generate(PROMPT, SamplingParams(**FREE | params))[0].outputs[0]


def stream(llm: LLM, **params: Any) -> list[CompletionOutput]:
    return [output.outputs[0] for output in llm.generate_stream(PROMPT, SamplingParams(**FREE | params))]


@pytest.fixture(scope="module")
def free(shared_llm: LLM) -> list[CompletionOutput]:
    """The states of a completion that nothing stops."""
    states = stream(shared_llm)
    assert len(states) == 24
    assert states[-1].finish_reason == "length"
    return states


def test_joined_deltas_are_the_text(llm: LLM, free: list[CompletionOutput]) -> None:
    text = ""
    for state in free:
        text += state.delta
        assert state.text == text
    whole = complete(llm)
    assert whole.text == text
    assert whole.token_ids == free[-1].token_ids
    assert llm.tokenizer.decode(list(llm.tokenizer.encode(PROMPT)) + list(whole.token_ids)) == PROMPT + text


@pytest.mark.parametrize("include", [False, True])
def test_no_part_of_a_stop_string_is_streamed(llm: LLM, free: list[CompletionOutput], include: bool) -> None:
    """A stop string from inside one token to inside the fourth after it (F46)."""
    stop = free[12].text[len(free[8].text) - 1 : -1]
    text = free[-1].text
    at = text.find(stop)
    expected = text[: at + len(stop)] if include else text[:at]
    states = stream(llm, stop=stop, include_stop_str_in_output=include)
    assert all(expected.startswith(state.text) for state in states)
    assert "".join(state.delta for state in states) == states[-1].text == expected
    assert states[-1].finish_reason == "stop"
    assert states[-1].stop_reason == stop
    assert len(states[-1].token_ids) <= 13
    assert free[-1].token_ids[: len(states[-1].token_ids)] == states[-1].token_ids
    assert complete(llm, stop=stop, include_stop_str_in_output=include).text == expected


def test_a_held_back_beginning_of_a_stop_comes_out_at_the_end(llm: LLM, free: list[CompletionOutput]) -> None:
    text = free[-1].text
    states = stream(llm, stop=[text[-3:] + "\N{SNOWMAN}"])
    assert states[-2].text != text
    assert states[-1].text == text
    assert states[-1].finish_reason == "length"
    assert states[-1].stop_reason is None


def test_the_first_of_several_stops_counts(llm: LLM, free: list[CompletionOutput]) -> None:
    text = free[-1].text
    stops = [text[30:33], text[10:14], "\N{SNOWMAN}"]
    first = min(stops, key=lambda stop: text.find(stop) % 10_000 + len(stop))
    completion = complete(llm, stop=stops)
    assert completion.stop_reason == first
    assert completion.text == text[: text.find(first)]


def test_a_stop_token_ends_and_has_no_text(llm: LLM, free: list[CompletionOutput]) -> None:
    token = free[-1].token_ids[6]
    count = free[-1].token_ids.index(token) + 1
    completion = complete(llm, stop_token_ids=[token], logprobs=0)
    assert completion.finish_reason == "stop"
    assert completion.stop_reason == token
    assert completion.token_ids == free[-1].token_ids[:count]
    assert completion.text == free[count - 2].text
    assert completion.logprobs is not None
    assert len(completion.logprobs) == count


def test_the_last_token_may_be_a_stop(llm: LLM, free: list[CompletionOutput]) -> None:
    """Length and stop at once: the stop is told, for tokens and for strings."""
    token = free[-1].token_ids[6]
    count = free[-1].token_ids.index(token) + 1
    assert complete(llm, stop_token_ids=[token], max_tokens=count).finish_reason == "stop"
    stop = free[6].text[-2:]
    through = next(i for i, state in enumerate(free) if stop in state.text) + 1
    completion = complete(llm, stop=stop, max_tokens=through)
    assert completion.finish_reason == "stop"
    assert completion.stop_reason == stop


def test_end_of_sequence_and_ignore_eos(llm: LLM) -> None:
    """A bias makes the model end at once; `ignore_eos` lets it go on, and other stop tokens still end it."""
    (eos,) = llm.engine.stop_token_ids
    bias = {eos: 100.0}
    ended = complete(llm, logit_bias=bias, ignore_eos=False)
    assert ended.token_ids == (eos,)
    assert (ended.finish_reason, ended.stop_reason, ended.text) == ("stop", eos, "")
    ignored = complete(llm, logit_bias=bias, max_tokens=3)
    assert ignored.token_ids == (eos, eos, eos)
    assert (ignored.finish_reason, ignored.text) == ("length", "")
    shown = complete(llm, logit_bias=bias, max_tokens=2, skip_special_tokens=False)
    assert shown.text == 2 * llm.tokenizer.decode([eos], skip_special_tokens=False) != ""
    stopped = complete(llm, logit_bias=bias, stop_token_ids=[eos])
    assert stopped.token_ids == (eos,)


@pytest.mark.parametrize("least", [1, 5])
def test_nothing_ends_before_min_tokens(llm: LLM, free: list[CompletionOutput], least: int) -> None:
    (eos,) = llm.engine.stop_token_ids
    ended = complete(llm, logit_bias={eos: 100.0}, ignore_eos=False, min_tokens=least)
    assert len(ended.token_ids) == least + 1
    assert ended.token_ids[-1] == eos
    assert eos not in ended.token_ids[:-1]
    stop = free[least - 1].text[-1]
    completion = complete(llm, stop=stop, min_tokens=least)
    assert len(completion.token_ids) > least
    assert completion.text.startswith(free[least - 1].text)


@pytest.mark.parametrize("most", [1, 2])
def test_max_tokens(llm: LLM, free: list[CompletionOutput], most: int) -> None:
    completion = complete(llm, max_tokens=most)
    assert completion.token_ids == free[-1].token_ids[:most]
    assert completion.finish_reason == "length"


def test_without_max_tokens_the_context_is_filled(make_llm: Any) -> None:
    llm = make_llm(context_length=40)
    for wanted in (None, 1000):
        (output,) = llm.generate([5] * 29, SamplingParams(temperature=0, max_tokens=wanted, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == 11
        assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("source", ["config", "generation_config", "tokenizer"])
def test_every_source_of_end_tokens_counts(tmp_path: Path, make_llm: Any, llm: LLM, source: str) -> None:
    """End tokens are the union of config, generation config and tokenizer (F57): each alone ends the text."""
    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    token = llm.generate(PROMPT, greedy)[0].outputs[0].token_ids[0]
    directory = tmp_path / "model"
    shutil.copytree(locate_model(None), directory)

    def edit(name: str, key: str, value: Any) -> None:
        path = directory / name
        path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))

    edit("config.json", "eos_token_id", [3, token] if source == "config" else [3])
    edit("generation_config.json", "eos_token_id", [4, token] if source == "generation_config" else 4)
    eos = llm.tokenizer.token(token) if source == "tokenizer" else "<|end|>"
    edit("tokenizer_config.json", "eos_token", eos)
    other = make_llm(model=str(directory), num_pages=16)
    assert {3, 4, token} <= other.engine.stop_token_ids
    (output,) = other.generate(PROMPT, SamplingParams(temperature=0, max_tokens=4))
    assert output.outputs[0].stop_reason == token
    assert output.outputs[0].token_ids == (token,)


def test_chat_and_its_stream_agree(llm: LLM) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    params = SamplingParams(temperature=0, max_tokens=6)
    (one,) = llm.chat(messages, params)
    states = list(llm.chat_stream(messages, params))
    assert states[-1].outputs[0].text == one.outputs[0].text == "".join(s.outputs[0].delta for s in states)
    prompt = llm.engine.chat_template.render(messages)
    assert one.prompt_token_ids == tuple(llm.tokenizer.encode(prompt, add_special_tokens=False))
    both = llm.chat([messages, messages], params)
    assert [output.outputs[0].text for output in both] == [one.outputs[0].text] * 2
