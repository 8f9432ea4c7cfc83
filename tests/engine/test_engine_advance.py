"""Steps that go on from the last one's buffers answer as steps that are filled anew, whatever comes between."""

from __future__ import annotations

import random
from typing import Any

import pytest

from ostinato import LLM, RequestOutput, SamplingParams
from ostinato.engine.admission import NewTokenRatio

PROMPTS = [
    "It is a truth",
    "And the Lord said unto Moses",
    "To be",
    "She was the youngest of the two daughters",
]


def _play(llm: LLM, seed: int) -> dict[str, list[RequestOutput]]:
    """Requests of all kinds that come, and some that are aborted, at steps drawn from `seed`: all they were told."""
    draw, engine = random.Random(seed), llm.engine
    coming = sorted(draw.randrange(25) for _ in range(7))
    leaving: dict[int, str] = {}
    told: dict[str, list[RequestOutput]] = {}
    step = 0
    while coming or engine.has_work:
        while coming and coming[0] <= step:
            coming.pop(0)
            name = engine.submit(draw.choice(PROMPTS), _params(draw), request_id=f"{seed}-{len(told)}")
            told[name] = []
            if draw.random() < 0.3:
                leaving[step + draw.randrange(1, 12)] = name
        gone = engine.abort(leaving.get(step, ""))
        if gone is not None:
            told[gone.request_id].append(gone)
        for output in engine.step():
            told[output.request_id].append(output)
        step += 1
    return told


def _params(draw: random.Random) -> SamplingParams:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0, "stop": [draw.choice(["the", "e ", ","])]},
        {"temperature": 1.0, "seed": 5, "top_k": 20, "n": 2},
        {"temperature": 0.8, "seed": 6, "top_p": 0.9, "logprobs": 2},
        {"temperature": 0, "frequency_penalty": 0.7},
        {"temperature": 0, "min_tokens": 4, "stop_token_ids": list(range(40, 400))},
        {"temperature": 0, "stop_token_ids": list(range(60, 100))},
    ]
    return SamplingParams(max_tokens=draw.randrange(1, 24), **draw.choice(kinds))


@pytest.mark.parametrize(
    "options", [{}, {"num_pages": 14}, {"mixed_prefill": True}], ids=["plain", "retract", "mixed"]
)
def test_answers_are_those_of_filled_steps(
    make_llm: Any, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Arrivals, aborts, stops and retractions between the steps; every output that was handed out, in order."""
    shape = {"page_size": 4, "max_running_requests": 5, "enable_prefix_caching": False}
    if "num_pages" in options:
        shape["context_length"] = 40
    going, filled = make_llm(**shape, **options), make_llm(**shape, **options)
    monkeypatch.setattr(filled.engine.worker.decode, "advance", lambda shape: None)
    for llm in (going, filled):
        # Admits more than fits, so that some must go back.
        llm.engine.scheduler.ratio = NewTokenRatio(0.1)
    for seed in range(6):
        assert _play(going, seed) == _play(filled, seed)
    stats = going.stats()["graph"]["decode"]
    assert 0 < stats["advanced"] < stats["replays"]
    if "num_pages" in options:
        assert going.stats()["scheduler"]["retractions"] > 0


def test_undisturbed_decoding_goes_on_from_step_to_step(make_llm: Any) -> None:
    """Greedy and sampled alike: only the first step of a batch is filled from the host."""
    llm = make_llm(page_size=4)
    for params in (SamplingParams(temperature=0, max_tokens=12), SamplingParams(seed=1, max_tokens=12)):
        before = llm.stats()["graph"]["decode"]["advanced"]
        llm.generate(PROMPTS, [params] * 4)
        llm.generate(PROMPTS, [params] * 4)
        assert llm.stats()["graph"]["decode"]["advanced"] - before >= 2 * 9
