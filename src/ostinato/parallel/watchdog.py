"""How long a rank waits for others, and what it looks at meanwhile; the same for every transport.

Knows nothing of transports. Invariant: whoever waits longer than `timeout_s` names the rank that is missing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


def _nothing() -> None:
    return


@dataclass(frozen=True, slots=True)
class Watchdog:
    """How long a rank waits for the others. `check` is called now and then while it does, and may raise.

    timeout_s: seconds after which the missing rank is named; None to wait for ever.
    """

    timeout_s: float | None = 60.0
    check: Callable[[], None] = _nothing
