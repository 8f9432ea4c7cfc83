"""Greedy placement: replicas where load is, even ranks, stable slots; and the file form."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.errors import ConfigError
from ostinato.moe.balance import (
    balance,
    evenness,
    logical_load,
    read_placement,
    replica_table,
    replicas,
)


def test_replicas_follow_load_per_replica() -> None:
    assert replicas([90, 30, 20, 10], 6, 4) == [3, 1, 1, 1]
    assert replicas([90, 30, 20, 10], 6, 2) == [2, 2, 1, 1], "more than ranks would be of no use"
    assert replicas([1, 1, 1], 3, 2) == [1, 1, 1]
    assert replicas([0, 0], 3, 2) == [2, 1], "equal ones in order"
    with pytest.raises(ConfigError, match="2 slots cannot hold 3 experts"):
        replicas([1, 1, 1], 2, 1)


def test_worked_example() -> None:
    """Loads 90 30 20 10 over 2 ranks: without replicas 100 against 50, with two more slots even."""
    plain = balance([90, 30, 20, 10], 4, 2)
    assert plain.slots == (0, 3, 1, 2)
    assert plain.evenness == 75 / 100
    wide = balance([90, 30, 20, 10], 6, 2)
    assert sorted(wide.slots) == [0, 0, 1, 1, 2, 3]
    assert wide.evenness == 75 / 80, "45 15 20 against 45 15 10"
    assert evenness([90, 30, 20, 10], (0, 1, 2, 3), 2) == 75 / 120


def test_replicas_of_one_expert_lie_apart() -> None:
    found = balance([100, 1, 1, 1], 8, 4)
    ranks = [found.slots[i : i + 2] for i in range(0, 8, 2)]
    assert all(rank.count(0) == 1 for rank in ranks), ranks


def test_experts_stay_in_their_slots() -> None:
    held = balance([5, 4, 3, 2, 1, 1], 8, 2).slots
    again = balance([5, 4, 3, 2, 1, 1], 8, 2, held)
    assert again.slots == held
    other = balance([4, 5, 3, 2, 1, 1], 8, 2, held).slots
    for r in (0, 1):
        before, after = held[4 * r : 4 * r + 4], other[4 * r : 4 * r + 4]
        for e in set(before) & set(after):
            assert any(b == a == e for b, a in zip(before, after, strict=True)), "it stays, yet moved"


@given(
    st.lists(st.integers(0, 1000), min_size=4, max_size=32),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(0, 3),
)
def test_every_expert_has_a_slot_and_ranks_are_even_enough(load: list[int], ranks: int, extra: int) -> None:
    physical = -(-len(load) // ranks) * ranks + extra * ranks
    found = balance(load, physical, ranks)
    assert len(found.slots) == physical
    assert set(found.slots) == set(range(len(load)))
    assert 0 < found.evenness <= 1 + 1e-9
    counts = logical_load([1] * physical, found.slots, len(load))
    assert counts == [found.slots.count(e) for e in range(len(load))]
    table = replica_table(found.slots, len(load))
    assert sorted(slot for row in table for slot in row) == list(range(physical))


def test_skewed_load_becomes_even() -> None:
    """Zipf load of 64 experts on 8 ranks: in order 0.34; packed, with 8 more slots, above 0.97."""
    load = [1000 / (e + 1) for e in range(64)]
    before = evenness(load, tuple(range(64)), 8)
    assert before < 0.35
    assert balance(load, 64, 8).evenness > before
    assert balance(load, 72, 8).evenness > 0.97


def test_refusals() -> None:
    with pytest.raises(ConfigError, match=r"10 / 4 = 2\.5"):
        balance([1] * 8, 10, 4)


def _file(path: Path, slots: object) -> Path:
    path.write_text(json.dumps({"slots": slots}))
    return path


def test_file(tmp_path: Path) -> None:
    path = _file(tmp_path / "placement.json", [[0, 1, 2, 0], [2, 1, 0, 1]])
    assert read_placement(path, [1, 3], 3, 2) == {1: (0, 1, 2, 0), 3: (2, 1, 0, 1)}


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([[0, 1, 2, 0]], "1 layers, the model has 2"),
        ([[0, 1, 2, 0], [0, 1, 1, 0]], r"layer 3 .*experts \[2\]"),
        ([[0, 1, 2, 0], [0, 1, 2, 7]], r"layer 3 .*experts \[7\]"),
        ([[0, 1, 2, 0], [0, 1, 2]], "as many slots"),
        ("nonsense", "is no expert placement"),
        ([["x"], [1]], "is no expert placement"),
        ([[float("inf")], [1]], "is no expert placement"),
        ([[0, 1, 2, 0] * 100_000] * 2, "layer 1 has 400000 slots, over 9 for 3 experts on ep 2"),
    ],
)
def test_damaged_files(tmp_path: Path, slots: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_placement(_file(tmp_path / "placement.json", slots), [1, 3], 3, 2)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.json cannot be read"):
        read_placement(tmp_path / "nothing.json", [0], 2, 2)
