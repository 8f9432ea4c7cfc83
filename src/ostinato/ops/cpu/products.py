"""How a word of a row multiplies words of a panel, for every dtype and instruction path.

A word is 4 bytes along K: 2 bf16 values, 1 fp32 or 4 int8 (of the panel unsigned, see `int8`). Its product is added in
parts, one after the other, so that few registers hold what was unpacked. Knows nothing of tiles. Invariant: a part adds
to one accumulator a lane, in the order of K; sums of int8 are exact.
"""

from __future__ import annotations

from typing import Protocol

from llvmlite import ir

from ostinato.ops.cpu.vector_ir import F32, I16, I32, VB32, VF, VI, Lanes, Value


class Product(Protocol):
    """sum += panel * row, `parts` times a word."""

    @property
    def parts(self) -> int: ...

    def panel(self, lanes: Lanes, words: Value, part: int) -> Value:
        """What a part multiplies of the panel's `words` (i32 lanes)."""
        ...

    def row(self, lanes: Lanes, word: Value, part: int) -> Value:
        """What it multiplies of a row's `word` (i32), in every lane."""
        ...

    def add(self, lanes: Lanes, total: Value, panel: Value, row: Value) -> Value:
        """`total` with the part's product added."""
        ...


class Bf16Dot:
    """vdpbf16ps: both products of the pair in one instruction."""

    parts = 1

    def panel(self, lanes: Lanes, words: Value, part: int) -> Value:
        return lanes.b.bitcast(words, VB32)

    def row(self, lanes: Lanes, word: Value, part: int) -> Value:
        return lanes.b.bitcast(lanes.splat(word), VB32)

    def add(self, lanes: Lanes, total: Value, panel: Value, row: Value) -> Value:
        return lanes.call("llvm.x86.avx512bf16.dpbf16ps.512", VF, total, panel, row)


class Bf16Fma:
    """bf16 is the upper half of fp32: widened by shift and mask, then one fused multiply-add for each of the pair."""

    parts = 2

    def panel(self, lanes: Lanes, words: Value, part: int) -> Value:
        b = lanes.b
        half = b.and_(words, lanes.ints(0xFFFF0000)) if part else b.shl(words, lanes.ints(16))
        return b.bitcast(half, lanes.vf)

    def row(self, lanes: Lanes, word: Value, part: int) -> Value:
        b = lanes.b
        half = b.and_(word, ir.Constant(I32, 0xFFFF0000)) if part else b.shl(word, ir.Constant(I32, 16))
        return lanes.splat(b.bitcast(half, F32))

    def add(self, lanes: Lanes, total: Value, panel: Value, row: Value) -> Value:
        return lanes.fma(panel, row, total)


class Bf16Narrow(Bf16Fma):
    """The same where a scalar reaches all lanes best from memory: copied first, widened there."""

    def row(self, lanes: Lanes, word: Value, part: int) -> Value:
        return self.panel(lanes, lanes.copied(word), part)


class Fp32Fma:
    """One fused multiply-add."""

    parts = 1

    def panel(self, lanes: Lanes, words: Value, part: int) -> Value:
        return lanes.b.bitcast(words, lanes.vf)

    def row(self, lanes: Lanes, word: Value, part: int) -> Value:
        return lanes.splat(lanes.b.bitcast(word, F32))

    def add(self, lanes: Lanes, total: Value, panel: Value, row: Value) -> Value:
        return lanes.fma(panel, row, total)


class Int8Dot:
    """vpdpbusd: four products of a byte of the panel and one of the row, added exactly."""

    parts = 1

    def panel(self, lanes: Lanes, words: Value, part: int) -> Value:
        return words

    def row(self, lanes: Lanes, word: Value, part: int) -> Value:
        return lanes.splat(word)

    def add(self, lanes: Lanes, total: Value, panel: Value, row: Value) -> Value:
        return lanes.call("llvm.x86.avx512.vpdpbusd.512", VI, total, panel, row)


class Int8Multiply:
    """The same sum by 32-bit integer multiply-adds, a byte at a time."""

    parts = 4

    def panel(self, lanes: Lanes, words: Value, part: int) -> Value:
        return lanes.b.and_(lanes.b.lshr(words, lanes.ints(8 * part)), lanes.ints(255))

    def row(self, lanes: Lanes, word: Value, part: int) -> Value:
        high = lanes.b.shl(word, ir.Constant(I32, 24 - 8 * part))
        return lanes.splat(lanes.b.ashr(high, ir.Constant(I32, 24)))

    def add(self, lanes: Lanes, total: Value, panel: Value, row: Value) -> Value:
        return lanes.b.add(total, lanes.b.mul(panel, row))


class Int8Narrow:
    """The same sum by vpmaddwd, exact as well: bytes 0 and 2 of a word as 16-bit integers, then bytes 1 and 3."""

    parts = 2

    def row(self, lanes: Lanes, word: Value, part: int) -> Value:
        halves = self._halves(lanes, lanes.copied(word))
        eight = ir.Constant(halves.type, [8] * halves.type.count)
        return lanes.b.ashr(halves if part else lanes.b.shl(halves, eight), eight)

    def panel(self, lanes: Lanes, words: Value, part: int) -> Value:
        halves = self._halves(lanes, words)
        if part:
            return lanes.b.lshr(halves, ir.Constant(halves.type, [8] * halves.type.count))
        return lanes.b.and_(halves, ir.Constant(halves.type, [255] * halves.type.count))

    def add(self, lanes: Lanes, total: Value, panel: Value, row: Value) -> Value:
        return lanes.b.add(total, lanes.call("llvm.x86.avx2.pmadd.wd", lanes.vi, panel, row))

    def _halves(self, lanes: Lanes, words: Value) -> Value:
        return lanes.b.bitcast(words, ir.VectorType(I16, 2 * lanes.size))
