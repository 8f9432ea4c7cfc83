"""Vector parts of choosing a token: weights of a row of logits, and the tokens that are near the best.

Knows nothing of what is chosen. Invariant: the operations of `ops.choice.weigh`, in its order, so the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from llvmlite import ir

from ostinato.ops.choice import ONE
from ostinato.ops.cpu.lane_kinds import Kind
from ostinato.ops.cpu.native import NativeFunction
from ostinato.ops.cpu.routing_ir import exact_exp
from ostinato.ops.cpu.vector_ir import F32, I16, I32, I64, LANES, VF, VI, Lanes, Value

BLOCK_VECTORS = 4
BLOCK = BLOCK_VECTORS * LANES
"""Tokens whose weights are summed, and whose best is noted, as one."""
VL = ir.VectorType(I64, LANES)


def _largest(lanes: Lanes, x: Value, count: Value) -> Value:
    """The largest of the fp32 values, in every lane; NaN never."""
    b, lowest = lanes.b, lanes.floats(float("-inf"))
    vectors = b.sdiv(lanes.at(count, LANES - 1), lanes.i64(LANES))

    def step(j: Value, state: list[Value]) -> list[Value]:
        mask = lanes.lanes_below(b.sub(count, lanes.times(j, LANES)))
        loaded = lanes.load_masked(lanes.at(x, lanes.times(j, 4 * LANES)), mask, VF)
        return [lanes.max(b.select(mask, loaded, lowest), state[0])]

    (most,) = lanes.loop(vectors, [lowest], step)
    return lanes.max_lanes(most)


def _weigh(lanes: Lanes, kind: Kind, args: list[Value]) -> None:
    """f(x, count, heat bits, least, d, q, sums, bests): d and q of `count` logits, up to whole blocks; for each block
    the sum of its q that reach `least`, and its smallest d.
    """
    x, count, heat_bits, least, distances, weights, sums, bests = args
    b = lanes.b
    most, infinity, zero = _largest(lanes, x, count), lanes.floats(float("inf")), lanes.floats(0.0)
    heat = lanes.splat(b.bitcast(b.trunc(heat_bits, I32), F32))
    nothing, enough = ir.Constant(VL, [0] * LANES), lanes.splat(least)

    def block(i: Value) -> None:
        def step(k: Value, state: list[Value]) -> list[Value]:
            first = lanes.at(lanes.times(i, BLOCK), lanes.times(k, LANES))
            mask = lanes.lanes_below(b.sub(count, first))
            value = lanes.load_masked(lanes.at(x, lanes.times(first, 4)), mask, VF)
            d = b.fdiv(b.fsub(most, value), heat)
            d = b.select(b.fcmp_ordered("==", value, most), zero, d)
            there = b.and_(mask, b.fcmp_ordered("ord", value, value))
            d = b.select(there, d, infinity)
            q = b.fptosi(b.fmul(exact_exp(lanes, b.fneg(d)), lanes.floats(float(ONE))), VL)
            lanes.store(d, lanes.at(distances, lanes.times(first, 4)))
            lanes.store(q, lanes.at(weights, lanes.times(first, 8)), 8)
            counted = b.select(b.icmp_signed(">=", q, enough), q, nothing)
            nearer = b.select(b.fcmp_ordered("<", d, state[1]), d, state[1])
            return [b.add(state[0], counted), nearer]

        total, best = lanes.loop(lanes.i64(BLOCK_VECTORS), [nothing, infinity], step)
        lanes.store(lanes.first_lane(lanes.fold(total, b.add)), lanes.at(sums, lanes.times(i, 8)), 8)
        nearest = lanes.fold(best, lambda m, n: b.select(b.fcmp_ordered("<", m, n), m, n))
        lanes.store(lanes.first_lane(nearest), lanes.at(bests, lanes.times(i, 4)), 4)

    lanes.each(b.sdiv(lanes.at(count, BLOCK - 1), lanes.i64(BLOCK)), block)


def _collect(lanes: Lanes, kind: Kind, args: list[Value]) -> None:
    """f(d, count, limit bits, keys, found): (bits of d, id) of the tokens with d <= limit as int64 keys, in order of
    id, and their number. There must be room for 16 more.
    """
    distances, count, limit_bits, keys, found = args
    b = lanes.b
    limit = lanes.splat(b.bitcast(b.trunc(limit_bits, I32), F32))

    def step(j: Value, state: list[Value]) -> list[Value]:
        first = lanes.times(j, LANES)
        d = lanes.load(lanes.at(distances, lanes.times(first, 4)))
        near = b.and_(b.fcmp_ordered("<=", d, limit), lanes.lanes_below(b.sub(count, first)))
        before = b.block
        some, after = b.append_basic_block("some"), b.append_basic_block("after")
        b.cbranch(b.icmp_unsigned("!=", b.bitcast(near, I16), ir.Constant(I16, 0)), some, after)
        b.position_at_end(some)
        bits, number = b.bitcast(d, VI), state[0]
        for lane in range(LANES):
            place = ir.Constant(I32, lane)
            high = b.shl(b.zext(b.extract_element(bits, place), I64), lanes.i64(32))
            lanes.store(b.add(high, lanes.at(first, lane)), lanes.at(keys, lanes.times(number, 8)), 8)
            number = b.add(number, b.zext(b.extract_element(near, place), I64))
        inside = b.block
        b.branch(after)
        b.position_at_end(after)
        merged = b.phi(I64)
        merged.add_incoming(state[0], before)
        merged.add_incoming(number, inside)
        return [merged]

    vectors = b.sdiv(lanes.at(count, LANES - 1), lanes.i64(LANES))
    (number,) = lanes.loop(vectors, [lanes.i64(0)], step)
    lanes.store(number, found, 8)


CHOICE_FUNCTIONS: Mapping[str, NativeFunction] = MappingProxyType(
    {"weigh": NativeFunction(8, _weigh), "collect": NativeFunction(5, _collect)}
)
