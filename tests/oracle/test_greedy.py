"""The whole engine against transformers' `generate`, fp32: every family, eager and tape, chunked, cold and cached.

One ragged batch per family, and a second one whose prompts begin like the first: it must run on the prefix cache.
Tokens are compared exactly, log-probabilities within 1e-4 of transformers' own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from ostinato import LLM, RequestOutput, SamplingParams

NEW_TOKENS = 32
TOLERANCE = 1e-4
LENGTHS = (1, 23, 70, 40, 37)
"""Five prompts, so that the decode bucket of eight has pads."""
SHARED = ((2, 64), (3, 33), (4, 37))
"""Prompts of the second round: (prompt of the first round, tokens in common); the last one comes again as it was."""
PAGE = 16
CHUNK = 16
MODES = [
    ("numba", "eager", 0),
    ("numba", "eager", CHUNK),
    ("numba", "tape", 0),
    ("numba", "tape", CHUNK),
    ("reference", "eager", 0),
    ("reference", "tape", CHUNK),
]


@dataclass(frozen=True)
class Answer:
    """What transformers says to one prompt: greedy tokens, and log-probabilities [tokens, vocab] before each."""

    prompt: list[int]
    tokens: list[int]
    logprobs: torch.Tensor


def ask(model: Any, prompt: list[int]) -> Answer:
    ids = torch.tensor([prompt])
    whole = model.generate(ids, do_sample=False, min_new_tokens=NEW_TOKENS, max_new_tokens=NEW_TOKENS)[0]
    logits = model(whole[None]).logits[0, len(prompt) - 1 : -1]
    tokens = whole[len(prompt) :].tolist()
    # Its cache and its whole forward agree, or it would be no oracle.
    assert logits.argmax(-1).tolist() == tokens
    return Answer(prompt, tokens, torch.log_softmax(logits, -1))


@pytest.fixture(scope="module")
def prompts(checkpoints: ModuleType) -> tuple[list[list[int]], list[list[int]]]:
    """Token ids of the first round, and of the second."""
    generator = torch.Generator().manual_seed(11)

    def draw(n: int) -> list[int]:
        return torch.randint(0, checkpoints.VOCAB, (n,), generator=generator).tolist()

    first = [draw(n) for n in LENGTHS]
    second = [first[i][:shared] + draw(9 if shared < LENGTHS[i] else 0) for i, shared in SHARED]
    return first, second


@pytest.fixture(scope="module")
def answers(
    oracle: Callable[[str], Any], prompts: tuple[list[list[int]], list[list[int]]]
) -> Callable[[str], tuple[list[Answer], list[Answer]]]:
    """answers(family) -> transformers' answers to both rounds, worked out once."""
    made: dict[str, tuple[list[Answer], list[Answer]]] = {}

    def get(family: str) -> tuple[list[Answer], list[Answer]]:
        if family not in made:
            model = oracle(family)
            first, second = ([ask(model, prompt) for prompt in group] for group in prompts)
            made[family] = first, second
        return made[family]

    return get


def check(outputs: list[RequestOutput], answers: list[Answer]) -> None:
    for output, answer in zip(outputs, answers, strict=True):
        (completion,) = output.outputs
        assert list(completion.token_ids) == answer.tokens
        assert completion.logprobs is not None
        for row, token, entries in zip(answer.logprobs, answer.tokens, completion.logprobs, strict=True):
            assert token in entries
            assert len(entries) == 5
            for candidate, entry in entries.items():
                assert entry.logprob == pytest.approx(float(row[candidate]), abs=TOLERANCE)


@pytest.mark.parametrize(
    ("kernels", "graph", "chunk"), MODES, ids=[f"{k}-{g}-{'chunks' if c else 'whole'}" for k, g, c in MODES]
)
@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "llama_tied",
        "mistral",
        "qwen2",
        "qwen3",
        "qwen2_moe",
        "qwen3_moe",
        "mixtral",
        "olmoe",
        "phimoe",
        "llama4",
    ],
)
def test_greedy_tokens_and_logprobs_are_those_of_transformers(
    family: str,
    kernels: str,
    graph: str,
    chunk: int,
    checkpoint: Callable[[str], Path],
    answers: Callable[[str], tuple[list[Answer], list[Answer]]],
) -> None:
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=5)
    options: dict[str, Any] = {
        "kernels": kernels,
        "graph": graph,
        "chunked_prefill_size": chunk,
        "page_size": PAGE,
    }
    first, second = answers(family)
    with LLM(
        str(checkpoint(family)),
        dtype="float32",
        threads=1,
        progress=False,
        max_running_requests=8,
        **options,
    ) as llm:
        cold = llm.generate([answer.prompt for answer in first], params)
        assert [output.num_cached_tokens for output in cold] == [0] * len(first)
        check(cold, first)
        warm = llm.generate([answer.prompt for answer in second], params)
        # Whole pages of what is shared; the last token of a prompt is always computed.
        expected = [min(shared, LENGTHS[i] - 1) // PAGE * PAGE for i, shared in SHARED]
        assert [output.num_cached_tokens for output in warm] == expected
        check(warm, second)
        stats = llm.stats()["graph"]
        assert stats["decode"]["pad_rows"] > 0
        if graph == "eager":
            assert stats["decode"]["replays"] == stats["prefill"]["replays"] == 0
        else:
            assert stats["decode"]["eager_steps"] == 0
            assert stats["decode"]["replays"] > NEW_TOKENS
            assert stats["prefill"]["captures"] > 0
        if chunk:
            assert all(int(key.split("/")[1]) <= chunk for key in stats["prefill"]["keys"])
        llm.engine.scheduler.check_leaks()
