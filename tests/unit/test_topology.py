"""Topology: who is who in every layout, and every invalid combination refused with its arithmetic."""

from __future__ import annotations

import itertools

import pytest

from ostinato.errors import ConfigError
from ostinato.padding import local_num_token_non_padded
from ostinato.parallel.topology import Gathering, Topology


def test_worked_example() -> None:
    here = Topology(tp=8, dp=2, cp=2, rank=5)
    assert (here.attn_tp, here.attn_tp_rank, here.cp_rank, here.attn_dp_rank) == (2, 1, 0, 1)


@pytest.mark.parametrize(
    ("tp", "dp", "ep", "cp"),
    [c for c in itertools.product((1, 2, 4, 8), repeat=4) if c[1] * c[3] <= c[0] >= c[2]],
)
def test_groups_partition_the_ranks(tp: int, dp: int, ep: int, cp: int) -> None:
    ranks = [Topology(tp, dp, ep, cp, r) for r in range(tp)]
    assert sorted(r for d in range(dp) for r in ranks[0].ranks_of_dp(d)) == list(range(tp))
    assert sorted(r for e in range(ep) for r in ranks[0].ranks_of_ep(e)) == list(range(tp))
    places = {(t.attn_dp_rank, t.cp_rank, t.attn_tp_rank) for t in ranks}
    assert places == set(itertools.product(range(dp), range(cp), range(tp // dp // cp)))
    assert {(t.ep_rank, t.moe_tp_rank) for t in ranks} == set(itertools.product(range(ep), range(tp // ep)))
    for t in ranks:
        assert t.rank in t.ranks_of_dp(t.attn_dp_rank)
        assert t.rank in t.attn_tp_ranks
        assert t.attn_tp_ranks[t.attn_tp_rank] == t.rank
        assert t.is_leader == (t.rank in t.leaders)


@pytest.mark.parametrize(
    ("sizes", "arithmetic"),
    [
        ({"tp": 4, "dp": 3}, "4 / 3 = 1.33333"),
        ({"tp": 1, "dp": 2}, "1 / 2 = 0.5"),
        ({"tp": 4, "dp": 2, "cp": 4}, "4 / 8 = 0.5"),
        ({"tp": 6, "ep": 4}, "6 / 4 = 1.5"),
        ({"tp": 2, "ep": 4}, "2 / 4 = 0.5"),
        ({"tp": 0}, "tp must be a whole number of at least 1, got 0"),
        ({"tp": 2, "dp": True}, "dp must be a whole number"),
        ({"tp": 2, "rank": 2}, "rank 2 is outside 0..1"),
    ],
)
def test_refusals_show_the_arithmetic(sizes: dict[str, int], arithmetic: str) -> None:
    with pytest.raises(ConfigError, match=arithmetic.replace(".", r"\.")):
        Topology(**sizes)


def test_sizes_left_out() -> None:
    assert Topology.of(tp=None, dp=2) == Topology(tp=2, dp=2, ep=2)
    assert Topology.of(tp=None, dp=2, ep=4) == Topology(tp=4, dp=2, ep=4)
    assert Topology.of(tp=4, dp=2, ep=1) == Topology(tp=4, dp=2, ep=1)
    assert Topology.of(tp=None) == Topology()


@pytest.mark.parametrize(
    ("tp", "dp", "sharded", "width", "counts", "expected"),
    [
        (4, 1, False, 16, (10,), [10, 10, 10, 10]),
        (4, 1, True, 16, (10,), [4, 4, 2, 0]),
        (4, 4, False, 16, (10, 10, 10, 10), [10, 10, 10, 10]),
        (4, 2, True, 16, (10, 10), [8, 2, 8, 2]),
        (4, 4, False, 32, (10, 20, 10, 20), [10, 20, 10, 20]),
        (4, 2, True, 32, (10, 20), [10, 0, 16, 4]),
    ],
)
def test_layout_table(
    tp: int, dp: int, sharded: bool, width: int, counts: tuple[int, ...], expected: list[int]
) -> None:
    """The table of docs/behaviour.md, section 1.3: local counts of every rank."""
    ranks = [Topology(tp, dp, 1, 1, r) for r in range(tp)]
    local = [
        local_num_token_non_padded(
            counts[t.attn_dp_rank],
            width,
            attn_tp_rank=t.attn_tp_rank,
            attn_tp_size=t.attn_tp,
            sharded=sharded,
        )
        for t in ranks
    ]
    assert local == expected


@pytest.mark.parametrize(
    ("tp", "dp", "dense", "head", "a2a", "expected"),
    [
        (4, 0, None, False, False, (False, False, False, False)),
        (4, 0, None, False, True, (False, True, True, True)),
        (4, 2, None, False, False, (True, False, True, True)),
        (4, 2, 1, True, True, (False, True, True, True)),
        (4, 4, 1, True, True, (False, False, False, True)),
    ],
)
def test_gathering_table(
    tp: int, dp: int, dense: int | None, head: bool, a2a: bool, expected: tuple[bool, ...]
) -> None:
    """The table of docs/behaviour.md, section 1.7."""
    g = Gathering(tp, dp, dense, head, a2a)
    found = (g.require_mlp_tp_gather, g.require_attn_tp_gather, g.require_gathered_buffer, g.require_mlp_sync)
    assert found == expected


def test_gathering_refusals() -> None:
    with pytest.raises(ConfigError, match="dp over 1"):
        Gathering(4, 1)
    with pytest.raises(ConfigError, match="moe_dense_tp 2"):
        _ = Gathering(4, 2, 2).require_attn_tp_gather
