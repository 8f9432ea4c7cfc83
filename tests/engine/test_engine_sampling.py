"""Sampling through the whole engine: transformers' numbers, transforms, seeds that no neighbour disturbs (F41)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ostinato import LLM, RequestOutput, SamplingParams
from ostinato.ops.choice import mix64

PROMPT = "It is a truth universally acknowledged, that"
OTHERS = [
    "And the Lord said unto",
    "To be, or not",
    "He",
    "She was the youngest of the two daughters of a most",
]


def tokens(output: RequestOutput, index: int = 0) -> list[int]:
    return list(output.outputs[index].token_ids)


def test_greedy_tokens_are_those_of_transformers(llm: LLM, oracle: Any) -> None:
    prompts = [PROMPT, *OTHERS]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=10, ignore_eos=True))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.prompt == prompt
        assert output.prompt_token_ids == tuple(llm.tokenizer.encode(prompt))
        assert tokens(output) == oracle.greedy(output.prompt_token_ids, 10)
        assert output.outputs[0].finish_reason == "length"
        assert output.finished


def test_logprobs_are_those_of_transformers(llm: LLM, oracle: Any) -> None:
    params = SamplingParams(temperature=1, seed=3, max_tokens=8, logprobs=4, ignore_eos=True)
    (output,) = llm.generate(PROMPT, params)
    completion = output.outputs[0]
    assert completion.logprobs is not None
    assert len(completion.logprobs) == len(completion.token_ids) == 8
    logits = oracle.logits(output.prompt_token_ids + completion.token_ids)
    expected = torch.log_softmax(logits, -1)[len(output.prompt_token_ids) - 1 :]
    total = 0.0
    for row, token, entries in zip(expected, completion.token_ids, completion.logprobs, strict=False):
        best = torch.topk(row, 4).indices.tolist()
        assert set(entries) == {*best, token}
        for candidate, entry in entries.items():
            assert entry.logprob == pytest.approx(float(row[candidate]), abs=1e-3)
            assert entry.rank == int((row > row[candidate]).sum()) + 1
        total += entries[token].logprob
    assert completion.cumulative_logprob == pytest.approx(total)


@pytest.mark.parametrize(
    "options", [{}, {"chunked_prefill_size": 16, "max_running_requests": 3}], ids=["whole", "chunks"]
)
def test_prompt_logprobs_are_those_of_transformers(
    make_llm: Any, oracle: Any, options: dict[str, Any]
) -> None:
    """In one prefill and in chunks; cold, and with every page of the prompt in the prefix cache already."""
    llm = make_llm(**options)
    ids = tuple(range(40, 79))
    row_of = torch.log_softmax(oracle.logits(ids), -1)
    for _ in range(2):
        (output,) = llm.generate(
            list(ids), SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2, n=2)
        )
        found = output.prompt_logprobs
        assert found is not None
        assert len(found) == len(ids)
        assert found[0] is None
        for position, entries in enumerate(found[1:], start=1):
            assert entries is not None
            row = row_of[position - 1]
            assert set(entries) == {*torch.topk(row, 2).indices.tolist(), ids[position]}
            for token, entry in entries.items():
                assert entry.logprob == pytest.approx(float(row[token]), abs=1e-3)


def test_scoring_a_prompt_generates_nothing(llm: LLM) -> None:
    """`max_tokens` 0 with prompt log-probabilities (F50): no hidden token, not in the counters either."""
    before = llm.stats()["tokens"]["generated"]
    (output,) = llm.generate(PROMPT, SamplingParams(max_tokens=0, prompt_logprobs=0))
    assert output.outputs[0].token_ids == ()
    assert output.outputs[0].text == ""
    assert output.outputs[0].finish_reason == "length"
    assert output.prompt_logprobs is not None
    assert all(entries is not None and len(entries) == 1 for entries in output.prompt_logprobs[1:])
    assert llm.stats()["tokens"]["generated"] == before


def test_nothing_is_reported_unless_asked_for(llm: LLM) -> None:
    (output,) = llm.generate(PROMPT, SamplingParams(max_tokens=1))
    assert output.prompt_logprobs is None
    assert output.outputs[0].logprobs is None
    assert output.outputs[0].cumulative_logprob is None


def test_penalties_and_bias(llm: LLM, oracle: Any) -> None:
    """Each against the formula applied to transformers' logits, all four in one batch."""
    ids = tuple(llm.tokenizer.encode(PROMPT))
    plain = oracle.greedy(ids, 1)[0]

    def repetition(logits: torch.Tensor, output: list[int]) -> torch.Tensor:
        seen = torch.tensor(sorted({*ids, *output}))
        logits[seen] = torch.where(logits[seen] > 0, logits[seen] / 1.5, logits[seen] * 1.5)
        return logits

    def counted(presence: float, frequency: float) -> Any:
        def adjust(logits: torch.Tensor, output: list[int]) -> torch.Tensor:
            for token in set(output):
                logits[token] -= presence + frequency * output.count(token)
            return logits

        return adjust

    def biased(logits: torch.Tensor, output: list[int]) -> torch.Tensor:
        logits[plain] -= 100.0
        return logits

    cases: list[tuple[dict[str, Any], Any]] = [
        ({"repetition_penalty": 1.5}, repetition),
        ({"frequency_penalty": 2.0}, counted(0.0, 2.0)),
        ({"presence_penalty": 2.0}, counted(2.0, 0.0)),
        ({"logit_bias": {plain: -100.0}}, biased),
    ]
    params = [
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, **options) for options, _ in cases
    ]
    outputs = llm.generate([PROMPT] * len(cases), params)
    unchanged = oracle.greedy(ids, 12)
    for (_, adjust), output in zip(cases, outputs, strict=True):
        assert tokens(output) == oracle.greedy(ids, 12, adjust)
    assert tokens(outputs[0]) != unchanged
    assert plain not in tokens(outputs[3])


@pytest.mark.parametrize("seed", [0, 7, -(2**63)])
def test_a_seeded_request_is_the_same_beside_any_neighbours(llm: LLM, seed: int) -> None:
    mine = SamplingParams(temperature=1.2, top_p=0.95, seed=seed, max_tokens=8, ignore_eos=True)
    neighbours = [
        SamplingParams(temperature=0, max_tokens=3),
        SamplingParams(temperature=0.7, max_tokens=12),
        SamplingParams(temperature=1.2, top_k=5, seed=11, max_tokens=5),
        SamplingParams(temperature=2.0, min_p=0.1, max_tokens=7, frequency_penalty=0.5),
    ]
    (alone,) = llm.generate(PROMPT, mine)
    for count in (1, 4):
        for place in (0, count):
            prompts, params = list(OTHERS[:count]), neighbours[:count]
            prompts.insert(place, PROMPT)
            params.insert(place, mine)
            assert tokens(llm.generate(prompts, params)[place]) == tokens(alone)
    (other,) = llm.generate(PROMPT, SamplingParams(temperature=1.2, top_p=0.95, seed=seed + 1, max_tokens=8))
    assert tokens(other) != tokens(alone)


def test_noise_belongs_to_the_position(llm: LLM) -> None:
    """A text taken up again from any of its own tokens goes on as it did, so nothing is lost by a retraction."""
    shape: dict[str, Any] = {"temperature": 1.3, "seed": 4, "ignore_eos": True}
    (whole,) = llm.generate(PROMPT, SamplingParams(max_tokens=8, **shape))
    for at in (1, 3, 6):
        begun = list(whole.prompt_token_ids) + tokens(whole)[:at]
        (rest,) = llm.generate(begun, SamplingParams(max_tokens=8 - at, **shape))
        assert tokens(rest) == tokens(whole)[at:]


def test_each_of_n_completions_is_a_request_of_its_own(llm: LLM) -> None:
    shape: dict[str, Any] = {"temperature": 1.0, "max_tokens": 6, "ignore_eos": True}
    (output,) = llm.generate(PROMPT, SamplingParams(n=4, seed=5, **shape))
    assert [completion.index for completion in output.outputs] == [0, 1, 2, 3]
    assert len({completion.token_ids for completion in output.outputs}) == 4
    seeds = [5, *(mix64(5, index) for index in (1, 2, 3))]
    for index, seed in enumerate(seeds):
        signed = seed - 2**64 if seed >= 2**63 else seed
        (single,) = llm.generate(PROMPT, SamplingParams(seed=signed, **shape))
        assert tokens(single) == tokens(output, index)


def test_n_prompts_are_prefilled_once(make_llm: Any) -> None:
    """Completions of one prompt share its whole pages: only the last, unfinished page is computed for each."""
    llm = make_llm(page_size=8)
    ids = list(range(30, 63))  # four pages and one token
    llm.generate(ids, SamplingParams(n=3, max_tokens=2, temperature=1.0))
    assert llm.stats()["scheduler"]["prefill_tokens"] == 33 + 2 * 1
    assert llm.stats()["tokens"] == {"prompt": 33, "generated": 6}


def test_an_unseeded_request_takes_the_engines_seed(make_llm: Any) -> None:
    params = {"temperature": 1.0, "max_tokens": 8}
    (by_engine,) = make_llm(seed=9).generate(PROMPT, SamplingParams(**params))
    other = make_llm()
    (by_request,) = other.generate(PROMPT, SamplingParams(seed=9, **params))
    (default,) = other.generate(PROMPT, SamplingParams(**params))
    assert tokens(by_engine) == tokens(by_request) != tokens(default)


@pytest.mark.parametrize("temperature", [5e-324, 1e-30, 100.0])
def test_temperatures_at_the_edges(llm: LLM, temperature: float) -> None:
    """No overflow warning (warnings are errors here), and next to 0 the answer is the greedy one."""
    (hot,) = llm.generate(PROMPT, SamplingParams(temperature=temperature, max_tokens=4, ignore_eos=True))
    (greedy,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    assert (tokens(hot) == tokens(greedy)) == (temperature < 1)
