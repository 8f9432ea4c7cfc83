"""Expert placement: the arithmetic of slots, replicas, and that a remap happens once and is safe for -1."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.errors import ConfigError
from ostinato.moe.load import ExpertLoad
from ostinato.moe.placement import OUT_OF_TABLE, ExpertPlacement, LogicalIds, PhysicalIds, SlotIds
from ostinato.moe.routing import TopKConfig, select_experts


def _logical(*ids: int) -> LogicalIds:
    return LogicalIds(torch.tensor([ids], dtype=torch.int32))


@pytest.mark.parametrize(("expert", "slot"), [(0, 0), (47, 47), (48, 49), (383, 390), (-1, -1)])
def test_routed_slots_of_384_experts_on_8_ranks(expert: int, slot: int) -> None:
    placement = ExpertPlacement.identity(384).with_shared_slots(ep_size=8, ep_rank=0, num_shared=1)
    physical = placement.to_physical(_logical(expert))
    assert placement.to_slots(physical).ids.tolist() == [[slot]]


@pytest.mark.parametrize(("rank", "slot"), [(0, 48), (7, 391)])
def test_shared_slots_of_384_experts_on_8_ranks(rank: int, slot: int) -> None:
    placement = ExpertPlacement.identity(384).with_shared_slots(ep_size=8, ep_rank=rank, num_shared=1)
    assert placement.shared_slot(0) == slot
    with pytest.raises(ValueError, match="shared expert 1"):
        placement.shared_slot(1)


def test_slots_cover_the_memory_exactly() -> None:
    ranks = [
        ExpertPlacement.identity(12).with_shared_slots(ep_size=3, ep_rank=r, num_shared=2) for r in range(3)
    ]
    routed = ranks[0].to_slots(PhysicalIds(torch.arange(12).view(1, -1))).ids.flatten().tolist()
    shared = [rank.shared_slot(i) for rank in ranks for i in range(2)]
    assert sorted(routed + shared) == list(range(12 + 3 * 2))


def test_static_map() -> None:
    placement = ExpertPlacement.static([2, 0, 3], num_physical=4)
    assert placement.to_physical(_logical(0, 2, -1, 1)).ids.tolist() == [[2, 3, -1, 0]]


def test_ids_off_the_table_never_alias_an_expert() -> None:
    placement = ExpertPlacement.static([2, 0, 3], num_physical=4)
    found = placement.to_physical(_logical(3, -7, 2**31 - 1, -(2**31))).ids
    assert found.tolist() == [[OUT_OF_TABLE, -7, OUT_OF_TABLE, -(2**31)]]
    assert found.dtype == torch.int32


@settings(deadline=None, max_examples=40)
@given(data=st.data(), num_logical=st.integers(1, 9), redundant=st.integers(0, 4), rows=st.integers(0, 30))
def test_remap_goes_to_a_replica_of_the_expert(
    data: st.DataObject, num_logical: int, redundant: int, rows: int
) -> None:
    num_physical = num_logical + redundant
    slots = data.draw(st.permutations(range(num_physical)))
    replicas = [[slots[e]] for e in range(num_logical)]
    for extra in slots[num_logical:]:
        replicas[data.draw(st.integers(0, num_logical - 1))].append(extra)
    placement = ExpertPlacement.dynamic(replicas, num_physical=num_physical)
    ids = torch.tensor([[data.draw(st.integers(-1, num_logical - 1)) for _ in range(2)] for _ in range(rows)])
    logical = LogicalIds(ids.view(rows, 2).int())
    physical = placement.to_physical(logical).ids
    again = placement.to_physical(logical).ids
    assert torch.equal(physical, again), "every rank that sees these rows picks the same replica"
    for row, found in zip(logical.ids.tolist(), physical.tolist(), strict=True):
        for e, p in zip(row, found, strict=True):
            assert p == -1 if e == -1 else p in replicas[e]


def test_replicas_share_the_rows() -> None:
    placement = ExpertPlacement.dynamic([[0, 2, 3], [1]], num_physical=4)
    ids = placement.to_physical(LogicalIds(torch.zeros(600, 1, dtype=torch.int32))).ids
    counts = torch.bincount(ids.flatten(), minlength=4).tolist()
    assert counts[1] == 0
    assert all(120 < counts[p] < 280 for p in (0, 2, 3))


@pytest.mark.parametrize(
    "other", [PhysicalIds(torch.zeros(1, 1)), SlotIds(torch.zeros(1, 1)), torch.zeros(1, 1)]
)
def test_f31_a_second_remap_is_refused(other: Any) -> None:
    placement = ExpertPlacement.static([1, 0], num_physical=2)
    with pytest.raises(TypeError, match="remapped once"):
        placement.to_physical(other)


@pytest.mark.parametrize(
    "other", [LogicalIds(torch.zeros(1, 1)), SlotIds(torch.zeros(1, 1)), torch.zeros(1, 1)]
)
def test_slots_and_load_take_physical_ids(other: Any) -> None:
    with pytest.raises(TypeError, match="PhysicalIds"):
        ExpertPlacement.identity(2).to_slots(other)
    with pytest.raises(TypeError, match="PhysicalIds"):
        ExpertLoad(1, 2).record(0, other)


@pytest.mark.parametrize(
    ("replicas", "message"),
    [
        ([[0], []], r"\[1\] have no physical"),
        ([[0], [0]], r"\[0\]"),
        ([[0], [2]], r"\[2\]"),
        ([[0, 0], [1]], r"\[0\]"),
    ],
)
def test_wrong_maps(replicas: list[list[int]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ExpertPlacement.dynamic(replicas, num_physical=2)


@pytest.mark.parametrize(("ep_size", "ep_rank"), [(5, 0), (2, 2), (2, -1)])
def test_wrong_ranks(ep_size: int, ep_rank: int) -> None:
    with pytest.raises(ConfigError, match="equal share"):
        ExpertPlacement.identity(4).with_shared_slots(ep_size=ep_size, ep_rank=ep_rank, num_shared=1)


def _select(placement: ExpertPlacement | None, *, shared: int = 0, renormalize: bool = True) -> Any:
    logits = torch.randn(10, 4, generator=torch.Generator().manual_seed(1))
    config = TopKConfig(
        top_k=2 + shared,
        scoring_func="sigmoid",
        renormalize=renormalize,
        correction_bias=torch.tensor([0.3, 0.0, -0.3, 0.1]),
        num_fused_shared_experts=shared,
        routed_scaling_factor=2.0,
    )
    return select_experts(
        torch.zeros(10, 2), logits, config, num_token_non_padded=torch.tensor([7]), placement=placement
    )


def test_f31_exactly_one_remap_in_select_experts() -> None:
    plain_weights, plain = _select(None)
    table = [3, 0, 1, 2]
    weights, ids = _select(ExpertPlacement.static(table, num_physical=4))
    assert ids[:7].tolist() == [[table[e] for e in row] for row in plain[:7].tolist()]
    assert bool((ids[7:] == -1).all())
    assert torch.equal(weights, plain_weights)


def test_shared_slots_in_select_experts() -> None:
    """Routed ids make room for shared slots, shared columns use the own rank's, pads are -1 everywhere."""
    _, plain = _select(None)
    placement = ExpertPlacement.identity(4).with_shared_slots(
        ep_size=2, ep_rank=1, num_shared=1, weight_scale=0.5
    )
    for renormalize in (True, False):
        weights, ids = _select(placement, shared=1, renormalize=renormalize)
        assert ids[:7, :2].tolist() == [[e + e // 2 for e in row] for row in plain[:7].tolist()]
        assert ids[:7, 2].tolist() == [5] * 7
        assert weights[:7, 2].tolist() == [0.25] * 7, "1 / factor, times the share of the later sum"
        assert bool((ids[7:] == -1).all())
        assert bool((weights[7:] == 0).all())
