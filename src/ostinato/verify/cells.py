"""Which cells (mode, bucket, n) there are, and in what order a run with little time takes them.

The corners of every bucket come first (n = 1, just over half, one less than full, full), then the rest; buckets take
turns, both by a seed. Plain arithmetic; knows nothing of engines. Invariant: an order is a function of its arguments,
so two runs with one seed take the same cells in the same order.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ostinato.errors import ConfigError


@dataclass(frozen=True, slots=True, order=True)
class CellId:
    """n real rows in a step of this mode that runs as wide as its bucket."""

    mode: str
    bucket: int
    n: int

    def __str__(self) -> str:
        return f"{self.mode}:{self.bucket}:{self.n}"

    @classmethod
    def parse(cls, text: str, modes: Iterable[str]) -> CellId:
        """From "decode:8:5". Raises ConfigError for anything that is no cell of `modes`."""
        mode, *sizes = text.split(":")
        if len(sizes) != 2 or not all(size.isdigit() and int(size) > 0 for size in sizes):
            raise ConfigError(f"cell {text!r} is none; give mode:bucket:n, like decode:8:5")
        if mode not in modes:
            raise ConfigError(f"cell {text!r} has mode {mode!r}; this deployment has {', '.join(modes)}")
        cell = cls(mode, int(sizes[0]), int(sizes[1]))
        if cell.n > cell.bucket:
            raise ConfigError(
                f"cell {text!r} has more real rows than its bucket is wide; give at most {sizes[0]}"
            )
        return cell


def corners(bucket: int) -> tuple[int, ...]:
    """Real rows that every bucket is tried with first."""
    return tuple(sorted({1, min(bucket // 2 + 1, bucket), max(bucket - 1, 1), bucket}))


def ordered(
    mode: str, buckets: Sequence[int], most: int, seed: int, takes: Callable[[CellId], bool]
) -> list[CellId]:
    """All cells of a mode that a check takes, in the order to run them in. most: real rows that a step can have."""
    cells = [CellId(mode, bucket, n) for bucket in buckets for n in range(1, min(bucket, most) + 1)]
    cells = [cell for cell in cells if takes(cell)]
    random.Random(f"{seed} {mode}").shuffle(cells)
    at = {bucket: corners(bucket) for bucket in buckets}
    first = [cell for cell in cells if cell.n in at[cell.bucket]]
    rest = [cell for cell in cells if cell.n not in at[cell.bucket]]
    return _in_turns(first) + _in_turns(rest)


def _in_turns(cells: list[CellId]) -> list[CellId]:
    """One of each bucket, then a second one of each, and so on."""
    taken: dict[int, int] = {}
    turns = []
    for cell in cells:
        taken[cell.bucket] = taken.get(cell.bucket, 0) + 1
        turns.append(taken[cell.bucket])
    return [cell for _, cell in sorted(zip(turns, cells, strict=True), key=lambda pair: pair[0])]
