"""Rotary position embedding of heads, and the largest value of a row.

Knows nothing of threads. Invariant: a pair is turned by two products each rounded, then added or subtracted and
rounded, as torch does it; the result depends on the pair and its position alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

from llvmlite import ir

from ostinato.ops.cpu import rows as field
from ostinato.ops.cpu.lane_kinds import Kind
from ostinato.ops.cpu.native import NativeFunction
from ostinato.ops.cpu.norm_ir import Fields, Vector, norm_function, rms_vector
from ostinato.ops.cpu.vector_ir import F32, I32, I64, LANES, VF, Lanes, Value

_NOWHERE = 0x7FFFFFFF  # an index behind all others


def _turned(lanes: Lanes, first: Value, second: Value, cos: Value, sin: Value) -> tuple[Value, Value]:
    b = lanes.b
    return (
        b.fsub(b.fmul(first, cos), b.fmul(second, sin)),
        b.fadd(b.fmul(second, cos), b.fmul(first, sin)),
    )


def _angles(lanes: Lanes, table: Value, half: Value, j: Value, mask: Value) -> tuple[Value, Value]:
    """Cosines and sines of the j-th 16 pairs; `table` is the row of a position."""
    at = lanes.at(table, lanes.times(j, 64))
    return lanes.load_masked(at, mask, VF), lanes.load_masked(lanes.at(at, lanes.times(half, 4)), mask, VF)


def turn_halves(lanes: Lanes, kind: Kind, x: Value, table: Value, half: Value) -> None:
    """Turn the pairs (i, i + half) of one head in place."""
    vector = Vector(lanes, kind, half)

    def visit(j: Value, mask: Value | None) -> None:
        there = vector.mask(j) if mask is None else mask
        low = lanes.at(x, vector.offset(j))
        high = lanes.at(low, lanes.times(half, kind.value_bytes))
        cos, sin = _angles(lanes, table, half, j, there)
        first, second = _turned(lanes, kind.load(lanes, low, mask), kind.load(lanes, high, mask), cos, sin)
        kind.store(lanes, first, low, mask)
        kind.store(lanes, second, high, mask)

    vector.each(visit)


def turn_neighbours(lanes: Lanes, kind: Kind, x: Value, table: Value, half: Value) -> None:
    """Turn the pairs (2 i, 2 i + 1) of one head in place."""
    vector = Vector(lanes, kind, half)

    def visit(j: Value, mask: Value | None) -> None:
        there = vector.mask(j)
        at = lanes.at(x, lanes.times(vector.offset(j), 2))
        cos, sin = _angles(lanes, table, half, j, there)
        first, second = kind.load_pairs(lanes, at, there)
        kind.store_pairs(lanes, _turned(lanes, first, second, cos, sin), at, there)

    vector.each(visit)


def rope_function(*, neighbours: bool, normed: bool) -> Callable[[Lanes, Kind, list[Value]], None]:
    """The body of f(p, first, last): turn the heads of x and y, after an RMS norm of each head if `normed`."""
    turn = turn_neighbours if neighbours else turn_halves

    def emit(lanes: Lanes, kind: Kind, args: list[Value]) -> None:
        p, first, last = args
        b, fields = lanes.b, Fields(lanes, p)
        dim, half, eps = fields[field.DIM], fields[field.HALF], fields.floats(field.EPS)
        vector, size = Vector(lanes, kind, dim), lanes.times(dim, kind.value_bytes)
        most = lanes.at(fields[field.TABLE_ROWS], -1)

        def row(i: Value) -> None:
            r = b.add(first, i)
            position = lanes.load(lanes.at(fields[field.POSITIONS], lanes.times(r, 8)), I64, 8)
            position = b.select(b.icmp_signed("<", position, lanes.i64(0)), lanes.i64(0), position)
            position = b.select(b.icmp_signed(">", position, most), most, position)
            table = lanes.at(fields[field.TABLE], b.mul(position, lanes.times(half, 8)))

            def heads(base: int, stride: int, count: int, weight: int) -> None:
                start = fields.row(base, stride, r)

                def head(h: Value) -> None:
                    x = lanes.at(start, b.mul(h, size))
                    if normed:
                        rms_vector(vector, x, fields[weight], x, eps)
                    turn(lanes, kind, x, table, half)

                lanes.each(fields[count], head)

            heads(field.X, field.X_STRIDE, field.X_HEADS, field.WEIGHT)
            heads(field.Y, field.Y_STRIDE, field.Y_HEADS, field.Y_WEIGHT)

        lanes.each(b.sub(last, first), row)

    return emit


def argmax_rows(lanes: Lanes, kind: Kind, args: list[Value]) -> None:
    """f(p, first, last): the index of the largest value of each row; the lowest among equals, NaN never."""
    p, first, last = args
    b, fields = lanes.b, Fields(lanes, p)
    vector = Vector(lanes, kind, fields[field.DIM])
    count = b.sdiv(lanes.at(vector.dim, LANES - 1), lanes.i64(LANES))
    lowest, nowhere = lanes.floats(float("-inf")), lanes.ints(_NOWHERE)

    def indices(j: Value) -> Value:
        return b.add(lanes.splat(b.trunc(lanes.times(j, LANES), I32)), lanes.lane_numbers())

    def first_number(x: Value, j: Value, found: list[Value]) -> list[Value]:
        mask, index = vector.mask(j), indices(j)
        value = kind.load(lanes, lanes.at(x, vector.offset(j)), mask)
        there = b.and_(mask, b.fcmp_ordered("ord", value, value))
        return [b.select(b.and_(there, b.icmp_signed("<", index, found[0])), index, found[0])]

    def row(i: Value) -> None:
        r = b.add(first, i)
        x = fields.row(field.X, field.X_STRIDE, r)

        def step(j: Value, best: list[Value]) -> list[Value]:
            mask = vector.mask(j)
            value = b.select(mask, kind.load(lanes, lanes.at(x, vector.offset(j)), mask), lowest)
            index = indices(j)
            larger = b.fcmp_ordered(">", value, best[0])
            return [b.select(larger, value, best[0]), b.select(larger, index, best[1])]

        value, index = lanes.loop(count, [lowest, lanes.lane_numbers()], step)
        most = lanes.max_lanes(value)
        winner = b.fcmp_ordered("==", value, most)
        candidates = b.select(winner, index, nowhere)
        # Nothing is larger than what the search begins with where a row holds NaN and -inf alone: look for the latter.
        nothing = b.fcmp_ordered("==", lanes.first_lane(most), ir.Constant(F32, float("-inf")))
        (number,) = lanes.loop(b.select(nothing, count, lanes.i64(0)), [nowhere], partial(first_number, x))
        candidates = b.select(nothing, number, candidates)
        smallest = lanes.first_lane(
            lanes.fold(candidates, lambda m, n: b.select(b.icmp_signed("<", m, n), m, n))
        )
        none = b.icmp_signed("==", smallest, ir.Constant(I32, _NOWHERE))
        chosen = b.select(none, ir.Constant(I32, 0), smallest)
        lanes.store(b.zext(chosen, I64), fields.row(field.OUT, field.OUT_STRIDE, r), 8)

    lanes.each(b.sub(last, first), row)


ROW_FUNCTIONS: Mapping[str, NativeFunction] = MappingProxyType(
    {
        "rms_norm": NativeFunction(3, norm_function(layer=False, residual=False, weighted=True)),
        "rms_norm_plain": NativeFunction(3, norm_function(layer=False, residual=False, weighted=False)),
        "add_rms_norm": NativeFunction(3, norm_function(layer=False, residual=True, weighted=True)),
        "layer_norm": NativeFunction(3, norm_function(layer=True, residual=False, weighted=True)),
        "add_layer_norm": NativeFunction(3, norm_function(layer=True, residual=True, weighted=True)),
        "rope": NativeFunction(3, rope_function(neighbours=False, normed=False)),
        "rope_neighbours": NativeFunction(3, rope_function(neighbours=True, normed=False)),
        "norm_rope": NativeFunction(3, rope_function(neighbours=False, normed=True)),
        "norm_rope_neighbours": NativeFunction(3, rope_function(neighbours=True, normed=True)),
        "argmax": NativeFunction(3, argmax_rows),
    }
)
