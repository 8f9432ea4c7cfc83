"""int8 matrix tiles: exact sums of one group of K after the other, scaled and added up in fp32.

The sums of a group stay in registers; what they come to lies in the scratch tile, so that as many rows fit as in
other tiles. Knows nothing of layers or threads. Invariant: an output adds its groups in the order of K by the same
fp32 operations on every path, whatever the number of rows in the tile.

    out[row, n] = panel scale[n] * sum over groups of row scale[g] * sum over the group of (byte - 128) * byte
"""

from __future__ import annotations

from ostinato.ops.cpu.int8 import GROUP, GROUP_BYTES
from ostinato.ops.cpu.isa import AVX512_BF16, PORTABLE
from ostinato.ops.cpu.products import Int8Dot, Int8Multiply
from ostinato.ops.cpu.tiles import STEP_BYTES, VECTORS, TileEmitter, tile_intrinsic
from ostinato.ops.cpu.vector_ir import F32, I32, VF, Value

GROUP_STEPS = GROUP // 4


class Int8TileEmitter(TileEmitter):
    """Emits int8 tiles."""

    def tile(
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
        lanes, b = self.lanes, self.lanes.b
        addresses = self.addresses(n, rows)
        groups = b.sdiv(lanes.at(steps, GROUP_STEPS - 1), lanes.i64(GROUP_STEPS))
        for i in range(n * VECTORS):
            lanes.store(lanes.floats(0.0), lanes.at(out, 64 * i), 64)

        def group(g: Value) -> None:
            first = lanes.times(g, GROUP_STEPS)
            left = b.sub(steps, first)
            full = b.icmp_signed("<", lanes.i64(GROUP_STEPS), left)
            count = b.select(full, lanes.i64(GROUP_STEPS), left)
            trailer = lanes.at(lanes.times(groups, GROUP), lanes.times(g, GROUP_BYTES))
            offsets = [lanes.splat(lanes.load(lanes.at(a, trailer, 4), I32, 4)) for a in addresses]

            def step(k: Value, sums: list[Value]) -> list[Value]:
                return self.whole_step(lanes.at(first, k), addresses, panel, ahead, stride, sums)

            sums = lanes.loop(count, [o for o in offsets for _ in range(VECTORS)], step)
            for r, address in enumerate(addresses):
                scale = lanes.splat(lanes.load(lanes.at(address, trailer), F32, 4))
                for j in range(VECTORS):
                    place = lanes.at(out, 64 * (r * VECTORS + j))
                    value = b.sitofp(sums[r * VECTORS + j], VF)
                    lanes.store(lanes.fma(value, scale, lanes.load(place, VF, 64)), place, 64)

        lanes.each(groups, group)
        end = lanes.at(panel, lanes.times(steps, STEP_BYTES))
        scales = [lanes.load(lanes.at(end, 64 * j), VF, 64) for j in range(VECTORS)]
        for i in range(n * VECTORS):
            place = lanes.at(out, 64 * i)
            lanes.store(b.fmul(lanes.load(place, VF, 64), scales[i % VECTORS]), place, 64)


_emit_dot = tile_intrinsic(Int8TileEmitter, Int8Dot(), AVX512_BF16)
_emit_portable = tile_intrinsic(Int8TileEmitter, Int8Multiply(), PORTABLE)


def tile_int8_dot(
    rows: int, count: int, panel: int, steps: int, odd: int, out: int, ahead: int, stride: int
) -> None:
    """Quantised rows and int8 panel, by dot-product instructions."""
    _emit_dot(rows, count, panel, steps, odd, out, ahead, stride)


def tile_int8_portable(
    rows: int, count: int, panel: int, steps: int, odd: int, out: int, ahead: int, stride: int
) -> None:
    """Quantised rows and int8 panel, by integer multiply-adds."""
    _emit_portable(rows, count, panel, steps, odd, out, ahead, stride)
