"""Routing in one kernel with a map behind it: the ids, weights and load of `select_experts`, also after a rewrite."""

from __future__ import annotations

import pytest
import torch

from ostinato.config import cache_dir
from ostinato.moe.fused import fused_routing
from ostinato.moe.load import ExpertLoad
from ostinato.moe.placement import ExpertPlacement
from ostinato.moe.routing import Consumers, select_experts
from ostinato.moe.topk import TopKConfig
from ostinato.ops.cpu.opset import open_numba_ops

E, K, ROWS = 8, 3, 23
SLOTS = ((3, 1, 0, 2, 7, 6, 5, 4, 3, 3), (0, 1, 2, 3, 4, 5, 6, 7, 1, 6))


@pytest.mark.parametrize("live", [ROWS, 10, 0])
def test_twin_of_select_experts(live: int) -> None:
    ops = open_numba_ops(num_threads=1, cache_dir=cache_dir() / "kernels")
    placement, config = ExpertPlacement.of_slots(SLOTS[0], E), TopKConfig(top_k=K)
    kernel = fused_routing(ops, config, E, placement, Consumers())
    assert kernel is not None
    logits = torch.randn(ROWS, E, generator=torch.Generator().manual_seed(1))
    count = torch.tensor([live], dtype=torch.int32)
    for slots in SLOTS:
        placement.rewrite(slots)
        load, expected = ExpertLoad(1, len(slots)), ExpertLoad(1, len(slots))
        for one in (load, expected):
            one.set_live(True)
        weights, ids = torch.empty(ROWS, K), torch.empty(ROWS, K, dtype=torch.int32)
        kernel(logits, weights, ids, count, load.counts[0], load.live)
        found = select_experts(
            torch.empty(ROWS, 4),
            logits,
            config,
            num_token_non_padded=count,
            placement=placement,
            load=expected,
        )
        assert torch.equal(ids, found[1])
        assert torch.equal(weights, found[0])
        assert torch.equal(load.counts, expected.counts)
        assert int(load.counts.sum()) == live * K
        logical = torch.tensor(slots)[ids[:live].long()]
        assert all(len(set(row)) == K for row in logical.tolist())


def test_replicas_share_the_rows() -> None:
    placement = ExpertPlacement.of_slots(SLOTS[0], E)
    assert placement.table is not None
    assert sorted(placement.table[3, :3].tolist()) == [0, 8, 9]
    assert placement.table[0].tolist() == [2, 2, 2]
