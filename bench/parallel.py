"""What running over several ranks costs and gives: decode steps of the bench MoE, layouts alternated in one run.

    python bench/parallel.py [--model DIR] [--layouts 1,1,1 2,2,2 2,1,2] [--batch 8] [--steps 32] [--rounds 3]

A layout is tp,dp,ep; every layout has the same number of threads in all. For each: the median decode step, tokens per
second, and the time of the step sync on rank 0: the fastest tenth, without the waiting for a slower rank.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

from ostinato import LLM, SamplingParams
from ostinato.config import cache_dir
from ostinato.engine.engine import Engine


class TimedSync:
    """Stands in for a `StepSync` on rank 0: the same exchange, timed."""

    def __init__(self, sync: Any, group: Any) -> None:
        self._sync = sync
        self._group = group
        self.seconds: list[float] = []

    def gather(self, vote: Any) -> Any:
        began = time.perf_counter()
        step = self._sync.gather(vote)
        self.seconds.append(time.perf_counter() - began)
        return step


def _round(engine: Engine, batch: int, steps: int) -> list[float]:
    """Seconds of each decode step of a full batch."""
    params = SamplingParams(max_tokens=steps + 4, temperature=0, ignore_eos=True)
    for i in range(batch):
        engine.submit([(37 * i + j) % 1000 + 5 for j in range(16)], params)
    times, generated = [], 0
    while engine.has_work:
        began = time.perf_counter()
        outputs = engine.step()
        now = sum(len(o.outputs[0].token_ids) for o in outputs)
        if len(outputs) == batch and generated and now == generated + batch:
            times.append(time.perf_counter() - began)
        generated = now
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=str(cache_dir() / "bench" / "checkpoints" / "moe-r1"))
    parser.add_argument("--layouts", nargs="+", default=["1,1,1", "2,2,2", "2,1,2"])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    cores = os.cpu_count() or 1
    found: dict[str, list[float]] = {name: [] for name in options.layouts}
    syncs: dict[str, list[float]] = {name: [] for name in options.layouts}
    for _ in range(options.rounds):
        for name in options.layouts:
            tp, dp, ep = map(int, name.split(","))
            sizes = {"tp_size": tp, "dp_size": dp, "ep_size": ep}
            with LLM(
                options.model, threads=max(cores // tp, 1), progress=False, context_length=256, **sizes
            ) as llm:
                engine = llm.engine
                _round(engine, options.batch, 4)  # captures
                coordinator = engine.worker.coordinator
                timed = TimedSync(coordinator.sync, coordinator.world.world)
                object.__setattr__(coordinator, "sync", timed)
                found[name] += _round(engine, options.batch, options.steps)
                syncs[name] += timed.seconds
    print(f"{options.model}, batch {options.batch}, {cores} cores")
    print(f"{'tp,dp,ep':10}{'step ms':>10}{'tok/s':>10}{'sync us':>10}{'of step':>10}")
    for name in options.layouts:
        step = statistics.median(found[name])
        # The fastest tenth: what the exchange takes once all are there.
        sync = statistics.quantiles(syncs[name], n=10)[0]
        print(
            f"{name:10}{step * 1e3:>10.2f}{options.batch / step:>10.1f}{sync * 1e6:>10.1f}{sync / step:>10.2%}"
        )


if __name__ == "__main__":
    main()
