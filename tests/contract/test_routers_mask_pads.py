"""No router leaves pads routed: every registered router, over pads of any content (F1, F3-F5, F32-F34)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.errors import PadContractError
from ostinato.graphs.stream import Stream
from ostinato.graphs.tape import TapeBackend
from ostinato.moe.custom import CUSTOM_ROUTING_FUNCTIONS, InternS1ProRouting
from ostinato.moe.export import RoutedExpertsExport
from ostinato.moe.fused import routing_rule
from ostinato.moe.load import ExpertLoad
from ostinato.moe.placement import ExpertPlacement
from ostinato.moe.routers import ROUTERS, Router, router_for
from ostinato.moe.routing import TopKConfig, select_experts
from ostinato.ops.cpu.isa import PORTABLE
from ostinato.ops.cpu.opset import open_numba_ops
from ostinato.padding import PadContract, check_pad_contracts

E, K, H = 32, 8, 6
BIAS = torch.linspace(-0.3, 0.3, E)


def _seven_on_nan(
    hidden_states: torch.Tensor, gating_output: torch.Tensor, topk: int, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """A custom router as found in the wild: every slot of a NaN row is expert 7, with weight NaN."""
    weights, ids = torch.softmax(gating_output, -1).topk(topk)
    return weights, torch.where(gating_output.isnan().any(-1, keepdim=True), 7, ids)


def _garbage_on_nan(
    hidden_states: torch.Tensor, gating_output: torch.Tensor, topk: int, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids of NaN rows lie far outside of every table."""
    weights, ids = torch.softmax(gating_output, -1).topk(topk)
    return weights, torch.where(gating_output.isnan().any(-1, keepdim=True), 2**31 - 5, ids)


CONFIGS = {
    "softmax": TopKConfig(top_k=K),
    "raw_logits": TopKConfig(top_k=K, scoring_func="raw_logits", renormalize=False),
    "sigmoid": TopKConfig(top_k=K, scoring_func="sigmoid", correction_bias=BIAS),
    "sqrtsoftplus": TopKConfig(top_k=K, scoring_func="sqrtsoftplus"),
    "grouped": TopKConfig(top_k=K, use_grouped_topk=True, num_expert_group=4, topk_group=2),
    "biased_grouped": TopKConfig(
        top_k=K,
        scoring_func="sigmoid",
        use_grouped_topk=True,
        num_expert_group=4,
        topk_group=2,
        correction_bias=BIAS,
    ),
    "custom": TopKConfig(top_k=K, custom_routing_function=_seven_on_nan),
    "custom, garbage": TopKConfig(top_k=K, custom_routing_function=_garbage_on_nan),
    "llama4": TopKConfig(
        top_k=K, renormalize=False, custom_routing_function=CUSTOM_ROUTING_FUNCTIONS["llama4"]
    ),
    "phimoe": TopKConfig(
        top_k=2, renormalize=False, custom_routing_function=CUSTOM_ROUTING_FUNCTIONS["phimoe"]
    ),
    "interns1_pro": TopKConfig(top_k=K, custom_routing_function=InternS1ProRouting(4)),
}
PLACEMENTS = {
    "none": None,
    "static": ExpertPlacement.static([(5 * e + 3) % E for e in range(E)], num_physical=E),
    "dynamic": ExpertPlacement.dynamic([[e, E + e] if e < 4 else [e] for e in range(E)], num_physical=E + 4),
}
POISON = [float("nan"), float("inf"), float("-inf"), 1e30, -1e30, 0.0]


def _with_shared(config: TopKConfig, shared: int) -> TopKConfig:
    return replace(config, top_k=config.top_k + shared, num_fused_shared_experts=shared)


def _inputs(rows: int, n: int, poison: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden, logits = torch.randn(rows, H, generator=generator), torch.randn(rows, E, generator=generator)
    hidden[n:], logits[n:] = poison, poison
    return hidden, logits


def test_every_router_is_tested_here() -> None:
    assert {router_for(config).name for config in CONFIGS.values()} == set(ROUTERS)
    assert set(CUSTOM_ROUTING_FUNCTIONS) <= set(CONFIGS)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("shared", [0, 1])
@pytest.mark.parametrize("where", PLACEMENTS)
@settings(deadline=None, max_examples=8)
@given(rows=st.integers(1, 20), n=st.integers(0, 20), poison=st.sampled_from(POISON))
def test_pads_go_nowhere_and_real_rows_do_not_notice(
    name: str, shared: int, where: str, rows: int, n: int, poison: float
) -> None:
    n = min(n, rows)
    config, placement = _with_shared(CONFIGS[name], shared), PLACEMENTS[where]
    hidden, logits = _inputs(rows, n, poison)
    count = torch.tensor([n], dtype=torch.int32)
    weights, ids = select_experts(hidden, logits, config, num_token_non_padded=count, placement=placement)
    assert bool((ids[n:] == -1).all())
    assert bool((weights[n:] == 0).all())
    alone, alone_ids = select_experts(hidden[:n], logits[:n], config, placement=placement)
    assert torch.equal(ids[:n], alone_ids)
    assert torch.equal(weights[:n], alone)
    num_slots = shared + (E if placement is None else placement.num_physical)
    assert bool(((ids[:n] >= 0) & (ids[:n] < num_slots)).all())
    assert all(len(set(row)) == config.top_k for row in ids[:n].tolist()), "ids of a real row are distinct"


@pytest.mark.parametrize("name", [n for n, c in CONFIGS.items() if c.custom_routing_function is None])
@pytest.mark.parametrize("shared", [0, 1])
@pytest.mark.parametrize("poison", POISON)
def test_the_fused_twin_masks_pads_as_the_post_process_does(name: str, shared: int, poison: float) -> None:
    """One kernel in place of every router but the custom ones: the same ids, weights and load, pads nowhere."""
    config = _with_shared(CONFIGS[name], shared)
    rule = routing_rule(config, E)
    assert rule is not None
    fused = open_numba_ops(isa=PORTABLE).routing_kernel(rule)
    assert fused is not None
    count = torch.tensor([0], dtype=torch.int32)
    weights, ids = torch.empty(20, config.top_k), torch.empty(20, config.top_k, dtype=torch.int32)
    for n in (20, 1, 0, 13):
        hidden, logits = _inputs(20, n, poison, seed=n)
        loads = [ExpertLoad(1, E) for _ in range(2)]
        for load in loads:
            load.set_live(True)
        count.fill_(n)
        weights.fill_(float("nan"))
        ids.fill_(7)
        fused(logits, weights, ids, count, loads[0].counts[0], loads[0].live)
        want, want_ids = select_experts(hidden, logits, config, num_token_non_padded=count, load=loads[1])
        assert torch.equal(ids, want_ids)
        assert torch.equal(weights, want)
        assert torch.equal(loads[0].snapshot(), loads[1].snapshot())
        assert bool((ids[n:] == -1).all())
        assert bool((weights[n:] == 0).all())


@pytest.mark.parametrize("name", CONFIGS)
def test_gathered_pads_go_nowhere(name: str) -> None:
    """dp 2, 5 rows each, real [3, 5]: rows 3 and 4 are pads, 8 and 9 are real."""
    hidden, logits = _inputs(10, 10, 0.0)
    logits[3:5] = float("nan")
    weights, ids = select_experts(
        hidden, logits, CONFIGS[name], gathered_counts=torch.tensor([3, 5]), rows_per_slot=5
    )
    dead = (ids == -1).all(-1)
    assert dead.nonzero().flatten().tolist() == [3, 4]
    assert bool((weights[3:5] == 0).all())
    assert bool((ids[~dead] >= 0).all())


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("where", PLACEMENTS)
def test_routing_is_captured_as_plain_torch(name: str, where: str) -> None:
    """No host read and no data-dependent shape on the way (the tape refuses them); replays follow the count."""
    config, placement = _with_shared(CONFIGS[name], 1), PLACEMENTS[where]
    load, export = ExpertLoad(1, E + 4), RoutedExpertsExport(1, 16, config.num_routed)
    count = torch.tensor([16], dtype=torch.int32)
    hidden, logits = _inputs(16, 16, 0.0)
    tape = TapeBackend().capture(
        lambda stream: select_experts(
            hidden,
            logits,
            config,
            num_token_non_padded=count,
            placement=placement,
            load=load,
            export=export,
        )
    )
    load.set_live(True)
    for n in (16, 3, 0, 9):
        load.reset()
        count.fill_(n)
        for static, fresh in zip((hidden, logits), _inputs(16, n, float("nan"), seed=n), strict=True):
            static.copy_(fresh)
        weights, ids = tape.replay()
        eager, eager_ids = select_experts(
            hidden, logits, config, num_token_non_padded=count, placement=placement
        )
        assert torch.equal(ids, eager_ids)
        assert torch.equal(weights, eager)
        assert int(load.snapshot().sum()) == n * config.num_routed
        assert bool((export.read(16)[0, n:] == -1).all())


def test_m8_f1_custom_router_on_nan_pads() -> None:
    hidden, logits = _inputs(12, 10, float("nan"))
    _, ids = select_experts(hidden, logits, CONFIGS["custom"], num_token_non_padded=torch.tensor([10]))
    assert bool((ids[10:] == -1).all())
    assert bool(((ids[:10] >= 0) & (ids[:10] < E)).all())
    _, unmasked = select_experts(hidden, logits, CONFIGS["custom"])
    assert unmasked[10:].tolist() == [[7] * K] * 2, "the router itself does not mask: the post-process does"


@pytest.mark.parametrize("name", CONFIGS)
def test_f32_load_counts_real_rows_only(name: str) -> None:
    """n 1, 64 identical pads: sum(load) == n * K per layer, on physical experts, without shared columns."""
    config, placement = _with_shared(CONFIGS[name], 1), PLACEMENTS["dynamic"]
    assert placement is not None
    load = ExpertLoad(2, placement.num_physical)
    load.set_live(True)
    count = torch.tensor([0], dtype=torch.int32)
    rows = 0
    for n in (1, 0, 64, 17):
        count.fill_(n)
        hidden, logits = _inputs(64, n, 1.0, seed=n)
        _, ids = select_experts(
            hidden, logits, config, num_token_non_padded=count, placement=placement, load=load, layer_id=1
        )
        rows += n
    assert load.snapshot().sum(-1).tolist() == [0, rows * config.num_routed]
    load.reset()
    hidden, logits = _inputs(64, 17, 1.0, seed=17)
    _, ids = select_experts(
        hidden, logits, config, num_token_non_padded=count, placement=placement, load=load, layer_id=0
    )
    routed = ids[:17, : config.num_routed].flatten()
    assert torch.equal(load.snapshot()[0], torch.bincount(routed, minlength=placement.num_physical))


def test_f33_warm_up_capture_and_idle_steps_are_not_counted() -> None:
    """The flag lives on device: a launch frozen while it was off counts as soon as it is on."""
    load = ExpertLoad(1, E)
    address = load.counts.data_ptr(), load.live.data_ptr()
    count = torch.tensor([0], dtype=torch.int32)
    hidden, logits = _inputs(8, 8, 0.0)

    def step(stream: Stream) -> None:
        select_experts(hidden, logits, CONFIGS["softmax"], num_token_non_padded=count, load=load)

    count.fill_(8)
    graph = TapeBackend().capture(step, warmup=2)
    graph.replay()
    assert int(load.snapshot().sum()) == 0
    load.set_live(True)
    count.fill_(0)
    graph.replay()  # idle step
    assert int(load.snapshot().sum()) == 0
    count.fill_(5)
    graph.replay()
    load.set_live(False)
    graph.replay()  # a dummy step
    assert int(load.snapshot().sum()) == 5 * K
    load.reset()
    assert (load.counts.data_ptr(), load.live.data_ptr()) == address


@pytest.mark.parametrize("name", CONFIGS)
def test_f34_exported_pads_are_nobody(name: str) -> None:
    """Two steps, the second with fewer rows, in a narrower bucket: nothing of the first is left."""
    config, placement = CONFIGS[name], PLACEMENTS["static"]
    export = RoutedExpertsExport(2, 16, config.num_routed)
    for rows, n in ((16, 12), (8, 3)):
        hidden, logits = _inputs(rows, n, float("nan"), seed=n)
        count = torch.tensor([n], dtype=torch.int32)
        shared = _with_shared(config, 1)
        select_experts(
            hidden, logits, shared, num_token_non_padded=count, placement=placement, export=export, layer_id=1
        )
        _, logical = select_experts(hidden[:n], logits[:n], config)
        exported = export.read(16)
        assert torch.equal(exported[1, :n], logical), "exported ids are logical, before the remap"
        assert bool((exported[1, n:] == -1).all())
        assert bool((exported[0] == -1).all()), "a layer that did not run exports nothing"
    with pytest.raises(ValueError, match="holds 16 rows"):
        export.record(0, torch.zeros(17, config.num_routed))


def test_f23_every_router_declares_its_pads_and_unsupported_pairs_are_refused() -> None:
    takes_ids = PadContract("kernel", accepts_sentinel=True, writes_zeros=True)
    for router in ROUTERS.values():
        check_pad_contracts(router.pad_contract, takes_ids)
        with pytest.raises(PadContractError, match=f"router {router.name}"):
            check_pad_contracts(router.pad_contract, PadContract("undeclared kernel"))
        with pytest.raises(PadContractError, match="zeros"):
            check_pad_contracts(router.pad_contract, PadContract("stale rows", accepts_sentinel=True))
    counting = Router("counting", ROUTERS["softmax"].route, PadContract("counting router", emits_count=True))
    with pytest.raises(PadContractError, match="a count"):
        check_pad_contracts(counting.pad_contract, takes_ids)
