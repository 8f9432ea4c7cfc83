"""Choosing tokens: the kernel against its twin, token for token, over rules, ties, flat and peaked rows, bad values."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.errors import ConfigError
from ostinato.ops import choice
from ostinato.ops.cpu.isa import AVX512_BF16, PORTABLE
from ostinato.ops.cpu.opset import NumbaOps, open_numba_ops
from ostinato.ops.reference import ReferenceOps

Rule = tuple[float, int, float, float]


@functools.cache
def opset(isa: str, threads: int) -> NumbaOps:
    try:
        return open_numba_ops(isa=isa, num_threads=threads)
    except ConfigError as error:
        pytest.skip(str(error))


def draw(rows: int, vocab: int, seed: int, spread: float, levels: int = 0) -> torch.Tensor:
    """Logits; with `levels` only so many different ones, so that ties abound."""
    x = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))
    if levels:
        x = (x * levels / 4).round() * 4 / levels
    return x * spread


def both(ops: NumbaOps, x: torch.Tensor, rules: list[Rule], seed: int) -> tuple[list[int], list[int]]:
    rows = x.shape[0]
    generator = torch.Generator().manual_seed(seed)
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator)
    positions = torch.randint(0, 5000, (rows,), generator=generator)
    table = torch.tensor(rules, dtype=torch.float64)
    outs = []
    for op in (ops, ReferenceOps()):
        out = torch.full((rows,), -1)
        op.sample(x, table, seeds, positions, out)
        outs.append(out.tolist())
    return outs[0], outs[1]


RULES: list[Rule] = [
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.7, 0, 1.0, 0.1),
    (1.3, 20, 1.0, 0.0),
    (1.0, 1, 1.0, 0.0),
    (2.0, 700, 0.9, 0.0),
    (1.0, 0, 0.9, 0.0),
    (5.0, 0, 0.999, 0.0),
    (1.0, 0, 1e-9, 0.0),
    (1.0, 50, 0.8, 0.2),
    (1e-30, 0, 1.0, 0.0),
    (100.0, 0, 0.5, 0.0),
    (1.0, 0, 1.0, 1.0),
]


@pytest.mark.parametrize("isa", [AVX512_BF16, PORTABLE])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("vocab", [1, 3, 16, 63, 64, 65, 1000, 5003])
@pytest.mark.parametrize(("spread", "levels"), [(3.0, 0), (0.01, 0), (3.0, 6), (40.0, 0), (0.0, 0)])
def test_the_kernel_chooses_what_its_twin_does(
    isa: str, threads: int, vocab: int, spread: float, levels: int
) -> None:
    rules = RULES * 3
    ours, theirs = both(opset(isa, threads), draw(len(rules), vocab, vocab, spread, levels), rules, vocab)
    assert ours == theirs
    assert all(0 <= token < vocab for token in ours)


@settings(deadline=None, max_examples=60)
@given(
    vocab=st.integers(1, 300),
    seed=st.integers(0, 2**32),
    spread=st.sampled_from([0.1, 1.0, 10.0]),
    levels=st.sampled_from([0, 3, 40]),
    rule=st.tuples(
        st.sampled_from([0.0, 0.3, 1.0, 50.0]),
        st.sampled_from([0, 1, 2, 5, 64, 299, 1000]),
        st.sampled_from([1.0, 0.999, 0.5, 0.01]),
        st.sampled_from([0.0, 0.001, 0.5]),
    ),
)
def test_any_rule(vocab: int, seed: int, spread: float, levels: int, rule: Rule) -> None:
    ours, theirs = both(opset(PORTABLE, 1), draw(4, vocab, seed, spread, levels), [rule] * 4, seed)
    assert ours == theirs


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), float("inf")])
@pytest.mark.parametrize("many", [1, 40, 100])
def test_values_that_are_no_numbers(value: float, many: int) -> None:
    """NaN is never chosen beside a number, -inf never beside a finite one, infinities share the choice."""
    x = draw(len(RULES), 100, 5, 2.0)
    x[:, torch.randperm(100, generator=torch.Generator().manual_seed(1))[:many]] = value
    ours, theirs = both(opset(PORTABLE, 1), x, RULES, 7)
    assert ours == theirs
    if many < 100:
        good = x.isinf() if value > 0 else x.isfinite()
        assert all(bool(good[row, token]) for row, token in enumerate(ours))


def test_rows_past_the_live_count_are_not_looked_at() -> None:
    ops, x = opset(PORTABLE, 1), draw(4, 100, 1, 2.0)
    rules = torch.tensor([RULES[1]] * 4, dtype=torch.float64)
    rules[2:] = torch.nan
    numbers, out = torch.arange(4), torch.full((4,), -1)
    for op in (ops, ReferenceOps()):
        op.sample(x, rules, numbers, numbers, out, torch.tensor([2], dtype=torch.int32))
        assert out[2:].tolist() == [0, 0]


def test_noise_is_splitmix64() -> None:
    """First output of splitmix64 seeded with 0 (value from the algorithm's reference implementation)."""
    assert choice.mix64(0) == 0xE220A8397B1DCDAF


def test_a_launch_follows_its_tensors() -> None:
    """Bound once, it serves new logits, rules, seeds and positions in the same memory."""
    ops = opset(PORTABLE, 1)
    x, rules = draw(2, 500, 1, 2.0), torch.tensor([RULES[1], RULES[6]], dtype=torch.float64)
    seeds, positions, out = torch.tensor([1, 2]), torch.tensor([3, 4]), torch.zeros(2, dtype=torch.int64)
    launch, expected = ops.sample.bind(x, rules, seeds, positions, out), torch.zeros_like(out)
    for step in range(20):
        x.copy_(draw(2, 500, step, 2.0))
        rules.copy_(torch.tensor([RULES[step % 13], RULES[(step * 5) % 13]]))
        positions += 1
        launch()
        ReferenceOps().sample(x, rules, seeds, positions, expected)
        assert out.tolist() == expected.tolist()


def test_refusals() -> None:
    ops, x = opset(PORTABLE, 1), torch.zeros(2, 8)
    rules, ids = torch.zeros(2, 4, dtype=torch.float64), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="rules must be contiguous float64"):
        ops.sample(x, rules.float(), ids, ids, ids)
    with pytest.raises(ValueError, match="positions must be contiguous int64"):
        ops.sample(x, rules, ids, ids.int(), ids)
    with pytest.raises(ValueError, match="logits must be"):
        ops.sample(torch.zeros(2, 0), rules, ids, ids, ids)


@pytest.mark.parametrize("isa", [AVX512_BF16, PORTABLE])
@pytest.mark.parametrize("vocab", [1, 5, 16, 17, 100])
def test_a_greedy_row_has_the_same_token_alone_and_beside_rows_that_sample(isa: str, vocab: int) -> None:
    """It is chosen by `argmax` in a step that samples nothing, else by `sample` with temperature 0."""
    generator = torch.Generator().manual_seed(vocab)
    kinds = torch.tensor([float("nan"), -float("inf"), float("inf"), 0.0, -0.0, 1.0])
    few = torch.rand(200, 1, generator=generator) * len(kinds) + 1  # NaN alone, NaN and -inf, ... of each row
    rows = kinds[(torch.rand(200, vocab, generator=generator) * few).long().clamp_max(len(kinds) - 1)]
    rules = torch.tensor([[0.0, 0.0, 1.0, 0.0]], dtype=torch.float64).repeat(200, 1)
    number = torch.zeros(200, dtype=torch.int64)
    chosen = []
    for library in (opset(isa, 1), ReferenceOps()):
        greedy, beside = torch.full((200,), -1), torch.full((200,), -1)
        library.argmax(rows, greedy)
        library.sample(rows, rules, number, number, beside)
        chosen += [greedy.tolist(), beside.tolist()]
    assert chosen[1:] == chosen[:-1]


@pytest.mark.parametrize("isa", [AVX512_BF16, PORTABLE])
def test_the_largest_vocabulary(isa: str) -> None:
    """All tokens as likely as the likeliest: their sum is the largest there is. One more is refused."""
    x = torch.zeros(1, choice.MOST_TOKENS)
    found = set()
    for seed in range(4):
        ours, theirs = both(opset(isa, 2), x, [(1.0, 0, 1.0, 0.0)], seed)
        assert ours == theirs
        found |= set(ours)
    assert len(found) == 4
    with pytest.raises(ValueError, match="logits must be"):
        both(opset(isa, 2), torch.zeros(1, choice.MOST_TOKENS + 1), [(1.0, 0, 1.0, 0.0)], 0)
