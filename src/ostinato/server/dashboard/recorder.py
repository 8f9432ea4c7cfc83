"""The dashboard's memory: ten minutes of samples, made of `Engine.stats()` and of the times the server saw.

    times of requests ─▶ observe_* ─┐
    Engine.stats(), each second ────┴▶ sample ─▶ data(after) ─▶ the page

Single-threaded, as the server's event loop is; starts no task of its own. Invariant: a counter that went back (the
engine was started again) counts from zero, so that no rate is negative.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ostinato.server.dashboard.data import (
    About,
    Bucket,
    DashboardData,
    ExpertLoad,
    Graphs,
    Quantiles,
    Sample,
    Totals,
)

KEPT_SAMPLES = 600
RECENT_S = 60.0  # span of the "recent" expert load
_LOAD_EVERY = 5  # samples between two kept snapshots of the expert load

_SHOWN = (
    "captures",
    "replays",
    "advanced",
    "eager",
    "real_rows",
    "pad_rows",
    "checked",
    "mismatches",
    "quarantined",
)

Load = npt.NDArray[np.int64]


class Recorder:
    """Collects what the page shows. `clock` gives Unix seconds.

    The server calls `observe_*` as requests go, `sample` about once a second with `Engine.stats()`, and `data` for
    each poll of a page.
    """

    def __init__(self, about: About, *, clock: Callable[[], float] = time.time) -> None:
        self.about = about
        self._clock = clock
        self._samples: deque[Sample] = deque(maxlen=KEPT_SAMPLES)
        self._number = 0
        self._then = clock()
        self._counters: dict[str, int] = {}
        self._ttft: list[float] = []
        self._itl: list[float] = []
        self._e2e: list[float] = []
        self._totals: Totals | None = None
        self._buckets: list[Bucket] = []
        self._graphs: Graphs | None = None
        self._loads: deque[tuple[float, Load]] = deque()
        self._load: ExpertLoad | None = None

    # ---- while requests go ----

    def observe_first_token(self, seconds: float) -> None:
        """From a request's arrival to its first token."""
        self._ttft.append(seconds)

    def observe_next_token(self, seconds: float) -> None:
        """Between two tokens of an answer."""
        self._itl.append(seconds)

    def observe_end(self, seconds: float) -> None:
        """From a request's arrival to its end."""
        self._e2e.append(seconds)

    # ---- each second ----

    def sample(self, stats: Mapping[str, Any]) -> None:
        """Add a sample of the time since the last one. `stats`: `Engine.stats()`."""
        now = self._clock()
        elapsed = max(now - self._then, 1e-3)
        self._then = now
        self._number += 1
        scheduler, pages = stats["scheduler"], max(stats["scheduler"]["kv_pages_total"], 1)
        counters = {
            "output": stats["tokens"]["generated"],
            "prefill": stats["graph"]["prefill"]["real_rows"],
            "cached": scheduler.get("cached_tokens", 0),
        }
        rates = {name: self._since(name, value) / elapsed for name, value in counters.items()}
        self._counters = counters
        self._samples.append(
            Sample(
                number=self._number,
                time=now,
                output_tokens=rates["output"],
                prefill_tokens=rates["prefill"],
                cached_tokens=rates["cached"],
                running=scheduler["running"],
                waiting=scheduler["waiting"],
                kv_used=scheduler["kv_pages_used"] / pages,
                kv_cached=scheduler["kv_pages_cached"] / pages,
                ttft=_drain(self._ttft),
                itl=_drain(self._itl),
                e2e=_drain(self._e2e),
            )
        )
        self._totals = _totals(stats)
        self._buckets = _buckets(stats["graph"])
        self._graphs = _graphs(stats["graph"], stats["buckets"])
        self._note_load(now, stats["expert_load"])

    def _since(self, name: str, value: int) -> int:
        before = self._counters.get(name, 0)
        return value - before if value >= before else value

    def _note_load(self, now: float, counts: list[list[int]] | None) -> None:
        if counts is None:
            self._load = None
            return
        load = np.asarray(counts, dtype=np.int64)
        if self._loads and (load < self._loads[-1][1]).any():
            self._loads.clear()
        if not self._loads:  # the first one, or a new engine: everything it counted is recent
            self._loads.append((now, np.zeros_like(load)))
        if self._number % _LOAD_EVERY == 0:
            self._loads.append((now, load))
        while len(self._loads) > 1 and now - self._loads[1][0] >= RECENT_S:
            self._loads.popleft()
        start, before = self._loads[0]
        self._load = ExpertLoad(counts, (load - before).tolist(), now - start)

    # ---- each poll ----

    def data(self, after: int = 0, *, state: str = "ready") -> DashboardData:
        """What a page gets that has the samples up to number `after`.

        A number that was never given out means another server's page: it gets everything.
        """
        if after > self._number:
            after = 0
        return DashboardData(
            about=self.about,
            state=state,
            now=self._clock(),
            samples=[sample for sample in self._samples if sample.number > after],
            totals=self._totals,
            buckets=self._buckets,
            graphs=self._graphs,
            expert_load=self._load,
        )


def _drain(seconds: list[float]) -> Quantiles | None:
    """Nearest-rank quantiles of the list, which is emptied."""
    if not seconds:
        return None
    ordered, count = sorted(seconds), len(seconds)
    seconds.clear()
    p50, p90, p99 = (ordered[-(-count * percent // 100) - 1] for percent in (50, 90, 99))
    return Quantiles(p50, p90, p99)


def _totals(stats: Mapping[str, Any]) -> Totals:
    counts = stats["scheduler"]
    return Totals(
        stats["tokens"]["prompt"],
        stats["tokens"]["generated"],
        counts.get("cached_tokens", 0),
        {
            name.removeprefix("finished_"): count
            for name, count in counts.items()
            if name.startswith("finished_")
        },
    )


def _buckets(graph: Mapping[str, Mapping[str, Any]]) -> list[Bucket]:
    """Buckets that served a step, decode first, then by size."""
    buckets = []
    for kind in ("decode", "prefill"):
        for key, counts in graph[kind]["keys"].items():
            if counts["real_rows"] + counts["pad_rows"]:
                shown = {name: counts[name] for name in _SHOWN}
                buckets.append(Bucket(key=key, kind=kind, size=int(key.split("/")[1]), **shown))
    return sorted(buckets, key=lambda bucket: (bucket.kind, bucket.size, bucket.key))


def _graphs(graph: Mapping[str, Mapping[str, Any]], buckets: Mapping[str, Any]) -> Graphs:
    reasons: Counter[str] = Counter()
    for stats in graph.values():
        reasons.update(stats["eager_reasons"])
    unused = sum(len(stats["captured_never_replayed"]) for stats in graph.values())
    sizes = {kind: stats["sizes"] for kind, stats in graph.items()}
    return Graphs(dict(reasons), unused, sizes, {kind: buckets[kind] for kind in graph})
