"""Functions of rows that touch each value once: sums, gates, clamping, and copying rows by index.

Bodies of f(p, first, last) for the driver in `rows`, over its parameter block. Computed in fp32 and rounded once.
Knows nothing of threads. Invariant: a value depends on the values at its own place alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from llvmlite import ir

from ostinato.ops.cpu import rows as field
from ostinato.ops.cpu.coded_tiles import copy_coded_row
from ostinato.ops.cpu.epilogue import EpilogueEmitter
from ostinato.ops.cpu.lane_kinds import Kind
from ostinato.ops.cpu.native import NativeFunction
from ostinato.ops.cpu.norm_ir import Fields, Vector
from ostinato.ops.cpu.tiles import PANEL
from ostinato.ops.cpu.vector_ir import F32, I1, I64, POINTER, VF, Lanes, Value

_LOG2_E = 1.4426950408889634
# One row: lanes, kind, the block's fields, row, and the vector whose places are visited.
RowBody = Callable[[Lanes, Kind, Fields, Value, Vector], None]


def _each_row(body: RowBody) -> Callable[[Lanes, Kind, list[Value]], None]:
    def emit(lanes: Lanes, kind: Kind, args: list[Value]) -> None:
        p, first, last = args
        fields = Fields(lanes, p)
        vector = Vector(lanes, kind, fields[field.DIM])
        lanes.each(
            lanes.b.sub(last, first), lambda i: body(lanes, kind, fields, lanes.b.add(first, i), vector)
        )

    return emit


def _add(lanes: Lanes, kind: Kind, fields: Fields, row: Value, vector: Vector) -> None:
    """out = x + y."""
    x, y = fields.row(field.X, field.X_STRIDE, row), fields.row(field.Y, field.Y_STRIDE, row)
    out = fields.row(field.OUT, field.OUT_STRIDE, row)

    def visit(j: Value, mask: Value | None) -> None:
        offset = vector.offset(j)
        one, other = (kind.load(lanes, lanes.at(a, offset), mask) for a in (x, y))
        kind.store(lanes, lanes.b.fadd(one, other), lanes.at(out, offset), mask)

    vector.each(visit)


def _sigmoid_gated_add(lanes: Lanes, kind: Kind, fields: Fields, row: Value, vector: Vector) -> None:
    """out = x + sigmoid(gate[row]) * y, the gate fp32 at WEIGHT with the stride BIAS."""
    x, y = fields.row(field.X, field.X_STRIDE, row), fields.row(field.Y, field.Y_STRIDE, row)
    out, b = fields.row(field.OUT, field.OUT_STRIDE, row), lanes.b
    gate = lanes.splat(lanes.load(fields.row(field.WEIGHT, field.BIAS, row), F32, 4))
    power = b.fmul(gate, lanes.floats(-_LOG2_E))
    power = b.select(b.fcmp_ordered(">", power, lanes.floats(127.0)), lanes.floats(127.0), power)
    share = b.fdiv(lanes.floats(1.0), b.fadd(lanes.floats(1.0), lanes.exp2(power)))

    def visit(j: Value, mask: Value | None) -> None:
        offset = vector.offset(j)
        one, other = (kind.load(lanes, lanes.at(a, offset), mask) for a in (x, y))
        kind.store(lanes, b.fadd(one, b.fmul(share, other)), lanes.at(out, offset), mask)

    vector.each(visit)


def _clamp(lanes: Lanes, kind: Kind, fields: Fields, row: Value, vector: Vector) -> None:
    """x into [-EPS, EPS]; NaN stays NaN."""
    x, b, limit = fields.row(field.X, field.X_STRIDE, row), lanes.b, fields.floats(field.EPS)
    lowest = b.fsub(lanes.floats(-0.0), limit)

    def visit(j: Value, mask: Value | None) -> None:
        at = lanes.at(x, vector.offset(j))
        value = kind.load(lanes, at, mask)
        value = b.select(b.fcmp_ordered(">", value, limit), limit, value)
        value = b.select(b.fcmp_ordered("<", value, lowest), lowest, value)
        kind.store(lanes, value, at, mask)

    vector.each(visit)


def _table_row(lanes: Lanes, fields: Fields, row: Value) -> Value:
    """index[row], clamped into the TABLE_ROWS rows of x."""
    b = lanes.b
    most = lanes.at(fields[field.TABLE_ROWS], -1)
    index = lanes.load(lanes.at(fields[field.POSITIONS], lanes.times(row, 8)), I64, 8)
    index = b.select(b.icmp_signed(">", index, most), most, index)
    return b.select(b.icmp_signed("<", index, lanes.i64(0)), lanes.i64(0), index)


def _copy_rows(lanes: Lanes, kind: Kind, fields: Fields, row: Value, vector: Vector) -> None:
    """out[row] = x[index[row]], DIM bytes; indices are clamped into the TABLE_ROWS rows of x."""
    b, index = lanes.b, _table_row(lanes, fields, row)
    places = (fields.row(field.OUT, field.OUT_STRIDE, row), fields.row(field.X, field.X_STRIDE, index))
    target, source = (b.inttoptr(place, POINTER) for place in places)
    lanes.call("llvm.memcpy.p0.p0.i64", ir.VoidType(), target, source, fields[field.DIM], ir.Constant(I1, 0))


def _copy_panel_rows(lanes: Lanes, kind: Kind, fields: Fields, row: Value, vector: Vector) -> None:
    """out[row] = row index[row] of packed weights at X, panels Y_STRIDE bytes apart: DIM whole words, HALF odd values.

    A panel holds a word of each of its PANEL rows, then the next word of each: a row's words lie far apart.
    """
    b, index = lanes.b, _table_row(lanes, fields, row)
    panel, place = (op(index, lanes.i64(PANEL)) for op in (b.sdiv, b.srem))
    source = lanes.at(fields[field.X], b.mul(panel, fields[field.Y_STRIDE]))
    source = lanes.at(source, lanes.times(place, 4))
    out = fields.row(field.OUT, field.OUT_STRIDE, row)

    def copy(word: Value, bits: ir.Type) -> None:
        value = lanes.load(lanes.at(source, lanes.times(word, 4 * PANEL)), bits, 2)
        lanes.store(value, lanes.at(out, lanes.times(word, 4)), 2)

    lanes.each(fields[field.DIM], lambda word: copy(word, ir.IntType(32)))
    lanes.each(fields[field.HALF], lambda word: copy(b.add(fields[field.DIM], word), ir.IntType(16)))


def _copy_coded_rows(lanes: Lanes, kind: Kind, fields: Fields, row: Value, vector: Vector) -> None:
    """out[row] = row index[row] of coded weights at X, whose panels begin where the int64 at Y say."""
    b, index = lanes.b, _table_row(lanes, fields, row)
    panel, place = (op(index, lanes.i64(PANEL)) for op in (b.sdiv, b.srem))
    start = lanes.load(lanes.at(fields[field.Y], lanes.times(panel, 8)), I64, 8)
    out = fields.row(field.OUT, field.OUT_STRIDE, row)
    copy_coded_row(lanes, lanes.at(fields[field.X], start), place, out, fields[field.DIM], fields[field.HALF])


def _combine_slots(lanes: Lanes, kind: Kind, fields: Fields, row: Value, vector: Vector) -> None:
    """out[row] = the sum over k, in slot order, of weight[row, k] * x[index[row, k]], x fp32; a negative index adds
    nothing. The X_HEADS slots of a row are added by the operations of the MoE kernel's own combine.
    """
    b, slots = lanes.b, fields[field.X_HEADS]
    out = fields.row(field.OUT, field.OUT_STRIDE, row)
    weights = fields.row(field.WEIGHT, field.BIAS, row)
    places = lanes.at(fields[field.POSITIONS], lanes.times(b.mul(row, slots), 8))

    def visit(j: Value, mask: Value | None) -> None:
        columns = lanes.times(j, 64)

        def slot(k: Value, sums: list[Value]) -> list[Value]:
            place = lanes.load(lanes.at(places, lanes.times(k, 8)), I64, 8)
            before = b.block
            live, after = b.append_basic_block("live"), b.append_basic_block("next")
            b.cbranch(b.icmp_signed(">=", place, lanes.i64(0)), live, after)
            b.position_at_end(live)
            weight = lanes.splat(lanes.load(lanes.at(weights, lanes.times(k, 4)), F32, 4))
            at = lanes.at(fields.row(field.X, field.X_STRIDE, place), columns)
            values = lanes.load(at) if mask is None else lanes.load_masked(at, mask, VF)
            added = lanes.fma(values, weight, sums[0])
            last = b.block
            b.branch(after)
            b.position_at_end(after)
            merged = b.phi(VF)
            merged.add_incoming(sums[0], before)
            merged.add_incoming(added, last)
            return [merged]

        (total,) = lanes.loop(slots, [lanes.floats(0.0)], slot)
        # Rounded as the MoE kernel does, which keeps subnormals; instructions of a kind may not.
        EpilogueEmitter(lanes).write(total, lanes.at(out, vector.offset(j)), kind.value_bytes == 4, mask)

    vector.each(visit)


ELEMENTWISE_FUNCTIONS: Mapping[str, NativeFunction] = MappingProxyType(
    {
        name: NativeFunction(3, _each_row(body))
        for name, body in (
            ("add", _add),
            ("sigmoid_gated_add", _sigmoid_gated_add),
            ("clamp", _clamp),
            ("copy_rows", _copy_rows),
            ("copy_panel_rows", _copy_panel_rows),
            ("copy_coded_rows", _copy_coded_rows),
            ("combine_slots", _combine_slots),
        )
    }
)
