"""What the machine can do: reading memory, and multiply-adds in registers. The measure of every other kernel.

The same threads, tasks and vectors as the real kernels, without anything else. Memory is read in two ways, asking ahead
and leaving that to the CPU, since neither is the faster one everywhere. Knows nothing of what is compared. Invariant:
every byte is loaded and every multiply-add is part of a result that is stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from ostinato.ops.cpu.intrinsics import stack_scratch
from ostinato.ops.cpu.isa import AVX2, AVX512_BF16, PORTABLE
from ostinato.ops.cpu.lane_kinds import Float32, Kind
from ostinato.ops.cpu.launch import (
    FIRST_FIELD,
    TASKS,
    THREADS,
    Launch,
    Runtime,
    draw,
    join_team,
    reset_counter,
    run_worker,
)
from ostinato.ops.cpu.memory import call_native, load_i64
from ostinato.ops.cpu.narrow_tiles import NARROW
from ostinato.ops.cpu.narrow_tiles import SUMS as NARROW_SUMS
from ostinato.ops.cpu.native import Emit, NativeFunction, NativeLibrary
from ostinato.ops.cpu.products import (
    Bf16Dot,
    Bf16Fma,
    Bf16Narrow,
    Fp32Fma,
    Int8Dot,
    Int8Multiply,
    Int8Narrow,
    Product,
)
from ostinato.ops.cpu.vector_ir import I32, LANES, VI, Keep, Lanes, Value

CHUNK_BYTES = 256 * 1024
_LINES = 8  # cache lines read per step
_AHEAD = 4096
_SUMS: Mapping[int, int] = MappingProxyType({LANES: 24, NARROW: NARROW_SUMS})  # accumulators, by their lanes
STEPS = 4096  # per task of the arithmetic kernels
(
    FUNCTION,
    ADDRESS,
    APART,  # bytes from one task's address to the next one's
    NUM_FIELDS,
) = range(FIRST_FIELD, FIRST_FIELD + 4)


def _reading(*, ask: bool) -> Emit:
    """(address, out): add up a chunk's words, lane by lane; `ask` for what comes next meanwhile."""

    def emit(lanes: Lanes, kind: Kind, args: list[Value]) -> None:
        address, out = args

        def step(k: Value, sums: list[Value]) -> list[Value]:
            at = lanes.at(address, lanes.times(k, 64 * _LINES))
            for line in range(_LINES if ask else 0):
                lanes.prefetch(lanes.at(at, _AHEAD + 64 * line), Keep.ONCE)
            return [lanes.b.add(s, lanes.load(lanes.at(at, 64 * i), VI, 64)) for i, s in enumerate(sums)]

        sums = lanes.loop(lanes.i64(CHUNK_BYTES // (64 * _LINES)), [lanes.ints(0)] * _LINES, step)
        for i, total in enumerate(sums):
            lanes.store(total, lanes.at(out, 64 * i), 64)

    return emit


def _arithmetic(product: Product, size: int = LANES, *, integer: bool = False) -> Emit:
    """(source, out): multiply-adds of `size` lanes, of words that stay in registers."""

    def emit(wide: Lanes, kind: Kind, args: list[Value]) -> None:
        lanes = Lanes(wide.b, size)
        zero = lanes.ints(0) if integer else lanes.floats(0.0)
        words, word = lanes.load(args[0], lanes.vi, 4 * size), lanes.load(args[0], I32, 4)
        factors = [
            (product.panel(lanes, words, i), product.row(lanes, word, i)) for i in range(product.parts)
        ]

        def step(k: Value, sums: list[Value]) -> list[Value]:
            for panel, row in factors:
                sums = [product.add(lanes, total, panel, row) for total in sums]
            return sums

        sums = lanes.loop(lanes.i64(STEPS), [zero] * _SUMS[size], step)
        for i, total in enumerate(sums):
            lanes.store(total, lanes.at(args[1], 4 * size * i), 4 * size)

    return emit


_READING: Mapping[str, Emit] = MappingProxyType(
    {"asking": _reading(ask=True), "plainly": _reading(ask=False)}
)
_FP32, _BF16, _INT8 = "float32", "bfloat16", "int8"
_ARITHMETIC: Mapping[str, Mapping[str, Emit]] = MappingProxyType(
    {
        AVX512_BF16: {
            _FP32: _arithmetic(Fp32Fma()),
            _BF16: _arithmetic(Bf16Dot()),
            _INT8: _arithmetic(Int8Dot(), integer=True),
        },
        AVX2: {
            _FP32: _arithmetic(Fp32Fma(), NARROW),
            _BF16: _arithmetic(Bf16Narrow(), NARROW),
            _INT8: _arithmetic(Int8Narrow(), NARROW, integer=True),
        },
        PORTABLE: {
            _FP32: _arithmetic(Fp32Fma()),
            _BF16: _arithmetic(Bf16Fma()),
            _INT8: _arithmetic(Int8Multiply(), integer=True),
        },
    }
)
_PER_LANE: Mapping[str, int] = MappingProxyType({_FP32: 2, _BF16: 4, _INT8: 8})  # operations with a word


def ceiling_worker(p: int) -> None:
    """Run the function for tasks until none is left, every thread its share of them."""
    scratch = stack_scratch()
    threads, member = load_i64(p + 8 * THREADS), join_team(p)
    for turn in range(threads):
        owner = (member + turn) % threads
        task = draw(p, 0, owner, load_i64(p + 8 * TASKS))
        while task >= 0:
            at = load_i64(p + 8 * ADDRESS) + task * load_i64(p + 8 * APART)
            call_native(load_i64(p + 8 * FUNCTION), at, scratch)
            task = draw(p, 0, owner, load_i64(p + 8 * TASKS))


def ceiling_entry(p: int) -> None:
    """Run all tasks in the team."""
    reset_counter(p)
    run_worker(p, load_i64(p + 8 * TASKS) * CHUNK_BYTES)


def _launch(runtime: Runtime, name: str, at: int, apart: int, tasks: int, source: torch.Tensor) -> Launch:
    """A launch of one of the path's functions over addresses in `source`."""
    emitted = {**_READING, **_ARITHMETIC[runtime.isa.name]}
    functions = {name: NativeFunction(2, emit) for name, emit in emitted.items()}
    library = NativeLibrary(f"ceilings_{runtime.isa.name}", functions, Float32(), runtime.compiler)
    values = {FUNCTION: library.addresses[name], ADDRESS: at, APART: apart, TASKS: tasks}
    return runtime.launch(ceiling_entry, ceiling_worker, values, NUM_FIELDS, (library, source))


def read_ceilings(runtime: Runtime, buffer: torch.Tensor) -> tuple[tuple[Launch, ...], int]:
    """Launches that read `buffer` (uint8, aligned to 64) once, each in its way, and the bytes that each reads: the
    fastest of them tells what memory can do.
    """
    tasks = (buffer.numel() - _AHEAD) // CHUNK_BYTES
    launches = tuple(
        _launch(runtime, name, buffer.data_ptr(), CHUNK_BYTES, tasks, buffer) for name in _READING
    )
    return launches, tasks * CHUNK_BYTES


def arithmetic_ceiling(runtime: Runtime, dtype: torch.dtype, tasks: int = 64) -> tuple[Launch, int]:
    """A launch of multiply-adds in registers as tiles of `dtype` do them, and their number of operations."""
    name = str(dtype).removeprefix("torch.")
    size = NARROW if runtime.isa.name == AVX2 else LANES
    source = torch.zeros(32)
    launch = _launch(runtime, name, -(-source.data_ptr() // 64) * 64, 0, tasks, source)
    return launch, tasks * STEPS * _SUMS[size] * size * _PER_LANE[name]
