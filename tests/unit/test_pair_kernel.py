"""Compiled planning of pairs leaves in memory what the reference leaves there, and says the same."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from ostinato.config import cache_dir
from ostinato.errors import ParallelError
from ostinato.moe.pairs import ExpertShare, PairBuffers, ReferencePairs
from ostinato.ops.cpu import pairs as compiled
from ostinato.ops.cpu.opset import open_numba_ops
from ostinato.ops.pairs import PairKernel, PairRule, RowTensors, rounded_pairs
from ostinato.parallel.topology import Topology

E, H, K, ROWS = 12, 20, 3, 9
SIZES = {(2, 2): (4, 9), (2, 1): (4, 5), (4, 4): (3, 0, 9, 0), (4, 2): (3, 0, 9, 0)}  # by tp and dp


def _buffers(at: Topology, dtype: torch.dtype) -> PairBuffers:
    torch.manual_seed(at.rank)
    buffers = PairBuffers.reserve(at, max_rows=ROWS, hidden_size=H, top_k=K, dtype=dtype)
    sent, pairs = buffers.gathered, buffers.pairs
    sent.x.copy_(torch.randn(sent.x.shape))
    sent.weights.copy_(torch.rand(sent.weights.shape))
    for row in sent.ids:
        row.copy_(torch.randperm(E)[:K])
    sent.ids[1, 1] = sent.ids[4:6] = -1
    for tensor in (pairs.x, pairs.weights, pairs.ids, buffers.places):
        tensor.fill_(77)
    return buffers


def _kernels(at: Topology, dtype: torch.dtype, on_input: bool) -> list[tuple[PairBuffers, PairKernel]]:
    share = ExpertShare(at, E // at.ep)
    rule = PairRule(share.first, share.per_rank, at.ep, at.moe_tp, on_input)
    first, second = _buffers(at, dtype), _buffers(at, dtype)
    ops = open_numba_ops(num_threads=1, cache_dir=cache_dir() / "kernels")
    kernel = ops.pair_kernel(second.memory, rule, at.tp)
    assert kernel is not None
    return [(first, ReferencePairs(first, share, rule)), (second, kernel)]


@pytest.mark.parametrize("many", [False, True], ids=["copied here", "copied by torch"])
@pytest.mark.parametrize(
    ("layout", "dtype", "on_input"),
    [
        ((2, 2, 2), torch.bfloat16, False),
        ((2, 1, 2), torch.float32, True),
        ((4, 4, 2), torch.bfloat16, True),
        ((4, 2, 1), torch.bfloat16, False),
    ],
)
def test_the_bits_of_the_reference(
    layout: tuple[int, int, int],
    dtype: torch.dtype,
    on_input: bool,
    many: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if many:
        monkeypatch.setattr(compiled, "_MOST_COPIED", 0)
    at = Topology(*layout).at(1)
    (want, reference), (found, kernel) = _kernels(at, dtype, on_input)
    wide = torch.randn(ROWS, H + 4).to(dtype)[:, 2 : H + 2]  # rows of a fused buffer
    ids = torch.stack([torch.randperm(E)[:K] for _ in range(ROWS)]).int()
    ids[0], ids[3, 2] = -1, -1
    for own in (5, 0, ROWS):
        weights = torch.rand(own, K)
        said = []
        for one in (reference, kernel):
            one.send(wide[:own], weights, ids[:own])
            said.append(one.pick(SIZES[at.tp, at.dp], own))
        assert said[0] == said[1]
        pairs = sum(said[0].brought)
        assert own == 0 or (pairs > 0 and sum(said[0].home) > 0)
        for a, b, rows in (
            (want.send.rows, found.send.rows, own),
            (want.pairs.rows, found.pairs.rows, pairs),
        ):
            for field in dataclasses.fields(RowTensors):
                assert torch.equal(getattr(a, field.name)[:rows], getattr(b, field.name)[:rows]), field.name
        assert torch.equal(want.pairs.ids, found.pairs.ids)
        assert (found.pairs.ids[pairs : rounded_pairs(pairs)] == -1).all()
        assert torch.equal(want.places, found.places)


def test_what_is_no_expert_is_refused() -> None:
    for buffers, kernel in _kernels(Topology(2, 2, 2).at(0), torch.float32, False):
        buffers.send.ids[:2] = torch.tensor([[0, 1, 2], [3, E, -1]], dtype=torch.int32)
        with pytest.raises(ParallelError, match=f"expert id {E} is outside 0..{E - 1}"):
            kernel.pick((2, 0), 2)
    with pytest.raises(ValueError, match="rows must be"):
        kernel.send(
            torch.zeros(1, H, dtype=torch.bfloat16), torch.zeros(1, K), torch.zeros(1, K, dtype=torch.int32)
        )


def test_rows_that_have_no_room_are_refused() -> None:
    _, (buffers, kernel) = _kernels(Topology(2, 1, 2).at(1), torch.float32, False)
    x, weights = torch.zeros(ROWS + 1, H), torch.zeros(ROWS + 1, K)
    with pytest.raises(ValueError, match=f"{ROWS + 1} rows, .* room for {ROWS}"):
        kernel.send(x, weights, torch.zeros(ROWS + 1, K, dtype=torch.int32))
    with pytest.raises(ValueError, match="3 of ids"):
        kernel.send(x[:4], weights[:4], torch.zeros(3, K, dtype=torch.int32))
    for sizes, own in (((4, ROWS), 4), ((4, 0), ROWS + 1)):
        with pytest.raises(ValueError, match=f"room for {len(buffers.gathered.x)} and {ROWS}"):
            kernel.pick(sizes, own)
