"""Lossless coding of packed bf16 weights at 12 bits a value: the layout, and the kernels that make it.

The weights of a network have few exponents. A bf16 value is kept as its low byte, as it is, and a code of 4 bits for
its high byte (sign and upper 7 bits of the exponent), which stands in a table of the panel's 16 most frequent ones. A
group of two steps of K that has another high byte is kept as it is. The form is of a fixed width so that a tile decodes
it in registers (`coded_tiles`); the observation is that of ZipNN (arXiv 2411.05239) and DFloat11 (arXiv 2504.11651).
Knows nothing of layers. Invariant: decoding gives back every bit of the plain panel.

    panel   64: table [16], int32 segments, int32 groups of the first segment, int32 plain steps at the end
            segments, and between them raw groups; then steps as they are, 128 each
    group   64: codes (first step low half, second step high half of a byte) | 64: low bytes | 64: low bytes
    raw     64: int32 groups of the next segment | 256: the two steps as they are
    bytes   vector v, column 4 q + d of it, half h of its word: at 16 q + 8 v + 2 d + h, as vpunpck wants them
A panel that would gain under a tenth has no segment: all its steps are plain.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from ostinato.ops.cpu.intrinsics import stack_scratch
from ostinato.ops.cpu.jit import intrinsic, njit, types
from ostinato.ops.cpu.launch import COUNTER, FIRST_FIELD, TASKS, reset_counter, run_worker
from ostinato.ops.cpu.memory import (
    fetch_add,
    load_i32,
    load_i64,
    load_u8,
    store_i8,
    store_i32,
    store_i64,
    zero_bytes,
)
from ostinato.ops.cpu.tiles import PANEL, STEP_BYTES
from ostinato.ops.cpu.vector_ir import I8, I16, I32, I64, LANES, Lanes, Value, host_has

HEADER_BYTES = 64
TABLE_SIZE = 16
SEGMENTS, FIRST_LENGTH, PLAIN_STEPS = 16, 20, 24  # offsets in the header
GROUP_STEPS = 2
GROUP_BYTES = 192
RAW_LEAD = 64  # of a raw group, before its steps
RAW_BYTES = RAW_LEAD + GROUP_STEPS * STEP_BYTES
CODE_BITS = 4

# What is found out about a panel before it is coded: code by high byte (_NO_CODE: none), table, bytes it will take.
PLAN_TABLE, PLAN_BYTES_NEEDED, PLAN_SIZE = 256, 272, 320
_NO_CODE = 0x80
_COUNTS = 1024  # bytes of the counters in a worker's scratch; as many follow
_SAMPLED, _SURE, _SEEN = (
    16,
    14,
    3,
)  # one group in so many; codes that a sample may give; to what occurs so often in it
_TENTHS = 9  # a coded panel takes no more of the plain one

SOURCE, PANEL_BYTES, STEPS, PLANS, TARGETS, NUM_FIELDS = range(FIRST_FIELD, FIRST_FIELD + 6)

VB = ir.VectorType(I8, 64)
VW = ir.VectorType(I16, 32)


def half_bytes(odd: int) -> ir.Constant:
    """The low (0) or high (1) bytes of two vectors of words, in the order of the layout."""
    order = [
        64 * vector + 16 * quarter + 2 * i + odd
        for quarter in range(4)
        for vector in range(PANEL // LANES)
        for i in range(8)
    ]
    return ir.Constant(ir.VectorType(I32, 64), order)


def _codes(lanes: Lanes, plan: Value, high: Value) -> Value:
    """Codes of 64 high bytes: looked up in a table of 256."""
    return codes_by_64(lanes, plan, high) if host_has("avx512vbmi") else codes_by_16(lanes, plan, high)


def codes_by_64(lanes: Lanes, plan: Value, high: Value) -> Value:
    """The table in two halves, chosen between by the highest bit."""
    tables = [lanes.load(lanes.at(plan, 64 * i), VB, 64) for i in range(4)]
    found = [
        lanes.call("llvm.x86.avx512.vpermi2var.qi.512", VB, tables[2 * i], high, tables[2 * i + 1])
        for i in range(2)
    ]
    negative = lanes.b.icmp_signed("<", high, ir.Constant(VB, [0] * 64))
    return lanes.b.select(negative, found[1], found[0])


def codes_by_16(lanes: Lanes, plan: Value, high: Value) -> Value:
    """The table in 16 parts, chosen between by the upper half of a byte (AVX2 looks up 16 bytes at a time)."""
    b, half = lanes.b, ir.VectorType(I8, 32)

    def every(value: int) -> ir.Constant:
        return ir.Constant(half, [value] * 32)

    part = ir.VectorType(I8, 16)
    twice = ir.Constant(ir.VectorType(I32, 32), [*range(16)] * 2)
    found = []
    for side in range(2):
        order = ir.Constant(ir.VectorType(I32, 32), [*range(32 * side, 32 * side + 32)])
        mine = b.shuffle_vector(high, ir.Constant(VB, ir.Undefined), order)
        lower, upper = b.and_(mine, every(0x0F)), b.and_(mine, every(0xF0))
        codes = every(0)
        for i in range(16):
            table = b.shuffle_vector(
                lanes.load(lanes.at(plan, 16 * i), part), ir.Constant(part, ir.Undefined), twice
            )
            seen = lanes.call("llvm.x86.avx2.pshuf.b", half, table, lower)
            codes = b.select(b.icmp_signed("==", upper, every(16 * i)), seen, codes)
        found.append(codes)
    return b.shuffle_vector(*found, ir.Constant(ir.VectorType(I32, 64), [*range(64)]))


@intrinsic
def code_group(typing_context: Any, source: Any, plan: Any, target: Any) -> tuple[Any, Any]:
    """Write the coded form of a group; returns a mask of the bytes that have no code in either step: 0 if it holds."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, plan, target = args
        lanes, b = Lanes(builder), builder
        codes = []
        for step in range(GROUP_STEPS):
            words = [
                lanes.load(lanes.at(source, STEP_BYTES * step + 64 * v), VB, 64)
                for v in range(PANEL // LANES)
            ]
            low, high = (b.shuffle_vector(*words, half_bytes(odd)) for odd in (0, 1))
            lanes.store(low, lanes.at(target, 64 + 64 * step), 64)
            codes.append(_codes(lanes, plan, high))
        second = b.shl(b.bitcast(codes[1], VW), ir.Constant(VW, [CODE_BITS] * 32))
        lanes.store(b.or_(codes[0], b.bitcast(second, VB)), target, 64)
        missing = b.icmp_signed("<", b.or_(*codes), ir.Constant(VB, [0] * 64))
        return b.bitcast(missing, I64)

    return types.int64(types.int64, types.int64, types.int64), emit


@intrinsic
def _lowest_bit(typing_context: Any, mask: Any) -> tuple[Any, Any]:
    """Index of the lowest set bit of a mask that has one."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return Lanes(builder).call("llvm.cttz.i64", I64, args[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.int64), emit


@intrinsic
def copy_lines(typing_context: Any, source: Any, target: Any, count: Any) -> tuple[Any, Any]:
    """Copy `count` times 64 bytes, aligned."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, target, count = args
        lanes = Lanes(builder)

        def line(i: Value) -> None:
            offset = lanes.times(i, 64)
            lanes.store(lanes.load(lanes.at(source, offset), VB, 64), lanes.at(target, offset), 64)

        lanes.each(count, line)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), emit


@njit(error_model="numpy")
def _count_high_bytes(at: int, size: int, counts: int) -> None:
    """Add to int32 [256] how often each high byte occurs in `size` bytes."""
    for i in range(size // 8):
        values = load_i64(at + 8 * i)
        for k in range(4):
            place = counts + 4 * ((values >> (16 * k + 8)) & 0xFF)
            store_i32(load_i32(place) + 1, place)


@njit(error_model="numpy")
def _give_codes(counts: int, plan: int, given: int, most: int, least: int) -> int:
    """Codes from `given` on, below `most`, to high bytes without one that occur `least` times, the most frequent first
    (of equally frequent ones the lower value). Returns how many have one.
    """
    found, candidates = 0, counts + _COUNTS
    for value in range(256):
        count = load_i32(counts + 4 * value)
        if count >= least and load_u8(plan + value) == _NO_CODE:
            store_i32(min(count, 1 << 22) * 256 + 255 - value, candidates + 4 * found)
            found += 1
    for code in range(given, most):
        best = 0
        for i in range(1, found):
            if load_i32(candidates + 4 * i) > load_i32(candidates + 4 * best):
                best = i
        chosen = load_i32(candidates + 4 * best)
        if found == 0 or chosen == 0:
            return code
        store_i32(0, candidates + 4 * best)
        value = 255 - chosen % 256
        store_i8(value, plan + PLAN_TABLE + code)
        store_i8(code, plan + value)
    return most


@njit(error_model="numpy")
def _choose_table(panel: int, groups: int, plan: int, scratch: int) -> None:
    """The most frequent high bytes, and the codes they get.

    Those that lead in a sample are sure of theirs; the others are counted exactly.
    """
    counts, size = scratch, GROUP_STEPS * STEP_BYTES
    zero_bytes(counts, _COUNTS)
    zero_bytes(plan + PLAN_TABLE, TABLE_SIZE)
    for value in range(256):
        store_i8(_NO_CODE, plan + value)
    for g in range(0, groups, _SAMPLED):
        _count_high_bytes(panel + g * size, size, counts)
    given = _give_codes(counts, plan, 0, _SURE, _SEEN)
    zero_bytes(counts, _COUNTS)
    for g in range(groups):
        missing = code_group(panel + g * size, plan, scratch + _COUNTS)
        while missing != 0:
            place = _lowest_bit(missing)
            missing &= missing - 1
            # The inverse of `half_bytes`; the high byte of one of the steps may have a code, which does no harm.
            at = panel + g * size + 64 * (place // 8 % 2) + 16 * (place // 16) + 2 * (place % 8) + 1
            for step in range(GROUP_STEPS):
                counted = counts + 4 * load_u8(at + STEP_BYTES * step)
                store_i32(load_i32(counted) + 1, counted)
    _give_codes(counts, plan, given, TABLE_SIZE, 1)


def plan_worker(p: int) -> None:
    """Tasks are panels: choose the table and find out the size."""
    scratch = stack_scratch()
    tasks, panel_bytes, steps = (
        load_i64(p + 8 * TASKS),
        load_i64(p + 8 * PANEL_BYTES),
        load_i64(p + 8 * STEPS),
    )
    groups = steps // GROUP_STEPS
    task = fetch_add(load_i64(p + 8 * COUNTER), 1)
    while task < tasks:
        panel = load_i64(p + 8 * SOURCE) + task * panel_bytes
        plan = load_i64(p + 8 * PLANS) + task * PLAN_SIZE
        _choose_table(panel, groups, plan, scratch)
        raw = 0
        for g in range(groups):
            if code_group(panel + g * GROUP_STEPS * STEP_BYTES, plan, scratch) != 0:
                raw += 1
        size = HEADER_BYTES + raw * RAW_BYTES + (groups - raw) * GROUP_BYTES
        size += panel_bytes - groups * GROUP_STEPS * STEP_BYTES
        if 10 * size > _TENTHS * panel_bytes:
            size = HEADER_BYTES + panel_bytes
        store_i64(size, plan + PLAN_BYTES_NEEDED)
        task = fetch_add(load_i64(p + 8 * COUNTER), 1)


@njit(error_model="numpy")
def _code_panel(panel: int, panel_bytes: int, steps: int, plan: int, target: int) -> None:
    """Write a panel as planned."""
    groups, segments, length = steps // GROUP_STEPS, 1, 0
    if load_i64(plan + PLAN_BYTES_NEEDED) == HEADER_BYTES + panel_bytes:
        groups, segments = 0, 0
    copy_lines(plan + PLAN_TABLE, target, 1)
    at, place = target + HEADER_BYTES, target + FIRST_LENGTH
    for g in range(groups):
        source = panel + g * GROUP_STEPS * STEP_BYTES
        if code_group(source, plan, at) == 0:
            at += GROUP_BYTES
            length += 1
        else:
            copy_lines(source, at + RAW_LEAD, GROUP_STEPS * STEP_BYTES // 64)
            store_i32(length, place)
            place, length = at, 0
            at += RAW_BYTES
            segments += 1
    store_i32(length, place)
    store_i32(segments, target + SEGMENTS)
    store_i32(steps - GROUP_STEPS * groups, target + PLAIN_STEPS)
    done = groups * GROUP_STEPS * STEP_BYTES
    copy_lines(panel + done, at, (panel_bytes - done) // 64)


def code_worker(p: int) -> None:
    """Tasks are panels: write them, each to its target."""
    tasks, panel_bytes, steps = (
        load_i64(p + 8 * TASKS),
        load_i64(p + 8 * PANEL_BYTES),
        load_i64(p + 8 * STEPS),
    )
    task = fetch_add(load_i64(p + 8 * COUNTER), 1)
    while task < tasks:
        _code_panel(
            load_i64(p + 8 * SOURCE) + task * panel_bytes,
            panel_bytes,
            steps,
            load_i64(p + 8 * PLANS) + task * PLAN_SIZE,
            load_i64(load_i64(p + 8 * TARGETS) + 8 * task),
        )
        task = fetch_add(load_i64(p + 8 * COUNTER), 1)


def coding_entry(p: int) -> None:
    """Share the panels out over the team."""
    reset_counter(p)
    run_worker(p, load_i64(p + 8 * TASKS) * load_i64(p + 8 * PANEL_BYTES) // 4)
