"""Norms of rows and of heads: RMS norm and layer norm, each also with the residual added first.

Rounds where `ops/reference.py` rounds: the sum with the residual, and an RMS norm before its weight, are in the
activations' dtype. Knows nothing of threads. Invariant: a sum runs over 4 x 16 lanes by place in the row, then over
the lanes in a fixed order, so it depends on the row alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ostinato.ops.cpu import rows as field
from ostinato.ops.cpu.lane_kinds import Kind
from ostinato.ops.cpu.vector_ir import F32, I64, LANES, Lanes, Value

_SUMS = 4  # sums of 16 lanes that follow each other through a row


@dataclass(frozen=True, slots=True)
class Fields:
    """Reads the parameter block at `p`."""

    lanes: Lanes
    p: Value

    def __getitem__(self, index: int) -> Value:
        return self.lanes.load(self.lanes.at(self.p, 8 * index), I64, 8)

    def floats(self, index: int) -> Value:
        """16 copies of a field that holds fp32 bits."""
        return self.lanes.splat(self.lanes.load(self.lanes.at(self.p, 8 * index), F32, 4))

    def row(self, base: int, stride: int, row: Value) -> Value:
        return self.lanes.at(self[base], self.lanes.b.mul(row, self[stride]))


@dataclass(frozen=True, slots=True)
class Vector:
    """One vector of `dim` values at `address`, visited 16 at a time; the last visit is masked."""

    lanes: Lanes
    kind: Kind
    dim: Value

    def offset(self, j: Value) -> Value:
        """Bytes of the j-th 16 values."""
        return self.lanes.times(j, LANES * self.kind.value_bytes)

    def mask(self, j: Value) -> Value:
        return self.lanes.lanes_below(self.lanes.b.sub(self.dim, self.lanes.times(j, LANES)))

    def each(self, visit: Callable[[Value, Value | None], None]) -> None:
        """visit(j, mask) for all values; mask is None where all 16 are there."""
        lanes = self.lanes
        full = lanes.b.sdiv(self.dim, lanes.i64(LANES))
        lanes.each(full, lambda j: visit(j, None))
        with lanes.b.if_then(lanes.b.icmp_signed("<", lanes.times(full, LANES), self.dim)):
            visit(full, self.mask(full))

    def sum(self, term: Callable[[Value, Value | None], Value]) -> Value:
        """Sum of term(j, mask) over all values, in every lane. Terms must be zero where the mask is off."""
        lanes = self.lanes
        wide = lanes.b.sdiv(self.dim, lanes.i64(LANES * _SUMS))

        def step(i: Value, sums: list[Value]) -> list[Value]:
            first = lanes.times(i, _SUMS)
            return [lanes.b.fadd(s, term(lanes.at(first, k), None)) for k, s in enumerate(sums)]

        sums = lanes.loop(wide, [lanes.floats(0.0)] * _SUMS, step)
        done = lanes.times(wide, _SUMS)
        rest = lanes.b.sub(lanes.b.sdiv(lanes.at(self.dim, LANES - 1), lanes.i64(LANES)), done)

        def last(i: Value, total: list[Value]) -> list[Value]:
            j = lanes.b.add(done, i)
            return [lanes.b.fadd(total[0], term(j, self.mask(j)))]

        (first,) = lanes.loop(rest, [sums[0]], last)
        pairs = lanes.b.fadd(lanes.b.fadd(first, sums[1]), lanes.b.fadd(sums[2], sums[3]))
        return lanes.sum_lanes(pairs)


def rounded(lanes: Lanes, kind: Kind, values: Value) -> Value:
    """fp32 values rounded to the kind's dtype."""
    return values if kind.value_bytes == 4 else lanes.widen(lanes.narrow(values))


def add_residual(vector: Vector, x: Value, residual: Value) -> None:
    """residual += x."""
    lanes, kind = vector.lanes, vector.kind

    def visit(j: Value, mask: Value | None) -> None:
        at = vector.offset(j)
        total = lanes.b.fadd(
            kind.load(lanes, lanes.at(residual, at), mask), kind.load(lanes, lanes.at(x, at), mask)
        )
        kind.store(lanes, total, lanes.at(residual, at), mask)

    vector.each(visit)


def rms_vector(vector: Vector, x: Value, weight: Value | None, out: Value, eps: Value) -> None:
    """out = weight * round(x / sqrt(mean(x**2) + eps)); `out` may be `x`."""
    lanes, kind, b = vector.lanes, vector.kind, vector.lanes.b

    def square(j: Value, mask: Value | None) -> Value:
        value = kind.load(lanes, lanes.at(x, vector.offset(j)), mask)
        return b.fmul(value, value)

    mean = b.fdiv(vector.sum(square), lanes.splat(b.sitofp(vector.dim, F32)))
    scale = b.fdiv(lanes.floats(1.0), lanes.sqrt(b.fadd(mean, eps)))

    def visit(j: Value, mask: Value | None) -> None:
        at = vector.offset(j)
        value = rounded(lanes, kind, b.fmul(kind.load(lanes, lanes.at(x, at), mask), scale))
        if weight is not None:
            value = b.fmul(value, kind.load(lanes, lanes.at(weight, at), mask))
        kind.store(lanes, value, lanes.at(out, at), mask)

    vector.each(visit)


def layer_vector(vector: Vector, x: Value, weight: Value, bias: Value, out: Value, eps: Value) -> None:
    """out = (x - mean) / sqrt(variance + eps) * weight + bias; `out` may be `x`."""
    lanes, kind, b = vector.lanes, vector.kind, vector.lanes.b
    count = lanes.splat(b.sitofp(vector.dim, F32))
    mean = b.fdiv(vector.sum(lambda j, m: kind.load(lanes, lanes.at(x, vector.offset(j)), m)), count)

    def square(j: Value, mask: Value | None) -> Value:
        value = b.fsub(kind.load(lanes, lanes.at(x, vector.offset(j)), mask), mean)
        term = b.fmul(value, value)
        return term if mask is None else b.select(mask, term, lanes.floats(0.0))

    variance = b.fdiv(vector.sum(square), count)
    scale = b.fdiv(lanes.floats(1.0), lanes.sqrt(b.fadd(variance, eps)))

    def visit(j: Value, mask: Value | None) -> None:
        at = vector.offset(j)
        value = b.fmul(b.fsub(kind.load(lanes, lanes.at(x, at), mask), mean), scale)
        value = lanes.fma(
            value, kind.load(lanes, lanes.at(weight, at), mask), kind.load(lanes, lanes.at(bias, at), mask)
        )
        kind.store(lanes, value, lanes.at(out, at), mask)

    vector.each(visit)


def norm_function(
    *, layer: bool, residual: bool, weighted: bool
) -> Callable[[Lanes, Kind, list[Value]], None]:
    """The body of f(p, first, last): a norm of every head of the rows [first, last)."""

    def emit(lanes: Lanes, kind: Kind, args: list[Value]) -> None:
        p, first, last = args
        fields = Fields(lanes, p)
        dim, eps = fields[field.DIM], fields.floats(field.EPS)
        vector = Vector(lanes, kind, dim)
        weight, bias = fields[field.WEIGHT], fields[field.BIAS]
        size = lanes.times(dim, kind.value_bytes)

        def row(i: Value) -> None:
            r = lanes.b.add(first, i)
            x = fields.row(field.X, field.X_STRIDE, r)
            out = fields.row(field.OUT, field.OUT_STRIDE, r)
            if residual:
                total = fields.row(field.Y, field.Y_STRIDE, r)
                add_residual(vector, x, total)
                x = total

            def head(h: Value) -> None:
                at = lanes.b.mul(h, size)
                if layer:
                    layer_vector(vector, lanes.at(x, at), weight, bias, lanes.at(out, at), eps)
                else:
                    scale = weight if weighted else None
                    rms_vector(vector, lanes.at(x, at), scale, lanes.at(out, at), eps)

            lanes.each(fields[field.X_HEADS], head)

        lanes.each(lanes.b.sub(last, first), row)

    return emit
