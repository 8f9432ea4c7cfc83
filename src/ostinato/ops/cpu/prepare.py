"""What is done to rows before a matrix product: nothing, copying them apart, or quantising them.

Tiles read up to 12 rows side by side. Rows a multiple of 4096 bytes apart fall into the same lines of the L1
cache and push each other out, so such rows are copied to a stride that spreads them. Knows nothing of
products. Invariant: a prepared row depends on its own row alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from llvmlite import ir

from ostinato.ops.cpu.int8 import quantise_bf16_row, quantise_fp32_row
from ostinato.ops.cpu.jit import intrinsic, types
from ostinato.ops.cpu.vector_ir import I64, POINTER

PREPARE_ARGUMENTS = 3
_PERIOD = 4096
_LINE = 64
FEWEST_ROWS = 4  # fewer rows do not fill the ways of a cache set


def collides(stride_bytes: int, rows: int) -> bool:
    """Whether rows at this stride push each other out of the L1 cache."""
    return rows >= FEWEST_ROWS and stride_bytes % _PERIOD == 0


def spread_stride(row_bytes: int) -> int:
    """A stride for rows of so many bytes: whole cache lines, an odd number of them."""
    return (-(-row_bytes // _LINE) | 1) * _LINE


@intrinsic
def copy_bytes(typing_context: Any, source: Any, target: Any, size: Any) -> tuple[Any, Any]:
    """Copy `size` bytes from address to address."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        name = "llvm.memcpy.p0.p0.i64"
        function = builder.module.globals.get(name)
        if function is None:
            kinds = [POINTER, POINTER, I64, ir.IntType(1)]
            function = ir.Function(builder.module, ir.FunctionType(ir.VoidType(), kinds), name)
        source, target = (builder.inttoptr(a, POINTER) for a in args[:2])
        builder.call(function, [target, source, args[2], ir.Constant(ir.IntType(1), 0)])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), emit


def copy_bf16_row(source: int, target: int, columns: int) -> None:
    """Copy a row of bf16."""
    copy_bytes(source, target, 2 * columns)


def copy_fp32_row(source: int, target: int, columns: int) -> None:
    """Copy a row of fp32."""
    copy_bytes(source, target, 4 * columns)


RowFunction = Callable[[int, int, int], None]


def row_function(
    weights: torch.dtype, activations: torch.dtype, stride_bytes: int, rows: int
) -> RowFunction | None:
    """What to do to rows before a product with weights of this dtype; None: nothing."""
    wide = activations == torch.float32
    if weights == torch.int8:
        return quantise_fp32_row if wide else quantise_bf16_row
    if not collides(stride_bytes, rows):
        return None
    return copy_fp32_row if wide else copy_bf16_row
