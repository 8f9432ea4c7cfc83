"""Waits briefly before a prefill until more data-parallel ranks can prefill too.

A rank that prefills alone keeps the others waiting at its side; when they prefill together they all gain. Ranks tell
each other their state once per scheduling pass; what follows is a pure function of what was told, then and before.

    begin ─▶ ask(True) from admission, at most one exchange ─▶ end: exchanges "cannot prefill" if nobody asked

Knows nothing of requests. Invariants: every rank takes part in every pass; no decision reads a local clock or a local
value; every wait is bounded by a number of passes, counted, and visible (docs/behaviour.md, section 6).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Literal

Status = Literal["all", "mixed", "none"]
RECENT_ATTEMPTS = 16
"""Prefill attempts whose largest batch is told to the others."""


@dataclass(frozen=True, slots=True)
class DelayerOptions:
    """max_delay_passes: passes that a prefill waits at most, all reasons together.

    low_watermark: share of KV tokens in use below which a rank that can prefill is not made to wait; None for never.
    wait_for_slots: also wait, when all can prefill, until as many request slots are free as a prefill lately took.
    queue_ratio: also wait until the queue holds so many requests for each running one, up to queue_cap; None for never.
    max_delay_ms: the longest such wait for the queue. quiet_us: also wait, when nothing runs, until the queue has not
    grown for so long; 0 for never.
    """

    max_delay_passes: int = 30
    low_watermark: float | None = None
    wait_for_slots: bool = False
    queue_ratio: float | None = None
    queue_cap: int = 16
    max_delay_ms: int = 5000
    quiet_us: int = 0
    max_running: int = 0


@dataclass(frozen=True, slots=True)
class PassState:
    """What one rank tells in a pass; all whole numbers."""

    prefillable: int = 0
    watermark_force: int = 0
    running_bs: int = 0
    max_prefill_bs: int = 0
    waiting_len: int = 0
    wait_elapsed_us: int = 0
    queue_quiet_us: int = 0

    def row(self) -> list[int]:
        return list(astuple(self))


STATE_WORDS = 7


@dataclass(frozen=True, slots=True)
class Verdict:
    """allow: whether prefills may start in this pass; reason: why, or why not; empty when nobody can prefill."""

    allow: bool
    reason: str = ""


class PrefillDelayer:
    """Decides passes. The same calls give the same verdicts, so one on each rank is as good as one for all."""

    def __init__(self, options: DelayerOptions | None = None) -> None:
        self.options = options or DelayerOptions()
        self.counts: Counter[str] = Counter()
        self._delayed = 0
        self._triggered = False

    def decide(self, states: Sequence[PassState]) -> Verdict:
        """The verdict of a pass from what all ranks told."""
        verdict = self._decide(states)
        if verdict.reason:
            self.counts[verdict.reason] += 1
        return verdict

    def _decide(self, states: Sequence[PassState]) -> Verdict:
        status = _status(states)
        if status == "none":
            self._reset()
            return Verdict(True)
        if any(state.watermark_force for state in states):
            self._reset()
            return Verdict(True, "token_watermark")
        reason = "delay" if status == "mixed" else self._wait_of_all(states)
        if reason:
            if self._delayed < self.options.max_delay_passes - 1:
                self._delayed += 1
                return Verdict(False, reason)
            self._reset()
            return Verdict(True, "wait_timeout")
        waited = self._delayed > 0
        self._reset()
        return Verdict(True, "wait_success" if waited else "no_wait")

    def _wait_of_all(self, states: Sequence[PassState]) -> str:
        """Why to wait although all can prefill, or nothing. The first pass with a cause is let through."""
        cause = self._cause(states)
        first = bool(cause) and not self._triggered
        self._triggered = bool(cause)
        return "" if first else cause

    def _cause(self, states: Sequence[PassState]) -> str:
        options = self.options
        running = max(state.running_bs for state in states)
        free, wanted_slots = options.max_running - running, max(state.max_prefill_bs for state in states)
        if options.wait_for_slots and running and free < wanted_slots:
            return "delay_slots"
        if options.queue_ratio is not None and running:
            wanted = min(running * options.queue_ratio, options.queue_cap)
            elapsed = max(state.wait_elapsed_us for state in states)
            if max(state.waiting_len for state in states) < wanted and elapsed < 1000 * options.max_delay_ms:
                return "delay_queue"
        if options.quiet_us and not running and min(s.queue_quiet_us for s in states) < options.quiet_us:
            return "delay_quiet"
        return ""

    def _reset(self) -> None:
        self._delayed = 0


def _status(states: Sequence[PassState]) -> Status:
    if min(state.prefillable for state in states):
        return "all"
    return "mixed" if max(state.prefillable for state in states) else "none"


@dataclass(frozen=True, slots=True)
class LocalLoad:
    """What a rank's scheduler knows when a pass begins. token_usage: share of its KV tokens in use."""

    running: int
    waiting: int
    token_usage: float


Exchange = Callable[[list[int]], list[list[int]]]
"""Gathers one row of STATE_WORDS whole numbers from every data-parallel rank."""


class PassExecutor:
    """One rank's side of the passes: `begin`, then `ask` any number of times, then `end`. `ask` fits `Scheduler`."""

    def __init__(self, delayer: PrefillDelayer, exchange: Exchange, clock: Callable[[], float]) -> None:
        self.delayer = delayer
        self._exchange = exchange
        self._clock = clock
        self._load = LocalLoad(0, 0, 0.0)
        self._verdict: Verdict | None = None
        self._attempts: deque[int] = deque(maxlen=RECENT_ATTEMPTS)
        self._waiting_since: float | None = None
        self._queue_changed = clock()
        self._last_waiting = 0

    def begin(self, load: LocalLoad) -> None:
        """A scheduling pass starts."""
        now = self._clock()
        if load.waiting > self._last_waiting:
            self._queue_changed = now
        if load.waiting == 0:
            self._waiting_since = None
        elif self._waiting_since is None:
            self._waiting_since = now
        self._last_waiting = load.waiting
        self._load, self._verdict = load, None

    def ask(self, prefillable: bool) -> bool:
        """Whether a prefill may start in this pass; the first question of a pass is put to all ranks."""
        if self._verdict is None:
            self._verdict = self._negotiate(prefillable)
        return self._verdict.allow

    def end(self, started: int) -> None:
        """The pass is over, `started` requests began to prefill; takes part in it if nobody has asked."""
        if self._verdict is None:
            self._verdict = self._negotiate(False)
        if started:
            self._attempts.append(started)

    def _negotiate(self, prefillable: bool) -> Verdict:
        load, watermark = self._load, self.delayer.options.low_watermark
        force = prefillable and watermark is not None and load.token_usage < watermark
        now = self._clock()
        waited = 0.0 if self._waiting_since is None else now - self._waiting_since
        state = PassState(
            prefillable=int(prefillable),
            watermark_force=int(force),
            running_bs=load.running,
            max_prefill_bs=max(self._attempts, default=0),
            waiting_len=load.waiting,
            wait_elapsed_us=int(waited * 1e6),
            queue_quiet_us=int((now - self._queue_changed) * 1e6),
        )
        return self.delayer.decide([PassState(*row) for row in self._exchange(state.row())])
