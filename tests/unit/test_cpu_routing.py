"""The fused routing kernel is the twin of `select_experts`, bit for bit: ids, weights, masked pads, load."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.errors import ConfigError
from ostinato.graphs.stream import EagerStream
from ostinato.graphs.workspace import Workspace
from ostinato.moe import (
    Consumers,
    ExpertLoad,
    ExpertPlacement,
    MoELayer,
    RoutedExpertsExport,
    reserve_moe_buffers,
)
from ostinato.moe.custom import llama4_routing
from ostinato.moe.fused import fused_routing, routing_rule
from ostinato.moe.routing import TopKConfig, select_experts
from ostinato.ops.cpu.isa import AVX512_BF16, PORTABLE
from ostinato.ops.cpu.opset import NumbaOps, open_numba_ops
from ostinato.ops.opset import RoutingKernel, RoutingRule
from ostinato.ops.reference import ReferenceOps

SCORES = ("softmax", "sigmoid", "sqrtsoftplus", "raw_logits")
NAN, INF = float("nan"), float("inf")


@functools.cache
def opset(isa: str = PORTABLE) -> NumbaOps:
    try:
        return open_numba_ops(isa=isa)
    except ConfigError as error:
        pytest.skip(str(error))


def kernel(config: TopKConfig, num_experts: int, isa: str = PORTABLE) -> RoutingKernel:
    found = fused_routing(opset(isa), config, num_experts, None, Consumers())
    assert found is not None
    return found


def draw(rows: int, num_experts: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, num_experts, generator=torch.Generator().manual_seed(seed)) * scale


def bias_of(num_experts: int, seed: int = 9) -> torch.Tensor:
    return draw(1, num_experts, seed, scale=0.3)[0]


def assert_twin(config: TopKConfig, logits: torch.Tensor, count: int | None, isa: str = PORTABLE) -> None:
    """Ids, weights and load of both, from buffers full of garbage."""
    rows, num_experts = logits.shape
    live = None if count is None else torch.tensor([count], dtype=torch.int32)
    weights = torch.full((rows, config.top_k), NAN)
    ids = torch.full((rows, config.top_k), 12345, dtype=torch.int32)
    ours, theirs = (ExpertLoad(1, num_experts) for _ in range(2))
    for load in (ours, theirs):
        load.set_live(True)
    kernel(config, num_experts, isa)(logits, weights, ids, live, ours.counts[0], ours.live)
    want_weights, want_ids = select_experts(
        logits[:, :1], logits, config, num_token_non_padded=live, load=theirs
    )
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(weights, want_weights, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(ours.snapshot(), theirs.snapshot())
    if count is not None:
        assert bool((ids[count:] == -1).all())
        assert bool((weights[count:] == 0).all())


def configs(num_experts: int, top_k: int) -> list[TopKConfig]:
    """Every combination that the kernel serves: scores, bias, groups, renormalisation, scale, shared columns."""
    found = []
    for scoring in SCORES:
        for bias in (None, bias_of(num_experts)):
            for renormalize in (False, True):
                plain = TopKConfig(
                    top_k=top_k, scoring_func=scoring, renormalize=renormalize, correction_bias=bias
                )
                found.append(plain)
                if scoring != "raw_logits" and num_experts % 4 == 0 and num_experts // 2 >= top_k:
                    groups = {"use_grouped_topk": True, "num_expert_group": 4}
                    found += [replace(plain, topk_group=kept, **groups) for kept in (2, 4)]
    scaled = {"routed_scaling_factor": 2.5, "apply_routed_scaling_factor_on_output": True}
    found += [replace(config, **scaled) for config in found]
    return found + [replace(c, top_k=c.top_k + s, num_fused_shared_experts=s) for c in found for s in (1, 2)]


@pytest.mark.parametrize("isa", [AVX512_BF16, PORTABLE])
@pytest.mark.parametrize(("num_experts", "top_k"), [(64, 8), (8, 2), (60, 4), (5, 5), (1, 1), (256, 8)])
def test_every_config_has_the_bits_of_the_post_process(isa: str, num_experts: int, top_k: int) -> None:
    logits = draw(9, num_experts)
    for config in configs(num_experts, top_k):
        for count in (None, 0, 5, 9):
            assert_twin(config, logits, count, isa)


VALUES = st.one_of(
    st.floats(-20, 20, width=32),
    st.sampled_from([0.0, -0.0, 1.0, 1.0, 2.0, 90.0, -90.0, 1e30, -1e30, INF, -INF, NAN]),
)


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_any_values_and_counts(data: st.DataObject) -> None:
    """Ties, both zeros, infinities, NaN in some places of a row: still the same choice and the same weights."""
    num_experts = data.draw(st.sampled_from([4, 8, 16, 20]))
    rows = data.draw(st.integers(1, 6))
    row = st.lists(VALUES, min_size=num_experts, max_size=num_experts)
    logits = torch.tensor(data.draw(st.lists(row, min_size=rows, max_size=rows)))
    config = data.draw(st.sampled_from(configs(num_experts, data.draw(st.sampled_from([1, 2])))))
    assert_twin(config, logits, data.draw(st.one_of(st.none(), st.integers(-2, rows + 3))))


@pytest.mark.parametrize("config", configs(32, 4)[:24], ids=lambda c: f"{c.scoring_func}-{c.renormalize}")
def test_rows_stand_alone_and_pads_are_never_read(config: TopKConfig) -> None:
    """Over the team and alone, strided, beside NaN: a row's bits are its own."""
    wide = torch.full((70, 40), NAN)
    logits = wide[:, 3:35]
    logits[:61] = draw(61, 32)
    assert_twin(config, logits, 61)
    weights, ids = torch.empty(70, 4), torch.empty(70, 4, dtype=torch.int32)
    route = kernel(config, 32)
    route(logits, weights, ids, torch.tensor([61], dtype=torch.int32), None, None)
    for i in (0, 17, 60):
        one, one_id = torch.empty(1, 4), torch.empty(1, 4, dtype=torch.int32)
        route(logits[i : i + 1], one, one_id, None, None, None)
        assert torch.equal(one[0], weights[i])
        assert torch.equal(one_id[0], ids[i])


def test_ties_go_to_the_lowest_expert_and_nan_is_the_largest() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, -0.0, 0.0, 3.0], [0.0, -0.0, 0.0, -1.0, 0.0, NAN]])
    ids, weights = torch.empty(2, 4, dtype=torch.int32), torch.empty(2, 4)
    kernel(TopKConfig(top_k=4, scoring_func="raw_logits"), 6)(logits, weights, ids, None, None, None)
    assert ids.tolist() == [[1, 2, 5, 0], [5, 0, 1, 2]]


def test_load_counts_only_when_live() -> None:
    config, logits, load = TopKConfig(top_k=2), draw(40, 6), ExpertLoad(3, 6)
    weights, ids = torch.empty(40, 2), torch.empty(40, 2, dtype=torch.int32)
    live = torch.tensor([40], dtype=torch.int32)
    launch = kernel(config, 6).bind(logits, weights, ids, live, load.counts[1], load.live)  # type: ignore[attr-defined]
    launch()
    assert not load.snapshot().any()
    load.set_live(True)
    for count in (40, 7, 0):
        live.fill_(count)
        launch()
    assert load.snapshot().sum(-1).tolist() == [0, 2 * 47, 0]


def test_layers_that_the_twin_does_not_serve_go_through_select_experts() -> None:
    ops, plain = opset(), TopKConfig(top_k=2)
    custom = TopKConfig(top_k=2, renormalize=False, custom_routing_function=llama4_routing)
    export = Consumers(export=RoutedExpertsExport(1, 8, 2))
    assert routing_rule(custom, 6) is None
    assert fused_routing(ops, custom, 6, None, Consumers()) is None
    shared = TopKConfig(top_k=3, num_fused_shared_experts=1)
    assert fused_routing(ops, shared, 6, ExpertPlacement.identity(6), Consumers()) is None
    assert fused_routing(ops, plain, 6, None, export) is None
    assert fused_routing(ReferenceOps(), plain, 6, None, Consumers()) is None
    assert ops.routing_kernel(RoutingRule(5000, 2, "softmax", True)) is None
    assert ops.routing_kernel(RoutingRule(8, 2, "softmax", True, torch.zeros(16)[::2])) is None


def test_the_layer_routes_by_the_kernel_or_by_torch_alike() -> None:
    """Counts of gathered rows are not a prefix: those steps take the general way, in the same layer."""
    ops, workspace = opset(), Workspace()
    reserve_moe_buffers(workspace, 8, hidden_size=16, num_experts=6, top_k=2, dtype=torch.float32)
    load = ExpertLoad(1, 6)
    load.set_live(True)
    layer = MoELayer(
        ops,
        workspace,
        TopKConfig(top_k=2),
        ops.pack_linear(draw(6, 16), out_dtype=torch.float32),
        ops.pack_experts(draw(6, 16, 1).view(6, 1, 16).repeat(1, 8, 1), draw(96, 4, 2).view(6, 16, 4)),
        consumers=Consumers(0, load),
    )
    x, prefix, gathered = draw(8, 16, 5), torch.empty(8, 16), torch.empty(8, 16)
    layer.forward(EagerStream(), x, torch.tensor([5], dtype=torch.int32), prefix)
    assert int(load.snapshot().sum()) == 10
    layer.forward(EagerStream(), x, None, gathered, gathered_counts=torch.tensor([5, 0]), rows_per_slot=4)
    assert not prefix[5:].any()
    assert torch.equal(prefix[:4], gathered[:4])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(3, 5)}, "logits must be"),
        ({"logits": torch.zeros(3, 6).bfloat16()}, "logits must be"),
        ({"weights": torch.zeros(3, 3)}, "topk_weights must be"),
        ({"ids": torch.zeros(3, 2, dtype=torch.int64)}, "topk_ids must be"),
        ({"ids": torch.zeros(2, 2, dtype=torch.int32)}, "3 rows of logits"),
        ({"live": torch.zeros(1, dtype=torch.int64)}, "one int32"),
        (
            {"load": torch.zeros(5, dtype=torch.int64), "flag": torch.ones((), dtype=torch.int64)},
            "load must be",
        ),
        ({"load": torch.zeros(6, dtype=torch.int64)}, "come together"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(change: dict[str, torch.Tensor], message: str) -> None:
    arguments: dict[str, torch.Tensor | None] = {
        "logits": torch.zeros(3, 6),
        "weights": torch.zeros(3, 2),
        "ids": torch.zeros(3, 2, dtype=torch.int32),
        "live": None,
        "load": None,
        "flag": None,
    }
    with pytest.raises(ValueError, match=message):
        kernel(TopKConfig(top_k=2), 6)(*(arguments | change).values())  # type: ignore[arg-type]
