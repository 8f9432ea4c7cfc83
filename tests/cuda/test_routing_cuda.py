"""Routing inside a CUDA graph: no host sync, and a replay follows the live count (case M4). Needs a GPU."""

from __future__ import annotations

import pytest
import torch

from ostinato.moe.export import RoutedExpertsExport
from ostinato.moe.load import ExpertLoad
from ostinato.moe.mask import mask_pad_rows_
from ostinato.moe.placement import ExpertPlacement
from ostinato.moe.routing import Consumers, TopKConfig, select_experts, select_experts_into

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

ROWS, E, K = 256, 64, 8


def test_m4_mask_follows_the_live_count() -> None:
    count = torch.tensor([ROWS], dtype=torch.int32, device="cuda")
    source = torch.rand(ROWS, 9, device="cuda") + 1
    x = torch.empty_like(source)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.copy_(source)
        mask_pad_rows_(x, count, 0.0)
    for live in (ROWS, 5, 0, 100):
        count.fill_(live)
        graph.replay()
        assert bool((x[:live] > 0).all())
        assert bool((x[live:] == 0).all())


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrtsoftplus", "raw_logits"])
def test_select_experts_replays_and_agrees_with_cpu(scoring: str) -> None:
    config = TopKConfig(top_k=K, scoring_func=scoring)
    replicas = [[e, E + e] if e < 4 else [e] for e in range(E)]
    placement = ExpertPlacement.dynamic(replicas, num_physical=E + 4, device="cuda")
    load, export = ExpertLoad(1, E + 4, "cuda"), RoutedExpertsExport(1, ROWS, K, "cuda")
    load.set_live(True)
    logits, hidden = torch.empty(ROWS, E, device="cuda"), torch.zeros(ROWS, 4, device="cuda")
    weights = torch.empty(ROWS, K, device="cuda")
    ids = torch.empty(ROWS, K, dtype=torch.int32, device="cuda")
    count = torch.tensor([ROWS], dtype=torch.int32, device="cuda")
    arguments = (
        weights,
        ids,
        hidden,
        logits,
        config,
        count,
        None,
        None,
        placement,
        Consumers(0, load, export),
    )
    logits.copy_(torch.randn(ROWS, E))
    select_experts_into(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        select_experts_into(*arguments)
    for live in (ROWS, 5, 0, 100):
        fresh = torch.randn(ROWS, E)
        logits.copy_(fresh)
        count.fill_(live)
        load.reset()
        graph.replay()
        expected, expected_ids = select_experts(
            torch.zeros(ROWS, 4),
            fresh,
            config,
            num_token_non_padded=count.cpu(),
            placement=ExpertPlacement.dynamic(replicas, num_physical=E + 4),
        )
        assert torch.equal(ids.cpu(), expected_ids)
        torch.testing.assert_close(weights.cpu(), expected, rtol=1e-5, atol=1e-6)
        assert int(load.snapshot().sum()) == live * K
        assert bool((export.read(ROWS)[0, live:] == -1).all())
