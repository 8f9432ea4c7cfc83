"""Routing, experts and choices in Triton against their torch twins; in Triton's interpreter where there is no GPU.

Routing and choices have the twins' bits; experts agree within the tolerance of another order of summation.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from ostinato.moe.fused import routing_rule
from ostinato.moe.load import ExpertLoad
from ostinato.moe.routing import TopKConfig, select_experts
from ostinato.ops.choice import choose, uniform
from ostinato.ops.reference import ReferenceOps

pytest.importorskip("triton")
from ostinato.ops.cuda import gemm
from ostinato.ops.cuda.opset import TritonOps

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module")
def ops() -> TritonOps:
    return TritonOps(DEVICE)


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def live(rows: int) -> torch.Tensor:
    return torch.tensor([rows], dtype=torch.int32, device=DEVICE)


BIAS = torch.linspace(-0.2, 0.2, 24, device=DEVICE).flip(0).contiguous()
CONFIGS = [
    *(
        TopKConfig(top_k=3, scoring_func=s, renormalize=r)
        for s, r in itertools.product(("softmax", "sigmoid", "sqrtsoftplus", "raw_logits"), (True, False))
    ),
    TopKConfig(top_k=18, renormalize=True),
    TopKConfig(top_k=18, scoring_func="raw_logits"),
    TopKConfig(top_k=4, scoring_func="sigmoid", correction_bias=BIAS, num_fused_shared_experts=1),
    TopKConfig(top_k=5, renormalize=False, num_fused_shared_experts=2, routed_scaling_factor=2.5),
    TopKConfig(top_k=4, use_grouped_topk=True, num_expert_group=6, topk_group=2),
    TopKConfig(
        top_k=4,
        scoring_func="sigmoid",
        use_grouped_topk=True,
        num_expert_group=4,
        topk_group=2,
        correction_bias=BIAS,
        routed_scaling_factor=2.5,
        apply_routed_scaling_factor_on_output=True,
    ),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.scoring_func}-{c.top_k}-{c.num_expert_group}")
def test_routing_has_the_bits_of_select_experts(ops: TritonOps, config: TopKConfig) -> None:
    """Ties, NaN, infinities and signed zeros included; pads are never read, and no load is counted for them."""
    experts, rows = 24, 7
    logits = draw(rows, experts, seed=3) * 3
    logits[1, 5:11] = logits[1, 4]
    logits[2, 7], logits[3, 9] = torch.nan, torch.inf
    logits[4] = 0.0
    logits[4, ::3] = -0.0
    logits[5:] = torch.nan
    rule = routing_rule(config, experts)
    assert rule is not None
    kernel = ops.routing_kernel(rule)
    assert kernel is not None
    weights = torch.full((rows, config.top_k), 9.0, device=DEVICE)
    ids = torch.full((rows, config.top_k), 9, dtype=torch.int32, device=DEVICE)
    counted, expected = ExpertLoad(1, experts, DEVICE), ExpertLoad(1, experts, DEVICE)
    for load in (counted, expected):
        load.set_live(True)
    kernel(logits, weights, ids, live(5), counted.counts[0], counted.live)
    want, want_ids = select_experts(
        logits[:, :2], logits, config, num_token_non_padded=live(5), load=expected
    )
    assert torch.equal(ids, want_ids)
    assert torch.equal(weights.nan_to_num(99.0), want.nan_to_num(99.0))
    assert torch.equal(counted.counts, expected.counts)


def test_what_the_routing_kernel_cannot_repeat_goes_another_way(ops: TritonOps) -> None:
    rule = routing_rule(TopKConfig(top_k=33), 64)
    assert rule is not None
    assert ops.routing_kernel(rule) is None


@pytest.mark.parametrize(
    ("hidden", "inner", "dtype", "on_input"),
    [(40, 24, torch.float32, False), (70, 66, torch.float32, True), (40, 24, torch.float16, False)],
)
def test_experts(ops: TritonOps, hidden: int, inner: int, dtype: torch.dtype, on_input: bool) -> None:
    """More slots of one expert than a tile has, experts without any, slots of nobody, and pads full of NaN."""
    experts, rows, top_k = 5, 21, 2
    gate_up = draw(experts, 2 * inner, hidden, dtype=dtype, seed=3) * 0.2
    down = draw(experts, hidden, inner, dtype=dtype, seed=4) * 0.2
    x = draw(rows, hidden, dtype=dtype)
    ids = torch.stack((torch.zeros(rows), torch.arange(rows) % 3 + 1), 1).int().to(DEVICE)
    weights = draw(rows, top_k, seed=6).sigmoid()
    ids[3, 1], ids[7], ids[19:] = -1, -1, -1
    x[19:], weights[19:] = torch.nan, 0.0
    outs = []
    for library in (ReferenceOps(), ops, TritonOps(DEVICE, tiles=gemm.GPU_TILES)):
        packed = library.pack_experts(gate_up, down)
        assert (packed.num_experts, packed.hidden_size, packed.intermediate_size) == (experts, hidden, inner)
        outs.append(torch.full((rows, hidden), 5.0, dtype=dtype, device=DEVICE))
        library.moe_experts(x, weights, ids, packed, on_input, outs[-1])
    tolerance = 4e-6 if dtype == torch.float32 else 8e-3
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], rtol=tolerance, atol=tolerance)
        assert not out[[7, 19, 20]].any()


def test_a_row_of_experts_has_the_same_bits_beside_any_others(ops: TritonOps) -> None:
    experts = ops.pack_experts(draw(4, 48, 40, seed=1), draw(4, 40, 24, seed=2))
    row, weights = draw(1, 40), torch.tensor([[0.3, 0.7]], device=DEVICE)
    ids = torch.tensor([[2, 0]], dtype=torch.int32, device=DEVICE)
    alone = torch.empty(1, 40, device=DEVICE)
    ops.moe_experts(row, weights, ids, experts, False, alone)
    for rows, place in ((3, 2), (20, 11)):
        x, many = draw(rows, 40, seed=rows), draw(rows, 4, seed=rows).topk(2).indices.int()
        shares, out = torch.rand(rows, 2, device=DEVICE), torch.empty(rows, 40, device=DEVICE)
        x[place], many[place], shares[place] = row[0], ids[0], weights[0]
        ops.moe_experts(x, shares, many, experts, False, out)
        assert torch.equal(out[place], alone[0])


def test_slots_are_combined_with_the_bits_of_the_reference(ops: TritonOps) -> None:
    results, weights = draw(9, 33), draw(4, 3, seed=1)
    places = torch.tensor([[0, 8, 3], [-1, 2, -1], [-1, -1, -1], [4, -1, 5]], device=DEVICE)
    weights[1, 0] = torch.nan
    outs = [torch.empty(4, 33, device=DEVICE) for _ in range(2)]
    for library, out in zip((ReferenceOps(), ops), outs, strict=True):
        library.combine_slots(results, places, weights, out)
    assert torch.equal(*outs)


def test_greedy_choice(ops: TritonOps) -> None:
    """The lowest of equals, never NaN, across several blocks; pads are never read and come out 0."""
    x = draw(6, 5000)
    x[0, [17, 4999]] = 50.0
    x[1, 3], x[1, 4500] = torch.nan, 60.0
    x[2] = torch.nan
    x[3] = -torch.inf
    x[3, :4200] = torch.nan
    x[4, 4097:] = 7.0
    outs = [torch.full((6,), 9, device=DEVICE) for _ in range(2)]
    for library, out in zip((ReferenceOps(), ops), outs, strict=True):
        library.argmax(x, out, live(5))
    assert outs[0].tolist() == outs[1].tolist()
    assert outs[1][:4].tolist() == [17, 4500, 0, 4200]


def test_sampled_tokens_are_those_of_the_definition(ops: TritonOps) -> None:
    """Every rule, seeds of either sign, ties, a row of NaN; the same token whatever is sampled beside it."""
    kinds = [
        (0.0, 0, 1.0, 0.0),
        (1.0, 0, 1.0, 0.0),
        (0.7, 5, 1.0, 0.0),
        (1.3, 0, 0.6, 0.0),
        (0.9, 40, 0.9, 0.05),
        (1e-9, 0, 0.5, 0.0),
        (2.0, 3, 0.0, 0.9),
        (1.0, 1000, 1.0, 0.2),
    ]
    rows = len(kinds) * 6
    x = (draw(rows, 300, seed=8) * 4).round(decimals=1)
    x[3], x[4, ::2] = torch.nan, torch.nan
    x[5] = 1.0
    rules = torch.tensor(kinds * 6, dtype=torch.float64)
    seeds = torch.randint(-(1 << 63), (1 << 63) - 1, (rows,), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(rows) * 37
    out = torch.full((rows,), 9, device=DEVICE)
    arguments = x, rules.to(DEVICE), seeds.to(DEVICE), positions.to(DEVICE)
    ops.sample(*arguments, out, live(rows - 1))
    want = [
        choose(x[i].cpu(), t, int(k), p, m, uniform(int(seeds[i]), int(positions[i]) + 1))
        for i, (t, k, p, m) in enumerate(rules.tolist())
    ]
    assert out.tolist() == [*want[:-1], 0]
    part = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    ops.sample(*(a[20:24] for a in arguments), part)
    assert part.tolist() == want[20:24]


def test_pads_are_declared(ops: TritonOps) -> None:
    contract = ops.pad_contracts["moe_experts"]
    assert contract.accepts_sentinel
    assert contract.writes_zeros
    assert (ops.name, TritonOps(DEVICE, exact=False).name) == ("triton", "triton.library")
