"""Scores of router logits: softmax, sigmoid and the root of softplus, 16 experts at a time.

Bodies of f(source, target, count): fp32 `count` values at `source` to fp32 at `target`, which has room for whole
vectors. Knows nothing of selection. Invariant: the operations of `ops.exact`, in its order, so the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from ostinato.ops import exact
from ostinato.ops.cpu.lane_kinds import Float32, Kind
from ostinato.ops.cpu.native import NativeFunction
from ostinato.ops.cpu.vector_ir import LANES, VF, VI, Lanes, Value


def exact_exp(lanes: Lanes, x: Value) -> Value:
    """`ops.exact.exp` of 16 values."""
    b = lanes.b
    most = lanes.floats(exact.LARGEST_EXPONENT)
    x = b.select(b.fcmp_ordered(">", x, most), most, x)
    shifted = b.fadd(b.fmul(x, lanes.floats(exact.LOG2_E)), lanes.floats(exact.ROUND_TO_INT))
    whole = b.fsub(shifted, lanes.floats(exact.ROUND_TO_INT))
    high, low = (b.fmul(whole, lanes.floats(part)) for part in (exact.LN2_HIGH, exact.LN2_LOW))
    r = b.fsub(b.fsub(x, high), low)
    power = _polynomial(lanes, r, exact.EXP_COEFFICIENTS)
    power = b.fadd(b.fadd(b.fmul(b.fmul(power, r), r), r), lanes.floats(1.0))
    exponent = b.shl(b.bitcast(shifted, VI), lanes.ints(23))
    scale = b.bitcast(b.add(exponent, lanes.ints(0x3F800000)), VF)
    tiny = b.fcmp_ordered("<", x, lanes.floats(exact.SMALLEST_EXPONENT))
    return b.select(tiny, lanes.floats(0.0), b.fmul(power, scale))


def _polynomial(lanes: Lanes, x: Value, coefficients: tuple[float, ...]) -> Value:
    """By Horner's rule, each product and each sum rounded."""
    total = lanes.floats(coefficients[0])
    for coefficient in coefficients[1:]:
        total = lanes.b.fadd(lanes.b.fmul(total, x), lanes.floats(coefficient))
    return total


def _sigmoid(lanes: Lanes, x: Value) -> Value:
    b, one = lanes.b, lanes.floats(1.0)
    return b.fdiv(one, b.fadd(one, exact_exp(lanes, b.fneg(x))))


def _sqrt_softplus(lanes: Lanes, x: Value) -> Value:
    b, zero = lanes.b, lanes.floats(0.0)
    t = exact_exp(lanes, b.fneg(lanes.call("llvm.fabs.v16f32", VF, x)))
    s = b.fdiv(t, b.fadd(t, lanes.floats(2.0)))
    square = b.fmul(s, s)
    series = b.fadd(b.fmul(_polynomial(lanes, square, exact.LOG1P_COEFFICIENTS), square), lanes.floats(1.0))
    positive = b.select(b.fcmp_ordered("<", x, zero), zero, x)
    return lanes.sqrt(b.fadd(positive, b.fmul(b.fadd(s, s), series)))


def _visit(
    lanes: Lanes, args: list[Value], carried: Value, body: Callable[[Value, Value, Value, Value], Value]
) -> Value:
    """carried = body(source, target, mask, carried) at every 16 values; addresses are those of the vector."""
    source, target, count = args
    vectors = lanes.b.sdiv(lanes.at(count, LANES - 1), lanes.i64(LANES))

    def step(j: Value, state: list[Value]) -> list[Value]:
        offset = lanes.times(j, 4 * LANES)
        mask = lanes.lanes_below(lanes.b.sub(count, lanes.times(j, LANES)))
        return [body(lanes.at(source, offset), lanes.at(target, offset), mask, state[0])]

    (last,) = lanes.loop(vectors, [carried], step)
    return last


def _elementwise(function: Callable[[Lanes, Value], Value]) -> Callable[[Lanes, Kind, list[Value]], None]:
    def emit(lanes: Lanes, kind: Kind, args: list[Value]) -> None:
        def body(source: Value, target: Value, mask: Value, carried: Value) -> Value:
            lanes.store(function(lanes, lanes.load_masked(source, mask, VF)), target)
            return carried

        _visit(lanes, args, lanes.i64(0), body)

    return emit


def _softmax(lanes: Lanes, kind: Kind, args: list[Value]) -> None:
    """Largest value, then powers and their sum, then shares. A NaN anywhere makes the sum NaN."""
    b = lanes.b
    lowest = lanes.floats(float("-inf"))

    def largest(source: Value, target: Value, mask: Value, most: Value) -> Value:
        return lanes.max(b.select(mask, lanes.load_masked(source, mask, VF), lowest), most)

    most = lanes.max_lanes(_visit(lanes, args, lowest, largest))

    def powers(source: Value, target: Value, mask: Value, total: Value) -> Value:
        power = exact_exp(lanes, b.fsub(lanes.load_masked(source, mask, VF), most))
        power = b.select(mask, power, lanes.floats(0.0))
        lanes.store(power, target)
        return b.fadd(total, power)

    total = lanes.sum_lanes(_visit(lanes, args, lanes.floats(0.0), powers))

    def share(source: Value, target: Value, mask: Value, carried: Value) -> Value:
        lanes.store(b.fdiv(lanes.load(target), total), target)
        return carried

    _visit(lanes, args, lanes.i64(0), share)


SCORE_KIND = Float32()
SCORE_FUNCTIONS: Mapping[str, NativeFunction] = MappingProxyType(
    {
        "softmax": NativeFunction(3, _softmax),
        "sigmoid": NativeFunction(3, _elementwise(_sigmoid)),
        "sqrtsoftplus": NativeFunction(3, _elementwise(_sqrt_softplus)),
    }
)
