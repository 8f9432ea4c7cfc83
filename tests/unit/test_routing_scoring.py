"""Scoring and selection: the worked examples of the behaviour reference, section 4.1, and their algebra."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.errors import ConfigError
from ostinato.moe.custom import InternS1ProRouting, llama4_routing, phimoe_routing
from ostinato.moe.routing import TopKConfig, select_experts
from ostinato.moe.scoring import keep_best_groups, slot_sum, sqrtsoftplus, top_k_ids


def _route(logits: list[float], config: TopKConfig) -> tuple[list[float], list[int]]:
    x = torch.tensor([logits])
    weights, ids = select_experts(torch.zeros(1, 4), x, config)
    return weights[0].tolist(), ids[0].tolist()


@pytest.mark.parametrize(("renormalize", "expected"), [(False, [0.6652, 0.2447]), (True, [0.7311, 0.2689])])
def test_softmax(renormalize: bool, expected: list[float]) -> None:
    weights, ids = _route([2.0, 1.0, 0.0], TopKConfig(top_k=2, renormalize=renormalize))
    assert ids == [0, 1]
    assert weights == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(("renormalize", "expected"), [(False, [0.6652, 0.2447]), (True, [0.7311, 0.2689])])
def test_f35_raw_logits_weigh_by_softmax(renormalize: bool, expected: list[float]) -> None:
    """Never the logits themselves: not renormalized, the softmax runs over ALL experts, then gathers."""
    config = TopKConfig(top_k=2, scoring_func="raw_logits", renormalize=renormalize)
    weights, ids = _route([2.0, 1.0, 0.0], config)
    assert ids == [0, 1]
    assert weights == pytest.approx(expected, abs=1e-4)


def test_f37_bias_chooses_but_does_not_weigh() -> None:
    config = TopKConfig(
        top_k=1, scoring_func="sigmoid", renormalize=False, correction_bias=torch.tensor([0.0, 5.0])
    )
    weights, ids = _route([0.0, -2.0], config)
    assert ids == [1]
    assert weights == pytest.approx([0.1192], abs=1e-4)


def test_sqrtsoftplus() -> None:
    weights, ids = _route(
        [1.0, -3.0, 4.0], TopKConfig(top_k=2, scoring_func="sqrtsoftplus", renormalize=False)
    )
    assert ids == [2, 0]
    assert weights == pytest.approx([math.sqrt(math.log1p(math.exp(4))), math.sqrt(math.log1p(math.e))])
    assert torch.isfinite(sqrtsoftplus(torch.tensor([1e4, -1e4]))).all()


def test_grouped_keeps_the_group_of_the_largest() -> None:
    config = TopKConfig(top_k=2, use_grouped_topk=True, num_expert_group=2, topk_group=1)
    weights, ids = _route([3.0, -1.0, 2.9, 2.8], config)
    assert ids == [0, 1]
    assert sum(weights) == pytest.approx(1.0)


def test_biased_grouped_sums_the_two_best() -> None:
    """Scores [.9, .1 | .6, .6]: sums 1.0 and 1.2 choose group 1, where the maximum would choose group 0."""
    scores = torch.tensor([0.9, 0.1, 0.6, 0.6])
    config = TopKConfig(
        top_k=2,
        scoring_func="sigmoid",
        renormalize=False,
        use_grouped_topk=True,
        num_expert_group=2,
        topk_group=1,
        correction_bias=torch.zeros(4),
    )
    weights, ids = _route(torch.logit(scores).tolist(), config)
    assert ids == [2, 3]
    assert weights == pytest.approx([0.6, 0.6], abs=1e-6)


def test_one_group_needs_no_masking() -> None:
    choice = torch.tensor([[1.0, 3.0, 2.0]])
    assert torch.equal(keep_best_groups(choice, num_groups=1, num_kept=1, best_pair=True), choice)


def test_groups_of_one_expert() -> None:
    choice = torch.tensor([[1.0, 3.0, 2.0]])
    kept = keep_best_groups(choice, num_groups=3, num_kept=2, best_pair=True)
    assert kept.tolist() == [[-math.inf, 3.0, 2.0]]


def test_kept_group_wins_over_zeros() -> None:
    """An expert of the kept group whose softmax underflows to 0 still comes before those of other groups."""
    config = TopKConfig(top_k=2, renormalize=False, use_grouped_topk=True, num_expert_group=2, topk_group=1)
    weights, ids = _route([-400.0, -400.0, 0.0, -300.0], config)
    assert ids == [2, 3]
    assert weights == [1.0, 0.0]


def test_llama4() -> None:
    config = TopKConfig(top_k=2, renormalize=False, custom_routing_function=llama4_routing)
    weights, ids = _route([0.0, 2.0, -1.0], config)
    assert ids == [1, 0]
    assert weights == pytest.approx([0.8808, 0.5], abs=1e-4)


def test_interns1_pro_chooses_in_every_group() -> None:
    config = TopKConfig(top_k=4, renormalize=True, custom_routing_function=InternS1ProRouting(2))
    weights, ids = _route([5.0, 4.0, 3.0, 0.0, -2.0, -1.0], config)
    assert ids == [0, 1, 3, 5]
    assert sum(weights) == pytest.approx(1.0)
    with pytest.raises(ConfigError, match="router_n_groups 2"):
        _route([1.0] * 6, TopKConfig(top_k=3, custom_routing_function=InternS1ProRouting(2)))


def test_phimoe_and_llama4_refuse_what_they_do_not_do() -> None:
    x = torch.zeros(1, 4)
    with pytest.raises(ConfigError, match="renormalize"):
        llama4_routing(x, x, 1, True)
    with pytest.raises(ConfigError, match="renormalize"):
        phimoe_routing(x, x, 2, True)
    with pytest.raises(ConfigError, match="top_k is 3"):
        phimoe_routing(x, x, 3, False)


@pytest.mark.parametrize("k", [1, 3, 8])
def test_ties_go_to_the_lowest_id(k: int) -> None:
    """Equal logits, in one row and in many: the answer does not depend on the batch."""
    for rows in (1, 2, 33, 200):
        ids = top_k_ids(torch.zeros(rows, 64), k)
        assert ids.tolist() == [list(range(k))] * rows
    two_levels = torch.zeros(70, 96)
    two_levels[:, 50:] = 1.0
    assert top_k_ids(two_levels, k).tolist() == [list(range(50, 50 + k))] * 70


@settings(deadline=None, max_examples=50)
@given(
    st.lists(
        st.lists(st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0]), min_size=6, max_size=6),
        min_size=1,
        max_size=5,
    )
)
def test_ids_are_distinct_whatever_the_row_holds(rows: list[list[float]]) -> None:
    ids = top_k_ids(torch.tensor(rows), 4)
    for row in ids.tolist():
        assert len(set(row)) == 4
        assert all(0 <= e < 6 for e in row)


def test_slot_sum_is_in_slot_order() -> None:
    weights = torch.tensor([[1.0, 2.0**-24, 2.0**-24], [2.0**-24, 2.0**-24, 1.0]])
    assert slot_sum(weights).flatten().tolist() == [1.0, 1.0 + 2.0**-23]


@pytest.mark.parametrize("k", [1, 2])
def test_f39_near_ties_are_kept_apart(k: int) -> None:
    """Logits 1e-3 apart at magnitude 8: bf16 would make them equal and choose the lowest id."""
    logits = [8.0, 8.001, 8.002]
    assert len(set(torch.tensor(logits).bfloat16().tolist())) == 1
    assert _route(logits, TopKConfig(top_k=k))[1] == [2, 1][:k]
    bias = torch.tensor([0.0, 0.001, 0.0])
    config = TopKConfig(top_k=k, scoring_func="sigmoid", correction_bias=bias)
    assert _route([8.0, 8.0, 8.0], config)[1] == [1, 0][:k]
