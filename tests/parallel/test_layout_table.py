"""The layout table: tokens of one rank in every layout, its bits in all whose experts are whole, in every way they run.

Without `--exhaustive` each family plays some ways in some layouts; all families together play every value of each.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ostinato.parallel.shm import shm_supported
from ostinato.parallel.topology import Topology

from .table import DENSE, SPARSE, TOLERANCE, Answers, Way, difference, is_exact, layouts, play, ways

pytestmark = pytest.mark.skipif(not shm_supported(), reason="needs memfd and x86")
SAMPLED = 7
"""Ways of all layouts that a sparse family plays in every run of the tests; they are some 50 times as many."""
Ways = dict[Topology, list[Way]]


def _all(family: str) -> list[tuple[Topology, Way]]:
    sparse = family in SPARSE
    return [
        (layout, way)
        for layout in layouts(sparse=sparse)
        if layout.tp > 1 or sparse
        for way in ways(layout, sparse=sparse)
    ]


def _sample(family: str) -> list[tuple[Topology, Way]]:
    """Evenly spread, each family beginning elsewhere."""
    everything = _all(family)
    each = SAMPLED if family in SPARSE else 3
    turn = (SPARSE + DENSE).index(family)
    step, offset = len(everything) / each, turn * len(everything) / each / len(SPARSE + DENSE)
    return [everything[int(i * step + offset)] for i in range(each)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test for each family and layout that it plays."""
    if "played" not in metafunc.fixturenames:
        return
    choose = _all if metafunc.config.getoption("exhaustive") else _sample
    cases, names = [], []
    for family in (*SPARSE, *DENSE):
        by_layout: Ways = {}
        for layout, way in choose(family):
            by_layout.setdefault(layout, []).append(way)
        for layout, played in by_layout.items():
            cases.append((family, layout, played))
            names.append(f"{family}-tp{layout.tp}-dp{layout.dp}-ep{layout.ep}")
    metafunc.parametrize(("family", "layout", "played"), cases, ids=names)


@pytest.fixture(scope="module")
def alone(checkpoint: Callable[[str], Path]) -> Callable[[str], Answers]:
    """alone(family) -> the answers of one rank, eager at the rows there are."""
    made: dict[str, Answers] = {}

    def get(family: str) -> Answers:
        if family not in made:
            made[family] = play(checkpoint(family), Topology(), Way(graph="eager"))
        return made[family]

    return get


def test_answers_of_one_rank(
    family: str,
    layout: Topology,
    played: list[Way],
    alone: Callable[[str], Answers],
    checkpoint: Callable[[str], Path],
    record_property: Callable[[str, object], None],
) -> None:
    differences = []
    for way in played:
        try:
            differences.append(difference(play(checkpoint(family), layout, way), alone(family)))
        except Exception as error:
            error.add_note(f"{family}, tp {layout.tp}, dp {layout.dp}, ep {layout.ep}: {way}")
            raise
    record_property("ways", len(played))
    record_property("difference", max(differences))
    bound = 0.0 if is_exact(layout) or family in DENSE else TOLERANCE
    far = [f"{way}: {found:g}" for way, found in zip(played, differences, strict=True) if found > bound]
    assert not far, f"over {bound:g}: {far}"


def test_the_sample_holds_every_value() -> None:
    for families in (SPARSE, DENSE):
        sample = [case for family in families for case in _sample(family)]
        everything = [case for family in families for case in _all(family)]
        for value in ("tp", "dp", "ep", "attn_tp", "moe_tp"):
            assert {getattr(t, value) for t, _ in sample} == {getattr(t, value) for t, _ in everything}, value
        for value in ("dispatch", "redundant", "graph", "padding"):
            assert {getattr(w, value) for _, w in sample} == {getattr(w, value) for _, w in everything}, value
