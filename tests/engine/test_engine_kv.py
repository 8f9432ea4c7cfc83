"""Answers do not depend on what the KV cache went through: hits, evictions, retractions, chunks, a full pool."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from ostinato import LLM, RequestError, SamplingParams
from ostinato.engine.admission import NewTokenRatio


def greedy(count: int, *, ignore_eos: bool = True) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=ignore_eos)


def answer(
    llm: LLM, prompts: Sequence[Sequence[int]], count: int, *, ignore_eos: bool = True
) -> list[tuple[int, ...]]:
    """What each prompt is answered. Growth that may end early (`ignore_eos=False`) is reserved in part only."""
    outputs = llm.generate([list(prompt) for prompt in prompts], greedy(count, ignore_eos=ignore_eos))
    assert {output.outputs[0].finish_reason for output in outputs} <= {"length", "stop"}
    return [output.outputs[0].token_ids for output in outputs]


class Reckless(NewTokenRatio):
    """Reserves nothing for the growth of what runs and never learns, so that sequences are retracted often."""

    def after_retraction(self, kept: Iterable[Any]) -> None:
        self.reset()


def random_prompts(count: int, *, longest: int, seed: int = 0) -> list[list[int]]:
    """Prompts of 1 to `longest` tokens, half of which begin with one of four shared prefixes."""
    rng = random.Random(seed)
    shared = [[rng.randrange(2, 2048) for _ in range(longest // 2)] for _ in range(4)]
    prompts = []
    for i in range(count):
        head = shared[i // 2 % 4] if i % 2 else []
        prompts.append(head + [rng.randrange(2, 2048) for _ in range(rng.randint(1, longest - len(head)))])
    return prompts


@pytest.mark.parametrize("length", [16, 64, 256])
def test_a_prompt_that_is_cached_whole(make_llm: Any, oracle: Any, length: int) -> None:
    """A prompt of whole pages, twice (F42): the last token at least is computed again."""
    llm = make_llm(page_size=16)
    prompt = [(7 * i) % 2000 + 5 for i in range(length)]
    results = [llm.generate(prompt, greedy(4))[0] for _ in range(2)]
    assert results[0].num_cached_tokens == 0
    assert results[1].num_cached_tokens == length - 16
    expected = oracle.greedy(tuple(prompt), 4)
    assert [list(result.outputs[0].token_ids) for result in results] == [expected, expected]


def test_a_hit_on_what_was_generated(llm: LLM, oracle: Any) -> None:
    """The next turn begins with prompt and answer of the last: both are in the cache."""
    prompt = tuple(range(300, 330))
    first = llm.generate(list(prompt), greedy(20))[0].outputs[0].token_ids
    (second,) = llm.generate([*prompt, *first, 77], greedy(3))
    assert second.num_cached_tokens == 48
    assert list(second.outputs[0].token_ids) == oracle.greedy((*prompt, *first, 77), 3)


def test_256_requests_on_a_small_cache(make_llm: Any, shared_llm: LLM) -> None:
    """Preemption, hits and evictions at once (F43): as if the cache were large."""
    prompts = random_prompts(256, longest=8)
    llm = make_llm(page_size=4, num_pages=33, context_length=64, fair_prefill=False)
    llm.engine.scheduler.ratio = Reckless(conservativeness=0.0)
    found = answer(llm, prompts, 5, ignore_eos=False)
    assert found == answer(shared_llm, prompts, 5, ignore_eos=False)
    counts = llm.stats()["scheduler"]
    assert counts["retractions"] > 20
    assert counts["cached_tokens"] > 100


@pytest.fixture(scope="module")
def undisturbed() -> list[tuple[int, ...]]:
    """Answers of an engine with room for all, without graphs and without a prefix cache."""
    with LLM(
        threads=1, progress=False, dtype="float32", graph="eager", enable_prefix_caching=False, num_pages=512
    ) as llm:
        return answer(llm, DISTURBED_PROMPTS, 10, ignore_eos=False)


DISTURBED_PROMPTS = random_prompts(14, longest=12, seed=3)
DISTURBED: dict[str, Any] = {"enable_prefix_caching": False, "graph": "eager", "num_pages": 512}
DISTURBED: dict[str, dict[str, Any]] = {
    "chunks": {"chunked_prefill_size": 8},
    "mixed": {"chunked_prefill_size": 8, "mixed_prefill": True},
    "whole": {"chunked_prefill_size": 0},
    "no prefix cache": {"chunked_prefill_size": 16, "enable_prefix_caching": False},
    "few prompt tokens": {"max_prefill_tokens": 12},
}


@pytest.mark.parametrize("name", DISTURBED)
def test_retraction_chunks_and_hits_change_nothing(
    make_llm: Any, undisturbed: list[tuple[int, ...]], name: str
) -> None:
    options = {"page_size": 4, "num_pages": 17, "context_length": 64, "max_running_requests": 8}
    llm = make_llm(**options | DISTURBED[name])
    llm.engine.scheduler.ratio = Reckless(conservativeness=0.0)
    assert answer(llm, DISTURBED_PROMPTS, 10, ignore_eos=False) == undisturbed
    # The last ones first, while the prefix cache still has them.
    assert answer(llm, DISTURBED_PROMPTS[::-1], 10, ignore_eos=False) == undisturbed[::-1]
    counts = llm.stats()["scheduler"]
    assert counts["retractions"] > 0
    assert (counts["cached_tokens"] > 0) == (name != "no prefix cache")


def test_a_padded_step_on_a_full_cache(make_llm: Any, shared_llm: LLM) -> None:
    """Pads have a page of their own, so a padded step runs when no page is free (F19)."""
    llm = make_llm(page_size=16, num_pages=8, decode_buckets=(8,), enable_prefix_caching=False)
    prompts = [list(range(at, at + 9)) for at in (10, 500, 900)]
    expected = answer(shared_llm, prompts, 6)
    names = [llm.engine.submit(prompt, greedy(6)) for prompt in prompts]
    llm.engine.step()
    allocator = llm.engine.scheduler.kv.allocator
    others = allocator.allocate(allocator.free_pages)
    assert llm.stats()["scheduler"]["kv_pages_used"] == 7
    found = {}
    while llm.engine.has_work:
        found |= {output.request_id: output.outputs[0].token_ids for output in llm.engine.step()}
    allocator.free(others)
    assert [found[name] for name in names] == expected
    decode = llm.stats()["graph"]["decode"]
    assert decode["replays"] == 4  # the first of five steps was captured
    assert decode["pad_rows"] == 5 * 5
    assert decode["eager_steps"] == 0


@pytest.mark.parametrize("wanted", [50, 4])
def test_what_can_never_fit_is_refused_with_the_numbers(make_llm: Any, wanted: int) -> None:
    """100 tokens of KV, a prompt of 90 (F44): refused at once, and a wish that fits is served to its end."""
    llm = make_llm(page_size=4, num_pages=26)
    prompt = list(range(100, 190))
    need = f"a prompt of 90 tokens and {wanted} to generate need {92 + wanted + 4 + 1} tokens of KV cache"
    with pytest.raises(RequestError, match=f"{need}, the pool holds 100; lower max_tokens"):
        llm.generate(prompt, greedy(wanted))
    assert len(answer(llm, [prompt], 3)[0]) == 3
    assert len(answer(llm, [prompt] * 3, 3)) == 3
    (open_ended,) = llm.generate(prompt, SamplingParams(temperature=0, ignore_eos=True))
    assert len(open_ended.outputs[0].token_ids) == 3


def test_whatever_intake_accepts_is_served_alone(make_llm: Any) -> None:
    """At the very edge, for every length of prompt: nothing waits for ever."""
    llm = make_llm(page_size=4, num_pages=9)
    limits = llm.engine.scheduler.limits
    for length in (1, 4, 5, 13, 23, 24):
        room = limits.max_new_tokens(length)
        prompt = [5 + length] * length
        assert len(answer(llm, [prompt], room)[0]) == room
        with pytest.raises(RequestError, match="KV cache"):
            llm.generate(prompt, greedy(room + 1))


def test_a_hit_that_was_evicted_while_waiting(make_llm: Any, shared_llm: LLM) -> None:
    """The cached count is taken when a request starts, not when it arrives (F45)."""
    llm = make_llm(page_size=4, num_pages=17, max_running_requests=1)
    shared = list(range(700, 716))
    other = list(range(20, 40))
    answer(llm, [shared], 2)
    llm.engine.submit(other, greedy(30))
    llm.engine.step()
    waiting = llm.engine.submit([*shared, 3], greedy(4))
    assert len(llm.engine.scheduler.kv.radix.match([*shared, 3]).pages) == 4
    outputs = []
    while llm.engine.has_work:
        outputs += [
            output for output in llm.engine.step() if output.finished and output.request_id == waiting
        ]
    assert outputs[0].num_cached_tokens < 16
    assert (outputs[0].outputs[0].token_ids,) == tuple(answer(shared_llm, [[*shared, 3]], 4))


def test_namespaces_share_nothing(make_llm: Any) -> None:
    llm = make_llm()
    prompt = list(range(50, 90))
    for key, cached in (("", 0), ("salt", 0), ("", 32), ("salt", 32), ("pepper", 0)):
        llm.engine.submit(prompt, greedy(1), extra_key=key)
        assert llm.engine.step()[0].num_cached_tokens == cached


def test_the_estimate_of_growth_starts_anew_after_a_rest(make_llm: Any) -> None:
    """Fully idle: back to the initial ratio, whoever drives the engine."""
    llm = make_llm(num_pages=32)
    answer(llm, [[5, 6, 7]], 20)
    assert llm.stats()["scheduler"]["new_token_ratio"] == pytest.approx(0.7)
