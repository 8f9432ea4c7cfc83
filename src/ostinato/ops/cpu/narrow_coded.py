"""Tiles over coded panels for registers of 256 bits (AVX2): bf16 words decoded block by block, once for all rows.

`coding` has the layout. Knows nothing of layers or threads. Invariant: the words that are multiplied, and the order in
which they are, are those of the plain tile (`narrow_tiles`), so the sums have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from llvmlite import ir

from ostinato.ops.cpu.coding import (
    CODE_BITS,
    FIRST_LENGTH,
    GROUP_BYTES,
    GROUP_STEPS,
    HEADER_BYTES,
    PLAIN_STEPS,
    RAW_BYTES,
    RAW_LEAD,
    TABLE_SIZE,
)
from ostinato.ops.cpu.narrow_tiles import (
    BLOCK_STEPS,
    NARROW,
    SUMS,
    VECTOR_BYTES,
    VECTORS,
    Block,
    NarrowTileEmitter,
    Tile,
    tile_of,
)
from ostinato.ops.cpu.products import Bf16Narrow, Product
from ostinato.ops.cpu.tiles import STEP_BYTES
from ostinato.ops.cpu.vector_ir import I8, I16, I32, I64, Lanes, Value

_SIDES = 2  # registers of a vector of 16 columns, whose bytes are coded together

Words = Callable[[Value, int, int], list[Value]]  # address of a group, step, side -> words of both vectors
Group = Callable[[Value, Value, list[Value]], list[Value]]  # address, number in the block, carried -> carried


class CodedNarrowEmitter(NarrowTileEmitter):
    """Tiles over coded panels (`coding` has the layout): words of a block are decoded once, for all rows.

    Those of a single row are multiplied as they are decoded.
    """

    def __init__(self, lanes: Lanes, product: Product) -> None:
        super().__init__(lanes, product)
        self.words = self.room(BLOCK_STEPS * STEP_BYTES)
        self.cursor = self.room(64)  # where the next group is, and how many coded ones come before a raw one

    def blocks(self, tile: Tile, first: Value, steps: Value, words: Value) -> None:
        """Coded and raw groups in their order, then the steps behind them, as they are."""
        lanes, b = self.lanes, self.lanes.b
        length, plain = (
            b.zext(lanes.load(lanes.at(tile.panel, place), I32, 4), I64)
            for place in (FIRST_LENGTH, PLAIN_STEPS)
        )
        coded = b.sub(tile.steps, plain)
        table = self._table(tile.panel)
        self._move(lanes.at(tile.panel, HEADER_BYTES), length)

        def one(i: Value) -> None:
            done = lanes.times(i, BLOCK_STEPS)
            left = b.sub(coded, done)
            here = b.select(b.icmp_signed("<", left, lanes.i64(BLOCK_STEPS)), left, lanes.i64(BLOCK_STEPS))
            place = b.mul(b.sub(self._at(), tile.panel), tile.stride)
            asked = lanes.at(tile.ahead, b.lshr(place, lanes.i64(STEP_BYTES.bit_length() - 1)))
            pace = self.share(lanes.times(tile.stride, GROUP_BYTES), lanes.i64(GROUP_STEPS * STEP_BYTES))
            block = Block(here, done, lanes.i64(0), self.words, asked, pace, before=1)
            with b.if_else(b.icmp_signed("==", tile.count, lanes.i64(1))) as (one_row, more):
                with one_row:
                    self._fused(tile, block, table)
                with more:
                    self._decode(tile, block, table)
                    self.block(tile, block)

        lanes.each(b.sdiv(lanes.at(coded, BLOCK_STEPS - 1), lanes.i64(BLOCK_STEPS)), one)
        super().blocks(tile, coded, plain, self._at())

    def _at(self) -> Value:
        return self.lanes.load(self.cursor, I64, 8)

    def _move(self, at: Value, length: Value) -> None:
        self.lanes.store(at, self.cursor, 8)
        self.lanes.store(length, self.lanes.at(self.cursor, 8), 8)

    def _groups(self, block: Block, carried: list[Value], coded: Group, raw: Group) -> list[Value]:
        """The block's groups from the cursor on, each one of two kinds, which is then behind them."""
        lanes, b = self.lanes, self.lanes.b

        def one(g: Value, state: list[Value]) -> list[Value]:
            at, length, *carried = state
            is_raw = b.icmp_signed("==", length, lanes.i64(0))
            ways = [b.append_basic_block(name) for name in ("raw", "coded")]
            joined = b.append_basic_block("group_end")
            b.cbranch(is_raw, *ways).set_weights([1, 99])
            ends = []
            for way, visit in zip(ways, (raw, coded), strict=True):
                b.position_at_end(way)
                ends.append((visit(at, g, carried), b.block))
                b.branch(joined)
            b.position_at_end(joined)
            merged = []
            for i, value in enumerate(carried):
                phi = b.phi(value.type)
                for found, block in ends:
                    phi.add_incoming(found[i], block)
                merged.append(phi)
            following = b.zext(lanes.load(at, I32, 4), I64)
            length = b.select(is_raw, following, b.sub(length, lanes.i64(1)))
            size = b.select(is_raw, lanes.i64(RAW_BYTES), lanes.i64(GROUP_BYTES))
            return [lanes.at(at, size), length, *merged]

        state = [self._at(), lanes.load(lanes.at(self.cursor, 8), I64, 8), *carried]
        at, length, *carried = lanes.loop(b.sdiv(block.steps, lanes.i64(GROUP_STEPS)), state, one)
        self._move(at, length)
        return carried

    def _decode(self, tile: Tile, block: Block, table: Value) -> None:
        """Write the words of a block."""
        lanes, b = self.lanes, self.lanes.b
        passes = b.sdiv(lanes.at(tile.count, SUMS // VECTORS - 1), lanes.i64(SUMS // VECTORS))
        pace = self.share(lanes.times(block.pace, GROUP_STEPS), lanes.at(passes, 1))

        def visit(words: Words) -> Group:
            def group(at: Value, g: Value, carried: list[Value]) -> list[Value]:
                self.ask(lanes.at(block.asked, b.mul(g, pace)), STEP_BYTES, tile.stride)
                target = lanes.at(block.words, lanes.times(g, GROUP_STEPS * STEP_BYTES))
                for step in range(GROUP_STEPS):
                    for side in range(_SIDES):
                        for vector, found in enumerate(words(at, step, side)):
                            place = STEP_BYTES * step + VECTOR_BYTES * (vector * _SIDES + side)
                            lanes.store(found, lanes.at(target, place), VECTOR_BYTES)
                return []

            return group

        self._groups(block, [], visit(partial(self._decoded, table)), visit(self._raw))

    def _fused(self, tile: Tile, block: Block, table: Value) -> None:
        """A block for the only row, without writing its words: decoding hides in the latency of so few sums."""
        lanes, b, product = self.lanes, self.lanes.b, self.product
        address = lanes.load(tile.rows, I64, 8)
        row = lanes.at(address, lanes.times(block.first, 4))
        places = [lanes.at(tile.out, VECTOR_BYTES * i) for i in range(VECTORS)]
        pace = lanes.times(block.pace, GROUP_STEPS)

        def visit(words: Words) -> Group:
            def group(at: Value, g: Value, sums: list[Value]) -> list[Value]:
                self.ask(lanes.at(block.asked, b.mul(g, pace)), GROUP_BYTES, tile.stride)
                added = list(sums)
                for step in range(GROUP_STEPS):
                    k = lanes.times(lanes.at(lanes.times(g, GROUP_STEPS), step), 4)
                    word = lanes.load(lanes.at(row, k), I32)
                    values = [product.row(lanes, word, part) for part in range(product.parts)]
                    for side in range(_SIDES):
                        for vector, columns in enumerate(words(at, step, side)):
                            i = vector * _SIDES + side
                            for part, value in enumerate(values):
                                panel = product.panel(lanes, columns, part)
                                added[i] = product.add(lanes, added[i], panel, value)
                return added

            return group

        sums = self.begin(places, [address], tile, block)
        sums = self._groups(block, sums, visit(partial(self._decoded, table)), visit(self._raw))
        self.end(places, [address], tile, block, sums)

    def _table(self, panel: Value) -> Value:
        """The panel's high bytes, once for each half of a register."""
        half = ir.VectorType(I8, TABLE_SIZE)
        order = ir.Constant(ir.VectorType(I32, 32), [*range(TABLE_SIZE)] * 2)
        found = self.lanes.load(panel, half, 64)
        return self.lanes.b.shuffle_vector(found, ir.Constant(half, ir.Undefined), order)

    def _raw(self, at: Value, step: int, side: int) -> list[Value]:
        """Words of columns 0-7 and 16-23 (side 0) or the others, of a step of the raw group at `at`."""
        places = [RAW_LEAD + STEP_BYTES * step + VECTOR_BYTES * (2 * vector + side) for vector in range(2)]
        return [self.lanes.load(self.lanes.at(at, place), self.lanes.vi, VECTOR_BYTES) for place in places]

    def _decoded(self, table: Value, at: Value, step: int, side: int) -> list[Value]:
        """The same of a coded group."""
        lanes, b = self.lanes, self.lanes.b
        size, halves = table.type, ir.VectorType(I16, 2 * NARROW)
        codes = lanes.load(lanes.at(at, 32 * side), size, 32)
        if step:
            shifted = b.lshr(b.bitcast(codes, halves), ir.Constant(halves, [CODE_BITS] * halves.count))
            codes = b.bitcast(shifted, size)
        own = b.and_(codes, ir.Constant(size, [TABLE_SIZE - 1] * size.count))
        high = lanes.call("llvm.x86.avx2.pshuf.b", size, table, own)
        low = lanes.load(lanes.at(at, 64 + 64 * step + 32 * side), size, 32)
        return [b.bitcast(b.shuffle_vector(low, high, _interleaved(vector)), lanes.vi) for vector in range(2)]


def _interleaved(vector: int) -> ir.Constant:
    """Low and high bytes in turn of the lower (vector 0) or upper half of each 128 bits, as vpunpck takes them."""
    order = [16 * half + 8 * vector + i + 32 * high for half in range(2) for i in range(8) for high in (0, 1)]
    return ir.Constant(ir.VectorType(I32, 32), order)


_emit_coded = tile_of(CodedNarrowEmitter, Bf16Narrow())


def tile_coded_avx2(
    rows: int, count: int, panel: int, steps: int, odd: int, out: int, ahead: int, stride: int
) -> None:
    """bf16 rows and coded panel, by fp32 multiply-adds."""
    _emit_coded(rows, count, panel, steps, odd, out, ahead, stride)
