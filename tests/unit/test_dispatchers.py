"""Dispatch between ranks (as threads): the bits of one rank in every layout, with idle and uneven ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from ostinato.config import cache_dir
from ostinato.errors import ParallelError
from ostinato.graphs import TapeBackend
from ostinato.graphs.stream import EagerStream, Stream
from ostinato.graphs.workspace import Workspace
from ostinato.moe.all_to_all import AllToAllDispatcher
from ostinato.moe.dispatch import Dispatcher, LocalDispatcher
from ostinato.moe.gathered import GatheredDispatcher
from ostinato.moe.home import Home
from ostinato.moe.layer import MoELayer, reserve_moe_buffers
from ostinato.moe.load import ExpertRows
from ostinato.moe.pairs import ExpertShare, PairBuffers, StepWidths, check_distinct, plan_home
from ostinato.moe.placement import ExpertPlacement
from ostinato.moe.topk import TopKConfig
from ostinato.ops.cpu.opset import open_numba_ops
from ostinato.ops.opset import OpSet
from ostinato.ops.pairs import rounded_pairs
from ostinato.ops.reference import ReferenceOps
from ostinato.parallel.collectives import Group, SingleGroup
from ostinato.parallel.shm import ShmGroup, create_memory, map_memory, shm_supported
from ostinato.parallel.topology import Topology
from ostinato.parallel.watchdog import Watchdog

pytestmark = pytest.mark.skipif(not shm_supported(), reason="needs memfd and x86")
E, H, INTER, K, ROWS = 8, 64, 32, 3, 8
SHARED = E - 1
SLOTS = (0, 1, 2, 3, 4, 5, 6, 0, 1, 1, 2, 4)
"""With a fused shared expert, the last: the routed ones in slots, some of them twice; the shared one lies behind each
rank's own."""


def _groups(ranks: tuple[int, ...]) -> list[Group]:
    if len(ranks) == 1:
        return [SingleGroup()]
    size = len(ranks)
    fd = create_memory(size, capacity=1 << 12)
    made: list[Group] = [
        ShmGroup(map_memory(fd, size, capacity=1 << 12), r, ranks, Watchdog(20.0), capacity=1 << 12)
        for r in range(size)
    ]
    os.close(fd)
    return made


@dataclass
class Weights:
    """One layer, whole."""

    router: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor

    @classmethod
    def of(cls, dtype: torch.dtype) -> Weights:
        gen = torch.Generator().manual_seed(11)
        shapes = ((E, H), (E, 2 * INTER, H), (E, H, INTER))
        return cls(*(torch.randn(s, generator=gen).div(4).to(dtype) for s in shapes))

    def share(self, at: Topology) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts, or slices of them, of one rank."""
        count, width = E // at.ep, INTER // at.moe_tp
        mine = slice(at.ep_rank * count, (at.ep_rank + 1) * count)
        cut = slice(at.moe_tp_rank * width, (at.moe_tp_rank + 1) * width)
        gate, up = self.gate_up[mine].chunk(2, 1)
        return torch.cat((gate[:, cut], up[:, cut]), 1), self.down[mine][:, :, cut].contiguous()

    def with_shared(self, at: Topology) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts in this rank's slots, and its copy of the shared one."""
        count = len(SLOTS) // at.ep
        mine = [*SLOTS[at.ep_rank * count : (at.ep_rank + 1) * count], SHARED]
        return self.gate_up[mine], self.down[mine]


def _layer(
    ops: OpSet,
    weights: Weights,
    experts: tuple[torch.Tensor, torch.Tensor],
    dispatcher: Dispatcher,
    on_input: bool,
    *,
    fused: bool = False,
    placement: ExpertPlacement | None = None,
) -> MoELayer:
    workspace, dtype = Workspace(), weights.router.dtype
    reserve_moe_buffers(workspace, ROWS, hidden_size=H, num_experts=E, top_k=K, dtype=dtype)
    router = weights.router[:SHARED] if fused else weights.router
    return MoELayer(
        ops=ops,
        workspace=workspace,
        topk=TopKConfig(top_k=K, num_fused_shared_experts=int(fused)),
        router=ops.pack_linear(router, out_dtype=torch.float32),
        experts=ops.pack_experts(*experts),
        dispatcher=dispatcher,
        weights_on_input=on_input,
        placement=placement,
    )


def _ops(name: str) -> OpSet:
    return (
        ReferenceOps()
        if name == "reference"
        else open_numba_ops(num_threads=1, cache_dir=cache_dir() / "kernels")
    )


@dataclass
class Case:
    """Rows of every data-parallel rank: `live` of `width` are real."""

    live: tuple[int, ...]
    width: tuple[int, ...]


def _x(dp_rank: int, rows: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(rows, H, generator=torch.Generator().manual_seed(dp_rank)).to(dtype)


def _whole(
    name: str, dtype: torch.dtype, on_input: bool, case: Case, *, fused: bool = False
) -> list[torch.Tensor]:
    weights = Weights.of(dtype)
    experts = weights.gate_up, weights.down
    layer = _layer(_ops(name), weights, experts, LocalDispatcher(), on_input, fused=fused)
    found = []
    for d, (live, width) in enumerate(zip(case.live, case.width, strict=True)):
        out = torch.empty(width, H, dtype=dtype)
        layer.forward(EagerStream(), _x(d, width, dtype), torch.tensor([live], dtype=torch.int32), out)
        found.append(out)
    return found


Make = Callable[[ExpertShare, Group, Group, OpSet, PairBuffers, StepWidths, bool], Dispatcher]


def _gathered(sharded: bool) -> Make:
    return lambda share, world, attn, ops, b, w, on: GatheredDispatcher(
        Home(world, attn, share, ops, b, w, on, sharded)
    )


def _all_to_all(capacity: int | None) -> Make:
    return lambda share, world, attn, ops, b, w, on: AllToAllDispatcher(
        Home(world, attn, share, ops, b, w, on, True), capacity
    )


WAYS: dict[str, tuple[Make, bool, int | None]] = {
    "gathered": (_gathered(False), False, None),
    "gathered_sharded": (_gathered(True), False, None),
    "all_to_all": (_all_to_all(None), True, None),
    "capacity": (_all_to_all(ROWS * K), True, ROWS * K),
}


def _ranks(
    layout: Topology,
    way: str,
    name: str,
    dtype: torch.dtype,
    cases: list[Case],
    *,
    on_input: bool = False,
    tape: bool = False,
    fused: bool = False,
) -> list[list[torch.Tensor]]:
    """What every rank finds in each case."""
    make, slots_travel, capacity = WAYS[way]
    weights = Weights.of(dtype)
    worlds = _groups(tuple(range(layout.tp)))
    attns = {d: _groups(layout.ranks_of_dp(d)) for d in range(layout.dp)}

    def run(rank: int) -> list[torch.Tensor]:
        at = layout.at(rank)
        ops, widths = _ops(name), StepWidths()
        buffers = PairBuffers.reserve(
            at, max_rows=ROWS, hidden_size=H, top_k=K, dtype=dtype, all_to_all=slots_travel, capacity=capacity
        )
        attn = attns[at.attn_dp_rank][at.attn_tp_rank]
        share, experts, placement = ExpertShare(at, E // at.ep), weights.share(at), None
        if fused:
            share, experts = ExpertShare(at, len(SLOTS) // at.ep + 1), weights.with_shared(at)
            leader = at.at(at.leader_of_each()[rank])  # ranks that have the same rows name the same copy
            placement = ExpertPlacement.of_slots(SLOTS, SHARED).with_shared_slots(
                ep_size=at.ep, ep_rank=leader.ep_rank, num_shared=1
            )
        dispatcher = make(share, worlds[rank], attn, ops, buffers, widths, on_input)
        layer = _layer(ops, weights, experts, dispatcher, on_input, fused=fused, placement=placement)
        found, graph = [], None
        x, count = torch.empty(ROWS, H, dtype=dtype), torch.empty(1, dtype=torch.int32)
        out = torch.empty(ROWS, H, dtype=dtype)
        for case in cases:
            widths.rows = case.width
            n = case.width[at.attn_dp_rank]
            x[:n] = _x(at.attn_dp_rank, n, dtype)
            count.fill_(case.live[at.attn_dp_rank])

            def step(stream: Stream, n: int = n) -> None:
                layer.forward(stream, x[:n], count, out[:n])

            if not tape:
                step(EagerStream())
            elif graph is None:
                graph = TapeBackend().capture(step, 0)
            else:
                graph.replay()
            found.append(out[:n].clone())
        return found

    with ThreadPoolExecutor(layout.tp) as pool:
        return list(pool.map(run, range(layout.tp)))


LAYOUTS = [(2, 2, 2), (2, 1, 2), (4, 2, 4), (4, 4, 4), (4, 1, 4)]
UNEVEN = [
    Case((3, 8, 0, 1), (4, 8, 0, 4)),
    Case((4, 0, 2, 4), (4, 4, 4, 4)),
    Case((0, 0, 0, 0), (4, 4, 4, 4)),
]


def _cases(dp: int) -> list[Case]:
    return [Case(c.live[:dp], c.width[:dp]) for c in UNEVEN]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_bits_of_one_rank(layout: tuple[int, int, int], way: str) -> None:
    at = Topology(*layout)
    cases = _cases(at.dp)
    ranks = _ranks(at, way, "numba", torch.bfloat16, cases)
    for i, case in enumerate(cases):
        whole = _whole("numba", torch.bfloat16, False, case)
        for rank, found in enumerate(ranks):
            assert torch.equal(found[i], whole[at.at(rank).attn_dp_rank]), f"rank {rank}, case {i}"


@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize("name", ["reference", "numba"])
def test_bits_of_one_rank_in_fp32(name: str, on_input: bool) -> None:
    at, cases = Topology(2, 2, 2), _cases(2)
    for way in WAYS:
        ranks = _ranks(at, way, name, torch.float32, cases, on_input=on_input)
        for i, case in enumerate(cases):
            whole = _whole(name, torch.float32, on_input, case)
            assert all(torch.equal(found[i], whole[rank]) for rank, found in enumerate(ranks)), (way, i)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", [(2, 2, 1), (4, 2, 2), (4, 1, 1)], ids=str)
def test_sliced_experts_within_tolerance(layout: tuple[int, int, int], way: str) -> None:
    at = Topology(*layout)
    cases = _cases(at.dp)
    ranks = _ranks(at, way, "reference", torch.float32, cases)
    for i, case in enumerate(cases):
        whole = _whole("reference", torch.float32, False, case)
        for rank, found in enumerate(ranks):
            assert torch.allclose(found[i], whole[at.at(rank).attn_dp_rank], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("way", WAYS)
def test_replay_follows_the_counts(way: str) -> None:
    """One capture at width 4; then other live counts, among them none at all."""
    at = Topology(2, 2, 2)
    cases = [Case(live, (4, 4)) for live in ((4, 4), (1, 0), (0, 3), (0, 0), (4, 2))]
    ranks = _ranks(at, way, "numba", torch.bfloat16, cases, tape=True)
    for i, case in enumerate(cases):
        whole = _whole("numba", torch.bfloat16, False, case)
        assert all(torch.equal(found[i], whole[rank]) for rank, found in enumerate(ranks)), i


class _CountingOps(ReferenceOps):
    """Counts the rows that it is given to compute."""

    rows = 0

    def moe_experts(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, *rest: Any) -> None:
        self.rows += int((ids >= 0).sum())
        super().moe_experts(x, weights, ids, *rest)


@pytest.mark.parametrize("way", WAYS)
def test_idle_rank_costs_no_expert_rows(way: str) -> None:
    """One busy and one idle rank, equal slots: rows in all are the busy rank's, none are pads."""
    at, (make, slots_travel, capacity) = Topology(2, 2, 2), WAYS[way]
    worlds = _groups((0, 1))
    weights = Weights.of(torch.float32)

    def run(rank: int) -> tuple[int, dict[str, int]]:
        here, ops, computed = at.at(rank), _CountingOps(), ExpertRows(live=True)
        sizes = {"max_rows": ROWS, "hidden_size": H, "top_k": K, "capacity": capacity}
        buffers = PairBuffers.reserve(
            here, dtype=torch.float32, all_to_all=slots_travel, computed=computed, **sizes
        )
        share = ExpertShare(here, E // here.ep)
        made = make(share, worlds[rank], SingleGroup(), ops, buffers, StepWidths((4, 4)), False)
        layer = _layer(ops, weights, weights.share(here), made, False)
        count = torch.tensor([3 if rank == 0 else 0], dtype=torch.int32)
        layer.forward(EagerStream(), _x(rank, 4, torch.float32), count, torch.empty(4, H))
        return ops.rows, computed.as_dict()

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(run, range(2)))
    assert [rows for rows, _ in found] == [counts["computed"] for _, counts in found]
    assert sum(rows for rows, _ in found) == 3 * K
    assert [counts["fetched"] for _, counts in found] == [3 * K, 0]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", [(4, 4, 4), (4, 1, 4), (2, 2, 2)], ids=str)
def test_fused_shared_experts_count_once(layout: tuple[int, int, int], way: str) -> None:
    """A shared expert as a column of the routed ones, in a slot of its own on each rank, beside replicas of others."""
    at = Topology(*layout)
    cases = _cases(at.dp)[:1]
    whole = _whole("numba", torch.bfloat16, False, cases[0], fused=True)
    plain = _whole("numba", torch.bfloat16, False, cases[0])
    assert not torch.equal(whole[0][:3], plain[0][:3]), "the shared expert changes nothing"
    for rank, found in enumerate(_ranks(at, way, "numba", torch.bfloat16, cases, fused=True)):
        assert torch.equal(found[0], whole[at.at(rank).attn_dp_rank]), f"rank {rank}"


def test_overflow_is_counted_and_raised_everywhere() -> None:
    at, worlds = Topology(2, 2, 2), _groups((0, 1))

    def run(rank: int) -> tuple[str, int]:
        here, ops = at.at(rank), ReferenceOps()
        buffers = PairBuffers.reserve(
            here, max_rows=ROWS, hidden_size=H, top_k=K, dtype=torch.float32, all_to_all=True, capacity=2
        )
        guard = buffers.pairs.data[4:].clone()
        share = ExpertShare(here, E // here.ep)
        way = _all_to_all(2)(share, worlds[rank], SingleGroup(), ops, buffers, StepWidths((4, 4)), False)
        ids = torch.tensor([[0, 1, 2], [4, 5, -1]], dtype=torch.int32)  # three slots to rank 0, two to rank 1
        try:
            way.dispatch(EagerStream(), torch.zeros(2, H), torch.zeros(2, K), ids, torch.empty(2, H))
        except ParallelError as error:
            assert torch.equal(guard, buffers.pairs.data[4:]), "a neighbour was written"
            return str(error), buffers.overflows
        return "", 0

    with ThreadPoolExecutor(2) as pool:
        for text, count in pool.map(run, range(2)):
            assert "2 slots do not fit" in text
            assert "raise dispatch_capacity to 3 or more" in text
            assert count == 2


def test_ids_are_checked() -> None:
    check_distinct(np.array([[1, -1, -1], [0, 2, 1]]))
    with pytest.raises(ParallelError, match=r"row 1 is routed to an expert twice: \[2, 0, 2\]"):
        check_distinct(np.array([[1, -1, -1], [2, 0, 2]]))
    with pytest.raises(ParallelError, match=r"expert id 8 is outside 0\.\.7"):
        ExpertShare(Topology(2, 2, 2), 4).owners(np.array([[8]]))


def test_places_of_results() -> None:
    home = plan_home(np.array([[1, 0], [-1, 1], [0, -1]]), Topology(4, 2, 2))
    assert home.counts == (2, 2)
    assert home.order.tolist() == [1, 4, 0, 3]
    assert home.places.tolist() == [[4, 0], [-1, 5], [1, -1]], "each owner's results lie there twice"


def test_few_different_numbers_of_pairs() -> None:
    assert [rounded_pairs(n) for n in (0, 1, 8, 9, 64, 65, 1000)] == [0, 8, 8, 16, 64, 80, 1024]
    assert len({rounded_pairs(n) for n in range(4096)}) < 60
