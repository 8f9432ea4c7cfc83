"""int8 tiles for registers of 256 bits (AVX2): a block of K is a group, whose exact sums are scaled and added up.

Knows nothing of layers or threads. Invariant: as in `int8_tiles`, whose bits these are.
"""

from __future__ import annotations

from ostinato.ops.cpu import int8
from ostinato.ops.cpu.narrow_tiles import VECTOR_BYTES, VECTORS, Block, NarrowTileEmitter, Tile, tile_of
from ostinato.ops.cpu.products import Int8Narrow
from ostinato.ops.cpu.tiles import PANEL, STEP_BYTES
from ostinato.ops.cpu.vector_ir import F32, I32, Value


class Int8NarrowEmitter(NarrowTileEmitter):
    """int8 tiles: a block is a group of K, whose exact sums are scaled as they are added up (see `int8_tiles`)."""

    block_steps = int8.GROUP // 4

    def emit(self, tile: Tile) -> None:
        super().emit(tile)
        lanes, b = self.lanes, self.lanes.b
        end = lanes.at(tile.panel, lanes.times(tile.steps, STEP_BYTES))
        scales = [lanes.load(lanes.at(end, VECTOR_BYTES * j), lanes.vf, VECTOR_BYTES) for j in range(VECTORS)]

        def row(r: Value) -> None:
            for j, scale in enumerate(scales):
                place = lanes.at(tile.out, lanes.times(r, 4 * PANEL), VECTOR_BYTES * j)
                value = lanes.load(place, lanes.vf, VECTOR_BYTES)
                lanes.store(b.fmul(value, scale), place, VECTOR_BYTES)

        lanes.each(tile.count, row)

    def _trailer(self, tile: Tile, block: Block) -> Value:
        """Of a row, where the block's scale and offset are."""
        lanes, b = self.lanes, self.lanes.b
        groups = b.sdiv(lanes.at(tile.steps, self.block_steps - 1), lanes.i64(self.block_steps))
        group = b.sdiv(block.first, lanes.i64(self.block_steps))
        return lanes.at(lanes.times(groups, int8.GROUP), lanes.times(group, int8.GROUP_BYTES))

    def begin(self, places: list[Value], addresses: list[Value], tile: Tile, block: Block) -> list[Value]:
        lanes, trailer = self.lanes, self._trailer(tile, block)
        offsets = [lanes.splat(lanes.load(lanes.at(a, trailer, 4), I32, 4)) for a in addresses]
        return [o for o in offsets for _ in range(len(places) // len(addresses))]

    def end(
        self, places: list[Value], addresses: list[Value], tile: Tile, block: Block, sums: list[Value]
    ) -> None:
        lanes, b, trailer = self.lanes, self.lanes.b, self._trailer(tile, block)
        scales = [lanes.splat(lanes.load(lanes.at(a, trailer), F32, 4)) for a in addresses]
        across = len(places) // len(addresses)
        for i, place in enumerate(places):
            value = b.sitofp(sums[i], lanes.vf)
            total = lanes.fma(value, scales[i // across], lanes.load(place, lanes.vf, VECTOR_BYTES))
            lanes.store(total, place, VECTOR_BYTES)


_emit_int8 = tile_of(Int8NarrowEmitter, Int8Narrow())


def tile_int8_avx2(
    rows: int, count: int, panel: int, steps: int, odd: int, out: int, ahead: int, stride: int
) -> None:
    """Quantised rows and int8 panel, by products of 16-bit integers."""
    _emit_int8(rows, count, panel, steps, odd, out, ahead, stride)
