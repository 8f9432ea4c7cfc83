"""Each CPU kernel's speed beside what the machine can do at the same moment.

Every round measures the ceilings (reading memory, multiply-adds in registers) and all kernels in turn; a kernel's
share is the median over the rounds of its ratio to the ceiling of the same round, where the ceiling of a kernel is
the slower of moving its bytes and doing its arithmetic. The last line is JSON.

    python bench/kernels.py [--rounds 7] [--threads 2] [--isa portable] [--only "moe_cases int8"]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from ostinato.ops.cpu.ceilings import arithmetic_ceiling, read_ceiling
from ostinato.ops.cpu.experts import ExpertWeights, MoeExperts
from ostinato.ops.cpu.huge_pages import prefer_huge_pages
from ostinato.ops.cpu.launch import Launch, Runtime, open_runtime
from ostinato.ops.cpu.linear import Linear, LinearWeights
from ostinato.ops.cpu.packing import empty_panels, pack_bias
from ostinato.ops.cpu.scratch import Scratch

COLD_BYTES = 256 * 2**20  # weights a kernel walks through, so that none is in a cache when its turn comes
NAMES = {torch.bfloat16: "bf16", torch.int8: "int8"}
EXPERTS, SLOTS, HIDDEN, INTERMEDIATE = 64, 8, 1024, 512


@dataclass(frozen=True, slots=True)
class Case:
    """A kernel over launches that take turns; bytes of weights and operations of one launch, on average."""

    name: str
    dtype: torch.dtype
    launches: tuple[Launch, ...]
    num_bytes: float
    operations: float


def seconds(runs: Iterable[Callable[[], None]]) -> float:
    """One pass over `runs`: no repetition, which would find caches warm, and no choice among passes."""
    start = time.perf_counter()
    for run in runs:
        run()
    return time.perf_counter() - start


def linear_cases(runtime: Runtime, dtype: torch.dtype) -> Iterator[Case]:
    kernel = Linear(runtime, Scratch())
    for rows, columns in ((1024, 1024), (576, 1536), (32768, 1024)):
        copies = max(1, COLD_BYTES // (rows * columns * dtype.itemsize))
        panels = [empty_panels(1, rows, columns, dtype) for _ in range(copies)]
        for panel in panels:
            panel.words.fill_(0x3C003C00)
        weights = [LinearWeights(panel, pack_bias(None, panel), torch.float32) for panel in panels]
        for m in (1, 4, 8, 16, 32, 64, 512):
            if m == 512 and rows > 1024:
                continue
            x = torch.randn(m, columns).bfloat16()
            out = torch.empty(m, rows, dtype=torch.float32)
            launches = tuple(kernel.bind(x, weight, out) for weight in weights[: 16 if m > 64 else None])
            size = rows * columns
            yield Case(
                f"linear {NAMES[dtype]} {rows}x{columns} M={m}",
                dtype,
                launches,
                dtype.itemsize * size,
                2 * size * m,
            )


def moe_cases(runtime: Runtime, dtype: torch.dtype) -> Iterator[Case]:
    kernel = MoeExperts(runtime, Scratch())
    layers = []
    for _ in range(2):  # taking turns, so that no launch finds its experts in a cache
        gate_up = empty_panels(EXPERTS, 2 * INTERMEDIATE, HIDDEN, dtype, gated=True)
        down = empty_panels(EXPERTS, HIDDEN, INTERMEDIATE, dtype)
        for panels in (gate_up, down):
            panels.words.fill_(0x3C003C00)
        layers.append(ExpertWeights(gate_up, down))
    size = 3 * HIDDEN * INTERMEDIATE
    for rows in (1, 5, 8, 32, 64, 256, 512, 2048):
        launches, active = [], 0
        for turn in range(8 if rows < 256 else 2):
            draw = torch.Generator().manual_seed(turn)
            ids = torch.rand(rows, EXPERTS, generator=draw).topk(SLOTS).indices.int()
            if rows == 1:  # all different experts
                ids = torch.arange(SLOTS, dtype=torch.int32).view(1, SLOTS) + turn * SLOTS
            x, weights = torch.randn(rows, HIDDEN).bfloat16(), torch.rand(rows, SLOTS)
            out = torch.empty(rows, HIDDEN, dtype=torch.bfloat16)
            launches.append(kernel.bind(x, weights, ids, layers[turn % 2], False, out))
            active += len(set(ids.flatten().tolist()))
        num_bytes = dtype.itemsize * size * active / len(launches)
        yield Case(
            f"moe {NAMES[dtype]} rows={rows}", dtype, tuple(launches), num_bytes, 2 * size * rows * SLOTS
        )


def measure(runtime: Runtime, cases: list[Case], rounds: int) -> list[dict[str, float | str]]:
    buffer = torch.empty(2 * COLD_BYTES + 8192, dtype=torch.uint8)
    prefer_huge_pages(buffer)
    buffer = buffer[-buffer.data_ptr() % 64 :].zero_()
    read, read_bytes = read_ceiling(runtime, buffer)
    arithmetic = {dtype: arithmetic_ceiling(runtime, dtype) for dtype in NAMES}
    bandwidths: list[float] = []
    peaks: dict[torch.dtype, list[float]] = {dtype: [] for dtype in NAMES}
    shares: dict[str, list[float]] = {case.name: [] for case in cases}
    times: dict[str, list[float]] = {case.name: [] for case in cases}
    for _ in range(rounds):
        for case in cases:
            # Reading comes first: it also drives the kernel's weights out of the caches.
            bandwidth = read_bytes / seconds([read])
            peak, operations = arithmetic[case.dtype]
            flops = operations / seconds([peak])
            spent = seconds(case.launches) / len(case.launches)
            bandwidths.append(bandwidth)
            peaks[case.dtype].append(flops)
            times[case.name].append(spent)
            shares[case.name].append(max(case.num_bytes / bandwidth, case.operations / flops) / spent)
    results: list[dict[str, float | str]] = [
        {
            "kernel": "ceilings",
            "GB/s": round(statistics.median(bandwidths) / 1e9, 1),
            **{
                f"{NAMES[dtype]} GFLOP/s": round(statistics.median(found) / 1e9, 1)
                for dtype, found in peaks.items()
                if found
            },
        }
    ]
    for case in cases:
        spent = statistics.median(times[case.name])
        results.append(
            {
                "kernel": case.name,
                "us": round(spent * 1e6, 1),
                "GB/s": round(case.num_bytes / spent / 1e9, 1),
                "GFLOP/s": round(case.operations / spent / 1e9, 1),
                "share": round(statistics.median(shares[case.name]), 3),
                "least": round(min(shares[case.name]), 3),
                "most": round(max(shares[case.name]), 3),
            }
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--isa", default=None)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    runtime = open_runtime(isa=options.isa, num_threads=options.threads)
    cases = [
        case
        for dtype in NAMES
        for make in (linear_cases, moe_cases)
        if options.only in f"{make.__name__} {NAMES[dtype]}"
        for case in make(runtime, dtype)
    ]
    results = measure(runtime, cases, options.rounds)
    for result in results:
        print("  ".join(f"{key} {value}" for key, value in result.items()))
    print(json.dumps({"isa": runtime.isa.name, "threads": runtime.pool.num_threads, "results": results}))


if __name__ == "__main__":
    main()
