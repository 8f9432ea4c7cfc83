"""A small assembler for 16-lane vector code: what the attention, norm and rope kernels are emitted with.

Wraps an LLVM builder: loads and stores by address, loops with carried values, fp32 arithmetic, bf16
conversion, exp2, and reductions of a fixed shape. Lanes are generic LLVM vectors, so the same code runs on
AVX512, AVX2 and NEON. Knows nothing of attention or of tensors. Invariant: nothing here may be reassociated
or contracted, so a value depends on its operands alone, never on the instruction set that LLVM picked for the
generic operations.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from llvmlite import binding, ir

LANES = 16
I1, I8, I16, I32, I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
F32 = ir.FloatType()
F64 = ir.DoubleType()
VF = ir.VectorType(F32, LANES)
VI = ir.VectorType(I32, LANES)
VH = ir.VectorType(I16, LANES)
VM = ir.VectorType(I1, LANES)
POINTER = ir.PointerType()

Value = Any  # ir.Value: llvmlite carries no types

# 2**r on [-1/2, 1/2], constant term exactly 1 (so that exp2(0) is exactly 1); least maximum relative error
# (9.1e-8 before rounding), fitted by iterated reweighted least squares on Chebyshev nodes.
EXP2_COEFFICIENTS = (
    1.3264727313071490e-03,
    9.6715129911899570e-03,
    5.5507335811853410e-02,
    2.4022242426872253e-01,
    6.9314700365066530e-01,
    1.0,
)
_ROUND_TO_INT = 12582912.0  # 1.5 * 2**23: adding it leaves the nearest integer in the low mantissa bits


class BFloat(ir.Type):
    """LLVM's `bfloat`, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash("bfloat")


VB16 = ir.VectorType(BFloat(), LANES)
VB32 = ir.VectorType(BFloat(), 2 * LANES)


def host_has(*features: str) -> bool:
    """Whether LLVM may use all of `features` on this machine."""
    found = binding.get_host_cpu_features()
    return all(found.get(name, False) for name in features)


class Keep(enum.Enum):
    """Where a line that is asked for stays: in every cache, from the second level on, or (what is read `ONCE`) in the
    nearest only, so that a stream drives nothing out of the last level.
    """

    NEAREST = 3
    SECOND = 2
    ONCE = 0


class Lanes:
    """Emits vector code at the builder's current position; values are LLVM values of 16 lanes.

    With `size` lanes, of `vf` (fp32) and `vi` (int32), as far as constants, copies and multiply-adds go, for code that
    counts registers.
    """

    __slots__ = ("b", "size", "vf", "vi")

    def __init__(self, builder: Any, size: int = LANES) -> None:
        self.b = builder
        self.size = size
        self.vf, self.vi = (VF, VI) if size == LANES else (ir.VectorType(t, size) for t in (F32, I32))

    # -- constants, addresses, memory ----------------------------------------------------------------------

    def i64(self, value: int) -> Value:
        return ir.Constant(I64, value)

    def floats(self, value: float) -> Value:
        return ir.Constant(self.vf, [value] * self.size)

    def ints(self, value: int) -> Value:
        return ir.Constant(self.vi, [value] * self.size)

    def at(self, base: Value, *terms: Value | int) -> Value:
        """base + the sum of the terms, as an i64 address."""
        for term in terms:
            base = self.b.add(base, self.i64(term) if isinstance(term, int) else term)
        return base

    def times(self, value: Value, factor: int) -> Value:
        return self.b.mul(value, self.i64(factor))

    def load(self, address: Value, typ: Any = VF, align: int = 2) -> Value:
        return self.b.load(self.b.inttoptr(address, POINTER), typ=typ, align=align)

    def store(self, value: Value, address: Value, align: int = 2) -> None:
        self.b.store(value, self.b.inttoptr(address, POINTER), align=align)

    def splat(self, scalar: Value) -> Value:
        """A copy of a scalar (any element type) in every lane."""
        vector = ir.VectorType(scalar.type, self.size)
        seed = self.b.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(I32, 0))
        return self.b.shuffle_vector(seed, ir.Constant(vector, ir.Undefined), self.ints(0))

    def copied(self, scalar: Value) -> Value:
        """`splat` that LLVM does not see through (AVX2): it would do to the scalar what is done to the copies."""
        half = LANES // 2
        register = ir.VectorType(scalar.type, half)
        same = ir.FunctionType(register, [register])
        copies = self.b.asm(same, "", "=x,0", [Lanes(self.b, half).splat(scalar)], side_effect=False)
        if self.size == half:
            return copies
        order = ir.Constant(ir.VectorType(I32, self.size), [*range(half)] * 2)
        return self.b.shuffle_vector(copies, ir.Constant(register, ir.Undefined), order)

    def barrier(self) -> None:
        """Nothing that follows is loaded before: LLVM would load early what registers have no room for."""
        self.b.asm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", [], side_effect=True)

    def call(self, name: str, result: Any, *args: Value) -> Value:
        """Call an LLVM intrinsic or external function by name."""
        module = self.b.module
        function = module.globals.get(name)
        if function is None:
            function = ir.Function(module, ir.FunctionType(result, [a.type for a in args]), name)
        return self.b.call(function, args)

    def prefetch(self, address: Value, keep: Keep = Keep.NEAREST, *, write: bool = False) -> None:
        """Ask for a line ahead, to `write` it if so, into the caches that `keep` says."""
        flags = [ir.Constant(I32, n) for n in (int(write), keep.value, 1)]  # use, locality, data
        self.call("llvm.prefetch.p0", ir.VoidType(), self.b.inttoptr(address, POINTER), *flags)

    # -- control -------------------------------------------------------------------------------------------

    def loop(
        self, count: Value, carried: Sequence[Value], body: Callable[[Value, list[Value]], Sequence[Value]]
    ) -> list[Value]:
        """`for i in range(count): carried = body(i, carried)`; returns the carried values after the loop."""
        b = self.b
        before = b.block
        head, inside, after = (b.append_basic_block(n) for n in ("loop", "body", "done"))
        b.branch(head)
        b.position_at_end(head)
        index = b.phi(I64)
        index.add_incoming(self.i64(0), before)
        state = []
        for value in carried:
            phi = b.phi(value.type)
            phi.add_incoming(value, before)
            state.append(phi)
        b.cbranch(b.icmp_signed("<", index, count), inside, after)
        b.position_at_end(inside)
        updated = body(index, list(state))
        index.add_incoming(b.add(index, self.i64(1)), b.block)
        for phi, value in zip(state, updated, strict=True):
            phi.add_incoming(value, b.block)
        b.branch(head)
        b.position_at_end(after)
        return state

    def each(self, count: Value, body: Callable[[Value], None]) -> None:
        """A loop that carries nothing."""

        def step(index: Value, _: list[Value]) -> list[Value]:
            body(index)
            return []

        self.loop(count, [], step)

    def cases(self, value: Value, keys: Iterable[int], body: Callable[[int], None]) -> None:
        """`body(key)` where `value` (i64) is that one of the keys; nothing where it is none."""
        b = self.b
        done = b.append_basic_block("cases_done")
        choice = b.switch(value, done)
        for key in keys:
            block = b.append_basic_block(f"case_{key}")
            choice.add_case(self.i64(key), block)
            b.position_at_end(block)
            body(key)
            b.branch(done)
        b.position_at_end(done)

    def rows(self, count: Value, most: int, body: Callable[[Value, int], None]) -> None:
        """`body(first_row, n)` over all rows: blocks of `most`, then one of the rows left over."""
        b = self.b
        full = b.sdiv(count, self.i64(most))
        self.each(full, lambda i: body(self.times(i, most), most))
        first = self.times(full, most)
        self.cases(b.sub(count, first), range(1, most), lambda n: body(first, n))

    def column_groups(self, dim: Value, columns: Callable[[int, Value, Value | None], None]) -> None:
        """`columns(vectors, first, tail_mask)` over `dim` values: groups of 4 vectors, then what is left."""
        b = self.b
        full = b.sdiv(dim, self.i64(4 * LANES))
        self.each(full, lambda i: columns(4, self.times(i, 4 * LANES), None))
        first = self.times(full, 4 * LANES)
        left = b.sub(dim, first)
        vectors = b.sdiv(self.at(left, LANES - 1), self.i64(LANES))

        def rest(n: int) -> None:
            columns(n, first, self.lanes_below(self.at(left, -LANES * (n - 1))))

        self.cases(vectors, range(1, 5), rest)

    # -- arithmetic ----------------------------------------------------------------------------------------

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        name = f"llvm.fma.v{a.type.count}f32" if isinstance(a.type, ir.VectorType) else "llvm.fma.f32"
        return self.call(name, a.type, a, b, c)

    def max(self, a: Value, b: Value) -> Value:
        """The larger; `b` where either is NaN."""
        return self.b.select(self.b.fcmp_ordered(">", a, b), a, b)

    def sqrt(self, a: Value) -> Value:
        return self.call("llvm.sqrt.v16f32" if a.type == VF else "llvm.sqrt.f32", a.type, a)

    def exp2(self, x: Value) -> Value:
        """2**x to about 2 ulp; exactly 1 at 0, exactly 0 under -126, NaN for NaN. x must be at most 127."""
        b = self.b
        magic = self.floats(_ROUND_TO_INT)
        shifted = b.fadd(x, magic)
        fraction = b.fsub(x, b.fsub(shifted, magic))
        power = self.floats(EXP2_COEFFICIENTS[0])
        for coefficient in EXP2_COEFFICIENTS[1:]:
            power = self.fma(power, fraction, self.floats(coefficient))
        exponent = b.shl(b.bitcast(shifted, VI), self.ints(23))
        scale = b.bitcast(b.add(exponent, self.ints(0x3F800000)), VF)
        tiny = b.fcmp_ordered("<", x, self.floats(-126.0))
        return b.select(tiny, self.floats(0.0), b.fmul(power, scale))

    def fold(self, vector: Value, op: Callable[[Value, Value], Value]) -> Value:
        """Reduce over the lanes by halving (8, 4, 2, 1); every lane of the result holds the value."""
        undefined = ir.Constant(vector.type, ir.Undefined)
        for shift in (8, 4, 2, 1):
            order = ir.Constant(VI, [lane ^ shift for lane in range(LANES)])
            vector = op(vector, self.b.shuffle_vector(vector, undefined, order))
        return vector

    def sum_lanes(self, vector: Value) -> Value:
        return self.fold(vector, self.b.fadd)

    def max_lanes(self, vector: Value) -> Value:
        return self.fold(vector, self.max)

    def first_lane(self, vector: Value) -> Value:
        return self.b.extract_element(vector, ir.Constant(I32, 0))

    # -- masks and partial vectors -------------------------------------------------------------------------

    def lane_numbers(self) -> Value:
        return ir.Constant(VI, list(range(LANES)))

    def lanes_below(self, count: Value) -> Value:
        """Mask of the first `count` lanes; `count` is an i64 of any value."""
        clipped = self.b.trunc(self._clip(count), I32)
        return self.b.icmp_signed("<", self.lane_numbers(), self.splat(clipped))

    def _clip(self, count: Value) -> Value:
        b = self.b
        low = b.select(b.icmp_signed("<", count, self.i64(0)), self.i64(0), count)
        return b.select(b.icmp_signed(">", low, self.i64(LANES)), self.i64(LANES), low)

    def load_masked(self, address: Value, mask: Value, typ: Any) -> Value:
        """Load the masked lanes, zero elsewhere; memory behind the other lanes is not touched."""
        suffix = {VF: "v16f32", VI: "v16i32", VH: "v16i16"}[typ]
        pointer = self.b.inttoptr(address, POINTER)
        module = self.b.module
        name = f"llvm.masked.load.{suffix}.p0"
        function = module.globals.get(name)
        if function is None:
            function = ir.Function(module, ir.FunctionType(typ, [POINTER, VM, typ]), name)
        return self.b.call(function, [pointer, mask, ir.Constant(typ, [0] * LANES)])

    def store_masked(self, value: Value, address: Value, mask: Value) -> None:
        """Store the masked lanes alone."""
        suffix = {VF: "v16f32", VI: "v16i32", VH: "v16i16"}[value.type]
        module = self.b.module
        name = f"llvm.masked.store.{suffix}.p0"
        function = module.globals.get(name)
        if function is None:
            function = ir.Function(module, ir.FunctionType(ir.VoidType(), [value.type, POINTER, VM]), name)
        pointer = self.b.inttoptr(address, POINTER)
        self.b.call(function, [value, pointer, mask])

    # -- bf16 ----------------------------------------------------------------------------------------------

    def widen(self, halves: Value) -> Value:
        """bf16 bits (16 lanes of i16) to fp32."""
        return self.b.bitcast(self.b.shl(self.b.zext(halves, VI), self.ints(16)), VF)

    def narrow(self, values: Value) -> Value:
        """fp32 to bf16 bits (i16 lanes), to the nearest, ties to even; NaN stays NaN, subnormals are kept."""
        b = self.b
        bits = b.bitcast(values, VI)
        odd = b.and_(b.lshr(bits, self.ints(16)), self.ints(1))
        rounded = b.lshr(b.add(bits, b.add(odd, self.ints(0x7FFF))), self.ints(16))
        quiet = b.or_(b.lshr(bits, self.ints(16)), self.ints(0x40))
        nan = b.fcmp_unordered("uno", values, values)
        return b.trunc(b.select(nan, quiet, rounded), VH)
