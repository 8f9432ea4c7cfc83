"""Signs of life: a rank that gives none for too long is named, whatever it and the others do at that moment.

    each rank: count its own number up in the store ─▶ read everybody's ─▶ one stays the same, look after look: missing

Collectives name a rank that does not come to them; this names one that hangs while nobody waits for it, or only ranks
that would wait for ever. Time is counted in own looks: a rank that was stopped itself, or a machine that slept, accuses
nobody. Knows nothing of what ranks do. Invariant: what was found stays found, and is told once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

from torch._C._distributed_c10d import Store

from ostinato.errors import ParallelError

LOOKS = 12
"""Looks within the timeout. A rank is missing after MISSED of them without a sign; the rest is for telling it."""

MISSED = 7
STORE_HOST = 0
"""The rank that is blamed when the store itself gives no answer: it holds it, or its machine does."""


def looked(
    missed: Sequence[int], seen: Sequence[bytes], signs: Sequence[bytes] | None, rank: int
) -> list[int]:
    """Looks in a row without a sign of each rank, after one more by `rank`, which found `signs`; None: no answer."""
    if signs is None:  # nothing is known of the others then
        return [n + (r == STORE_HOST != rank) for r, n in enumerate(missed)]
    same = [new == old and r != rank for r, (new, old) in enumerate(zip(signs, seen, strict=True))]
    return [n + 1 if silent else 0 for n, silent in zip(missed, same, strict=True)]


class Heartbeat:
    """One rank's signs, and its watch over the others', in two threads from `start` to `stop`.

    store: shared by all ranks; a connection of its own is made to it. timeout_s: a rank without a sign for so long was
    named by then.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout_s: float) -> None:
        self._store: Any = cast("Any", store).clone()  # torch's stubs do not know it
        self._keys = [f"sign/{r}" for r in range(size)]
        self._rank = rank
        self._timeout_s = timeout_s
        self._every = timeout_s / LOOKS
        self._signs = [b""] * size
        self._answers = 0
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._error: ParallelError | None = None
        self._tell: Callable[[ParallelError], None] | None = None
        self._threads = [threading.Thread(target=f, daemon=True) for f in (self._give_signs, self._watch)]
        self._sign(0)

    def start(self) -> None:
        """Begin; all ranks have made theirs."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """No more signs, and nobody is named any more."""
        self._stopped.set()
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(self._every)

    def check(self) -> None:
        """Raise ParallelError when a rank is missing."""
        if self._error is not None:
            raise ParallelError(str(self._error))

    def on_missing(self, tell: Callable[[ParallelError], None]) -> None:
        """Call `tell`, once, when a rank is missing; on another thread, or here when one is already."""
        with self._lock:
            self._tell = tell
            error = self._error
        if error is not None:
            tell(error)

    def pause(self, looks: int) -> None:
        """Let the time of so many looks pass."""
        time.sleep(looks * self._every)

    # ---- the threads ----

    def _sign(self, count: int) -> None:
        self._store.set(self._keys[self._rank], str(count))

    def _give_signs(self) -> None:
        """Talks to the store, which may block for as long as the store does not answer."""
        count = 0
        while not self._stopped.wait(self._every):
            count += 1
            try:
                self._sign(count)
                self._signs = self._store.multi_get(self._keys)
            except RuntimeError:  # no answer
                continue
            self._answers += 1

    def _watch(self) -> None:
        missed, seen, answers = [0] * len(self._keys), list(self._signs), 0
        while not self._stopped.wait(self._every):
            signs = None if self._answers == answers else self._signs
            missed, answers = looked(missed, seen, signs, self._rank), self._answers
            seen = signs or seen
            missing = [str(rank) for rank, n in enumerate(missed) if n >= MISSED]
            if missing and not self._stopped.is_set():
                self._found(missing)
                return

    def _found(self, missing: list[str]) -> None:
        error = ParallelError(
            f"rank{'s' if len(missing) > 1 else ''} {', '.join(missing)} gave no sign of life within "
            f"{self._timeout_s:g} s; it hangs or is gone: look at its output, or allow more time"
        )
        with self._lock:
            self._error = error
            self._stopped.set()
            tell = self._tell
        if tell is not None:
            tell(error)
