"""The dashboard's memory: rates, shares, quantiles and expert load, from made-up statistics and a clock set by hand."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ostinato.server.dashboard.data import About, DashboardData, Graphs, Quantiles
from ostinato.server.dashboard.recorder import KEPT_SAMPLES, Recorder

ABOUT = About(
    model="demo",
    version="0",
    started=1000.0,
    chat=True,
    family="qwen3_moe",
    layers=2,
    experts=3,
    dtype="bfloat16",
    backend="tape",
    ops="numba",
    threads=2,
    max_running_requests=32,
)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def stats(generated: int = 0, load: Any = None, **scheduler: int) -> dict[str, Any]:
    """Statistics as an engine gives them, one decode bucket and one prefill bucket."""
    rows: dict[str, Any] = {
        "captures": 1,
        "replays": 3,
        "advanced": 2,
        "eager": 0,
        "real_rows": 7,
        "pad_rows": 1,
    }
    rows |= {"checked": 2, "mismatches": 1, "quarantined": True, "something_new": 2}
    unused = dict.fromkeys(rows, 0) | {"captures": 1}
    graphs = {"eager_reasons": {"not captured": 2}, "captured_never_replayed": ["decode/16"]}
    graphs |= {"sizes": {"7": 1}}
    return {
        "tokens": {"prompt": 5, "generated": generated},
        "scheduler": {
            "running": 2,
            "waiting": 1,
            "kv_pages_used": 25,
            "kv_pages_cached": 50,
            "kv_pages_total": 100,
            **scheduler,
        },
        "graph": {
            "decode": graphs
            | {"real_rows": 7, "keys": {"decode/8": rows, "decode/16": unused, "decode/2": rows}},
            "prefill": {
                "real_rows": 40,
                "keys": {"extend/16": rows},
                "eager_reasons": {"not captured": 1, "quarantined": 4},
                "captured_never_replayed": [],
                "sizes": {},
            },
        },
        "buckets": {"decode": [8, 16], "prefill": [16], "plans": 0},
        "expert_load": load,
    }


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def recorder(clock: Clock) -> Recorder:
    return Recorder(ABOUT, clock=clock)


def test_before_the_first_sample_there_is_nothing(recorder: Recorder) -> None:
    data = recorder.data(state="starting")
    assert (data.samples, data.totals, data.buckets, data.expert_load) == ([], None, [], None)
    assert data.state == "starting"


def test_a_sample_holds_rates_and_shares(recorder: Recorder, clock: Clock) -> None:
    clock.now += 2.0
    recorder.sample(stats(generated=30, cached_tokens=8, finished_stop=4))
    data = recorder.data()
    sample = data.samples[0]
    assert (sample.number, sample.time) == (1, 1002.0)
    assert (sample.output_tokens, sample.prefill_tokens, sample.cached_tokens) == (15.0, 20.0, 4.0)
    assert (sample.running, sample.waiting, sample.kv_used, sample.kv_cached) == (2, 1, 0.25, 0.5)
    assert sample.ttft is sample.itl is sample.e2e is None
    assert data.totals is not None
    assert (data.totals.output_tokens, data.totals.finished) == (30, {"stop": 4})
    clock.now += 1.0
    recorder.sample(stats(generated=40, cached_tokens=8))
    assert recorder.data().samples[1].output_tokens == 10.0
    assert recorder.data().samples[1].cached_tokens == 0.0


def test_a_new_engine_counts_from_zero(recorder: Recorder, clock: Clock) -> None:
    for generated in (100, 7):
        clock.now += 1.0
        recorder.sample(stats(generated=generated))
    assert [sample.output_tokens for sample in recorder.data().samples] == [100.0, 7.0]


def test_times_belong_to_the_sample_they_fell_into(recorder: Recorder) -> None:
    for value in range(100, 0, -1):
        recorder.observe_next_token(float(value))
    recorder.observe_first_token(0.5)
    recorder.sample(stats())
    recorder.observe_end(3.0)
    recorder.sample(stats())
    first, second = recorder.data().samples
    assert first.itl == Quantiles(50.0, 90.0, 99.0)
    assert first.ttft == Quantiles(0.5, 0.5, 0.5)
    assert (first.e2e, second.ttft, second.itl) == (None, None, None)
    assert second.e2e == Quantiles(3.0, 3.0, 3.0)


def test_a_page_gets_what_it_has_not_seen(recorder: Recorder) -> None:
    for _ in range(KEPT_SAMPLES + 5):
        recorder.sample(stats())
    last = KEPT_SAMPLES + 5
    assert [s.number for s in recorder.data(last - 2).samples] == [last - 1, last]
    assert recorder.data(last).samples == []
    assert len(recorder.data(0).samples) == KEPT_SAMPLES
    assert len(recorder.data(last + 1).samples) == KEPT_SAMPLES, "a page that outlived another server"


def test_buckets_that_served_nothing_are_left_out(recorder: Recorder) -> None:
    recorder.sample(stats())
    buckets = recorder.data().buckets
    assert [(b.key, b.kind, b.size) for b in buckets] == [
        ("decode/2", "decode", 2),
        ("decode/8", "decode", 8),
        ("extend/16", "prefill", 16),
    ]
    assert (buckets[0].real_rows, buckets[0].pad_rows, buckets[0].replays) == (7, 1, 3)
    assert (buckets[0].advanced, buckets[0].checked, buckets[0].mismatches, buckets[0].quarantined) == (
        2,
        2,
        1,
        True,
    )
    assert recorder.data().graphs == Graphs(
        {"not captured": 3, "quarantined": 4},
        1,
        {"decode": {"7": 1}, "prefill": {}},
        {"decode": [8, 16], "prefill": [16]},
    )


def test_recent_expert_load_forgets_after_a_minute(recorder: Recorder, clock: Clock) -> None:
    for second in range(1, 101):
        clock.now += 1.0
        recorder.sample(stats(load=[[second, 0], [10 * second, 1]]))
    load = recorder.data().expert_load
    assert load is not None
    assert load.total == [[100, 0], [1000, 1]]
    assert load.recent_s == 60.0
    assert load.recent == [[60, 0], [600, 0]]
    recorder.sample(stats(load=[[3, 0], [2, 0]]))
    load = recorder.data().expert_load
    assert load is not None
    assert load.recent == load.total == [[3, 0], [2, 0]], "a new engine"


def test_the_record_is_json_and_back(recorder: Recorder) -> None:
    recorder.observe_end(1.5)
    recorder.sample(stats(load=[[1, 2, 3], [4, 5, 6]]))
    data = recorder.data()
    assert msgspec.json.decode(msgspec.json.encode(data), type=DashboardData) == data
