"""`/metrics`: what was counted, as Prometheus reads it.

Names follow vLLM's under the prefix `ostinato_`; this engine's own stand beside them. Made anew for each scrape from
plain numbers. Counters that the engine process keeps (steps, rows, expert load) start again with it, which Prometheus
takes as a reset.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from ostinato import __version__
from ostinato.server.metrics import Histogram
from ostinato.server.service import Service

Rows = Mapping[Any, float]
Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Exposition(Collector):
    """Everything a scrape gets."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def describe(self) -> Iterable[Family]:
        return ()

    def collect(self) -> Iterator[Family]:
        yield from self._server()
        yield from self._latencies()
        yield from self._scheduler(self._service.client.stats.get("scheduler", {}))
        yield from self._steps(self._service.client.stats.get("graph", {}))
        yield from self._checks(self._service.client.stats.get("graph", {}))
        yield from self._experts(self._service.client.stats.get("expert_load"))

    def _family(self, kind: type[Any], name: str, text: str, rows: Rows, *labels: str) -> Family:
        family = kind(f"ostinato_{name}", text, labels=("model_name", *labels))
        for values, number in rows.items():
            family.add_metric((self._service.model_name, *values), number)
        assert isinstance(family, CounterMetricFamily | GaugeMetricFamily)
        return family

    def _counter(self, name: str, text: str, rows: Rows, *labels: str) -> Family:
        return self._family(CounterMetricFamily, name, text, rows, *labels)

    def _gauge(self, name: str, text: str, rows: Rows, *labels: str) -> Family:
        return self._family(GaugeMetricFamily, name, text, rows, *labels)

    def _server(self) -> Iterator[Family]:
        service, metrics = self._service, self._service.metrics
        yield self._gauge("info", "Version of the server", {(__version__,): 1}, "version")
        ready = float(service.client.state.value == "ready")
        yield self._gauge("engine_ready", "Whether the engine serves requests", {(): ready})
        yield self._counter(
            "engine_restarts", "Restarts of the engine process", {(): service.client.restarts}
        )
        yield self._gauge(
            "num_requests_in_flight", "Completions not yet answered", {(): service.client.in_flight}
        )
        yield self._gauge("server_tasks", "Tasks on the server's event loop", {(): len(asyncio.all_tasks())})
        rejected = sum(n for (_, status), n in metrics.http.items() if status == 429)
        yield self._counter("requests_rejected", "Requests answered 429", {(): rejected})
        yield self._counter(
            "prompt_tokens", "Prompt tokens of accepted requests", {(): metrics.prompt_tokens}
        )
        yield self._counter("generation_tokens", "Tokens generated", {(): metrics.generation_tokens})
        reasons = {(reason,): float(n) for reason, n in metrics.finish_reasons.items()}
        yield self._counter(
            "request_success", "Completions that ended, by reason", reasons, "finished_reason"
        )
        http = {(path, str(status)): float(n) for (path, status), n in metrics.http.items()}
        yield self._counter("http_requests", "HTTP requests answered", http, "path", "status")

    def _latencies(self) -> Iterator[Family]:
        metrics = self._service.metrics
        yield self._histogram("time_to_first_token_seconds", "From request to first token", metrics.ttft)
        yield self._histogram("inter_token_latency_seconds", "Between tokens of a completion", metrics.itl)
        yield self._histogram("e2e_request_latency_seconds", "From request to its last token", metrics.e2e)

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Family:
        family = HistogramMetricFamily(f"ostinato_{name}", text, labels=("model_name",))
        names = [*map(str, histogram.bounds), "+Inf"]
        rows = list(zip(names, accumulate(histogram.counts), strict=True))
        family.add_metric((self._service.model_name,), buckets=rows, sum_value=histogram.total)
        return family

    def _scheduler(self, scheduler: dict[str, Any]) -> Iterator[Family]:
        if not scheduler:
            return
        yield self._gauge(
            "num_requests_running", "Sequences in the running batch", {(): scheduler["running"]}
        )
        yield self._gauge("num_requests_waiting", "Sequences that wait to start", {(): scheduler["waiting"]})
        used = scheduler["kv_pages_used"] / max(scheduler["kv_pages_total"], 1)
        yield self._gauge("kv_cache_usage_perc", "Share of KV pages held, 1 is all", {(): used})
        cached, prefilled = scheduler.get("cached_tokens", 0), scheduler.get("prefill_tokens", 0)
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up", {(): cached + prefilled})
        yield self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache", {(): cached})
        yield self._counter(
            "num_preemptions", "Sequences sent back to the queue", {(): scheduler.get("retractions", 0)}
        )
        delays = self._service.client.stats.get("prefill_delay") or {}
        verdicts = {(reason,): float(number) for reason, number in delays.items()}
        yield self._counter("prefill_delayer", "Verdicts of the prefill delayer", verdicts, "verdict")

    def _steps(self, graph: dict[str, Any]) -> Iterator[Family]:
        steps: dict[tuple[str, ...], float] = {}
        rows: dict[tuple[str, ...], float] = {}
        advanced: dict[tuple[str, ...], float] = {}
        for kind, stats in graph.items():
            for key, counts in stats["keys"].items():
                bucket = key.partition("/")[2]  # "decode/8/variant": the kind of step has a label of its own
                for how in ("captures", "replays", "eager"):
                    steps[kind, bucket, how] = counts[how]
                for row in ("real", "pad"):
                    rows[kind, bucket, row] = counts[f"{row}_rows"]
                advanced[kind, bucket] = counts["advanced"]
        reasons = {(k, r): float(n) for k, g in graph.items() for r, n in g["eager_reasons"].items()}
        yield self._counter("steps", "Captures, replays and eager steps", steps, "kind", "bucket", "how")
        yield self._counter("step_rows", "Rows computed, real and padding", rows, "kind", "bucket", "rows")
        yield self._counter("eager_steps", "Eager steps by reason", reasons, "kind", "reason")
        yield self._counter(
            "advanced_steps", "Replays whose inputs were made on the device", advanced, "kind", "bucket"
        )

    def _checks(self, graph: dict[str, Any]) -> Iterator[Family]:
        def by_kind(name: str) -> Rows:
            values = {(kind,): stats[name] for kind, stats in graph.items()}
            return {kind: len(value) if isinstance(value, list) else value for kind, value in values.items()}

        yield self._counter(
            "shadow_checks", "Replays that were run again eagerly", by_kind("checked"), "kind"
        )
        yield self._counter("shadow_mismatches", "Those that differed", by_kind("mismatches"), "kind")
        yield self._gauge(
            "quarantined_buckets", "Buckets that run eagerly since", by_kind("quarantined"), "kind"
        )
        unused = by_kind("captured_never_replayed")
        yield self._gauge("graphs_never_replayed", "Graphs captured and not replayed so far", unused, "kind")

    def _experts(self, counts: list[list[int]] | None) -> Iterator[Family]:
        if counts is None:
            return
        tokens = {(str(i), str(e)): float(n) for i, row in enumerate(counts) for e, n in enumerate(row)}
        yield self._counter("expert_tokens", "Tokens routed to an expert", tokens, "layer", "expert")
        uneven = {(str(i),): max(row) * len(row) / sum(row) for i, row in enumerate(counts) if sum(row)}
        yield self._gauge("expert_load_imbalance", "Busiest expert over the mean", uneven, "layer")
