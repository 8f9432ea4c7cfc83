"""Numba intrinsics that read and write memory by address, atomically where threads meet.

Kernels take one address of a block of parameters and find everything else from it, so a launch is one cheap
call. Knows nothing of what lies at the addresses. Invariant: callers own every address they pass.
"""

from __future__ import annotations

from typing import Any

from llvmlite import binding, ir

from ostinato.ops.cpu.jit import intrinsic, types
from ostinato.ops.cpu.vector_ir import F32, F64, I8, I32, I64, POINTER, Keep, Lanes

_Signature = tuple[Any, Any]


@intrinsic
def load_i64(typing_context: Any, address: Any) -> _Signature:
    """The int64 at `address`."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(builder.inttoptr(args[0], POINTER), typ=I64, align=8)

    return types.int64(types.int64), emit


@intrinsic
def load_i32(typing_context: Any, address: Any) -> _Signature:
    """The int32 at `address`, as int64."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.sext(builder.load(builder.inttoptr(args[0], POINTER), typ=I32, align=4), I64)

    return types.int64(types.int64), emit


@intrinsic
def store_i64(typing_context: Any, value: Any, address: Any) -> _Signature:
    """Write an int64 to `address`."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[0], builder.inttoptr(args[1], POINTER), align=8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@intrinsic
def store_i32(typing_context: Any, value: Any, address: Any) -> _Signature:
    """Write the low half of an int64 to the int32 at `address`."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(builder.trunc(args[0], I32), builder.inttoptr(args[1], POINTER), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@intrinsic
def load_u8(typing_context: Any, address: Any) -> _Signature:
    """The byte at `address`, as int64."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.zext(builder.load(builder.inttoptr(args[0], POINTER), typ=I8, align=1), I64)

    return types.int64(types.int64), emit


@intrinsic
def store_i8(typing_context: Any, value: Any, address: Any) -> _Signature:
    """Write the lowest byte of an int64 to `address`."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(builder.trunc(args[0], I8), builder.inttoptr(args[1], POINTER), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@intrinsic
def load_f32(typing_context: Any, address: Any) -> _Signature:
    """The fp32 at `address`."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(builder.inttoptr(args[0], POINTER), typ=F32, align=4)

    return types.float32(types.int64), emit


@intrinsic
def load_f64(typing_context: Any, address: Any) -> _Signature:
    """The fp64 at `address`."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(builder.inttoptr(args[0], POINTER), typ=F64, align=8)

    return types.float64(types.int64), emit


@intrinsic
def store_f32(typing_context: Any, value: Any, address: Any) -> _Signature:
    """Write an fp32 to `address`."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[0], builder.inttoptr(args[1], POINTER), align=4)
        return context.get_dummy_value()

    return types.void(types.float32, types.int64), emit


@intrinsic
def fetch_add(typing_context: Any, address: Any, amount: Any) -> _Signature:
    """Atomically add to the int64 at `address`; returns its value before.

    What other threads wrote before their own `fetch_add` on the address is visible after it.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.PointerType(I64))
        return builder.atomic_rmw("add", pointer, args[1], "acq_rel")

    return types.int64(types.int64, types.int64), emit


@intrinsic
def load_shared(typing_context: Any, address: Any) -> _Signature:
    """The int64 at `address`, with all that whoever stored it (`store_shared`, `compare_swap`) wrote before."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.PointerType(I64))
        return builder.load_atomic(pointer, "acquire", 8)

    return types.int64(types.int64), emit


@intrinsic
def store_shared(typing_context: Any, value: Any, address: Any) -> _Signature:
    """Write an int64 to `address`, after all that was written before."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[0], builder.inttoptr(args[1], ir.PointerType(I64)), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@intrinsic
def compare_swap(typing_context: Any, address: Any, expected: Any, value: Any) -> _Signature:
    """Atomically put `value` in the place of `expected` at `address`; 1 if it was there, else 0."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.PointerType(I64))
        pair = builder.cmpxchg(pointer, args[1], args[2], "acq_rel", "acquire")
        return builder.zext(builder.extract_value(pair, 1), I64)

    return types.int64(types.int64, types.int64, types.int64), emit


def _prefetcher(keep: Keep, *, write: bool = False) -> Any:
    @intrinsic
    def prefetch(typing_context: Any, address: Any) -> _Signature:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            Lanes(builder).prefetch(args[0], keep, write=write)
            return context.get_dummy_value()

        return types.void(types.int64), emit

    return prefetch


prefetch_line = _prefetcher(Keep.SECOND)
"""(address): ask for the cache line there, into the second-level cache."""
prefetch_once = _prefetcher(Keep.ONCE)
"""(address): ask for the cache line there, which is read once, into the first-level cache alone."""
prefetch_to_write = _prefetcher(Keep.NEAREST, write=True)
"""(address): ask for the cache line there, which is to be written, into the first-level cache."""


@intrinsic
def pause(typing_context: Any) -> _Signature:
    """Tell the core that this is a loop that waits.

    On ARM a barrier for instructions takes about as long as x86's pause; the hint made for this, yield, does nothing on
    most cores.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        machine = binding.get_default_triple().partition("-")[0]
        hint = {"x86_64": ("llvm.x86.sse2.pause", ()), "aarch64": ("llvm.aarch64.isb", (15,))}.get(machine)
        if hint is not None:
            Lanes(builder).call(hint[0], ir.VoidType(), *(ir.Constant(I32, n) for n in hint[1]))
        return context.get_dummy_value()

    return types.void(), emit


@intrinsic
def zero_bytes(typing_context: Any, address: Any, size: Any) -> _Signature:
    """Write `size` zero bytes from `address` on."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        name = "llvm.memset.p0.i64"
        function = builder.module.globals.get(name)
        if function is None:
            kinds = [POINTER, ir.IntType(8), I64, ir.IntType(1)]
            function = ir.Function(builder.module, ir.FunctionType(ir.VoidType(), kinds), name)
        zero, plain = ir.Constant(ir.IntType(8), 0), ir.Constant(ir.IntType(1), 0)
        builder.call(function, [builder.inttoptr(args[0], POINTER), zero, args[1], plain])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@intrinsic
def claim_rows(typing_context: Any, address: Any, stride: Any, count: Any, lines: Any) -> _Signature:
    """Ask to own the first `lines` cache lines of `count` rows, `stride` bytes apart, which will be written whole.

    A store to a line that lies in memory holds up those behind it until the line is there.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = Lanes(builder)

        def row(i: Any) -> None:
            at = lanes.at(args[0], builder.mul(i, args[1]))
            lanes.each(args[3], lambda k: lanes.prefetch(lanes.at(at, lanes.times(k, 64)), write=True))

        lanes.each(args[2], row)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), emit


@intrinsic
def call_native(typing_context: Any, function: Any, *values: Any) -> _Signature:
    """Call the C function at address `function` with int64 values."""
    given = values[0] if len(values) == 1 and isinstance(values[0], types.BaseTuple) else values
    packed = types.StarArgTuple(tuple(types.int64 for _ in given))

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        words = [builder.extract_value(args[1], i) for i in range(len(signature.args[1]))]
        kind = ir.FunctionType(ir.VoidType(), [I64] * len(words))
        builder.call(builder.inttoptr(args[0], ir.PointerType(kind)), words)
        return context.get_dummy_value()

    return types.void(types.int64, packed), emit
