"""What the machine can do: reading memory, and multiply-adds in registers. The measure of every other kernel.

The same threads, tasks and vectors as the real kernels, without anything else. Knows nothing of what is
compared. Invariant: every byte is loaded and every multiply-add is part of a result that is stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from ostinato.ops.cpu.compile import Kernel
from ostinato.ops.cpu.intrinsics import stack_scratch
from ostinato.ops.cpu.isa import AVX2, AVX512_BF16, PORTABLE
from ostinato.ops.cpu.jit import intrinsic, types
from ostinato.ops.cpu.launch import (
    COUNTER,
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
from ostinato.ops.cpu.memory import fetch_add, load_i64
from ostinato.ops.cpu.narrow_tiles import NARROW
from ostinato.ops.cpu.narrow_tiles import SUMS as NARROW_SUMS
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
ADDRESS, NUM_FIELDS = FIRST_FIELD, FIRST_FIELD + 1


@intrinsic
def _read_chunk(typing_context: Any, address: Any, out: Any) -> tuple[Any, Any]:
    """Add up a chunk's words, lane by lane."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = Lanes(builder)

        def step(k: Value, sums: list[Value]) -> list[Value]:
            at = lanes.at(args[0], lanes.times(k, 64 * _LINES))
            for line in range(_LINES):
                lanes.prefetch(lanes.at(at, _AHEAD + 64 * line), Keep.ONCE)
            return [builder.add(s, lanes.load(lanes.at(at, 64 * i), VI, 64)) for i, s in enumerate(sums)]

        sums = lanes.loop(lanes.i64(CHUNK_BYTES // (64 * _LINES)), [lanes.ints(0)] * _LINES, step)
        for i, total in enumerate(sums):
            lanes.store(total, lanes.at(args[1], 64 * i), 64)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


def _arithmetic(product: Product, size: int = LANES, *, integer: bool = False) -> Any:
    @intrinsic
    def multiply_add(typing_context: Any, source: Any, out: Any) -> tuple[Any, Any]:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            lanes = Lanes(builder, size)
            zero = lanes.ints(0) if integer else lanes.floats(0.0)
            words, word = lanes.load(args[0], lanes.vi, 4 * size), lanes.load(args[0], I32, 4)
            parts = range(product.parts)
            factors = [(product.panel(lanes, words, i), product.row(lanes, word, i)) for i in parts]

            def step(k: Value, sums: list[Value]) -> list[Value]:
                for panel, row in factors:
                    sums = [product.add(lanes, total, panel, row) for total in sums]
                return sums

            sums = lanes.loop(lanes.i64(STEPS), [zero] * _SUMS[size], step)
            for i, total in enumerate(sums):
                lanes.store(total, lanes.at(args[1], 4 * size * i), 4 * size)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), emit

    return multiply_add


_bf16_dot = _arithmetic(Bf16Dot())
_bf16_avx2 = _arithmetic(Bf16Narrow(), NARROW)
_bf16_portable = _arithmetic(Bf16Fma())
_fp32 = _arithmetic(Fp32Fma())
_fp32_avx2 = _arithmetic(Fp32Fma(), NARROW)
_int8_dot = _arithmetic(Int8Dot(), integer=True)
_int8_avx2 = _arithmetic(Int8Narrow(), NARROW, integer=True)
_int8_portable = _arithmetic(Int8Multiply(), integer=True)


def read_worker(p: int) -> None:
    """Read chunks of the buffer, every thread its share of it."""
    scratch = stack_scratch()
    threads, member = load_i64(p + 8 * THREADS), join_team(p)
    for turn in range(threads):
        owner = (member + turn) % threads
        task = draw(p, 0, owner, load_i64(p + 8 * TASKS))
        while task >= 0:
            _read_chunk(load_i64(p + 8 * ADDRESS) + task * CHUNK_BYTES, scratch)
            task = draw(p, 0, owner, load_i64(p + 8 * TASKS))


def bf16_dot_worker(p: int) -> None:
    """Multiply-adds by bf16 dot products."""
    scratch = stack_scratch()
    task = fetch_add(load_i64(p + 8 * COUNTER), 1)
    while task < load_i64(p + 8 * TASKS):
        _bf16_dot(load_i64(p + 8 * ADDRESS), scratch)
        task = fetch_add(load_i64(p + 8 * COUNTER), 1)


def bf16_avx2_worker(p: int) -> None:
    """Multiply-adds of bf16 values by fp32 arithmetic in registers of 256 bits."""
    scratch = stack_scratch()
    task = fetch_add(load_i64(p + 8 * COUNTER), 1)
    while task < load_i64(p + 8 * TASKS):
        _bf16_avx2(load_i64(p + 8 * ADDRESS), scratch)
        task = fetch_add(load_i64(p + 8 * COUNTER), 1)


def bf16_portable_worker(p: int) -> None:
    """Multiply-adds of bf16 values by fp32 arithmetic."""
    scratch = stack_scratch()
    task = fetch_add(load_i64(p + 8 * COUNTER), 1)
    while task < load_i64(p + 8 * TASKS):
        _bf16_portable(load_i64(p + 8 * ADDRESS), scratch)
        task = fetch_add(load_i64(p + 8 * COUNTER), 1)


def fp32_worker(p: int) -> None:
    """fp32 multiply-adds."""
    scratch = stack_scratch()
    task = fetch_add(load_i64(p + 8 * COUNTER), 1)
    while task < load_i64(p + 8 * TASKS):
        _fp32(load_i64(p + 8 * ADDRESS), scratch)
        task = fetch_add(load_i64(p + 8 * COUNTER), 1)


def fp32_avx2_worker(p: int) -> None:
    """fp32 multiply-adds in registers of 256 bits."""
    scratch = stack_scratch()
    task = fetch_add(load_i64(p + 8 * COUNTER), 1)
    while task < load_i64(p + 8 * TASKS):
        _fp32_avx2(load_i64(p + 8 * ADDRESS), scratch)
        task = fetch_add(load_i64(p + 8 * COUNTER), 1)


def int8_dot_worker(p: int) -> None:
    """Multiply-adds by int8 dot products."""
    scratch = stack_scratch()
    task = fetch_add(load_i64(p + 8 * COUNTER), 1)
    while task < load_i64(p + 8 * TASKS):
        _int8_dot(load_i64(p + 8 * ADDRESS), scratch)
        task = fetch_add(load_i64(p + 8 * COUNTER), 1)


def int8_avx2_worker(p: int) -> None:
    """Multiply-adds of int8 values by products of 16-bit integers."""
    scratch = stack_scratch()
    task = fetch_add(load_i64(p + 8 * COUNTER), 1)
    while task < load_i64(p + 8 * TASKS):
        _int8_avx2(load_i64(p + 8 * ADDRESS), scratch)
        task = fetch_add(load_i64(p + 8 * COUNTER), 1)


def int8_portable_worker(p: int) -> None:
    """Multiply-adds of int8 values by integer arithmetic."""
    scratch = stack_scratch()
    task = fetch_add(load_i64(p + 8 * COUNTER), 1)
    while task < load_i64(p + 8 * TASKS):
        _int8_portable(load_i64(p + 8 * ADDRESS), scratch)
        task = fetch_add(load_i64(p + 8 * COUNTER), 1)


_WORKERS: Mapping[torch.dtype, tuple[Mapping[str, Kernel], int]] = MappingProxyType(
    {
        torch.float32: ({AVX512_BF16: fp32_worker, AVX2: fp32_avx2_worker, PORTABLE: fp32_worker}, 2),
        torch.bfloat16: (
            {AVX512_BF16: bf16_dot_worker, AVX2: bf16_avx2_worker, PORTABLE: bf16_portable_worker},
            4,
        ),
        torch.int8: (
            {AVX512_BF16: int8_dot_worker, AVX2: int8_avx2_worker, PORTABLE: int8_portable_worker},
            8,
        ),
    }
)  # and the operations that a lane does with a word


def ceiling_entry(p: int) -> None:
    """Run all tasks in the team."""
    reset_counter(p)
    run_worker(p, load_i64(p + 8 * TASKS) * CHUNK_BYTES)


def read_ceiling(runtime: Runtime, buffer: torch.Tensor) -> tuple[Launch, int]:
    """A launch that reads `buffer` (uint8, aligned to 64) once, and the bytes it reads."""
    tasks = (buffer.numel() - _AHEAD) // CHUNK_BYTES
    values = {ADDRESS: buffer.data_ptr(), TASKS: tasks}
    launch = runtime.launch(ceiling_entry, read_worker, values, NUM_FIELDS, (buffer,))
    return launch, tasks * CHUNK_BYTES


def arithmetic_ceiling(runtime: Runtime, dtype: torch.dtype, tasks: int = 64) -> tuple[Launch, int]:
    """A launch of multiply-adds in registers as tiles of `dtype` do them, and their number of operations."""
    workers, per_lane = _WORKERS[dtype]
    worker = workers[runtime.isa.name]
    size = NARROW if runtime.isa.name == AVX2 else LANES
    source = torch.zeros(32)
    launch = runtime.launch(
        ceiling_entry,
        worker,
        {ADDRESS: -(-source.data_ptr() // 64) * 64, TASKS: tasks},
        NUM_FIELDS,
        (source,),
    )
    return launch, tasks * STEPS * _SUMS[size] * size * per_lane
