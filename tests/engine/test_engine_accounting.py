"""What `stats()` says is what ran: captures, replays, pads, eager steps and why, expert load, tokens."""

from __future__ import annotations

from typing import Any

import pytest

from ostinato import LLM, SamplingParams

PROMPTS = ["It is a truth universally acknowledged, that", "And the Lord said unto", "To be, or not"]


def greedy(count: int, **params: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, **params)


def real_rows(stats: dict[str, Any]) -> int:
    return sum(stats["graph"][mode]["real_rows"] for mode in ("decode", "prefill"))


def test_graphs_captured_at_startup_are_replayed_from_the_first_step(make_llm: Any) -> None:
    llm = make_llm(capture="startup", decode_buckets=(1, 4), prefill_buckets=(32, 64), num_pages=32)
    before = llm.stats()
    assert before["graph"]["decode"]["captures"] == before["graph"]["prefill"]["captures"] == 2
    assert real_rows(before) == 0
    assert not any(any(layer) for layer in before["expert_load"])
    outputs = llm.generate(PROMPTS, greedy(4))
    rows = sum(len(output.prompt_token_ids) for output in outputs)
    graph = llm.stats()["graph"]
    assert graph["prefill"]["replays"] == 1
    assert graph["prefill"]["real_rows"] == rows
    assert graph["prefill"]["pad_rows"] == -rows % 32
    assert graph["decode"]["replays"] == 3
    assert (graph["decode"]["real_rows"], graph["decode"]["pad_rows"]) == (9, 3)
    for mode in ("decode", "prefill"):
        assert graph[mode]["captures"] == 2
        assert graph[mode]["eager_steps"] == 0


@pytest.mark.parametrize(
    "options", [{}, {"graph": "eager"}, {"capture": "startup", "decode_buckets": (4,)}], ids=str
)
def test_expert_load_counts_real_rows_only(make_llm: Any, options: dict[str, Any]) -> None:
    """The last layer's are those whose logits somebody wants: one a token, or all of a prompt that is scored."""
    llm = make_llm(num_pages=32, prefill_buckets=(64,), **options)
    llm.generate(PROMPTS, greedy(4))
    stats = llm.stats()
    top_k = llm.engine.model_config.moe.top_k
    *layers, last = (sum(layer) for layer in stats["expert_load"])
    assert layers == [real_rows(stats) * top_k] * (stats["model"]["layers"] - 1)
    assert last == 4 * len(PROMPTS) * top_k
    (scored,) = llm.generate(PROMPTS[0], greedy(1, prompt_logprobs=0))
    after = [sum(layer) for layer in llm.stats()["expert_load"]]
    assert after[-1] - last == len(scored.prompt_token_ids) * top_k


def test_a_chunk_without_logits_leaves_the_last_layer_alone(make_llm: Any) -> None:
    llm = make_llm(num_pages=32, chunked_prefill_size=16)
    llm.generate([list(range(5, 55))], greedy(1))
    stats = llm.stats()
    *layers, last = (sum(layer) for layer in stats["expert_load"])
    assert real_rows(stats) == 50
    assert (set(layers), last) == (
        {50 * llm.engine.model_config.moe.top_k},
        llm.engine.model_config.moe.top_k,
    )


def test_eager_steps_say_why(make_llm: Any) -> None:
    """More rows than the largest bucket: the step runs eagerly, is counted with its reason, and answers the same."""
    llm = make_llm(decode_buckets=(2,), num_pages=32)
    expected = [output.outputs for output in llm.generate(PROMPTS[:2], greedy(4))]
    assert llm.stats()["graph"]["decode"]["eager_steps"] == 0
    outputs = llm.generate(PROMPTS, greedy(4))
    assert [output.outputs for output in outputs[:2]] == expected
    decode = llm.stats()["graph"]["decode"]
    assert decode["eager_steps"] == 3
    assert sum(decode["eager_reasons"].values()) == 3
    assert all(decode["eager_reasons"])


def test_eager_and_replayed_answers_are_equal_bit_for_bit(make_llm: Any) -> None:
    """Log-probabilities too, in sampled text, in batches that are padded."""
    params = [
        greedy(5, logprobs=3),
        SamplingParams(seed=1, max_tokens=7, logprobs=3),
        greedy(3, prompt_logprobs=2),
    ]
    eager, tape = make_llm(graph="eager", num_pages=32), make_llm(graph="tape", num_pages=32)
    assert (eager.stats()["backend"], tape.stats()["backend"]) == ("eager", "tape")
    first = eager.generate(PROMPTS, params)
    for _ in range(2):
        again = tape.generate(PROMPTS, params)
        assert [output.outputs for output in again] == [output.outputs for output in first]
    assert tape.stats()["graph"]["decode"]["replays"] > 0
    assert eager.stats()["graph"]["decode"]["eager_reasons"] == {"backend eager": 6}


def test_tokens_and_requests_are_counted(make_llm: Any) -> None:
    llm = make_llm(num_pages=32)
    outputs = llm.generate(PROMPTS, greedy(4, n=2))
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    stats = llm.stats()
    assert stats["tokens"] == {"prompt": prompt, "generated": 3 * 2 * 4}
    assert stats["scheduler"]["finished_length"] == 6
    assert (stats["scheduler"]["running"], stats["scheduler"]["waiting"]) == (0, 0)
    assert stats["threads"] == 1


def test_a_mixed_step_scores_a_prompt_beside_decoding_rows(make_llm: Any, shared_llm: LLM) -> None:
    """The rows of a prompt's log-probabilities are its own when others decode in the same step."""
    llm = make_llm(chunked_prefill_size=16, mixed_prefill=True, num_pages=32)
    long = list(range(200, 245))
    running = llm.engine.submit(PROMPTS[0], greedy(8))
    for _ in range(3):
        llm.engine.step()
    scored = llm.engine.submit(long, greedy(2, prompt_logprobs=1))
    outputs = {}
    while llm.engine.has_work:
        outputs |= {output.request_id: output for output in llm.engine.step()}
    (alone,) = shared_llm.generate(long, greedy(2, prompt_logprobs=1))
    assert outputs[scored].outputs[0].token_ids == alone.outputs[0].token_ids
    found, expected = outputs[scored].prompt_logprobs, alone.prompt_logprobs
    assert found is not None
    assert expected is not None
    for mine, theirs in zip(found[1:], expected[1:], strict=True):
        assert mine is not None
        assert theirs is not None
        assert mine.keys() == theirs.keys()
        assert all(mine[token].logprob == pytest.approx(theirs[token].logprob, abs=1e-4) for token in mine)
    (undisturbed,) = shared_llm.generate(PROMPTS[0], greedy(8))
    assert outputs[running].outputs[0].token_ids == undisturbed.outputs[0].token_ids
