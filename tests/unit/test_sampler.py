"""Token choice: noise from (seed, position) alone, rows independent, transforms equal to transformers' processors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.engine import sampler
from ostinato.engine.request import SamplingParams
from ostinato.engine.sampler import Sampled, SampleInput, adjust, rule_of, score, top_logprobs
from ostinato.engine.sampler import sample as sample_by
from ostinato.ops.choice import candidates, uniform
from ostinato.ops.reference import ReferenceOps

VOCAB = 40


def make_input(
    *,
    seed: int = 0,
    position: int = 0,
    prompt: tuple[int, ...] = (1, 2),
    output: tuple[int, ...] = (),
    blocked: frozenset[int] = frozenset(),
    **params: Any,
) -> SampleInput:
    return SampleInput(SamplingParams(**params), seed, position, prompt, output, blocked)


def make_logits(rows: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def sample(logits: torch.Tensor, rows: list[SampleInput]) -> list[Sampled]:
    return sample_by(logits, rows, ReferenceOps())


@given(st.integers(-(2**63), 2**64 - 1), st.integers(0, 2**31))
def test_uniform_is_a_pure_function_in_range(seed: int, position: int) -> None:
    value = uniform(seed, position)
    assert 0.0 <= value < 1.0
    assert value == uniform(seed, position)


def test_uniform_spreads_over_positions_and_seeds() -> None:
    by_position = np.array([uniform(3, p) for p in range(4000)])
    by_seed = np.array([uniform(s, 3) for s in range(4000)])
    for values in (by_position, by_seed):
        counts, _ = np.histogram(values, bins=20, range=(0, 1))
        chi2 = float(((counts - 200) ** 2 / 200).sum())
        assert chi2 < 45  # 19 degrees of freedom: 0.1 % point is 43.8; the draw is fixed
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.05


def test_samples_follow_the_distribution() -> None:
    logits = make_logits(1)[0]
    rows = [make_input(seed=5, position=p, temperature=0.8) for p in range(6000)]
    tokens = [s.token_id for s in sample(logits.expand(len(rows), -1), rows)]
    observed = np.bincount(tokens, minlength=VOCAB)
    expected = torch.softmax(logits / 0.8, 0).numpy() * len(rows)
    big = expected > 5
    chi2 = float(((observed[big] - expected[big]) ** 2 / expected[big]).sum())
    assert chi2 < 2.5 * int(big.sum())


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 6))
def test_rows_do_not_see_each_other(seed: int, count: int) -> None:
    """A row's token is the same alone and beside any neighbours, greedy and seedless ones included."""
    rng = np.random.default_rng(seed)
    logits = make_logits(count, seed)
    rows = [
        make_input(
            seed=int(rng.integers(1 << 40)),
            position=int(rng.integers(1000)),
            temperature=float(rng.choice([0.0, 0.7, 1.3])),
            top_k=int(rng.choice([0, 1, 5])),
            top_p=float(rng.choice([1.0, 0.6])),
            min_p=float(rng.choice([0.0, 0.1])),
            frequency_penalty=float(rng.choice([0.0, 0.5])),
            output=(3, 3, 7),
        )
        for _ in range(count)
    ]
    together = sample(logits, rows)
    order = rng.permutation(count)
    shuffled = sample(logits[torch.from_numpy(order)], [rows[i] for i in order])
    for place, i in enumerate(order):
        assert together[i] == shuffled[place] == sample(logits[i : i + 1], [rows[i]])[0]


def test_greedy_takes_the_lowest_id_of_a_tie() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[1, [9, 4]] = 1.0
    assert [s.token_id for s in sample(logits, [make_input(temperature=0.0)] * 2)] == [0, 4]


@pytest.mark.parametrize("params", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
def test_the_narrowest_filters_are_greedy(params: dict[str, Any]) -> None:
    logits = make_logits(50)
    rows = [make_input(seed=i, temperature=1.5, **params) for i in range(50)]
    assert [s.token_id for s in sample(logits, rows)] == logits.argmax(-1).tolist()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("params", "processor"),
    [
        ({"top_k": 7}, ("TopKLogitsWarper", 7)),
        ({"top_p": 0.6}, ("TopPLogitsWarper", 0.6)),
        ({"top_p": 0.95}, ("TopPLogitsWarper", 0.95)),
        ({"min_p": 0.05}, ("MinPLogitsWarper", 0.05)),
    ],
)
def test_filters_keep_what_transformers_keeps(
    params: dict[str, Any], processor: tuple[str, float], seed: int
) -> None:
    from transformers.generation import logits_process

    logits = make_logits(1, seed)
    warped = getattr(logits_process, processor[0])(processor[1])(None, logits.clone())
    ids, weights = candidates(logits[0], *rule_of(make_input(temperature=1.0, **params).params))
    assert ids.tolist() == torch.isfinite(warped[0]).nonzero()[:, 0].tolist()
    expected = torch.softmax(warped[0].double(), 0)[ids]
    assert np.allclose(weights / weights.sum(), expected.numpy(), rtol=1e-6)


def test_top_k_breaks_ties_by_the_lowest_id() -> None:
    ids, _ = candidates(torch.zeros(VOCAB), 1.0, 3, 1.0, 0.0)
    assert ids.tolist() == [0, 1, 2]


def test_repetition_penalty_is_that_of_transformers() -> None:
    from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

    logits = make_logits(1)
    history = (3, 3, 5, 9)
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([history]), logits.clone())
    row = make_input(prompt=(3, 5), output=(3, 9), repetition_penalty=1.7)
    assert torch.equal(adjust(logits[0], row), expected[0])


def test_presence_and_frequency_penalties_count_the_output_only() -> None:
    """OpenAI's formula: logit - count * frequency - (count > 0) * presence."""
    row = make_input(prompt=(1, 1, 1), output=(2, 2, 4), presence_penalty=0.5, frequency_penalty=0.25)
    out = adjust(torch.zeros(VOCAB), row)
    assert out[1] == 0.0
    assert out[2] == -1.0
    assert out[4] == -0.75


def test_blocked_tokens_and_bias() -> None:
    logits = make_logits(1)
    best = int(logits.argmax())
    (blocked,) = sample(logits, [make_input(temperature=0.0, blocked=frozenset({best}))])
    assert blocked.token_id != best
    (biased,) = sample(logits, [make_input(temperature=0.0, logit_bias={6: 100.0})])
    assert biased.token_id == 6


def test_logprobs_are_the_models_own() -> None:
    """Temperature, penalties and filters change the choice, not the log-probabilities reported."""
    logits = make_logits(1)
    (chosen,) = sample(logits, [make_input(temperature=2.0, seed=4, top_k=20, logprobs=3)])
    expected = torch.log_softmax(logits[0].double(), 0)
    assert chosen.logprob == pytest.approx(float(expected[chosen.token_id]))
    assert chosen.top_logprobs is not None
    best = torch.topk(expected, 3).indices.tolist()
    assert list(chosen.top_logprobs)[:3] == best
    assert chosen.token_id in chosen.top_logprobs
    assert [chosen.top_logprobs[t].rank for t in best] == [1, 2, 3]


def test_logprob_of_a_token_outside_the_best() -> None:
    logits = make_logits(1)[0]
    worst = int(logits.argmin())
    value, top = top_logprobs(logits, worst, 2)
    assert len(top) == 3
    assert top[worst].rank == VOCAB
    assert top[worst].logprob == value


@pytest.mark.parametrize("count", [0, 1, 5, VOCAB, 100])
def test_rows_are_scored_together_as_each_alone(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many rows at a time, a few at a time, or a stable sort of each row: the same bits, equals and NaN included."""
    logits = torch.cat([make_logits(20), make_logits(20, seed=1).round()])
    logits[1, ::3] = -math.inf
    logits[2] = math.nan
    logits[3, 5] = math.inf
    logits[4] = 0.0
    ids = [i * 7 % VOCAB for i in range(len(logits))]
    expected = []
    for row, token in zip(logits, ids, strict=True):
        logprobs = torch.log_softmax(row.double(), dim=-1)
        order = logprobs.argsort(descending=True, stable=True)[:count].tolist()
        rows = [(t, float(logprobs[t]), place) for place, t in enumerate(order, 1)]
        if token not in order:
            rows.append((token, float(logprobs[token]), int((logprobs > logprobs[token]).sum()) + 1))
        expected.append(rows)
    assert repr(score(logits, ids, count)) == repr(expected)
    monkeypatch.setattr(sampler, "_SCORED_AT_ONCE", 3 * VOCAB)
    assert repr(score(logits, ids, count)) == repr(expected)
