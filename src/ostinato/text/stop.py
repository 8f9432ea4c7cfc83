"""Stop strings over a stream of text.

Text is handed on unless its end could still grow into a stop string: what is held back is exactly the longest
suffix that is a real prefix of one. The set is matched by one automaton, so the work per character does not
grow with the number of stops, and the result does not depend on how the text was cut into pieces. Must not
know of tokens beyond their count. Invariant: text handed out is never taken back, and all of it comes before
the stop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from ostinato.errors import RequestError


class StopSet:
    """Aho-Corasick automaton of a set of stop strings (Aho and Corasick 1975). Immutable; share it freely."""

    def __init__(self, stops: Iterable[str]) -> None:
        self.stops = tuple(stops)
        for stop in self.stops:
            if not isinstance(stop, str) or not stop:
                raise RequestError(f"stop string {stop!r} is empty or not a string; remove it from `stop`")
        self._next: list[dict[str, int]] = [{}]
        self._fail = [0]
        self._match: list[str | None] = [None]
        self._hold = [0]
        self._depth = [0]
        for stop in self.stops:
            self._add(stop)
        self._link()

    def step(self, state: int, char: str) -> int:
        """The state after one more character: its depth is the longest suffix that begins a stop."""
        while state and char not in self._next[state]:
            state = self._fail[state]
        return self._next[state].get(char, 0)

    def match(self, state: int) -> str | None:
        """The longest stop string that ends here."""
        return self._match[state]

    def hold(self, state: int) -> int:
        """Characters at the end that are a real prefix of some stop, so may still become it."""
        return self._hold[state]

    def _add(self, stop: str) -> None:
        state = 0
        for char in stop:
            nxt = self._next[state].get(char)
            if nxt is None:
                nxt = len(self._next)
                self._next[state][char] = nxt
                self._next.append({})
                self._fail.append(0)
                self._match.append(None)
                self._depth.append(self._depth[state] + 1)
                self._hold.append(0)
            state = nxt
        self._match[state] = stop

    def _link(self) -> None:
        """Failure links, breadth first: the longest proper suffix that is also a path from the root."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            fail = self._fail[state]
            if self._match[state] is None:
                self._match[state] = self._match[fail]
            self._hold[state] = self._depth[state] if self._next[state] else self._hold[fail]
            for char, child in self._next[state].items():
                self._fail[child] = self.step(fail, char)
                queue.append(child)


class StopStream:
    """One sequence's text on its way out.

    `matched` is the stop string that ended it, None while there is none. `include`: the stop itself is handed
    out.
    `min_tokens`: a stop completed by one of the first `min_tokens` tokens does not count (as for
    end-of-sequence).
    """

    def __init__(self, stops: StopSet, *, include: bool = False, min_tokens: int = 0) -> None:
        self.matched: str | None = None
        self._stops = stops
        self._include = include
        self._min_tokens = min_tokens
        self._state = 0
        self._held = ""

    def push(self, text: str, *, num_tokens: int) -> str:
        """Take text completed by generated token number `num_tokens` (counted from 1); returns what may go
        out.
        """
        if self.matched is not None:
            return ""
        if not self._stops.stops:
            return text
        armed = num_tokens > self._min_tokens
        buffer = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            self._state = self._stops.step(self._state, char)
            stop = self._stops.match(self._state)
            if armed and stop is not None:
                self.matched, self._held = stop, ""
                return buffer[: end if self._include else end - len(stop)]
        cut = len(buffer) - self._stops.hold(self._state)
        self._held = buffer[cut:]
        return buffer[:cut]

    def finish(self) -> str:
        """The sequence has ended without a stop string: returns what was held back."""
        held, self._held, self._state = self._held, "", 0
        return held


def begun(text: str, mark: str) -> int:
    """Length of the longest end of `text` that `mark` begins with: of a mark that may still be forming."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)
