"""Live counts: rows at or past the count cost nothing, are never read and come out zero, in both op sets alike."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ostinato.errors import ConfigError
from ostinato.ops.cpu.isa import AVX512_BF16, PORTABLE
from ostinato.ops.cpu.opset import NumbaOps, open_numba_ops
from ostinato.ops.opset import OpSet
from ostinato.ops.reference import ReferenceOps

ROWS, WIDTH = 9, 40
TOLERANCES = {torch.bfloat16: 4e-2, torch.float32: 2e-5}


@functools.cache
def opset(isa: str) -> NumbaOps:
    try:
        return open_numba_ops(isa=isa)
    except ConfigError as error:
        pytest.skip(str(error))


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def poisoned(count: int, *shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Random rows, NaN from `count` on."""
    x = draw(*shape, dtype=dtype, seed=seed)
    x[max(count, 0) :] = float("nan")
    return x


# Each runs one op with outputs of its own over rows whose tail is NaN, and returns what it wrote.
Case = Callable[[OpSet, torch.dtype, int, torch.Tensor], torch.Tensor]


def _linear(ops: OpSet, dtype: torch.dtype, count: int, live: torch.Tensor) -> torch.Tensor:
    packed = ops.pack_linear(draw(50, WIDTH, dtype=dtype, seed=1), draw(50, dtype=dtype, seed=2))
    out = torch.full((ROWS, 50), 7.0, dtype=dtype)
    ops.linear(poisoned(count, ROWS, WIDTH, dtype=dtype), packed, out, live)
    return out


def _gated(ops: OpSet, dtype: torch.dtype, count: int, live: torch.Tensor) -> torch.Tensor:
    packed = ops.pack_gated(draw(34, WIDTH, dtype=dtype, seed=1) * 0.3, draw(34, dtype=dtype, seed=2))
    assert (packed.in_features, packed.out_features) == (WIDTH, 17)
    out = torch.full((ROWS, 17), 7.0, dtype=dtype)
    ops.linear(poisoned(count, ROWS, WIDTH, dtype=dtype), packed, out, live)
    return out


def _norm(name: str, *, residual: bool, weights: int) -> Case:
    def run(ops: OpSet, dtype: torch.dtype, count: int, live: torch.Tensor) -> torch.Tensor:
        x, total = (poisoned(count, ROWS, WIDTH, dtype=dtype, seed=s) for s in (0, 1))
        total[max(count, 0) :] = 3.0
        out = torch.full((ROWS, WIDTH), 7.0, dtype=dtype)
        affine = [draw(WIDTH, dtype=dtype, seed=5 + i) for i in range(weights)]
        getattr(ops, name)(x, *([total] if residual else []), *affine, 1e-6, out, live)
        assert bool((total[max(count, 0) :] == 3.0).all()), "the residual of a pad row stays as it is"
        return torch.cat((out, total), 1) if residual and count >= ROWS else out

    return run


def _argmax(ops: OpSet, dtype: torch.dtype, count: int, live: torch.Tensor) -> torch.Tensor:
    out = torch.full((ROWS,), 99)
    ops.argmax(draw(ROWS, WIDTH), out, live)
    return out


CASES: dict[str, Case] = {
    "linear": _linear,
    "gated linear": _gated,
    "rms_norm": _norm("rms_norm", residual=False, weights=1),
    "add_rms_norm": _norm("add_rms_norm", residual=True, weights=1),
    "layer_norm": _norm("layer_norm", residual=False, weights=2),
    "add_layer_norm": _norm("add_layer_norm", residual=True, weights=2),
    "argmax": _argmax,
}


@pytest.mark.parametrize("isa", [AVX512_BF16, PORTABLE])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("count", [-1, 0, 1, 5, ROWS, ROWS + 3])
@pytest.mark.parametrize("name", CASES)
def test_rows_past_the_count_come_out_zero(isa: str, dtype: torch.dtype, count: int, name: str) -> None:
    live = torch.tensor([count], dtype=torch.int32)
    ours, theirs = (CASES[name](ops, dtype, count, live) for ops in (opset(isa), ReferenceOps()))
    assert not ours[max(count, 0) :].any()
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@pytest.mark.parametrize("isa", [AVX512_BF16, PORTABLE])
@pytest.mark.parametrize("count", [0, 3, ROWS])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_in_place_leaves_pads_alone(isa: str, count: int, normed: bool, interleaved: bool) -> None:
    live, table = torch.tensor([count], dtype=torch.int32), draw(30, 16, seed=3)
    positions, weights = torch.arange(ROWS), [draw(16, seed=s) for s in (4, 5)]
    results = []
    for ops in (opset(isa), ReferenceOps()):
        q, k = draw(ROWS, 3, 16), draw(ROWS, 2, 16, seed=1)
        if normed:
            ops.norm_rope(q, k, *weights, 1e-6, positions, table, interleaved, live)
        else:
            ops.rope(q, k, positions, table, interleaved, live)
        assert torch.equal(q[count:], draw(ROWS, 3, 16)[count:])
        results.append((q, k))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-6)


def test_a_bound_launch_follows_its_count() -> None:
    ops, live = opset(PORTABLE), torch.tensor([2], dtype=torch.int32)
    x, out = draw(4, 8), torch.full((4, 8), 7.0)
    launch: Any = ops.rms_norm.bind(x, None, 1e-6, out, live)
    for count in (2, 4, 0):
        live.fill_(count)
        launch()
        assert out.any(-1).tolist() == [i < count for i in range(4)]


def test_counts_of_another_kind_are_refused() -> None:
    x = torch.zeros(2, 8)
    for live in (torch.tensor([1]), torch.zeros(2, dtype=torch.int32)):
        with pytest.raises(ValueError, match="one int32"):
            opset(PORTABLE).rms_norm(x, None, 1e-6, x, live)
