"""Elementwise functions for Triton kernels with the bits of `ops.exact`: the same operations in the same order.

Divisions and roots are the correctly rounded ones; the launcher forbids fused multiply-adds. Knows nothing of memory.
Invariant: the bits of the functions of the same names in `ops.exact`, of fp32, on any device.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ostinato.ops import exact

LOG2_E = tl.constexpr(exact.LOG2_E)
LN2_HIGH, LN2_LOW = tl.constexpr(exact.LN2_HIGH), tl.constexpr(exact.LN2_LOW)
ROUND_TO_INT = tl.constexpr(exact.ROUND_TO_INT)
LARGEST, SMALLEST = tl.constexpr(exact.LARGEST_EXPONENT), tl.constexpr(exact.SMALLEST_EXPONENT)
E0, E1, E2, E3, E4 = (tl.constexpr(c) for c in exact.EXP_COEFFICIENTS)
L0, L1, L2, L3, L4 = (tl.constexpr(c) for c in exact.LOG1P_COEFFICIENTS)
NAN_KEY = tl.constexpr(0x7FFFFFFF)
INFINITY_BITS = tl.constexpr(0x7F800000)


@triton.jit
def exp(x: tl.tensor) -> tl.tensor:
    x = tl.where(x > LARGEST, LARGEST, x)
    shifted = x * LOG2_E + ROUND_TO_INT
    whole = shifted - ROUND_TO_INT
    r = (x - whole * LN2_HIGH) - whole * LN2_LOW
    power = r * E0 + E1
    power = power * r + E2
    power = power * r + E3
    power = power * r + E4
    power = power * r * r + r + 1.0
    scale = ((shifted.to(tl.int32, bitcast=True) << 23) + 0x3F800000).to(tl.float32, bitcast=True)
    return tl.where(x < SMALLEST, 0.0, power * scale)


@triton.jit
def sigmoid(x: tl.tensor) -> tl.tensor:
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), 1.0 + exp(-x))


@triton.jit
def softplus(x: tl.tensor) -> tl.tensor:
    t = exp(-tl.abs(x))
    s = tl.div_rn(t, t + 2.0)
    square = s * s
    series = square * L0 + L1
    series = series * square + L2
    series = series * square + L3
    series = series * square + L4
    return tl.where(x < 0.0, 0.0, x) + (s + s) * (series * square + 1.0)


@triton.jit
def sum_of_lanes(lanes: tl.tensor) -> tl.tensor:
    """fp32 [16] by halving, as `ops.exact` adds the lanes of a row."""
    half = tl.sum(tl.reshape(lanes, (2, 8)), axis=0)
    half = tl.sum(tl.reshape(half, (2, 4)), axis=0)
    half = tl.sum(tl.reshape(half, (2, 2)), axis=0)
    return tl.sum(half, axis=0)


@triton.jit
def ordered_key(x: tl.tensor) -> tl.tensor:
    """An int32 that orders fp32 values as they are, with NaN on top and both zeros alike."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = tl.where(size == 0, 0, key)
    return tl.where(size > INFINITY_BITS, NAN_KEY, key)


@triton.jit
def value_of_key(key: tl.tensor) -> tl.tensor:
    """An fp32 that has this key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def place_key(key: tl.tensor, place: tl.tensor) -> tl.tensor:
    """An int64 by which the larger key wins, and the lower place among equals."""
    return (key.to(tl.int64) << 32) + (0x7FFFFFFF - place).to(tl.int64)


@triton.jit
def place_of(key: tl.tensor) -> tl.tensor:
    """The place in what `place_key` made, int32."""
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)
