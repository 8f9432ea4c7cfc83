"""What buckets cost on this machine: of a padded row, a graph, and a step without one, measured on a loaded engine.

Knows the engine's worker, whose steps it runs on dummies in the trash page. Runs that are compared take turns.
Invariant: the worker's own statistics and graphs are as before when it is done.
"""

from __future__ import annotations

import statistics
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import torch

from ostinato.engine.batch import capture_batch
from ostinato.engine.worker import Worker
from ostinato.graphs import GraphRunner
from ostinato.graphs.planner import Costs
from ostinato.padding import StepMode, StepShape

ROUNDS = 25


def measured_costs(worker: Worker) -> dict[str, Costs]:
    """Seconds, by kind of step."""
    rules = worker.rules
    wide = rules.decode.largest
    decode = [StepShape(StepMode.DECODE, (n,), n, width, width) for n, width in ((1, 1), (1, wide))]
    wide = rules.extend.largest
    half, slots = max(wide // 2, 1), rules.max_extend_bs or 1
    extend = [StepShape(StepMode.EXTEND, (half,), 1, width, slots) for width in (half, wide)]
    return {
        "decode": _costs(worker.decode, *decode, padded=rules.decode.largest - 1),
        "prefill": _costs(worker.prefill, *extend, padded=wide - half),
    }


def _costs(runner: GraphRunner[Any, Any], exact: StepShape, wide: StepShape, *, padded: int) -> Costs:
    before = runner.captured
    batch = capture_batch(exact)
    try:
        with runner.uncounted():
            runner.run(wide, batch)
            captures = [_captured_anew(runner, exact, batch) for _ in range(5)]
            held = _bytes_of_a_graph(runner, exact, batch)
            runs: list[Callable[[], object]] = [
                lambda: runner.run(exact, batch),
                lambda: runner.run(wide, batch),
                lambda: runner.run(exact, batch, reject="measured"),
            ]
            times: list[list[float]] = [[] for _ in runs]
            for _ in range(ROUNDS):
                for seen, run in zip(times, runs, strict=True):
                    seen.append(_seconds(run))
    finally:
        for key in runner.captured:
            if key not in before:
                runner.drop(key)
    capture = statistics.median(captures)
    replay, with_pads, eager = (statistics.median(seen) for seen in times)
    # Noise may make the better of two look the worse one; a cost below nothing would plan nonsense.
    return Costs(
        pad_row=max(0.0, with_pads - replay) / max(padded, 1),
        eager=max(0.0, eager - replay),
        graph=max(0.0, capture - replay),
        graph_bytes=held,
        capture_s=capture,
    )


def _bytes_of_a_graph(runner: GraphRunner[Any, Any], shape: StepShape, batch: Any) -> int:
    """What a graph keeps: objects and launch blocks on the host, and what the device's allocator had to reserve."""
    device = torch.cuda.is_available()
    runner.drop(shape.key)
    tracemalloc.start()
    try:
        before, reserved = tracemalloc.get_traced_memory()[0], torch.cuda.memory_reserved() if device else 0
        runner.run(shape, batch)
        host = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    return max(0, host) + (max(0, torch.cuda.memory_reserved() - reserved) if device else 0)


def _captured_anew(runner: GraphRunner[Any, Any], shape: StepShape, batch: Any) -> float:
    runner.drop(shape.key)
    return _seconds(lambda: runner.run(shape, batch))


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
