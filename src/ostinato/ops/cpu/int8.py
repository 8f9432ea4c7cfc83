"""int8 values: weights quantised per output, rows per row and group of 64 values of K, and their exact sums.

A weight is scale * q with q in [-127, 127], rounded to nearest, kept as the byte q + 128 (dot-product instructions
want one side unsigned). A row is scale * q in each group, signed, so that an outlier costs its own group its
precision and no other; behind it lie, for each group, the scale and what takes the 128 out again. Knows nothing of
layers or tiles. Invariant: the integer sum of a group is exact, so every instruction path gives the same bits.

    panel   words [ceil(K / 4), 32]   scales fp32 [32]
    row     bytes [ceil(K / 64), 64]   groups [ceil(K / 64)] of: scale fp32, -128 * sum of q int32
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from llvmlite import ir

from ostinato.ops.cpu.epilogue import EpilogueEmitter
from ostinato.ops.cpu.jit import intrinsic, types
from ostinato.ops.cpu.vector_ir import F32, I8, I32, I64, LANES, VI, Lanes, Value

GROUP = 64  # values of K that share a row's scale
GROUP_BYTES = 8  # of a row's trailer, for each group
TRAILER_WORDS = 1  # of a panel, behind its words: scales
_LEVELS = 127.0
_ZERO = 128
_LEAST = 1e-30  # a group with nothing larger counts as zero; its inverse scale would be infinite
_ROUND = 12582912.0  # 1.5 * 2**23: adding it leaves the nearest integer, ties to even, in the low bits
_ROUND_BITS = 0x4B400000


def row_bytes(columns: int) -> int:
    """Bytes of a quantised row."""
    return -(-columns // GROUP) * (GROUP + GROUP_BYTES)


def quantise_weight(weight: torch.Tensor) -> torch.Tensor:
    """int32 [N, words + 1] of `weight` [N, K]: 4 values a word, and the scale's bits."""
    wide = weight.float()
    scale = wide.abs().amax(1, keepdim=True) / _LEVELS
    q = torch.where(scale > 0, wide / scale, 0.0).round_().clamp_(-_LEVELS, _LEVELS)
    q = q.add_(_ZERO).to(torch.uint8)
    padded = torch.nn.functional.pad(q, (0, -q.shape[1] % 4)).contiguous()
    return torch.cat([padded.view(torch.int32), scale.view(torch.int32)], dim=1)


def _quantise_group(lanes: Lanes, values: list[Value], target: Value, trailer: Value) -> None:
    """Bytes of a group at `target`, scale and offset at `trailer`; `values` are its vectors of 16.

    The scale is NaN where the group holds NaN: the bits of absolute values, read as integers, are in their order
    with NaN on top.
    """
    b = lanes.b

    def larger(x: Value, y: Value) -> Value:
        return b.select(b.icmp_signed(">", x, y), x, y)

    sizes = [b.and_(b.bitcast(value, VI), lanes.ints(0x7FFFFFFF)) for value in values]
    most = b.bitcast(lanes.first_lane(lanes.fold(functools.reduce(larger, sizes), larger)), F32)
    levels = ir.Constant(F32, _LEVELS)
    counts = b.fcmp_ordered(">", most, ir.Constant(F32, _LEAST))
    inverse = lanes.splat(b.select(counts, b.fdiv(levels, most), ir.Constant(F32, 0.0)))
    total = lanes.ints(0)
    for j, value in enumerate(values):
        shifted = b.fadd(b.fmul(value, inverse), lanes.floats(_ROUND))
        number = b.sub(b.bitcast(shifted, VI), lanes.ints(_ROUND_BITS))
        total = b.add(total, number)
        lanes.store(b.trunc(number, ir.VectorType(I8, LANES)), lanes.at(target, LANES * j), 1)
    lanes.store(b.fdiv(most, levels), trailer, 4)
    offset = b.mul(lanes.first_lane(lanes.fold(total, b.add)), ir.Constant(I32, -_ZERO))
    lanes.store(offset, lanes.at(trailer, 4), 4)


def _quantise(lanes: Lanes, source: Value, target: Value, columns: Value, *, fp32: bool) -> None:
    """Whole groups, then the one that is left with zeros behind its values."""
    b, emitter, size = lanes.b, EpilogueEmitter(lanes), 4 if fp32 else 2
    whole = b.sdiv(columns, lanes.i64(GROUP))
    left = b.sub(columns, lanes.times(whole, GROUP))
    some = b.zext(b.icmp_signed(">", left, lanes.i64(0)), I64)
    trailers = lanes.at(target, lanes.times(b.add(whole, some), GROUP))

    def group(g: Value, masks: list[Value | None]) -> None:
        at = lanes.at(source, lanes.times(g, size * GROUP))
        values = [emitter.read(lanes.at(at, size * LANES * j), fp32, mask) for j, mask in enumerate(masks)]
        trailer = lanes.at(trailers, lanes.times(g, GROUP_BYTES))
        _quantise_group(lanes, values, lanes.at(target, lanes.times(g, GROUP)), trailer)

    vectors = range(GROUP // LANES)
    lanes.each(whole, lambda g: group(g, [None for _ in vectors]))
    masks = [lanes.lanes_below(b.sub(left, lanes.i64(LANES * j))) for j in vectors]
    lanes.each(some, lambda g: group(whole, [*masks]))


def _quantise_intrinsic(fp32: bool) -> Any:
    @intrinsic
    def quantise(typing_context: Any, source: Any, target: Any, columns: Any) -> tuple[Any, Any]:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _quantise(Lanes(builder), *args, fp32=fp32)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 3), emit

    return quantise


_emit_bf16 = _quantise_intrinsic(False)
_emit_fp32 = _quantise_intrinsic(True)


def quantise_bf16_row(source: int, target: int, columns: int) -> None:
    """Bytes, scales and offsets of a row of bf16."""
    _emit_bf16(source, target, columns)


def quantise_fp32_row(source: int, target: int, columns: int) -> None:
    """Bytes, scales and offsets of a row of fp32."""
    _emit_fp32(source, target, columns)
