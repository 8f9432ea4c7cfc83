"""Matrix tiles: up to 12 rows times one panel of 32 columns, summed over K in registers.

Emits the inner loops of every matrix product as LLVM IR: rows are given by address, a panel lies in memory in
the order it is read (`packing`), sums go to a scratch tile of fp32 [rows, 32]. Knows nothing of layers or
threads. Invariant: an output sums its products in the order of K in one accumulator, whatever the number of
rows in the tile, so a row's bits do not depend on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from ostinato.ops.cpu.isa import AVX512_BF16, PORTABLE, select_isa
from ostinato.ops.cpu.jit import intrinsic, types
from ostinato.ops.cpu.products import Bf16Dot, Bf16Fma, Fp32Fma, Product
from ostinato.ops.cpu.vector_ir import I16, I32, I64, VI, Keep, Lanes, Value

PANEL = 32  # columns of a panel
VECTORS = 2  # vectors of 16 lanes across a panel
STEP_BYTES = 4 * PANEL  # of a panel, per step of K: 2 bf16, 1 fp32 or 4 int8 values a column
TILE_ARGUMENTS = 8
_WAITING_ROWS = 3  # rows of a tile whose arithmetic takes about as long as reading its panel
_AGAIN = 3072  # bytes of a panel after which such a tile asks again: a core drops what finds its queue full
_CROWDED = 16  # sums beyond which LLVM must be kept from loading words early and spilling sums for them


class TileEmitter:
    """Emits one kind of tile: all row counts behind one switch."""

    def __init__(self, lanes: Lanes, most_rows: int, product: Product) -> None:
        self.lanes = lanes
        self.most_rows = most_rows
        self.product = product

    def emit(self, count: Value, args: list[Value]) -> None:
        """Arguments: address of `count` row addresses; panel; whole steps; 1 when one bf16 is left after them;
        the scratch tile; and what to ask memory for on the way: a step asks for two lines at `ahead` + k *
        `stride`.
        """
        self.lanes.cases(count, range(1, self.most_rows + 1), lambda n: self.tile(n, *args))

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
        """One row count; the arguments are those of `emit`."""
        lanes = self.lanes
        addresses = self.addresses(n, rows)
        zeros = [lanes.floats(0.0)] * (n * VECTORS)
        sums = lanes.loop(
            steps, zeros, lambda k, sums: self.whole_step(k, addresses, panel, ahead, stride, sums)
        )

        self.finish(lanes.at(panel, lanes.times(steps, STEP_BYTES)), addresses, steps, odd, sums, out)

    def finish(
        self, at: Value, addresses: list[Value], steps: Value, odd: Value, sums: list[Value], out: Value
    ) -> None:
        """Add the odd value behind the whole steps, whose words are at `at`, and store the sums."""
        lanes = self.lanes
        offset = lanes.times(steps, 4)

        def rest(_: Value, sums: list[Value]) -> list[Value]:
            def word(row: int) -> Value:
                return lanes.b.zext(lanes.load(lanes.at(addresses[row], offset), I16), I32)

            return self.add_words(self.columns(at), word, sums)

        sums = lanes.loop(odd, sums, rest)
        for i, total in enumerate(sums):
            lanes.store(total, lanes.at(out, 64 * i), 64)

    def addresses(self, n: int, rows: Value) -> list[Value]:
        """Row addresses, from the address of the first of them."""
        lanes = self.lanes
        return [lanes.load(lanes.at(rows, 8 * r), I64, 8) for r in range(n)]

    def whole_step(
        self, k: Value, addresses: list[Value], panel: Value, ahead: Value, stride: Value, sums: list[Value]
    ) -> list[Value]:
        """Sums with the k-th words added; asks memory for what `ahead` and `stride` say."""
        lanes = self.lanes
        asked = lanes.at(ahead, lanes.b.mul(k, stride))
        self.ask(len(addresses), asked, STEP_BYTES, stride)
        offset = lanes.times(k, 4)
        at = lanes.at(panel, lanes.times(k, STEP_BYTES))
        return self.add_words(
            self.columns(at), lambda r: lanes.load(lanes.at(addresses[r], offset), I32), sums
        )

    def ask(self, n: int, at: Value, size: int, stride: Value) -> None:
        """Ask for `size` bytes ahead of a tile of `n` rows. A panel that is asked for as fast as it is used is read
        once; what is asked for at another pace stays, for the tiles to come.

        From _WAITING_ROWS rows on what is read once comes into the second-level cache: arithmetic takes about as
        long as memory then, and the first level has too few places for lines on their way to bridge the gaps. There
        it is asked for twice, since tiles use some of their lines faster than memory delivers.
        """
        lanes, b = self.lanes, self.lanes.b

        def lines(keep: Keep, behind: int = 0) -> None:
            for line in range(0, size, 64):
                lanes.prefetch(lanes.at(at, line - behind), keep)

        if n == 1:
            lines(Keep.ONCE)
            return
        with b.if_else(b.icmp_signed("==", stride, lanes.i64(STEP_BYTES))) as (streams, stays):
            with streams:
                lines(Keep.ONCE if n < _WAITING_ROWS else Keep.SECOND)
                if n >= _WAITING_ROWS:
                    lines(Keep.SECOND, _AGAIN)
            with stays:
                lines(Keep.NEAREST)

    def columns(self, at: Value) -> list[Value]:
        """A step's words of the panel."""
        return [self.lanes.load(self.lanes.at(at, 64 * j), VI, 64) for j in range(VECTORS)]

    def add_words(self, columns: list[Value], word: Callable[[int], Value], sums: list[Value]) -> list[Value]:
        """One step: a row's word is loaded just before its use, so that the sums keep their registers."""
        lanes, product = self.lanes, self.product
        added = []
        panel = [[product.panel(lanes, words, part) for words in columns] for part in range(product.parts)]
        for row in range(len(sums) // VECTORS):
            value = word(row)
            mine = sums[row * VECTORS : (row + 1) * VECTORS]
            for part, vectors in enumerate(panel):
                factor = product.row(lanes, value, part)
                mine = [product.add(lanes, total, vectors[j], factor) for j, total in enumerate(mine)]
            if len(sums) > _CROWDED:
                fence = ir.FunctionType(sums[0].type, [sums[0].type])
                mine = [lanes.b.asm(fence, "", "=v,0,~{memory}", [m], side_effect=True) for m in mine]
            added += mine
        return added


def intrinsic_of(emit_tile: Callable[[Any, list[Value]], None]) -> Any:
    """A Numba intrinsic of eight int64 that is what `emit_tile` emits with a builder and the arguments."""

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
            emit_tile(builder, list(args))
            return context.get_dummy_value()

        return types.void(*[types.int64] * TILE_ARGUMENTS), emit

    return tile


def tile_intrinsic(emitter: type[TileEmitter], product: Product, isa_name: str) -> Any:
    """An intrinsic that runs the tiles of an emitter on an instruction path."""

    def emit(builder: Any, args: list[Value]) -> None:
        rows, count, *rest = args
        emitter(Lanes(builder), select_isa(isa_name).tile_rows, product).emit(count, [rows, *rest])

    return intrinsic_of(emit)


_emit_bf16_dot = tile_intrinsic(TileEmitter, Bf16Dot(), AVX512_BF16)
_emit_bf16_portable = tile_intrinsic(TileEmitter, Bf16Fma(), PORTABLE)
_emit_fp32 = tile_intrinsic(TileEmitter, Fp32Fma(), PORTABLE)


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


TileFunction = Callable[[int, int, int, int, int, int, int, int], None]
