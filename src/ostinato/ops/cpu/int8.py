"""int8 products: weights quantised per output, rows per row, summed exactly, scaled in fp32.

A weight is q * scale with q in [-127, 127], rounded to nearest. A row becomes bytes u = q + 128 (dot-product
instructions want one side unsigned) and its scale behind them; the panel holds, behind its words, every
output's scale and 128 * the sum of its q, which takes the offset out again. Knows nothing of layers.
Invariant: the integer sum is exact, so every instruction path gives the same bits.

    panel   words [ceil(K / 4), 32]  scales fp32 [32]  offsets int32 [32]
    row     bytes [4 * ceil(K / 4)]  scale fp32
"""

from __future__ import annotations

from typing import Any

import torch
from llvmlite import ir

from ostinato.ops.cpu.epilogue import EpilogueEmitter
from ostinato.ops.cpu.jit import intrinsic, types
from ostinato.ops.cpu.vector_ir import I8, I32, LANES, VF, VI, Lanes, Value

TRAILER_WORDS = 2  # of a panel, behind its words: scales, offsets
_LEVELS = 127.0
_ZERO = 128
_ROUND = 12582912.0  # 1.5 * 2**23: adding it leaves the nearest integer, ties to even, in the low bits
_ROUND_BITS = 0x4B400000


def quantise_weight(weight: torch.Tensor) -> torch.Tensor:
    """int32 [N, words + 2] of `weight` [N, K]: 4 values a word, the scale's bits, and the offset."""
    wide = weight.float()
    scale = wide.abs().amax(1, keepdim=True) / _LEVELS
    q = torch.where(scale > 0, wide / scale, 0.0).round_().clamp_(-_LEVELS, _LEVELS).to(torch.int8)
    padded = torch.nn.functional.pad(q, (0, -q.shape[1] % 4)).contiguous()
    offset = _ZERO * q.sum(1, keepdim=True, dtype=torch.int32)
    return torch.cat([padded.view(torch.int32), scale.view(torch.int32), offset], dim=1)


def dot_vnni(lanes: Lanes, total: Value, panel: Value, word: Value) -> Value:
    """vpdpbusd: four products of a byte of the row and one of the panel, added exactly."""
    return lanes.call("llvm.x86.avx512.vpdpbusd.512", VI, total, lanes.splat(word), panel)


def dot_portable(lanes: Lanes, total: Value, panel: Value, word: Value) -> Value:
    """The same sum by integer multiply-adds."""
    b = lanes.b
    for byte in range(4):
        weight = b.ashr(b.shl(panel, lanes.ints(24 - 8 * byte)), lanes.ints(24))
        value = b.and_(b.lshr(word, ir.Constant(I32, 8 * byte)), ir.Constant(I32, 255))
        total = b.add(total, b.mul(weight, lanes.splat(value)))
    return total


def rescale(lanes: Lanes, total: Value, panel_end: Value, row_end: Value) -> Value:
    """fp32 of an integer sum; the addresses are those of 16 scales of the panel, and of the row's scale."""
    b = lanes.b
    exact = b.sub(total, lanes.load(lanes.at(panel_end, 128), VI, 64))
    scaled = b.fmul(b.sitofp(exact, VF), lanes.load(panel_end, VF, 64))
    return b.fmul(scaled, lanes.splat(lanes.load(row_end, ir.FloatType(), 4)))


def _scale_of(lanes: Lanes, emitter: EpilogueEmitter, source: Value, columns: Value, fp32: bool) -> Value:
    """Largest absolute value of a row in every lane; NaN when the row holds one."""
    b = lanes.b
    blocks = b.sdiv(lanes.at(columns, LANES - 1), lanes.i64(LANES))

    def visit(j: Value, carried: list[Value]) -> list[Value]:
        offset = lanes.times(j, LANES * (4 if fp32 else 2))
        mask = lanes.lanes_below(b.sub(columns, lanes.times(j, LANES)))
        value = emitter.read(lanes.at(source, offset), fp32, mask)
        size = b.bitcast(b.and_(b.bitcast(value, VI), lanes.ints(0x7FFFFFFF)), VF)
        nan = b.select(b.fcmp_unordered("uno", value, value), lanes.ints(1), lanes.ints(0))
        return [lanes.max(size, carried[0]), b.or_(carried[1], nan)]

    most, nan = lanes.loop(blocks, [lanes.floats(0.0), lanes.ints(0)], visit)
    most, nan = lanes.max_lanes(most), lanes.fold(nan, b.or_)
    return b.select(b.icmp_signed("!=", nan, lanes.ints(0)), lanes.floats(float("nan")), most)


def _quantise(lanes: Lanes, source: Value, target: Value, columns: Value, *, fp32: bool) -> None:
    b, emitter = lanes.b, EpilogueEmitter(lanes)
    most = _scale_of(lanes, emitter, source, columns, fp32)
    some = b.fcmp_ordered(">", most, lanes.floats(0.0))
    inverse = b.select(some, b.fdiv(lanes.floats(_LEVELS), most), lanes.floats(0.0))
    blocks = b.sdiv(lanes.at(columns, LANES - 1), lanes.i64(LANES))

    def visit(j: Value) -> None:
        offset = lanes.times(j, LANES * (4 if fp32 else 2))
        mask = lanes.lanes_below(b.sub(columns, lanes.times(j, LANES)))
        value = b.fmul(emitter.read(lanes.at(source, offset), fp32, mask), inverse)
        value = b.select(b.fcmp_ordered("<", value, lanes.floats(_LEVELS)), value, lanes.floats(_LEVELS))
        value = b.select(b.fcmp_ordered(">", value, lanes.floats(-_LEVELS)), value, lanes.floats(-_LEVELS))
        bits = b.bitcast(b.fadd(value, lanes.floats(_ROUND)), VI)
        number = b.add(b.sub(bits, lanes.ints(_ROUND_BITS)), lanes.ints(_ZERO))
        lanes.store(b.trunc(number, ir.VectorType(I8, LANES)), lanes.at(target, lanes.times(j, LANES)), 1)

    lanes.each(blocks, visit)
    scale = b.fdiv(most, lanes.floats(_LEVELS))
    words = lanes.times(b.sdiv(lanes.at(columns, 3), lanes.i64(4)), 4)
    lanes.store(lanes.first_lane(scale), lanes.at(target, words), 4)


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
    """Bytes and scale of a row of bf16; up to 16 bytes behind the bytes are scratch until the scale is there."""
    _emit_bf16(source, target, columns)


def quantise_fp32_row(source: int, target: int, columns: int) -> None:
    """Bytes and scale of a row of fp32."""
    _emit_fp32(source, target, columns)
