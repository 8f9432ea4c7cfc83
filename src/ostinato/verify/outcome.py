"""What a check notes while it runs on one rank: comparisons made, and what was found wrong, with its place.

Knows nothing of steps or ranks. Invariant: the same fault seen in several ways of one cell is one finding, the first.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from ostinato.graphs.audit import first_difference
from ostinato.verify.stage import Played


class Found(msgspec.Struct, frozen=True):
    """One broken promise on this rank; see `Place` and `Finding` for the fields."""

    what: str
    layer: int | None = None
    slot: str | None = None
    row: int | None = None
    max_abs: float | None = None


@dataclass(slots=True)
class Outcome:
    """Of one check in one cell on one rank."""

    checks: int = 0
    found: dict[str, Found] = field(default_factory=dict)

    def say(self, kind: str, found: Found) -> None:
        """Note a fault, once of each kind."""
        self.found.setdefault(kind, found)

    def that(self, holds: bool, kind: str, found: Found) -> bool:
        """One comparison: note `found` unless it holds."""
        self.checks += 1
        if not holds:
            self.say(kind, found)
        return holds

    def same(self, kind: str, want: Played, got: Played, how: str, *, slot: str | None = None) -> bool:
        """Real rows of two runs of one step have the same bits. With taps, also which layer is the first that differs.

        how: what was different about the second run, to follow "real rows differ ".
        """
        self.checks += 1
        difference = first_difference(want.rows, got.rows)
        if difference is None:
            return True
        layer, row, gap, what = None, difference.row, difference.max_abs, f"real rows differ {how}"
        if want.taps is not None and got.taps is not None:
            first = want.taps.first_difference(got.taps, len(want.rows))
            if first is None:
                what += ", behind the last layer"
            else:
                layer, part, row, _ = first
                what += f", first in {part}"
        self.say(kind, Found(what, layer, slot, row, gap))
        return False
