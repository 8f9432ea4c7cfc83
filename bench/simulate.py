"""What many ranks would do, by simulation: no model runs, but the scheduler, the router, the PrefillDelayer and the
placement of experts are the engine's own.

    python bench/simulate.py [--ranks 8 32 128 256] [--requests 24] [--out bench/results]

dp = ep = the number of ranks. Costs of a row and of an expert's weights are measured on this machine at the start, with
the engine's kernels; a step takes as long as its slowest rank. Requests arrive at random times, faster than they can be
served, with random lengths; experts are as popular as Zipf's law has it, in another order in each layer. The four lines
are with and without PrefillDelayer and EPLB. Writes simulation.md and simulation.svg.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from ostinato.config import cache_dir
from ostinato.engine.plan import StepPlan
from ostinato.engine.prefill_delayer import DelayerOptions, PassState, PrefillDelayer
from ostinato.engine.request import Request, SamplingParams
from ostinato.engine.residency import Residency
from ostinato.engine.router import Router
from ostinato.engine.scheduler import Scheduler, SchedulerOptions
from ostinato.engine.sequence import Sequence, SequenceState
from ostinato.kv.pages import PageAllocator
from ostinato.kv.pool import KVLayout, KVPool
from ostinato.kv.radix import RadixCache
from ostinato.moe.balance import Slots, balance
from ostinato.ops.cpu.opset import open_numba_ops

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, LAYERS = 1024, 512, 256, 8, 8
PAGE, CONTEXT, MOST_RUNNING = 16, 1024, 32
VARIANTS = ("neither", "delayer", "EPLB", "both")
COLOURS = ("#94a3b8", "#0f766e", "#c2410c", "#1d4ed8")


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds: of a row outside the experts, of a pair (row, expert), of reading one expert, of a collective."""

    row: float
    pair: float
    expert: float
    collective: float = 50e-6


def measure_costs() -> Costs:
    """By the CPU kernels, one thread, one layer."""
    ops = open_numba_ops(num_threads=1, cache_dir=cache_dir() / "kernels")
    held, rows = 32, 256
    experts = ops.pack_experts(
        torch.randn(held, 2 * INTERMEDIATE, HIDDEN).bfloat16(),
        torch.randn(held, HIDDEN, INTERMEDIATE).bfloat16(),
    )
    dense = ops.pack_linear(torch.randn(4 * HIDDEN, HIDDEN).bfloat16())
    x, out = torch.randn(rows, HIDDEN).bfloat16(), torch.empty(rows, HIDDEN)
    wide, weights = torch.empty(rows, 4 * HIDDEN).bfloat16(), torch.ones(rows, 1)

    def seconds(call: Callable[[], None]) -> float:
        call()
        times = []
        for _ in range(5):
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
        return min(times)

    def pairs(each: int) -> float:
        ids = torch.arange(held).repeat(each).int().unsqueeze(1)
        n = held * each
        return seconds(lambda: ops.moe_experts(x[:n], weights[:n], ids, experts, False, out[:n]))

    few, many = pairs(1), pairs(8)
    pair = max((many - few) / (held * 7), 1e-7)
    return Costs(
        row=seconds(lambda: ops.linear(x, dense, wide)) / rows, pair=pair, expert=max(few / held - pair, 1e-7)
    )


@dataclass
class Rank:
    """One data-parallel rank: the engine's scheduler over a small pool."""

    scheduler: Scheduler
    verdict: list[bool]

    @classmethod
    def make(cls) -> Rank:
        layout = KVLayout(1, 1, 1, torch.float32, PAGE)
        num_pages = MOST_RUNNING * CONTEXT // PAGE // 2
        pool = KVPool(
            layout, num_pages=num_pages, max_requests=MOST_RUNNING, max_pages_per_request=CONTEXT // PAGE + 1
        )
        allocator = PageAllocator(num_pages, PAGE)
        residency = Residency(allocator, RadixCache(allocator, enabled=False), pool)
        verdict = [True]
        options = SchedulerOptions(MOST_RUNNING, 2048, CONTEXT)
        return cls(Scheduler(options, residency, lambda _: verdict[0]), verdict)

    def state(self) -> PassState:
        """What it tells before a pass; with pages to spare, whoever waits can prefill."""
        running, waiting = len(self.scheduler.running), len(self.scheduler.waiting)
        return PassState(int(waiting > 0 and running < MOST_RUNNING), 0, running, 0, waiting)


@dataclass
class Result:
    tokens_per_second: float
    expert_evenness: float
    rank_evenness: float
    first_token_s: float
    expert_share: float  # of the time
    rounds: int
    delays: dict[str, int]


@dataclass
class Experts:
    """Popularity of experts by layer, and where they lie; with EPLB, placed anew by what was measured."""

    ranks: int
    eplb: bool
    rng: np.random.Generator
    popularity: list[np.ndarray] = field(init=False)
    slots: list[Slots] = field(init=False)
    counts: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        zipf = 1.0 / np.arange(1, EXPERTS + 1) ** 0.6
        self.popularity = [self.rng.permutation(zipf / zipf.sum()) for _ in range(LAYERS)]
        extra = self.ranks // 4 if self.ranks > 4 else self.ranks
        physical = -(-(EXPERTS + (extra if self.eplb else 0)) // self.ranks) * self.ranks
        plain = balance([1] * EXPERTS, physical, self.ranks).slots if self.eplb else tuple(range(EXPERTS))
        self.slots = [plain] * LAYERS
        # The engine has served before: the first placement goes by load that was measured already.
        self.counts = np.array([self.rng.multinomial(100_000, p) for p in self.popularity])
        self.rebalance()

    def step(self, rows: int, costs: Costs) -> tuple[float, float]:
        """(seconds, evenness of the ranks' pairs) of the experts of one step."""
        seconds, even = 0.0, []
        for layer in range(LAYERS):
            pairs = self.rng.multinomial(rows * TOP_K, self.popularity[layer])
            self.counts[layer] += pairs
            slots = np.array(self.slots[layer])
            share = pairs[slots] / np.bincount(slots, minlength=EXPERTS)[slots]
            by_rank = share.reshape(self.ranks, -1)
            work = by_rank.sum(1) * costs.pair + (by_rank > 0).sum(1) * costs.expert
            seconds += float(work.max()) + 2 * costs.collective
            even.append(float(by_rank.sum(1).mean() / by_rank.sum(1).max()))
        return seconds, statistics.mean(even)

    def rebalance(self) -> None:
        if self.eplb:
            self.slots = [
                balance(
                    self.counts[layer].tolist(), len(self.slots[layer]), self.ranks, self.slots[layer]
                ).slots
                for layer in range(LAYERS)
            ]


def simulate(ranks: int, requests: int, costs: Costs, *, delayer: bool, eplb: bool, seed: int = 0) -> Result:
    """`requests` for each rank; every scheduler steps in every round, as in the engine."""
    rng = np.random.default_rng(seed)
    total = ranks * requests
    prompts = np.clip(rng.lognormal(5.3, 0.6, total), 16, 512).astype(int)
    answers = np.clip(rng.lognormal(3.8, 0.6, total), 4, 200).astype(int)
    experts = Experts(ranks, eplb, rng)
    # Faster than one request at a time could be served, so that batches form.
    rate = 4 * ranks / (float(np.mean(answers)) * LAYERS * (costs.row + TOP_K * (costs.pair + costs.expert)))
    arrivals = np.cumsum(rng.exponential(1.0 / rate, total))
    everybody, router = [Rank.make() for _ in range(ranks)], Router(ranks)
    waits = PrefillDelayer(DelayerOptions(10)) if delayer else None
    now, sent, done, generated = 0.0, 0, 0, 0
    first: dict[Sequence, float] = {}
    came: dict[Sequence, float] = {}
    expert_even: list[float] = []
    rank_even: list[float] = []
    rounds, expert_s = 0, 0.0
    while done < total:
        while sent < total and arrivals[sent] <= now:
            name, ids = f"r{sent}", tuple([sent % 997] * int(prompts[sent]))
            params = SamplingParams(max_tokens=int(answers[sent]), temperature=0)
            sequence = Sequence(Request(name, ids, params), 0, sent, 0, PAGE, int(answers[sent]), frozenset())
            everybody[router.route(name, ids)].scheduler.submit(sequence)
            came[sequence] = float(arrivals[sent])
            sent += 1
        if waits is not None:
            allowed = waits.decide([rank.state() for rank in everybody]).allow
            for rank in everybody:
                rank.verdict[0] = allowed
        plans: list[StepPlan | None] = [rank.scheduler.schedule() for rank in everybody]
        rows = np.array([0 if plan is None else plan.num_tokens for plan in plans])
        if not rows.any():
            now = max(now, float(arrivals[sent])) if sent < total else now + 1e-3
            continue
        seconds, even = experts.step(int(rows.sum()), costs)
        expert_s += seconds
        now += seconds + float(rows.max()) * costs.row * LAYERS + costs.collective
        expert_even.append(even)
        rank_even.append(float(rows.mean() / rows.max()))
        for rank, plan in zip(everybody, plans, strict=True):
            if plan is None:
                continue
            sampled = {row.sequence: 1 for row in plan.rows if row.samples}
            for sequence in sampled:
                first.setdefault(sequence, now)
            generated += len(sampled)
            for sequence in rank.scheduler.commit(plan, sampled):
                assert sequence.state is SequenceState.FINISHED
                router.finish(sequence.request.request_id)
                done += 1
        rounds += 1
        if rounds % 10 == 0:
            experts.rebalance()
    waited = [first[s] - came[s] for s in first]
    return Result(
        generated / now,
        statistics.mean(expert_even),
        statistics.mean(rank_even),
        statistics.median(waited),
        expert_s / now,
        rounds,
        {} if waits is None else dict(waits.counts),
    )


def draw(sizes: list[int], found: dict[str, list[Result]]) -> str:
    """Two panels over the number of ranks: tokens a second of each rank, and evenness of experts' work."""
    panels: tuple[tuple[str, Callable[[Result, int], float]], ...] = (
        ("tokens a second, of each rank", lambda r, n: r.tokens_per_second / n),
        ("even work of experts (mean / most)", lambda r, n: r.expert_evenness),
    )
    font = 'font-family="system-ui, sans-serif" font-size="12" fill="#6b7280"'
    parts = ['<svg xmlns="http://www.w3.org/2000/svg" width="760" height="300" viewBox="0 0 760 300">']
    for p, (title, value) in enumerate(panels):
        left, top, width, height = 60 + 370 * p, 40, 300, 190
        most = max(value(r, n) for rows in found.values() for r, n in zip(rows, sizes, strict=True)) * 1.1
        parts.append(f'<text x="{left}" y="24" {font}>{title}</text>')
        parts.append(f'<path d="M{left} {top}v{height}h{width}" fill="none" stroke="#9ca3af"/>')
        for tick in (0.0, 0.5, 1.0):
            y = top + height * (1 - tick)
            parts.append(
                f'<text x="{left - 8}" y="{y + 4:.0f}" text-anchor="end" {font}>{most * tick:.3g}</text>'
            )
        xs = [left + width * (i + 0.5) / len(sizes) for i in range(len(sizes))]
        for x, n in zip(xs, sizes, strict=True):
            parts.append(f'<text x="{x:.0f}" y="{top + height + 18}" text-anchor="middle" {font}>{n}</text>')
        for colour, rows in zip(COLOURS, found.values(), strict=True):
            ys = [top + height * (1 - value(r, n) / most) for r, n in zip(rows, sizes, strict=True)]
            line = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True))
            parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
    for i, (colour, name) in enumerate(zip(COLOURS, found, strict=True)):
        x = 60 + 150 * i
        parts.append(f'<path d="M{x} 280h24" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{x + 30}" y="284" {font}>{name}</text>')
    parts.append(f'<text x="410" y="252" text-anchor="middle" {font}>ranks (dp = ep)</text></svg>')
    return "\n".join(parts) + "\n"


def table(sizes: list[int], found: dict[str, list[Result]], costs: Costs, requests: int) -> str:
    """The same numbers as text."""
    lines = [
        "# Many ranks, simulated",
        "",
        "Written by `python bench/simulate.py`. **A simulation:** no model ran, no rank but this process; the",
        "scheduler, the router, the PrefillDelayer and the expert placement are the engine's own. Measured on one",
        f"core: a row outside the experts {costs.row * 1e6:.1f} µs, a pair (row, expert) {costs.pair * 1e6:.1f} µs,",
        f"reading an expert {costs.expert * 1e6:.1f} µs; a collective is taken as {costs.collective * 1e6:.0f} µs.",
        f"{EXPERTS} experts, {TOP_K} for each row, {LAYERS} layers,",
        f"{requests} requests for each rank.",
        "",
        "![Throughput and evenness](simulation.svg)",
        "",
        "| ranks | variant | tokens/s | of each rank | experts even | ranks even | time in experts | first token, s |",
        "| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for i, n in enumerate(sizes):
        for name, rows in found.items():
            r = rows[i]
            lines.append(
                f"| {n} | {name} | {r.tokens_per_second:.0f} | {r.tokens_per_second / n:.1f} "
                f"| {r.expert_evenness:.2f} "
                f"| {r.rank_evenness:.2f} | {r.expert_share:.0%} | {r.first_token_s:.2f} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 32, 128, 256])
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results"))
    options = parser.parse_args()
    costs = measure_costs()
    found: dict[str, list[Result]] = {name: [] for name in VARIANTS}
    for n in options.ranks:
        for i, name in enumerate(VARIANTS):
            result = simulate(n, options.requests, costs, delayer=bool(i & 1), eplb=bool(i & 2))
            found[name].append(result)
            print(n, name, json.dumps(vars(result)), flush=True)
    options.out.mkdir(exist_ok=True)
    (options.out / "simulation.md").write_text(table(options.ranks, found, costs, options.requests))
    (options.out / "simulation.svg").write_text(draw(options.ranks, found))


if __name__ == "__main__":
    main()
