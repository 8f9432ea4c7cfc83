"""What the server counts and measures, for Prometheus (`/metrics`) and the dashboard.

Observations happen for every token of every stream, so they are a bisection and two additions; Prometheus objects are
made when somebody asks (`exposition.py`). Knows nothing of HTTP. Invariant: counters never go down, also across
restarts of the engine.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from typing import TYPE_CHECKING

from ostinato.engine.delta import SequenceDelta
from ostinato.server.dashboard.recorder import Recorder

if TYPE_CHECKING:
    from ostinato.server.replies import Reply

TTFT_BOUNDS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
)
ITL_BOUNDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
)
E2E_BOUNDS = (
    0.05,
    0.1,
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    40.0,
    50.0,
    60.0,
    120.0,
    240.0,
)


class Histogram:
    """Counts of values by upper bound; `counts` has one more entry than `bounds`, for what lies above."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Metrics:
    """Counters and histograms of one server; latencies go to the dashboard's recorder as well."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.ttft = Histogram(TTFT_BOUNDS)
        self.itl = Histogram(ITL_BOUNDS)
        self.e2e = Histogram(E2E_BOUNDS)
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.cached_tokens = 0
        self.finish_reasons: Counter[str] = Counter()
        self.http: Counter[tuple[str, int]] = Counter()

    def observe(self, reply: Reply, delta: SequenceDelta, now: float) -> None:
        """One delta, received at `now` (perf_counter)."""
        key = (delta.request_id, delta.index)
        last = reply.last_news.get(key)
        tokens = len(delta.token_ids)
        if last is None:
            self.ttft.observe(now - reply.started)
            self.recorder.observe_first_token(now - reply.started)
            self.cached_tokens += delta.num_cached_tokens
        elif tokens:
            self.itl.observe((now - last) / tokens)
            self.recorder.observe_next_token((now - last) / tokens)
        reply.last_news[key] = now
        self.generation_tokens += tokens
        if delta.finish_reason is not None:
            self.finished(delta.finish_reason)
            self.e2e.observe(now - reply.started)
            self.recorder.observe_end(now - reply.started)

    def finished(self, reason: str, number: int = 1) -> None:
        """Sequences that have ended."""
        self.finish_reasons[reason] += number
