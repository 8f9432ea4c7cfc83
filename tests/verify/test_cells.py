"""Which cells there are and in what order they are taken."""

from __future__ import annotations

import pytest

from ostinato.errors import ConfigError
from ostinato.verify.cells import CellId, corners, ordered


def test_corners() -> None:
    assert [corners(bucket) for bucket in (1, 2, 3, 8)] == [(1,), (1, 2), (1, 2, 3), (1, 5, 7, 8)]


def test_every_cell_comes_once_corners_first_and_buckets_take_turns() -> None:
    cells = ordered("decode", (1, 4, 8, 16), 12, 3, lambda cell: True)
    assert sorted(cells) == [CellId("decode", b, n) for b in (1, 4, 8, 16) for n in range(1, min(b, 12) + 1)]
    firsts = [cell.n in corners(cell.bucket) for cell in cells]
    assert firsts == sorted(firsts, reverse=True)
    assert {cell.bucket for cell in cells[:4]} == {1, 4, 8, 16}
    assert cells == ordered("decode", (1, 4, 8, 16), 12, 3, lambda cell: True)
    assert cells != ordered("decode", (1, 4, 8, 16), 12, 4, lambda cell: True)
    assert all(c.n > 1 for c in ordered("decode", (4, 8), 8, 0, lambda cell: cell.n > 1))


def test_a_cell_as_words() -> None:
    assert CellId.parse("prefill:16:3", ("decode", "prefill")) == CellId("prefill", 16, 3)
    assert str(CellId("prefill", 16, 3)) == "prefill:16:3"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("decode:8", "mode:bucket:n"),
        ("decode:8:0", "mode:bucket:n"),
        ("x:8:1", "has mode"),
        ("decode:4:5", "more real"),
    ],
)
def test_what_is_no_cell(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        CellId.parse(text, ("decode", "prefill"))
