"""Matrix tiles over coded panels: bf16 words decoded in registers on their way into the dot products.

Also how anyone walks through a coded panel (`coding` has the layout). Knows nothing of layers or threads. Invariant:
the words that are multiplied, and the order in which they are, are those of the plain tile (`tiles`), so the sums
have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
    SEGMENTS,
    TABLE_SIZE,
    VB,
    VW,
)
from ostinato.ops.cpu.isa import AVX512_BF16
from ostinato.ops.cpu.jit import intrinsic, types
from ostinato.ops.cpu.products import Bf16Dot
from ostinato.ops.cpu.tiles import STEP_BYTES, VECTORS, TileEmitter, tile_intrinsic
from ostinato.ops.cpu.vector_ir import I8, I16, I32, I64, VI, Lanes, Value

_TABLE = ir.VectorType(I8, TABLE_SIZE)

Visit = Callable[[Value, Value, list[Value]], list[Value]]  # address, first step, carried -> carried


def walk_panel(
    lanes: Lanes, panel: Value, carried: list[Value], group: Visit, raw: Visit, plain: Visit
) -> tuple[Value, list[Value]]:
    """Visit the whole steps of a coded panel in order: coded groups, raw groups (from their lead on), plain steps.

    Returns the address behind them and what was carried.
    """
    b = lanes.b
    segments, length, plain_steps = (
        b.zext(lanes.load(lanes.at(panel, place), I32, 4), I64)
        for place in (SEGMENTS, FIRST_LENGTH, PLAIN_STEPS)
    )

    def segment(i: Value, state: list[Value]) -> list[Value]:
        at, step, length, *carried = state

        def one_group(k: Value, carried: list[Value]) -> list[Value]:
            return group(
                lanes.at(at, lanes.times(k, GROUP_BYTES)), lanes.at(step, lanes.times(k, 2)), carried
            )

        carried = lanes.loop(length, carried, one_group)
        at = lanes.at(at, lanes.times(length, GROUP_BYTES))
        step = lanes.at(step, lanes.times(length, GROUP_STEPS))
        more = b.zext(b.icmp_signed("<", lanes.at(i, 1), segments), I64)

        def one_raw(_: Value, state: list[Value]) -> list[Value]:
            length = b.zext(lanes.load(at, I32, 4), I64)
            return [length, *raw(at, step, state[1:])]

        length, *carried = lanes.loop(more, [length, *carried], one_raw)
        at = lanes.at(at, lanes.times(more, RAW_BYTES))
        return [at, lanes.at(step, lanes.times(more, GROUP_STEPS)), length, *carried]

    start = [lanes.at(panel, HEADER_BYTES), lanes.i64(0), length]
    at, step, _, *carried = lanes.loop(segments, [*start, *carried], segment)

    def one_step(k: Value, carried: list[Value]) -> list[Value]:
        return plain(lanes.at(at, lanes.times(k, STEP_BYTES)), lanes.at(step, k), carried)

    carried = lanes.loop(plain_steps, carried, one_step)
    return lanes.at(at, lanes.times(plain_steps, STEP_BYTES)), carried


class CodedTileEmitter(TileEmitter):
    """Emits tiles over coded panels."""

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
        table = _table(lanes, panel)

        def ask(at: Value, size: int) -> None:
            """Ask for as many bytes as are used at a place in the panel; steps of a plain one say how far ahead."""
            place = b.mul(b.sub(at, panel), stride)
            asked = lanes.at(ahead, b.lshr(place, lanes.i64(STEP_BYTES.bit_length() - 1)))
            self.ask(n, asked, size, stride)

        def multiply(columns: list[Value], step: Value, sums: list[Value]) -> list[Value]:
            offset = lanes.times(step, 4)
            return self.add_words(columns, lambda r: lanes.load(lanes.at(addresses[r], offset), I32), sums)

        def group(at: Value, step: Value, sums: list[Value]) -> list[Value]:
            ask(at, GROUP_BYTES)
            codes = lanes.load(at, VB, 64)
            for i in range(GROUP_STEPS):
                columns = _words(lanes, codes, lanes.at(at, 64 + 64 * i), table, i)
                sums = multiply(columns, lanes.at(step, i), sums)
            return sums

        def raw(at: Value, step: Value, sums: list[Value]) -> list[Value]:
            ask(at, RAW_BYTES)
            for i in range(GROUP_STEPS):
                sums = multiply(
                    self.columns(lanes.at(at, RAW_LEAD + STEP_BYTES * i)), lanes.at(step, i), sums
                )
            return sums

        def plain(at: Value, step: Value, sums: list[Value]) -> list[Value]:
            ask(at, STEP_BYTES)
            return multiply(self.columns(at), step, sums)

        zeros = [lanes.floats(0.0)] * (n * VECTORS)
        end, sums = walk_panel(lanes, panel, zeros, group, raw, plain)
        self.finish(end, addresses, steps, odd, sums, out)


def _table(lanes: Lanes, panel: Value) -> Value:
    """The panel's high bytes, four times over: a byte permutation looks at six bits of a code, two of them not its
    own.
    """
    found = lanes.load(panel, _TABLE, 64)
    order = ir.Constant(ir.VectorType(I32, 64), [*range(TABLE_SIZE)] * 4)
    return lanes.b.shuffle_vector(found, ir.Constant(_TABLE, ir.Undefined), order)


def _words(lanes: Lanes, codes: Value, low: Value, table: Value, step: int) -> list[Value]:
    """The words of a step of a group whose low bytes are at `low`."""
    b = lanes.b
    if step:
        codes = b.bitcast(b.lshr(b.bitcast(codes, VW), ir.Constant(VW, [CODE_BITS] * 32)), VB)
    high = lanes.call("llvm.x86.avx512.permvar.qi.512", VB, table, codes)
    found = lanes.load(low, VB, 64)
    return [b.bitcast(b.shuffle_vector(found, high, _interleaved(v)), VI) for v in range(VECTORS)]


def _interleaved(vector: int) -> ir.Constant:
    """Low and high bytes in turn of the lower (vector 0) or upper half of each 128 bits, as vpunpck takes them."""
    order = [
        16 * quarter + 8 * vector + i + 64 * high for quarter in range(4) for i in range(8) for high in (0, 1)
    ]
    return ir.Constant(ir.VectorType(I32, 64), order)


def copy_coded_row(lanes: Lanes, panel: Value, place: Value, out: Value, steps: Value, odd: Value) -> None:
    """Decode row `place` of a panel to `out`: `steps` words, and one value more if `odd`."""
    b = lanes.b
    word, byte = ir.IntType(32), I8

    def widened(at: Value, typ: ir.Type) -> Value:
        return b.zext(lanes.load(at, typ, 1), word)

    def shifted(value: Value, bits: int) -> Value:
        return b.shl(value, ir.Constant(I32, bits))

    quarter, vector = b.and_(b.lshr(place, lanes.i64(2)), lanes.i64(3)), b.lshr(place, lanes.i64(4))
    first = lanes.at(
        lanes.times(quarter, 16), lanes.times(vector, 8), lanes.times(b.and_(place, lanes.i64(3)), 2)
    )
    column = lanes.times(place, 4)

    def store(value: Value, step: Value) -> None:
        lanes.store(value, lanes.at(out, lanes.times(step, 4)), 2)

    def group(at: Value, step: Value, _: list[Value]) -> list[Value]:
        for i in range(GROUP_STEPS):
            value = ir.Constant(I32, 0)
            for half in range(2):
                code = lanes.load(lanes.at(at, first, half), byte, 1)
                code = b.and_(b.lshr(code, ir.Constant(I8, CODE_BITS * i)), ir.Constant(I8, TABLE_SIZE - 1))
                high = widened(lanes.at(panel, b.zext(code, I64)), byte)
                low = widened(lanes.at(at, 64 + 64 * i, first, half), byte)
                value = b.or_(value, shifted(b.or_(low, shifted(high, 8)), 16 * half))
            store(value, lanes.at(step, i))
        return []

    def raw(at: Value, step: Value, _: list[Value]) -> list[Value]:
        for i in range(GROUP_STEPS):
            store(lanes.load(lanes.at(at, RAW_LEAD + STEP_BYTES * i, column), I32, 4), lanes.at(step, i))
        return []

    def plain(at: Value, step: Value, _: list[Value]) -> list[Value]:
        store(lanes.load(lanes.at(at, column), I32, 4), step)
        return []

    end, _ = walk_panel(lanes, panel, [], group, raw, plain)
    lanes.each(odd, lambda _: store(lanes.load(lanes.at(end, column), I16, 2), steps))


def write_words(lanes: Lanes, panel: Value, out: Value, columns: Value) -> None:
    """Write all words of a panel of `columns` values to `out`, in the order of a plain one."""
    table = _table(lanes, panel)

    def store(words: list[Value], step: Value) -> list[Value]:
        for j, value in enumerate(words):
            lanes.store(value, lanes.at(out, lanes.times(step, STEP_BYTES), 64 * j), 64)
        return []

    def plain(at: Value, step: Value, _: list[Value]) -> list[Value]:
        return store([lanes.load(lanes.at(at, 64 * j), VI, 64) for j in range(VECTORS)], step)

    def group(at: Value, step: Value, _: list[Value]) -> list[Value]:
        codes = lanes.load(at, VB, 64)
        for i in range(GROUP_STEPS):
            store(_words(lanes, codes, lanes.at(at, 64 + 64 * i), table, i), lanes.at(step, i))
        return []

    def raw(at: Value, step: Value, _: list[Value]) -> list[Value]:
        for i in range(GROUP_STEPS):
            plain(lanes.at(at, RAW_LEAD + STEP_BYTES * i), lanes.at(step, i), [])
        return []

    end, _ = walk_panel(lanes, panel, [], group, raw, plain)
    odd = lanes.b.and_(columns, lanes.i64(1))
    lanes.loop(odd, [], lambda _, nothing: plain(end, lanes.b.lshr(columns, lanes.i64(1)), nothing))


@intrinsic
def _write_words(typing_context: Any, panel: Any, out: Any, columns: Any) -> tuple[Any, Any]:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        write_words(Lanes(builder), *args)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), emit


def decode_panel(panel: int, out: int, columns: int) -> None:
    """Write the plain panel that a coded one of so many columns stands for."""
    _write_words(panel, out, columns)


_emit_coded = tile_intrinsic(CodedTileEmitter, Bf16Dot(), AVX512_BF16)


def tile_coded(
    rows: int, count: int, panel: int, steps: int, odd: int, out: int, ahead: int, stride: int
) -> None:
    """bf16 rows and coded panel, by dot-product instructions."""
    _emit_coded(rows, count, panel, steps, odd, out, ahead, stride)
