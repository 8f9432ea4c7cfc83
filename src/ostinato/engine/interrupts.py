"""Ctrl-C waits until a step is over: an engine that is interrupted in the middle of one may have pages that nobody
holds, and ranks that are interrupted in the middle of a round are out of step for good.

Knows nothing of steps and rounds. Invariant: an interrupt is delayed, never lost; a second one does not wait.
"""

from __future__ import annotations

import importlib
import signal
import threading
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

# What `signal` wraps. The wrappers look each handler up among enumerations, which takes ten times as long: there are
# blocks in every step, and their 12 us would show.
_signal: Any = importlib.import_module("_signal")


def delayed_interrupts() -> AbstractContextManager[None]:
    """Deliver SIGINT at the end of the block. Does nothing outside the main thread, where no signal arrives."""
    return _Delay()


class _Delay(AbstractContextManager[None]):
    __slots__ = ("_before", "_came")

    def __enter__(self) -> None:
        self._came: list[FrameType | None] = []
        self._before: Any = _signal.getsignal(signal.SIGINT)
        within = isinstance(
            getattr(self._before, "__self__", None), _Delay
        )  # a block that delays for this one, too
        elsewhere = threading.current_thread() is not threading.main_thread()
        if within or elsewhere or not callable(self._before):
            self._before = None
        else:
            _signal.signal(signal.SIGINT, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._came:
            self._before(number, frame)
        self._came.append(frame)

    def __exit__(self, *exc_info: object) -> None:
        if self._before is None:
            return
        _signal.signal(signal.SIGINT, self._before)
        if len(self._came) == 1:
            self._before(signal.SIGINT, self._came[0])
