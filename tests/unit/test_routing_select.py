"""`select_experts`: scaling, fused shared experts, dtypes, wrong configs; a row depends on itself alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.errors import ConfigError
from ostinato.moe.counts import RouterRows, moe_num_token_non_padded
from ostinato.moe.custom import InternS1ProRouting, llama4_routing, phimoe_routing
from ostinato.moe.placement import ExpertPlacement
from ostinato.moe.routing import TopKConfig, select_experts, select_experts_into

E = 12
CONFIGS = {
    "softmax": TopKConfig(top_k=3),
    "softmax, not renormalized": TopKConfig(top_k=3, renormalize=False),
    "raw_logits": TopKConfig(top_k=3, scoring_func="raw_logits"),
    "raw_logits, not renormalized": TopKConfig(top_k=3, scoring_func="raw_logits", renormalize=False),
    "sigmoid": TopKConfig(top_k=3, scoring_func="sigmoid", correction_bias=torch.linspace(-0.2, 0.2, E)),
    "sqrtsoftplus": TopKConfig(top_k=3, scoring_func="sqrtsoftplus"),
    "grouped": TopKConfig(top_k=3, use_grouped_topk=True, num_expert_group=4, topk_group=2),
    "biased_grouped": TopKConfig(
        top_k=3,
        scoring_func="sigmoid",
        use_grouped_topk=True,
        num_expert_group=4,
        topk_group=2,
        correction_bias=torch.linspace(0.2, -0.2, E),
    ),
    "llama4": TopKConfig(top_k=2, renormalize=False, custom_routing_function=llama4_routing),
    "phimoe": TopKConfig(top_k=2, renormalize=False, custom_routing_function=phimoe_routing),
    "interns1_pro": TopKConfig(top_k=4, custom_routing_function=InternS1ProRouting(2)),
}


def _logits(rows: int, seed: int = 0, experts: int = E) -> torch.Tensor:
    return torch.randn(rows, experts, generator=torch.Generator().manual_seed(seed)) * 3


def _hidden(rows: int) -> torch.Tensor:
    return torch.zeros(rows, 4)


@pytest.mark.parametrize("name", CONFIGS)
@settings(deadline=None, max_examples=12)
@given(rows=st.integers(1, 40), seed=st.integers(0, 1000), data=st.data())
def test_a_row_depends_on_itself_alone(name: str, rows: int, seed: int, data: st.DataObject) -> None:
    """Bit for bit: alone, in another order, and beside other rows."""
    config = CONFIGS[name]
    logits = _logits(rows, seed)
    weights, ids = select_experts(_hidden(rows), logits, config)
    order = torch.tensor(data.draw(st.permutations(range(rows))))
    moved, moved_ids = select_experts(_hidden(rows), logits[order], config)
    assert torch.equal(moved, weights[order])
    assert torch.equal(moved_ids, ids[order])
    row = data.draw(st.integers(0, rows - 1))
    alone, alone_ids = select_experts(_hidden(1), logits[row : row + 1], config)
    assert torch.equal(alone[0], weights[row])
    assert torch.equal(alone_ids[0], ids[row])


@pytest.mark.parametrize("name", CONFIGS)
def test_form_of_the_result(name: str) -> None:
    config = CONFIGS[name]
    weights, ids = select_experts(_hidden(50), _logits(50), config)
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int32)
    assert weights.shape == ids.shape == (50, config.top_k)
    assert all(len(set(row)) == config.top_k for row in ids.tolist())
    assert bool(((ids >= 0) & (ids < E)).all())
    assert bool((weights > 0).all())
    if config.renormalize:
        torch.testing.assert_close(weights.sum(-1), torch.ones(50))


@pytest.mark.parametrize("name", CONFIGS)
def test_no_rows(name: str) -> None:
    weights, ids = select_experts(
        _hidden(0), _logits(0), CONFIGS[name], num_token_non_padded=torch.zeros(1, dtype=torch.int32)
    )
    assert weights.shape == ids.shape == (0, CONFIGS[name].top_k)


@pytest.mark.parametrize("name", CONFIGS)
def test_f38_scaling_is_applied_once_whatever_renormalize_says(name: str) -> None:
    plain = CONFIGS[name]
    options = {f: getattr(plain, f) for f in plain.__slots__}
    options |= {"routed_scaling_factor": 2.5, "apply_routed_scaling_factor_on_output": True}
    weights, ids = select_experts(_hidden(20), _logits(20), plain)
    scaled, scaled_ids = select_experts(_hidden(20), _logits(20), TopKConfig(**options))
    assert torch.equal(scaled, weights * 2.5)
    assert torch.equal(scaled_ids, ids)
    options |= {"apply_routed_scaling_factor_on_output": False}
    left, _ = select_experts(_hidden(20), _logits(20), TopKConfig(**options))
    assert torch.equal(left, weights), "the caller scales its output"


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("applied", [False, True])
def test_fused_shared_experts(name: str, applied: bool) -> None:
    """The last columns: ids E, E + 1, weight = sum of the routed ones / factor; the others stay."""
    plain = CONFIGS[name]
    options = {f: getattr(plain, f) for f in plain.__slots__}
    options |= {
        "top_k": plain.top_k + 2,
        "num_fused_shared_experts": 2,
        "routed_scaling_factor": 2.5,
        "apply_routed_scaling_factor_on_output": applied,
    }
    weights, ids = select_experts(_hidden(20), _logits(20), plain)
    fused, fused_ids = select_experts(_hidden(20), _logits(20), TopKConfig(**options))
    assert torch.equal(fused_ids[:, :-2], ids)
    assert fused_ids[:, -2:].tolist() == [[E, E + 1]] * 20
    factor = 2.5 if applied else 1.0
    assert torch.equal(fused[:, :-2], weights * factor)
    expected = weights.sum(-1, keepdim=True) / 2.5 * factor
    torch.testing.assert_close(fused[:, -2:], expected.expand(20, 2))
    if applied and plain.renormalize:
        assert bool((fused[:, -2:] == 1.0).all()), "exactly one, not one and a rounding"


def test_kernel_form_writes_what_it_is_given() -> None:
    weights, ids = torch.full((6, 3), 7.0), torch.full((6, 3), 7, dtype=torch.int32)
    count = torch.tensor([4], dtype=torch.int32)
    select_experts_into(weights, ids, _hidden(6), _logits(6), CONFIGS["softmax"], count)
    again = select_experts(_hidden(6), _logits(6), CONFIGS["softmax"], num_token_non_padded=count)
    assert torch.equal(weights, again[0])
    assert torch.equal(ids, again[1])


def test_inputs_are_left_alone() -> None:
    logits = _logits(6)
    for config in CONFIGS.values():
        select_experts(_hidden(6), logits, config, num_token_non_padded=torch.tensor([2]))
    assert torch.equal(logits, _logits(6))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_f39_logits_and_bias_stay_fp32(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=r"must be torch\.float32"):
        select_experts(_hidden(2), _logits(2).to(dtype), CONFIGS["softmax"])
    with pytest.raises(ConfigError, match=r"must be torch\.float32"):
        TopKConfig(top_k=2, scoring_func="sigmoid", correction_bias=torch.zeros(E, dtype=dtype))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 0}, "no routed expert"),
        ({"top_k": 2, "num_fused_shared_experts": 2}, "no routed expert"),
        ({"top_k": 2, "num_fused_shared_experts": -1}, "no routed expert"),
        ({"top_k": 2, "scoring_func": "tanh"}, "unknown scoring_func 'tanh'"),
        ({"top_k": 2, "use_grouped_topk": True}, "topk_group None"),
        ({"top_k": 2, "use_grouped_topk": True, "num_expert_group": 2, "topk_group": 3}, "topk_group 3"),
        ({"top_k": 2, "num_expert_group": 2, "topk_group": 1}, "do nothing"),
        (
            {
                "top_k": 2,
                "scoring_func": "raw_logits",
                "use_grouped_topk": True,
                "num_expert_group": 2,
                "topk_group": 1,
            },
            "cannot be grouped",
        ),
        ({"top_k": 2, "apply_routed_scaling_factor_on_output": True}, "needs a routed_scaling_factor"),
        ({"top_k": 2, "routed_scaling_factor": 0.0}, "positive"),
        ({"top_k": 2, "routed_scaling_factor": float("nan")}, "positive"),
        ({"top_k": 2, "scoring_func": "sigmoid", "custom_routing_function": llama4_routing}, "replaces"),
        (
            {"top_k": 2, "correction_bias": torch.zeros(E), "custom_routing_function": llama4_routing},
            "replaces",
        ),
    ],
)
def test_wrong_configs(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TopKConfig(**options)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (TopKConfig(top_k=E + 1), f"{E + 1} routed experts"),
        (
            TopKConfig(top_k=2, scoring_func="sigmoid", correction_bias=torch.zeros(E - 1)),
            "correction_bias has shape",
        ),
        (TopKConfig(top_k=2, use_grouped_topk=True, num_expert_group=5, topk_group=2), "5 equal groups"),
        (TopKConfig(top_k=4, use_grouped_topk=True, num_expert_group=4, topk_group=1), "hold 3 experts"),
    ],
)
def test_configs_that_do_not_fit_the_layer(config: TopKConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        select_experts(_hidden(2), _logits(2), config)


def test_placement_of_another_size() -> None:
    with pytest.raises(ConfigError, match="maps 4 experts"):
        select_experts(_hidden(2), _logits(2), CONFIGS["softmax"], placement=ExpertPlacement.identity(4))
    slots = ExpertPlacement.identity(E).with_shared_slots(ep_size=2, ep_rank=0, num_shared=1)
    with pytest.raises(ConfigError, match="1 shared experts per rank"):
        select_experts(_hidden(2), _logits(2), CONFIGS["softmax"], placement=slots)


@pytest.mark.parametrize(
    ("weights", "ids", "error", "message"),
    [
        (torch.ones(2, 3), torch.zeros(2, 3).long(), ValueError, "must be"),
        (torch.ones(2, 2).bfloat16(), torch.zeros(2, 2).long(), TypeError, "bfloat16 weights"),
        (torch.ones(2, 2), torch.zeros(2, 2), TypeError, "must be integers"),
    ],
)
def test_custom_router_with_a_wrong_result(
    weights: torch.Tensor, ids: torch.Tensor, error: type[Exception], message: str
) -> None:
    config = TopKConfig(top_k=2, custom_routing_function=lambda *_: (weights, ids))
    with pytest.raises(error, match=message):
        select_experts(_hidden(2), _logits(2), config)


def test_custom_router_gets_what_it_needs_and_may_return_views() -> None:
    seen: list[Any] = []
    fixed_weights, fixed_ids = torch.ones(1, 1).expand(4, 2), torch.tensor([[3, 5]]).expand(4, 2)

    def router(
        hidden_states: torch.Tensor, gating_output: torch.Tensor, topk: int, renormalize: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append((hidden_states.shape, gating_output.shape, topk, renormalize))
        return fixed_weights, fixed_ids

    config = TopKConfig(
        top_k=3, num_fused_shared_experts=1, renormalize=False, custom_routing_function=router
    )
    _, ids = select_experts(_hidden(4), _logits(4), config, num_token_non_padded=torch.tensor([2]))
    assert seen == [((4, 4), (4, E), 2, False)]
    assert ids.tolist() == [[3, 5, E], [3, 5, E], [-1, -1, -1], [-1, -1, -1]]
    assert fixed_ids.tolist() == [[3, 5]] * 4, "the mask must not write into the router's own memory"


LOCAL, GLOBAL = torch.tensor([3]), torch.tensor([7])


@pytest.mark.parametrize(
    ("rows", "options", "expected"),
    [
        (RouterRows.OWN_SLICE, {"attn_dp_size": 4, "sharded": True}, LOCAL),
        (RouterRows.MOE_CP_GATHERED, {"cp_prefill": True}, None),
        (RouterRows.MOE_CP_GATHERED, {}, LOCAL),
        (RouterRows.FFN_GATHERED, {"cp_prefill": True}, None),
        (RouterRows.FFN_GATHERED, {"attn_dp_size": 2}, None),
        (RouterRows.FFN_GATHERED, {"sharded": True}, GLOBAL),
        (RouterRows.FFN_GATHERED, {}, LOCAL),
    ],
)
def test_which_count_the_router_gets(
    rows: RouterRows, options: dict[str, Any], expected: torch.Tensor | None
) -> None:
    assert moe_num_token_non_padded(rows, local=LOCAL, global_count=GLOBAL, **options) is expected
    assert moe_num_token_non_padded(rows, local=None, global_count=GLOBAL, **options) is None


def test_a_sharded_gather_without_a_global_count_has_none() -> None:
    rows = RouterRows.FFN_GATHERED
    assert moe_num_token_non_padded(rows, local=LOCAL, global_count=None, sharded=True) is None
