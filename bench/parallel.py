"""What running over several ranks costs and gives: decode steps of the bench MoE in several layouts, turn by turn.

    python bench/parallel.py [--model DIR] [--layouts 1,1,1 2,2,2 2,1,2] [--batches 8 1] [--steps 24] [--rounds 8]

A layout is tp,dp,ep; every layout has the same number of threads in all. All are loaded, then take turns. A turn counts
when nobody else used the machine meanwhile; ratios are taken within a round. Parts of a step are rank 0's. Results go
to bench/results/parallel.json and parallel.md. Linux only: it reads /proc.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from machine import Meter, describe, wait_until_quiet
from ostinato import LLM, SamplingParams
from ostinato.config import cache_dir
from ostinato.engine.engine import Engine
from ostinato.engine.front import FrontEngine
from ostinato.moe.gathered import GatheredDispatcher
from ostinato.moe.pairs import BoundPairs
from ostinato.parallel.shm import ShmGroup
from ostinato.parallel.step_sync import StepSync

RESULTS = Path(__file__).parent / "results"
QUIET = 0.1
"""Cores that others may use in a turn that counts."""
PARTS: dict[str, tuple[type, str]] = {
    "step sync": (StepSync, "gather"),
    "experts": (BoundPairs, "__call__"),
    "rows out": (GatheredDispatcher, "_gather"),
    "results home": (GatheredDispatcher, "_bring_home"),
    "waiting": (ShmGroup, "_sync"),
}
"""What is timed on rank 0. Waiting for the other ranks is part of the others, but for the experts."""


class Clock:
    """Seconds spent in the parts of a step since `reset`."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        for part, (owner, name) in PARTS.items():
            setattr(owner, name, self._timed(part, getattr(owner, name)))

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            began = time.perf_counter()
            result = function(*args)
            self.seconds[part].append(time.perf_counter() - began)
            return result

        return run

    def reset(self) -> None:
        self.seconds.clear()

    def a_step(self, steps: int) -> dict[str, float]:
        """Seconds of each part in a step; of the step sync the median."""
        found = {part: sum(times) / steps for part, times in self.seconds.items() if part != "step sync"}
        syncs = self.seconds.get("step sync")
        return found | ({"step sync": statistics.median(syncs)} if syncs else {})


def _steps(engine: Engine, batch: int, steps: int, begin: Callable[[], None] = lambda: None) -> list[float]:
    """Seconds of each decode step of a full batch; `begin` is called before the first."""
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
        elif len(outputs) == batch:
            begin()
        generated = now
    return times


def _rows(engine: Engine) -> list[dict[str, int]]:
    """Rows of experts by rank so far; empty in one process, where nobody counts them."""
    rows: list[dict[str, int]] = engine.stats().get("parallel", {}).get("expert_rows", [])
    return rows


def _turn(engine: Engine, clock: Clock, batch: int, steps: int) -> dict[str, Any]:
    pids = engine._processes.pids if isinstance(engine, FrontEngine) and engine._processes else ()
    before = _rows(engine)
    wait_until_quiet(QUIET, patience=5.0)
    meter = Meter.start(*pids)
    times = _steps(engine, batch, steps, clock.reset)
    others = meter.others()
    after = _rows(engine)
    rows = [{k: now[k] - then[k] for k in now} for then, now in zip(before, after, strict=True)]
    return {
        "step": statistics.median(times),
        "fastest": min(times),
        "parts": clock.a_step(len(times)),
        "others": others,
        "expert_rows": rows,
    }


def play(options: argparse.Namespace) -> dict[str, Any]:
    """All turns: [batch][round][layout]."""
    cores, clock = os.cpu_count() or 1, Clock()
    turns: dict[str, list[dict[str, Any]]] = {str(batch): [] for batch in options.batches}
    with ExitStack() as stack:
        engines = {}
        for name in options.layouts:
            tp, dp, ep = map(int, name.split(","))
            sizes = {"tp_size": tp, "dp_size": dp, "ep_size": ep}
            llm = LLM(options.model, threads=max(cores // tp, 1), progress=False, context_length=256, **sizes)
            engines[name] = stack.enter_context(llm).engine
            for batch in options.batches:
                _steps(engines[name], batch, 4)  # captures
        for _ in range(options.rounds):
            for batch in options.batches:
                turns[str(batch)].append(
                    {name: _turn(engine, clock, batch, options.steps) for name, engine in engines.items()}
                )
    return turns


def report(results: dict[str, Any]) -> str:
    """The turns as a page."""
    lines = [
        "# Several ranks on one machine",
        "",
        f"Written by `python bench/parallel.py`: decode steps of {results['model']}, "
        f"{results['machine']['cpus']} threads in all in every layout.",
        "Medians over rounds in which nobody else used the machine; ratios to the first layout within a round: median",
        "(least–most). Parts of a step are those of rank 0; waiting for other ranks is part of moving rows.",
    ]
    for batch, rounds in results["turns"].items():
        good = [r for r in rounds if all(turn["others"] < QUIET for turn in r.values())]
        lines += ["", f"## {batch} requests" if batch != "1" else "## 1 request", ""]
        lines += [f"{len(good)} of {len(rounds)} rounds count.", ""]
        if good:
            lines += _table(good)
    machine = results["machine"]
    lines += ["", f"{results['date']}, {machine['processor']}, {machine['cpus']} CPUs, {machine['system']}"]
    return "\n".join(lines) + "\n"


def _table(rounds: list[dict[str, Any]]) -> list[str]:
    first = next(iter(rounds[0]))
    lines = [
        "| tp, dp, ep | step ms | fastest ms | to one process | step sync | experts ms | moving rows ms | waiting ms | "
        "expert rows computed (fetched) by rank |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for name in rounds[0]:
        turns = [r[name] for r in rounds]
        ratios = [r[name]["step"] / r[first]["step"] for r in rounds]
        step = statistics.median(turn["step"] for turn in turns)
        parts = {
            part: statistics.median(turn["parts"].get(part, 0.0) for turn in turns) * 1e3 for part in PARTS
        }
        sync = f"{parts['step sync'] * 1e3:.0f} µs, {parts['step sync'] / step / 10:.2f} %"
        moving = parts["rows out"] + parts["results home"]
        rows = ", ".join(f"{one['computed']} ({one['fetched']})" for one in turns[-1]["expert_rows"])
        lines.append(
            f"| {name} | {step * 1e3:.1f} | {min(t['fastest'] for t in turns) * 1e3:.1f} | "
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f}) | "
            f"{sync if parts['step sync'] else '-'} | {parts['experts']:.1f} | {moving:.1f} | {parts['waiting']:.1f} | "
            f"{rows or '-'} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=str(cache_dir() / "bench" / "checkpoints" / "moe-r1"))
    parser.add_argument("--layouts", nargs="+", default=["1,1,1", "2,2,2", "2,1,2"])
    parser.add_argument("--batches", nargs="+", type=int, default=[8, 1])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    results = {
        "model": Path(options.model).name,
        "machine": describe(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "turns": play(options),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "parallel.json").write_text(json.dumps(results, indent=1) + "\n")
    page = report(results)
    (options.out / "parallel.md").write_text(page)
    print(page)


if __name__ == "__main__":
    main()
