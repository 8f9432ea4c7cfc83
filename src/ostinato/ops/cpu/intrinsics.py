"""Numba intrinsics for calls by address and memory on the stack: what drivers of kernels need.

With `memory` (loads and stores) and `vector_ir` (vectors) this is all that drivers use beyond plain integer
loops. Knows nothing of matrices. Invariant: nothing here allocates, raises or touches Python.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from ostinato.ops.cpu.isa import MOST_TILE_ROWS
from ostinato.ops.cpu.jit import intrinsic, types
from ostinato.ops.cpu.vector_ir import I8, I32, I64, POINTER

_Signature = tuple[Any, Any]
SCRATCH_BYTES = MOST_TILE_ROWS * (8 + 4 * 32)
"""Addresses of a tile's rows, and their sums over a panel of 32 columns."""


def _call(builder: Any, address: Any, *args: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [a.type for a in args])
    builder.call(builder.inttoptr(address, ir.PointerType(kind)), args)


@intrinsic
def call_address(typing_context: Any, function: Any, argument: Any) -> _Signature:
    """Call the C function at `function` with one int64."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _call(builder, args[0], args[1])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@intrinsic
def call_tile(
    typing_context: Any,
    tile: Any,
    rows: Any,
    count: Any,
    panel: Any,
    steps: Any,
    odd: Any,
    out: Any,
    ahead: Any,
    stride: Any,
) -> _Signature:
    """Call the tile function at address `tile`; see `tiles`."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _call(builder, args[0], *args[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 9), emit


@intrinsic
def call_prepare(typing_context: Any, prepare: Any, source: Any, target: Any, columns: Any) -> _Signature:
    """Call the row function at address `prepare`; see `prepare`."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _call(builder, args[0], *args[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), emit


@intrinsic
def call_barrier(typing_context: Any, barrier: Any) -> _Signature:
    """Wait for the team; nothing when the address is 0 (there is no team)."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        with builder.if_then(builder.icmp_signed("!=", args[0], ir.Constant(I64, 0))):
            _call(builder, args[0])
        return context.get_dummy_value()

    return types.void(types.int64), emit


@intrinsic
def run_team(typing_context: Any, parallel: Any, worker: Any, argument: Any, threads: Any) -> _Signature:
    """Run `worker(argument)` in every thread of a team, through GOMP_parallel at address `parallel`."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function, data = (builder.inttoptr(a, POINTER) for a in args[1:3])
        _call(builder, args[0], function, data, builder.trunc(args[3], I32), ir.Constant(I32, 0))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), emit


@intrinsic
def stack_scratch(typing_context: Any) -> _Signature:
    """Address of `SCRATCH_BYTES` of this call's stack, aligned to 64."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        with builder.goto_entry_block():  # once a call, whatever loop this stands in
            place = builder.alloca(I8, SCRATCH_BYTES + 64)
        address = builder.add(builder.ptrtoint(place, I64), ir.Constant(I64, 63))
        return builder.and_(address, ir.Constant(I64, -64))

    return types.int64(), emit
