"""Ctrl-C waits until a round is over: ranks that are interrupted in the middle of one are out of step for good.

Knows nothing of rounds. Invariant: an interrupt is delayed, never lost; a second one does not wait.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def delayed_interrupts() -> Iterator[None]:
    """Deliver SIGINT at the end of the block. Does nothing outside the main thread, where no signal arrives."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    came: list[FrameType | None] = []

    def note(number: int, frame: FrameType | None) -> None:
        if came:
            before(number, frame)
        came.append(frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if len(came) == 1:
        before(signal.SIGINT, came[0])
