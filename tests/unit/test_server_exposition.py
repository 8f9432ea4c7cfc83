"""`/metrics` over made-up statistics: what the engine counts comes out under its name, with its labels."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from ostinato.config import EngineConfig, ServerConfig
from ostinato.server.exposition import Exposition
from ostinato.server.service import Service

KEYS = {"captures": 1, "replays": 7, "advanced": 5, "eager": 2, "real_rows": 30, "pad_rows": 4}
CHECKED = {"checked": 6, "mismatches": 1, "quarantined": ["decode/8"], "captured_never_replayed": ["a", "b"]}
UNCHECKED = {"checked": 0, "mismatches": 0, "quarantined": [], "captured_never_replayed": []}
STATS: dict[str, Any] = {
    "scheduler": {
        "running": 3,
        "waiting": 5,
        "kv_pages_used": 6,
        "kv_pages_total": 24,
        "cached_tokens": 30,
        "prefill_tokens": 70,
        "retractions": 2,
    },
    "graph": {
        "decode": {
            "keys": {"decode/8": KEYS, "decode/8/idle": KEYS | {"replays": 9}},
            "eager_reasons": {"too large": 2},
            **CHECKED,
        },
        "prefill": {"keys": {}, "eager_reasons": {}, **UNCHECKED},
    },
    "expert_load": [[1, 3], [0, 0]],
    "prefill_delay": {"delay": 4, "wait_success": 1},
}


def scrape(stats: dict[str, Any]) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    service = Service(EngineConfig(), ServerConfig(served_model_name='a "name"'))
    service.client.stats = stats

    async def text() -> str:
        return Exposition(service).text().decode()

    families = text_string_to_metric_families(asyncio.run(text()))
    return {
        (
            s.name.removeprefix("ostinato_"),
            frozenset(s.labels.items() - {("model_name", 'a "name"')}),
        ): s.value
        for family in families
        for s in family.samples
    }


def test_engine_statistics() -> None:
    found = scrape(STATS)

    def value(name: str, **labels: str) -> float:
        return found[name, frozenset(labels.items())]

    assert value("num_requests_running") == 3
    assert value("num_requests_waiting") == 5
    assert value("kv_cache_usage_perc") == 0.25
    assert value("prefix_cache_queries_total") == 100
    assert value("prefix_cache_hits_total") == 30
    assert value("num_preemptions_total") == 2
    assert value("steps_total", kind="decode", bucket="8", how="replays") == 7
    assert value("steps_total", kind="decode", bucket="8/idle", how="replays") == 9
    assert value("step_rows_total", kind="decode", bucket="8", rows="pad") == 4
    assert value("eager_steps_total", kind="decode", reason="too large") == 2
    assert value("advanced_steps_total", kind="decode", bucket="8") == 5
    assert value("shadow_checks_total", kind="decode") == 6
    assert value("shadow_mismatches_total", kind="decode") == 1
    assert value("shadow_mismatches_total", kind="prefill") == 0
    assert value("quarantined_buckets", kind="decode") == 1
    assert value("graphs_never_replayed", kind="decode") == 2
    assert value("expert_tokens_total", layer="0", expert="1") == 3
    assert value("expert_load_imbalance", layer="0") == 1.5
    assert ("expert_load_imbalance", frozenset({("layer", "1")})) not in found
    assert value("prefill_delayer_total", verdict="delay") == 4


def test_before_the_engine_is_there() -> None:
    found = scrape({})
    assert found["engine_ready", frozenset()] == 0
    assert ("num_requests_running", frozenset()) not in found
    dense = scrape(STATS | {"expert_load": None, "prefill_delay": None})
    assert not [key for key in dense if key[0].startswith(("expert", "prefill_delayer_total"))]


def test_the_documentation_lists_every_metric() -> None:
    text = (Path(__file__).parents[2] / "docs" / "http-api.md").read_text(encoding="utf-8")
    table = text.partition("## Metrics")[2]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    listed = {name for cell in cells for name in re.findall(r"`([a-z_0-9]+)(?:\{[a-z,_]*\})?`", cell)}
    suffixes = ("_bucket", "_count", "_sum")
    shown = {next((n.removesuffix(s) for s in suffixes if n.endswith(s)), n) for n, _ in scrape(STATS)}
    # Counters by label have no series before the first one is counted.
    assert listed - shown == {"http_requests_total", "request_success_total"}
    assert shown <= listed
