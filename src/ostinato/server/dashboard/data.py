"""The JSON of `GET /dashboard/data?after=N`: everything the page draws, as typed records.

Plain values, encoded by msgspec; knows neither HTTP nor the engine. Invariant: times are Unix seconds, durations
seconds, shares numbers from 0 to 1, and None says "nothing was there to measure", which is not zero.
"""

from __future__ import annotations

import msgspec


class About(msgspec.Struct, frozen=True, kw_only=True):
    """What does not change while the server runs. `chat`: whether the model has a chat template."""

    model: str
    version: str
    started: float
    chat: bool
    family: str
    layers: int
    experts: int | None
    dtype: str
    backend: str
    ops: str
    threads: int
    max_running_requests: int


class Quantiles(msgspec.Struct, frozen=True):
    """Seconds, of what ended within one sample."""

    p50: float
    p90: float
    p99: float


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """About one second of serving. `number` counts samples from 1, without gaps.

    Tokens are per second: generated, computed in prefill, and taken from the prefix cache. `kv_used` and `kv_cached`
    are shares of all pages: held by requests, and kept for their prefix only. `ttft`, `itl` and `e2e` are the times
    to a request's first token, between its tokens, and to its end.
    """

    number: int
    time: float
    output_tokens: float
    prefill_tokens: float
    cached_tokens: float
    running: int
    waiting: int
    kv_used: float
    kv_cached: float
    ttft: Quantiles | None
    itl: Quantiles | None
    e2e: Quantiles | None


class Bucket(msgspec.Struct, frozen=True, kw_only=True):
    """Served steps of one padded size: how they ran, and their rows. `key` is spelled as in `Engine.stats()`.

    advanced: replays whose inputs were made on the device; checked: those that were run again eagerly, of which
    `mismatches` differed; quarantined: so its steps run eagerly.
    """

    key: str
    kind: str
    size: int
    captures: int
    replays: int
    advanced: int
    eager: int
    real_rows: int
    pad_rows: int
    checked: int
    mismatches: int
    quarantined: bool


class Graphs(msgspec.Struct, frozen=True):
    """Of all buckets: eager steps by reason, and graphs that were captured and have not replayed so far.

    sizes: steps by their real rows, for each kind, and `lists`, the buckets in use: what `ostinato bench buckets --from
    URL` plans by.
    """

    eager_reasons: dict[str, int]
    never_replayed: int
    sizes: dict[str, dict[str, int]]
    lists: dict[str, list[int]]


class ExpertLoad(msgspec.Struct, frozen=True):
    """Tokens that each expert was given, [layers][experts]: since the start, and in the last `recent_s` seconds."""

    total: list[list[int]]
    recent: list[list[int]]
    recent_s: float


class Totals(msgspec.Struct, frozen=True):
    """Since the engine started. `finished` counts answers by their reason."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    finished: dict[str, int]


class DashboardData(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer. `state` is one word for people: ready, starting, draining, engine lost.

    `samples` are those with a number above `after`, oldest first, as far back as the server remembers. The rest is as
    of the last sample; `totals` and `graphs` are None, and the lists are empty, before the first one.
    """

    about: About
    state: str
    now: float
    samples: list[Sample]
    totals: Totals | None
    buckets: list[Bucket]
    graphs: Graphs | None
    expert_load: ExpertLoad | None
