"""Matrix tiles: up to 12 rows times one panel of 32 columns, summed over K in registers.

Emits the inner loops of every matrix product as LLVM IR: rows are given by address, a panel lies in memory in
the order it is read (`packing`), sums go to a scratch tile of fp32 [rows, 32]. Knows nothing of layers or
threads. Invariant: an output sums its products in the order of K in one accumulator, whatever the number of
rows in the tile, so a row's bits do not depend on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from llvmlite import ir

from ostinato.ops.cpu.int8 import dot_portable, dot_vnni, rescale
from ostinato.ops.cpu.isa import AVX512_BF16, PORTABLE, Isa, select_isa
from ostinato.ops.cpu.jit import intrinsic, types
from ostinato.ops.cpu.vector_ir import F32, I16, I32, I64, VB32, VF, VI, Lanes, Value

PANEL = 32  # columns of a panel
_VECTORS = 2  # vectors of 16 lanes across a panel
STEP_BYTES = 4 * PANEL  # of a panel, per step of K: 2 bf16, 1 fp32 or 4 int8 values a column
TILE_ARGUMENTS = 8
_CROWDED = 16  # sums beyond which LLVM must be kept from loading words early and spilling sums for them

# A step adds one 4-byte word of each row (2 bf16, 1 fp32, 4 int8) times the panel's words to the sums.
Step = Callable[[Lanes, Value, Value, Value], Value]  # lanes, sum, panel words, row word -> sum


@dataclass(frozen=True, slots=True)
class TileKind:
    """How words are multiplied; int8 sums are integers, rescaled at the end."""

    step: Step
    integer: bool = False

    @property
    def sums(self) -> Any:
        """The type of 16 sums."""
        return VI if self.integer else VF


def bf16_dot(lanes: Lanes, total: Value, panel: Value, word: Value) -> Value:
    """vdpbf16ps: both products of the pair in one instruction."""
    pairs = lanes.b.bitcast(lanes.splat(word), VB32)
    return lanes.call("llvm.x86.avx512bf16.dpbf16ps.512", VF, total, lanes.b.bitcast(panel, VB32), pairs)


def bf16_portable(lanes: Lanes, total: Value, panel: Value, word: Value) -> Value:
    """bf16 is the upper half of fp32: widen by shift and mask, then two fused multiply-adds in the order of
    K.
    """
    b = lanes.b
    shift, mask = ir.Constant(I32, 16), ir.Constant(I32, 0xFFFF0000)
    first = lanes.splat(b.bitcast(b.shl(word, shift), F32))
    second = lanes.splat(b.bitcast(b.and_(word, mask), F32))
    total = lanes.fma(b.bitcast(b.shl(panel, lanes.ints(16)), VF), first, total)
    return lanes.fma(b.bitcast(b.and_(panel, lanes.ints(0xFFFF0000)), VF), second, total)


def fp32_step(lanes: Lanes, total: Value, panel: Value, word: Value) -> Value:
    """One fused multiply-add."""
    return lanes.fma(lanes.b.bitcast(panel, VF), lanes.splat(lanes.b.bitcast(word, F32)), total)


class TileEmitter:
    """Emits one kind of tile: all row counts behind one switch."""

    def __init__(self, lanes: Lanes, most_rows: int, kind: TileKind) -> None:
        self.lanes = lanes
        self.most_rows = most_rows
        self.kind = kind

    def emit(self, count: Value, args: list[Value]) -> None:
        """Arguments: address of `count` row addresses; panel; whole steps; 1 when one bf16 is left after them;
        the scratch tile; and what to ask memory for on the way: a step asks for two lines at `ahead` + k *
        `stride`.
        """
        b = self.lanes.b
        done = b.append_basic_block("tile_done")
        choice = b.switch(count, done)
        for n in range(1, self.most_rows + 1):
            block = b.append_basic_block(f"tile_{n}")
            choice.add_case(ir.Constant(I64, n), block)
            b.position_at_end(block)
            self._tile(n, *args)
            b.branch(done)
        b.position_at_end(done)

    def _tile(
        self,
        n: int,
        rows: Value,
        panel: Value,
        steps: Value,
        odd: Value,
        out: Value,
        ahead: Value,
        stride: Value,
    ) -> None:
        lanes = self.lanes
        addresses = [lanes.load(lanes.at(rows, 8 * r), I64, 8) for r in range(n)]
        zero = lanes.ints(0) if self.kind.integer else lanes.floats(0.0)
        zeros = [zero] * (n * _VECTORS)

        def step(k: Value, sums: list[Value]) -> list[Value]:
            at = lanes.at(panel, lanes.times(k, STEP_BYTES))
            asked = lanes.at(ahead, lanes.b.mul(k, stride))
            for line in range(0, STEP_BYTES, 64):
                lanes.prefetch(lanes.at(asked, line))
            offset = lanes.times(k, 4)
            return self._add(at, lambda r: lanes.load(lanes.at(addresses[r], offset), I32), sums)

        sums = lanes.loop(steps, zeros, step)

        def rest(k: Value, sums: list[Value]) -> list[Value]:
            at = lanes.at(panel, lanes.times(steps, STEP_BYTES))
            offset = lanes.times(steps, 4)

            def word(row: int) -> Value:
                return lanes.b.zext(lanes.load(lanes.at(addresses[row], offset), I16), I32)

            return self._add(at, word, sums)

        if not self.kind.integer:
            sums = lanes.loop(odd, sums, rest)
        for i, total in enumerate(sums):
            if self.kind.integer:
                end = lanes.at(panel, lanes.times(steps, STEP_BYTES), 64 * (i % _VECTORS))
                row_end = lanes.at(addresses[i // _VECTORS], lanes.times(steps, 4))
                total = rescale(lanes, total, end, row_end)
            lanes.store(total, lanes.at(out, 64 * i), 64)

    def _add(self, panel: Value, word: Callable[[int], Value], sums: list[Value]) -> list[Value]:
        """One step: a row's word is loaded just before its use, so that the sums keep their registers."""
        lanes = self.lanes
        columns = [lanes.load(lanes.at(panel, 64 * j), VI, 64) for j in range(_VECTORS)]
        added = []
        for row in range(len(sums) // _VECTORS):
            value = word(row)
            mine = sums[row * _VECTORS : (row + 1) * _VECTORS]
            mine = [self.kind.step(lanes, total, columns[j], value) for j, total in enumerate(mine)]
            if len(sums) > _CROWDED:
                fence = ir.FunctionType(self.kind.sums, [self.kind.sums])
                mine = [lanes.b.asm(fence, "", "=v,0,~{memory}", [m], side_effect=True) for m in mine]
            added += mine
        return added


def _tile_intrinsic(kind: TileKind, isa_name: str) -> Any:
    @intrinsic
    def tile(
        typing_context: Any,
        rows: Any,
        count: Any,
        panel: Any,
        steps: Any,
        odd: Any,
        out: Any,
        ahead: Any,
        stride: Any,
    ) -> tuple[Any, Any]:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            rows, count, *rest = args
            emitter = TileEmitter(Lanes(builder), select_isa(isa_name).tile_rows, kind)
            emitter.emit(count, [rows, *rest])
            return context.get_dummy_value()

        return types.void(*[types.int64] * TILE_ARGUMENTS), emit

    return tile


_emit_bf16_dot = _tile_intrinsic(TileKind(bf16_dot), AVX512_BF16)
_emit_bf16_portable = _tile_intrinsic(TileKind(bf16_portable), PORTABLE)
_emit_fp32 = _tile_intrinsic(TileKind(fp32_step), PORTABLE)
_emit_int8_dot = _tile_intrinsic(TileKind(dot_vnni, integer=True), AVX512_BF16)
_emit_int8_portable = _tile_intrinsic(TileKind(dot_portable, integer=True), PORTABLE)


def tile_bf16_dot(
    rows: int, count: int, panel: int, steps: int, odd: int, out: int, ahead: int, stride: int
) -> None:
    """bf16 rows and panel, by dot-product instructions."""
    _emit_bf16_dot(rows, count, panel, steps, odd, out, ahead, stride)


def tile_bf16_portable(
    rows: int, count: int, panel: int, steps: int, odd: int, out: int, ahead: int, stride: int
) -> None:
    """bf16 rows and panel, by fp32 multiply-adds."""
    _emit_bf16_portable(rows, count, panel, steps, odd, out, ahead, stride)


def tile_fp32(
    rows: int, count: int, panel: int, steps: int, odd: int, out: int, ahead: int, stride: int
) -> None:
    """fp32 rows and panel."""
    _emit_fp32(rows, count, panel, steps, odd, out, ahead, stride)


def tile_int8_dot(
    rows: int, count: int, panel: int, steps: int, odd: int, out: int, ahead: int, stride: int
) -> None:
    """Quantised rows and int8 panel, by dot-product instructions."""
    _emit_int8_dot(rows, count, panel, steps, odd, out, ahead, stride)


def tile_int8_portable(
    rows: int, count: int, panel: int, steps: int, odd: int, out: int, ahead: int, stride: int
) -> None:
    """Quantised rows and int8 panel, by integer multiply-adds."""
    _emit_int8_portable(rows, count, panel, steps, odd, out, ahead, stride)


TileFunction = Callable[[int, int, int, int, int, int, int, int], None]


def tile_function(dtype: torch.dtype, isa: Isa) -> TileFunction:
    """The tile for weights of `dtype`: rows of the same, or quantised rows for int8."""
    if dtype == torch.int8:
        return tile_int8_dot if isa.dot_products else tile_int8_portable
    if dtype == torch.float32:
        return tile_fp32
    assert dtype == torch.bfloat16, dtype
    return tile_bf16_dot if isa.dot_products else tile_bf16_portable
