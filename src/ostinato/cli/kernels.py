"""What `ostinato bench kernels` measures: each CPU kernel beside what the machine can do at the same moment.

Every round measures the ceilings (reading memory, multiply-adds in registers) and all kernels in turn; a kernel's
share is its ratio to the ceiling of the same round, where the ceiling is the slower of moving its bytes and doing its
arithmetic. Knows nothing of models. Invariant: only operations that nobody can avoid are counted, bytes of weights are
those stored (fewer where they are coded, which makes a share harder to reach), and no kernel finds them in a cache.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch

from ostinato.attention.backend import AttentionLayer
from ostinato.attention.cpu import CpuAttention
from ostinato.cli.measure import summary
from ostinato.config import EngineConfig
from ostinato.engine.progress import bars
from ostinato.errors import ConfigError
from ostinato.kv.pool import KVLayout, KVPool
from ostinato.ops.cpu.ceilings import arithmetic_ceiling, read_ceilings
from ostinato.ops.cpu.coded_packing import CodedPacker
from ostinato.ops.cpu.experts import ExpertWeights, MoeExperts
from ostinato.ops.cpu.huge_pages import HUGE_PAGE, mapped_zeros, prefer_huge_pages
from ostinato.ops.cpu.launch import Launch, Runtime, open_runtime
from ostinato.ops.cpu.linear import Linear, LinearWeights
from ostinato.ops.cpu.packing import Packer, Panels, pack_bias
from ostinato.ops.cpu.scratch import Scratch
from ostinato.padding import StepMode

COLD_BYTES = 256 << 20  # what a kernel walks through, so that nothing is in a cache when its turn comes
_DRAWN_ROWS = 512  # of weights; then they repeat
_NAMES = ((torch.bfloat16, "bf16"), (torch.int8, "int8"))


@dataclass(frozen=True, slots=True)
class KernelShapes:
    """Sizes of a mixture-of-experts decoder, and how many rows and tokens its kernels get."""

    hidden: int = 1024
    vocab: int = 32768
    experts: int = 64
    top_k: int = 8
    intermediate: int = 512
    heads: int = 16
    kv_heads: int = 4
    head_dim: int = 64
    linear_rows: tuple[int, ...] = (1, 4, 8, 32, 512)
    head_rows: tuple[int, ...] = (1, 8, 32)
    expert_rows: tuple[int, ...] = (1, 8, 32, 64, 512)
    contexts: tuple[tuple[int, int], ...] = (
        (1, 512),
        (1, 4096),
        (8, 512),
        (8, 4096),
    )  # requests, tokens of each
    cold_bytes: int = COLD_BYTES


@dataclass(frozen=True, slots=True)
class Case:
    """A kernel over launches that take turns, in one chain as a step's launches are; what one of them must read and do,
    on average.
    """

    name: str
    dtype: torch.dtype
    launches: tuple[Launch, ...]
    num_bytes: float
    operations: float


def measure_kernels(
    config: EngineConfig, rounds: int, shapes: KernelShapes | None = None, runtime: Runtime | None = None
) -> dict[str, Any]:
    """Shares of all kernels with the options' instructions, threads and weights. Raises ConfigError off the CPU."""
    if config.kernels in ("reference", "triton") or config.device == "cuda":
        raise ConfigError(
            f"device {config.device!r} with kernels {config.kernels!r} has no CPU kernels to measure; leave them out"
        )
    if runtime is None:
        isa = None if config.isa == "auto" else config.isa
        runtime = open_runtime(isa=isa, num_threads=config.threads or os.cpu_count())
    shapes = shapes or KernelShapes()
    dtype = torch.int8 if config.quantization == "int8" else torch.bfloat16
    codes = config.weight_coding == "auto" and runtime.isa.byte_tables
    packer = CodedPacker(runtime) if codes else Packer(runtime)
    cases = [
        *linear_cases(runtime, packer, dtype, shapes),
        *expert_cases(runtime, packer, dtype, shapes),
        *attention_cases(runtime, shapes),
    ]
    measured = _measure(runtime, cases, rounds, shapes.cold_bytes)
    found = {"isa": runtime.isa.name, "threads": runtime.pool.num_threads}
    return found | {"weight_coding": "12 bits" if codes else "plain"} | measured


def _packed(
    packer: Packer, dtype: torch.dtype, *shape: int, gated: bool = False, copies: int
) -> list[Panels]:
    """Weights as networks have them (Gaussian), several times over."""
    *matrices, rows, columns = shape
    drawn = 0.02 * torch.randn(min(rows, _DRAWN_ROWS), columns, generator=torch.Generator().manual_seed(rows))
    weight = drawn.bfloat16().repeat(*matrices, -(-rows // len(drawn)), 1)[..., :rows, :]
    one = packer.pack(weight, gated=gated, dtype=dtype)
    made = [one]
    for _ in range(copies - 1):
        words = mapped_zeros(one.words.shape, torch.int32, huge=True)
        made.append(replace(one, words=words.copy_(one.words)))
    return made


def _weight_bytes(panels: Panels, size: int) -> float:
    """Of so many values: as they are stored, without the padding of plain panels."""
    return panels.nbytes if panels.coded else panels.dtype.itemsize * size


def _name(panels: Panels) -> str:
    return dict(_NAMES)[panels.dtype] + (" at 12 bits" if panels.coded else "")


def linear_cases(
    runtime: Runtime, packer: Packer, dtype: torch.dtype, shapes: KernelShapes
) -> Iterator[Case]:
    """A projection, and the head (bf16 whatever the other weights are)."""
    kernel = Linear(runtime, Scratch())
    kinds = (
        ("linear", shapes.hidden, dtype, shapes.linear_rows),
        ("head", shapes.vocab, torch.bfloat16, shapes.head_rows),
    )
    for name, outputs, kind, row_counts in kinds:
        size = outputs * shapes.hidden
        copies = max(2, shapes.cold_bytes // (size * kind.itemsize))
        packed = _packed(packer, kind, outputs, shapes.hidden, copies=copies)
        weights = [LinearWeights(panels, pack_bias(None, panels), torch.float32) for panels in packed]
        for rows in row_counts:
            x, out = torch.randn(rows, shapes.hidden).bfloat16(), torch.empty(rows, outputs)
            launches = tuple(kernel.bind(x, weight, out) for weight in weights)
            title = f"{name} {_name(packed[0])} {outputs}x{shapes.hidden}, {rows} rows"
            yield Case(title, kind, launches, _weight_bytes(packed[0], size), 2 * size * rows)


def expert_cases(
    runtime: Runtime, packer: Packer, dtype: torch.dtype, shapes: KernelShapes
) -> Iterator[Case]:
    """All experts of a layer, rows routed at random."""
    kernel = MoeExperts(runtime, Scratch())
    hidden, inner, experts = shapes.hidden, shapes.intermediate, shapes.experts
    size = 3 * hidden * inner
    copies = max(2, shapes.cold_bytes // (experts * size * dtype.itemsize))
    gate_up = _packed(packer, dtype, experts, 2 * inner, hidden, gated=True, copies=copies)
    down = _packed(packer, dtype, experts, hidden, inner, copies=copies)
    layers = [ExpertWeights(*pair) for pair in zip(gate_up, down, strict=True)]
    stored = sum(_weight_bytes(p[0], experts * p[0].rows * p[0].columns) for p in (gate_up, down)) / experts
    for rows in shapes.expert_rows:
        launches, active = [], 0
        x, out = torch.randn(rows, hidden).bfloat16(), torch.empty(rows, hidden, dtype=torch.bfloat16)
        for turn in range(2 * len(layers) if rows < 64 else len(layers)):
            draw = torch.Generator().manual_seed(turn)
            ids = torch.rand(rows, experts, generator=draw).topk(shapes.top_k).indices.int()
            weights = torch.rand(rows, shapes.top_k)
            launches.append(kernel.bind(x, weights, ids, layers[turn % len(layers)], False, out))
            active += len(set(ids.flatten().tolist()))
        yield Case(
            f"experts {_name(down[0])} {experts} of {inner}x{hidden}, {rows} rows",
            dtype,
            tuple(launches),
            stored * active / len(launches),
            2 * size * rows * shapes.top_k,
        )


def attention_cases(runtime: Runtime, shapes: KernelShapes) -> Iterator[Case]:
    """A decode step of requests of one length, over as many layers as it takes to leave the caches."""
    heads, kv_heads, dim = shapes.heads, shapes.kv_heads, shapes.head_dim
    for requests, tokens in shapes.contexts:
        num_bytes = 4 * kv_heads * dim * tokens * requests
        layers = max(2, min(64, shapes.cold_bytes // num_bytes))
        layout = KVLayout(layers, kv_heads, dim, torch.bfloat16, 16)
        pages = -(-tokens // 16)
        room = max(
            1 + requests * pages, HUGE_PAGE // (2 * kv_heads * dim * 16)
        )  # in huge pages, as an engine's
        pool = KVPool(layout, num_pages=room, max_requests=requests, max_pages_per_request=pages)
        for row in range(requests):
            pool.write_row(row + 1, 0, range(1 + row * pages, 1 + (row + 1) * pages))
        for part in (*pool.k, *pool.v):
            part.fill_(0.5)
        attention = CpuAttention(pool, runtime)
        attention.init_graph_state(requests, requests)
        rows = torch.arange(1, requests + 1)
        view: Any = SimpleNamespace(
            mode=StepMode.DECODE, seq_lens_cpu=torch.full((requests,), tokens), req_pool_indices=rows
        )
        shape: Any = SimpleNamespace(bs=requests, raw_num_tokens=requests)
        attention.plan(view, shape)
        q, out = (torch.ones(requests, heads, dim, dtype=torch.bfloat16) for _ in range(2))
        k, v = (torch.ones(requests, kv_heads, dim, dtype=torch.bfloat16) for _ in range(2))
        slots = pool.slots(rows, torch.full((requests,), tokens - 1))
        launches = tuple(
            attention.launch_of(
                AttentionLayer(layer, dim**-0.5), (q, k, v, slots, out), (q, k, v, slots, out)
            )
            for layer in range(layers)
        )
        title = f"attention bf16 {heads}/{kv_heads} heads of {dim}, {requests} requests of {tokens}"
        yield Case(title, torch.bfloat16, launches, num_bytes, 4 * heads * dim * tokens * requests)


def _seconds(runs: Iterable[Callable[[], None]]) -> float:
    """One pass over `runs`: no repetition, which would find caches warm, and no choice among passes."""
    start = time.perf_counter()
    for run in runs:
        run()
    return time.perf_counter() - start


def _measure(runtime: Runtime, cases: list[Case], rounds: int, cold_bytes: int) -> dict[str, Any]:
    """Ceilings and kernels by name, each as summaries over the rounds, after a round that warms up."""
    buffer = torch.empty(2 * cold_bytes + 8192, dtype=torch.uint8)
    prefer_huge_pages(buffer)
    buffer = buffer[-buffer.data_ptr() % 64 :].zero_()
    reads, read_bytes = read_ceilings(runtime, buffer)
    arithmetic = {dtype: arithmetic_ceiling(runtime, dtype) for dtype in {case.dtype for case in cases}}
    bandwidths: list[float] = []
    peaks: dict[torch.dtype, list[float]] = {dtype: [] for dtype in arithmetic}
    times: dict[str, list[float]] = {case.name: [] for case in cases}
    shares: dict[str, list[float]] = {case.name: [] for case in cases}
    chains = [Launch.chain(case.launches) for case in cases]
    with bars() as report:
        for number in range(-1, rounds):
            report("kernels", number + 1, rounds + 1)
            for case, chain in zip(cases, chains, strict=True):
                # Reading comes first: it also drives what the kernel reads out of the caches.
                bandwidth = read_bytes / min(_seconds([read]) for read in reads)
                peak, operations = arithmetic[case.dtype]
                rate = operations / _seconds([peak])
                spent = _seconds([chain]) / len(case.launches)
                if number >= 0:
                    bandwidths.append(bandwidth)
                    peaks[case.dtype].append(rate)
                    times[case.name].append(spent)
                    shares[case.name].append(max(case.num_bytes / bandwidth, case.operations / rate) / spent)
    return {
        "bytes_per_s": summary(bandwidths),
        "operations_per_s": {name: summary(peaks[dtype]) for dtype, name in _NAMES if dtype in peaks},
        "kernels": {
            case.name: {
                "seconds": summary(times[case.name]),
                "share": summary(shares[case.name]),
                "bytes": case.num_bytes,
                "operations": case.operations,
            }
            for case in cases
        },
    }
