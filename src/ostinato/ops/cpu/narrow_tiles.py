"""Matrix tiles for 16 vector registers of 256 bits (AVX2): rows times one panel of 32 columns, block by block along K.

A block of a panel stays in the first-level cache while all rows pass over it, at most six at a time and half a panel's
columns when there are more than three: twelve sums in registers, which lie in the scratch tile between blocks. These
passes share out asking memory for what comes next, so that it is never idle meanwhile. Knows nothing of layers or
threads. Invariant: as in `tiles`, whose bits on the portable path these are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from llvmlite import ir

from ostinato.ops.cpu.products import Bf16Narrow, Fp32Fma, Product
from ostinato.ops.cpu.tiles import PANEL, STEP_BYTES, intrinsic_of
from ostinato.ops.cpu.vector_ir import I8, I16, I32, I64, Keep, Lanes, Value

NARROW = 8  # lanes of a register
SUMS = 12  # that stay in registers, beside what is multiplied
_MOST_ROWS = 6  # that are summed at once
VECTORS = PANEL // NARROW  # across a panel
VECTOR_BYTES = 4 * NARROW
BLOCK_STEPS = 64  # steps of K
_CROWDED = 8  # sums from which on LLVM must be kept from loading early and spilling sums for it

Step = Callable[[Any, Value, list[Value]], list[Value]]  # type of a row's word, which step, sums -> sums


class Tile(NamedTuple):
    """The arguments of a tile (see `tiles.TileEmitter.emit`)."""

    rows: Value
    count: Value
    panel: Value
    steps: Value
    odd: Value
    out: Value
    ahead: Value
    stride: Value


class Block(NamedTuple):
    """Some steps of K, and what to ask memory for meanwhile; `before`: shares of that which others than passes take."""

    steps: Value
    first: Value
    odd: Value  # 1 where a value alone follows
    words: Value  # address of the panel's
    asked: Value  # address
    pace: Value  # bytes a step
    before: int = 0


class NarrowTileEmitter:
    """Emits one kind of tile, for any number of rows."""

    block_steps = BLOCK_STEPS

    def __init__(self, lanes: Lanes, product: Product) -> None:
        self.lanes = lanes
        self.product = product

    def room(self, size: int) -> Value:
        """Address of `size` bytes of the stack, aligned to 64."""
        b = self.lanes.b
        with b.goto_entry_block():
            place = b.alloca(I8, size + 64)
        return b.and_(b.add(b.ptrtoint(place, I64), ir.Constant(I64, 63)), ir.Constant(I64, -64))

    def emit(self, tile: Tile) -> None:
        """The whole tile."""
        lanes = self.lanes

        def clear(i: Value) -> None:
            lanes.store(lanes.floats(0.0), lanes.at(tile.out, lanes.times(i, VECTOR_BYTES)), VECTOR_BYTES)

        lanes.each(lanes.times(tile.count, VECTORS), clear)
        self.blocks(tile, lanes.i64(0), tile.steps, tile.panel)

    def blocks(self, tile: Tile, first: Value, steps: Value, words: Value) -> None:
        """Steps from `first` on, and the odd value behind them, whose words are as they will be multiplied."""
        lanes, b = self.lanes, self.lanes.b
        size = lanes.i64(self.block_steps)
        # What is odd behind a last block that is full comes as a block of no steps.
        count = b.sdiv(lanes.at(steps, tile.odd, self.block_steps - 1), size)

        def one(i: Value) -> None:
            done = lanes.times(i, self.block_steps)
            left = b.sub(steps, done)
            here = b.select(b.icmp_signed("<", left, size), left, size)
            last = b.icmp_signed("==", lanes.at(i, 1), count)
            start = lanes.at(first, done)
            block = Block(
                here,
                start,
                b.select(last, tile.odd, lanes.i64(0)),
                lanes.at(words, lanes.times(done, STEP_BYTES)),
                lanes.at(tile.ahead, b.mul(start, tile.stride)),
                tile.stride,
            )
            self.block(tile, block)

        lanes.each(count, one)

    def block(self, tile: Tile, block: Block) -> None:
        """All rows: as few groups of them as may be, of even size."""
        lanes, b = self.lanes, self.lanes.b
        groups = b.sdiv(lanes.at(tile.count, _MOST_ROWS - 1), lanes.i64(_MOST_ROWS))

        def group(g: Value, carried: list[Value]) -> list[Value]:
            (row,) = carried
            left = b.sub(groups, g)
            n = b.sdiv(lanes.at(b.sub(tile.count, row), b.sub(left, lanes.i64(1))), left)
            lanes.cases(
                n, range(1, _MOST_ROWS + 1), lambda rows: self.rows(tile, block, row, rows, (groups, g))
            )
            return [b.add(row, n)]

        lanes.loop(groups, [lanes.i64(0)], group)

    def rows(self, tile: Tile, block: Block, row: Value, n: int, group: tuple[Value, Value]) -> None:
        """`n` rows from `row` on; `group`: of how many groups they are which."""
        lanes, b = self.lanes, self.lanes.b
        begin = lanes.at(tile.rows, lanes.times(row, 8))
        addresses = [lanes.load(lanes.at(begin, 8 * r), I64, 8) for r in range(n)]
        across = VECTORS if n <= SUMS // VECTORS else VECTORS // 2
        passes = VECTORS // across
        pace = self.share(block.pace, lanes.at(lanes.times(group[0], passes), block.before))
        out = lanes.at(tile.out, lanes.times(row, 4 * PANEL))
        for i, first in enumerate(range(0, VECTORS, across)):
            vectors = range(first, first + across)
            places = [lanes.at(out, 4 * PANEL * r + VECTOR_BYTES * j) for r in range(n) for j in vectors]
            done = lanes.at(lanes.times(group[1], passes), i + block.before)
            asked = lanes.at(block.asked, b.mul(b.mul(done, block.steps), pace))
            sums = self.begin(places, addresses, tile, block)
            step = self.step(tile, block, addresses, vectors, (asked, pace))

            def whole(k: Value, sums: list[Value], step: Step = step) -> list[Value]:
                return step(I32, k, sums)

            def odd(_: Value, sums: list[Value], step: Step = step) -> list[Value]:
                return step(I16, block.steps, sums)

            sums = lanes.loop(block.steps, sums, whole)
            sums = lanes.loop(block.odd, sums, odd)
            self.end(places, addresses, tile, block, sums)

    def share(self, pace: Value, parts: Value) -> Value:
        """A part's pace, such that all of them leave nothing out."""
        return self.lanes.b.sdiv(self.lanes.at(pace, parts, -1), parts)

    def step(
        self,
        tile: Tile,
        block: Block,
        addresses: list[Value],
        vectors: Sequence[int],
        asked: tuple[Value, Value],
    ) -> Step:
        """A function that adds the words of a step, of a type (I16: the odd value), to sums."""
        lanes, b, product = self.lanes, self.lanes.b, self.product
        n, across = len(addresses), len(vectors)
        rows = [lanes.at(address, lanes.times(block.first, 4)) for address in addresses]

        def step(typ: Any, k: Value, sums: list[Value]) -> list[Value]:
            if typ == I32:
                self.ask(
                    lanes.at(asked[0], b.mul(k, asked[1])), STEP_BYTES // (VECTORS // across), tile.stride
                )
            at, along = lanes.at(block.words, lanes.times(k, STEP_BYTES)), lanes.times(k, 4)
            added = list(sums)

            def value(r: int, part: int) -> Value:
                word = lanes.load(lanes.at(rows[r], along), typ)
                return product.row(lanes, word if typ == I32 else b.zext(word, I32), part)

            def panel(j: int, part: int) -> Value:
                words = lanes.load(lanes.at(at, VECTOR_BYTES * vectors[j]), lanes.vi, VECTOR_BYTES)
                return product.panel(lanes, words, part)

            def add(r: int, j: int, panel: Value, row: Value) -> None:
                total = product.add(lanes, added[r * across + j], panel, row)
                added[r * across + j] = self._fenced(total, len(sums))

            # What there is less of stays in registers.
            for part in range(product.parts):
                if n < across:
                    values = [value(r, part) for r in range(n)]
                    for j in range(across):
                        found = panel(j, part)
                        for r in range(n):
                            add(r, j, found, values[r])
                else:
                    columns = [panel(j, part) for j in range(across)]
                    for r in range(n):
                        row = value(r, part)
                        for j in range(across):
                            add(r, j, columns[j], row)
            return added

        return step

    def _fenced(self, total: Value, count: int) -> Value:
        """`total`, which nothing that follows may pass by: LLVM would load early and spill sums for it."""
        if count < _CROWDED:
            return total
        fence = ir.FunctionType(total.type, [total.type])
        return self.lanes.b.asm(fence, "", "=x,0,~{memory}", [total], side_effect=True)

    def ask(self, at: Value, size: int, stride: Value) -> None:
        """Ask for `size` bytes ahead (see `tiles.TileEmitter.ask`)."""
        lanes, b = self.lanes, self.lanes.b
        with b.if_else(b.icmp_signed("==", stride, lanes.i64(STEP_BYTES))) as (streams, stays):
            for keep, branch in ((Keep.ONCE, streams), (Keep.NEAREST, stays)):
                with branch:
                    for line in range(0, size, 64):
                        lanes.prefetch(lanes.at(at, line), keep)

    def begin(self, places: list[Value], addresses: list[Value], tile: Tile, block: Block) -> list[Value]:
        """What a block's sums begin with."""
        return [self.lanes.load(place, self.lanes.vf, VECTOR_BYTES) for place in places]

    def end(
        self, places: list[Value], addresses: list[Value], tile: Tile, block: Block, sums: list[Value]
    ) -> None:
        """What becomes of a block's sums."""
        for place, total in zip(places, sums, strict=True):
            self.lanes.store(total, place, VECTOR_BYTES)


def tile_of(emitter: type[NarrowTileEmitter], product: Product) -> Any:
    """An intrinsic that runs the tiles of an emitter."""
    return intrinsic_of(lambda builder, args: emitter(Lanes(builder, NARROW), product).emit(Tile(*args)))


_emit_bf16 = tile_of(NarrowTileEmitter, Bf16Narrow())
_emit_fp32 = tile_of(NarrowTileEmitter, Fp32Fma())


def tile_bf16_avx2(
    rows: int, count: int, panel: int, steps: int, odd: int, out: int, ahead: int, stride: int
) -> None:
    """bf16 rows and panel, by fp32 multiply-adds."""
    _emit_bf16(rows, count, panel, steps, odd, out, ahead, stride)


def tile_fp32_avx2(
    rows: int, count: int, panel: int, steps: int, odd: int, out: int, ahead: int, stride: int
) -> None:
    """fp32 rows and panel."""
    _emit_fp32(rows, count, panel, steps, odd, out, ahead, stride)
