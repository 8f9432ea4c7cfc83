"""Prefill graph modes beside each other: one loaded model, a runner for each mode, turns in every round.

    python bench/prefill_modes.py --model DIR [--rounds 9]

Prints JSON: for each kind of step the median seconds of a mode, and the median over rounds of its ratio to the full
graph's turn in the same round, so that whatever else slows the machine slows both. Knows nothing of serving.
"""

from __future__ import annotations

import argparse
import json
import statistics
from time import perf_counter

import torch

from ostinato.config import EngineConfig
from ostinato.engine.batch import ForwardBatch, extend_batch
from ostinato.engine.launch import Parts, launch
from ostinato.engine.prefill_graph import PrefillGraph
from ostinato.padding import StepMode, decide_shape

CONTEXT, PAGE = 1024, 16
ALONE = "eager, unpadded"
STEPS = {
    "512 tokens": [(0, 512)],
    "64 tokens": [(0, 64)],
    "64 tokens behind 448": [(448, 64)],
    "8 requests of 8 behind 100": [(100, 8)] * 8,
    "50 tokens in bucket 64": [(0, 50)],
}
"""Kinds of steps: (cached tokens, new tokens) of each request."""


class Bench:
    """A worker and a prefill runner for each mode, all over its buffers."""

    def __init__(self, model: str) -> None:
        options = {"graph": "tape", "context_length": CONTEXT, "max_running_requests": 8, "page_size": PAGE}
        config = EngineConfig.of(model=model, progress=False, **options)
        self.parts: Parts = launch(config, lambda *args: None)
        worker = self.parts.worker
        self.runners = {mode.value: worker.prefill_runner(mode) for mode in PrefillGraph}
        allocator = self.parts.scheduler.kv.allocator
        self.rows = [worker.pool.take_row() for _ in range(8)]
        for row in self.rows:
            worker.pool.write_row(row, 0, allocator.allocate(CONTEXT // PAGE))

    def batch(self, requests: list[tuple[int, int]]) -> ForwardBatch:
        pool, rows = self.parts.worker.pool, self.rows[: len(requests)]
        slots = [
            pool.slots(row, torch.arange(start, start + count))
            for row, (start, count) in zip(rows, requests, strict=True)
        ]
        counts = [count for _, count in requests]
        ids = torch.arange(sum(counts)) % 1000 + 5
        return extend_batch(ids, counts, [start for start, _ in requests], rows, torch.cat(slots))

    def seconds(self, mode: str, batch: ForwardBatch) -> float:
        """One step; `ALONE` runs it eagerly without any pad."""
        rules, rows = self.parts.worker.rules, (batch.global_num_token_non_padded_cpu,)
        reject = mode if mode == ALONE else ""
        shape = decide_shape(StepMode.EXTEND, rows, batch.batch_size, rules, reject=reject)
        start = perf_counter()
        self.runners["eager" if reject else mode].run(shape, batch)
        return perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    bench, found = Bench(given.model), {}
    modes = [*bench.runners, ALONE]
    bench.seconds("full", bench.batch([(0, 512)]))
    for name, requests in STEPS.items():
        batch = bench.batch(requests)
        for mode in modes:  # captures
            bench.seconds(mode, batch)
        rounds = [{mode: bench.seconds(mode, batch) for mode in modes} for _ in range(given.rounds)]
        found[name] = {
            mode: {
                "ms": round(1000 * statistics.median(r[mode] for r in rounds), 3),
                "of full": round(statistics.median(r[mode] / r["full"] for r in rounds), 4),
            }
            for mode in modes
        }
    launches = {
        m: bench.runners[m].graph(k) for m in ("full", "breakable") for k in bench.runners[m].captured[:1]
    }
    found["one graph"] = {m: {"calls": len(g.trace), "launches": g.num_launches} for m, g in launches.items()}
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
