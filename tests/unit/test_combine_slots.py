"""`combine_slots` over results of one slot each has the bits of `moe_experts` over whole rows, in both op sets."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ostinato.config import cache_dir
from ostinato.ops.cpu.opset import open_numba_ops
from ostinato.ops.opset import OpSet
from ostinato.ops.reference import ReferenceOps

E, H, INTER, K = 5, 72, 40, 3


def _ops(name: str) -> OpSet:
    return ReferenceOps() if name == "reference" else open_numba_ops(num_threads=1, cache_dir=_cache())


def _cache() -> Path:
    return cache_dir() / "kernels"


@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["reference", "numba"])
def test_bits_of_the_whole_kernel(name: str, dtype: torch.dtype, on_input: bool) -> None:
    ops, rows = _ops(name), 11
    gen = torch.Generator().manual_seed(3)
    experts = ops.pack_experts(
        torch.randn(E, 2 * INTER, H, generator=gen).to(dtype),
        torch.randn(E, H, INTER, generator=gen).to(dtype),
    )
    x = torch.randn(rows, H, generator=gen).to(dtype)
    weights = torch.rand(rows, K, generator=gen)
    ids = torch.stack([torch.randperm(E, generator=gen)[:K] for _ in range(rows)]).int()
    ids[2, 1] = ids[5] = -1
    whole = torch.empty(rows, H, dtype=dtype)
    ops.moe_experts(x, weights, ids, experts, on_input, whole)

    # Pairs in another order than the kernel's own, with a hole.
    order = torch.randperm(rows * K, generator=gen)
    places = torch.empty(rows * K, dtype=torch.int64)
    places[order] = torch.arange(rows * K)
    results = torch.empty(rows * K, H)
    pair_weights = weights.view(-1)[order].unsqueeze(1) if on_input else torch.ones(rows * K, 1)
    ops.moe_experts(
        x[order // K].contiguous(), pair_weights, ids.view(-1)[order].unsqueeze(1), experts, on_input, results
    )
    places = places.view(rows, K).masked_fill(ids < 0, -1)
    out = torch.full((rows, H), torch.nan, dtype=dtype)
    ops.combine_slots(results, places, torch.ones_like(weights) if on_input else weights, out)
    assert torch.equal(out, whole)
    assert not out[5].any()


def test_shapes_are_checked() -> None:
    ops = _ops("numba")
    with pytest.raises(ValueError, match="places must be"):
        ops.combine_slots(torch.zeros(2, 8), torch.zeros(3, 2).int(), torch.zeros(3, 2), torch.zeros(3, 8))
    with pytest.raises(ValueError, match="results"):
        ops.combine_slots(torch.zeros(2, 9), torch.zeros(3, 2).long(), torch.zeros(3, 2), torch.zeros(3, 8))


def test_the_smallest_numbers() -> None:
    """bf16 has numbers under the least normal one; the MoE kernel keeps them, as torch does."""
    results = torch.tensor([2e-38, -2e-38, 4e-39, 1.2e-38]).repeat(1, 18)
    out = torch.full((1, H), torch.nan, dtype=torch.bfloat16)
    _ops("numba").combine_slots(results, torch.tensor([[0]]), torch.tensor([[0.25]]), out)
    assert torch.equal(out.view(torch.int16), (results * 0.25).bfloat16().view(torch.int16))
    assert bool(out.all())
