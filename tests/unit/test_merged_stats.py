"""Statistics of several data-parallel groups read as those of one engine."""

from __future__ import annotations

from typing import Any

from ostinato.engine.front import merged_stats
from ostinato.graphs.stats import GraphStats
from ostinato.padding import StepMode, StepShape


def group(rows: dict[int, int], *, generated: int) -> dict[str, Any]:
    """A group that took a decode step of so many rows in buckets of a size."""
    stats = GraphStats()
    for padded, raw in rows.items():
        shape = StepShape(StepMode.DECODE, (raw,), bs=raw, padded_num_tokens=padded, padded_bs=padded)
        stats.count_step(shape, replay_s=0.0)
    return {
        "tokens": {"generated": generated},
        "scheduler": {"running": len(rows), "state": "x"},
        "graph": {"decode": stats.as_dict()},
        "expert_load": None,
    }


def test_rows_are_those_of_all_groups() -> None:
    groups = [group({4: 3}, generated=3), group({4: 1, 8: 7}, generated=8), group({}, generated=0)]
    before = [str(one) for one in groups]
    merged = merged_stats(groups)
    decode = merged["graph"]["decode"]
    assert (decode["real_rows"], decode["pad_rows"]) == (11, 1 + 3 + 1)
    assert (decode["keys"]["decode/4"]["real_rows"], decode["keys"]["decode/8"]["real_rows"]) == (4, 7)
    assert decode["replays"] == 1, "a step that groups take together is one"
    assert merged["tokens"]["generated"] == 11
    assert merged["scheduler"] == {"running": 3, "state": "x"}
    assert [str(one) for one in groups] == before, "what groups told is left as it is"
