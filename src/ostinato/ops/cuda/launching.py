"""How Triton kernels of this op set are launched: their grid, their options, and the live count as an argument.

Every launch is made without fused multiply-adds beyond those of a product of tiles, and with divisions and roots that
keep subnormals: the same source then rounds alike in every kernel, which bit-exact twins rest on. Knows nothing of what
is computed. Invariant: a count of rows is read from device memory by the kernel, never here, so a captured launch
follows it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton

MOST_IN_A_BLOCK = 65536
"""Values that one program holds at most: of a row of activations, or of router logits."""


def cdiv(x: int, y: int) -> int:
    """x / y, rounded up."""
    return -(-x // y)


def power_of_two(x: int, least: int = 1) -> int:
    """The next power of two that holds x, at least `least`: sizes of blocks."""
    return max(least, 1 << (max(x, 1) - 1).bit_length())


def run(kernel: Any, grid: tuple[int, ...], *args: Any, num_warps: int = 4, **constants: Any) -> None:
    """Launch over `grid`, which must not be empty in any dimension: callers leave out what has no rows."""
    with np.errstate(all="ignore"):  # the interpreter computes with numpy, which warns of NaN and infinity
        kernel[grid](
            *args, **constants, num_warps=num_warps, enable_fp_fusion=False, enable_reflect_ftz=False
        )


def count_argument(live: torch.Tensor | None, beside: torch.Tensor) -> torch.Tensor:
    """The live count, or any tensor in its place where all rows are live: kernels are told which by HAS_LIVE."""
    if live is None:
        return beside
    if live.dtype != torch.int32 or live.numel() != 1:
        raise ValueError(f"the live count must be one int32, got {tuple(live.shape)} {live.dtype}")
    return live


def interpreted() -> bool:
    """Whether kernels made now run in Triton's interpreter, on tensors of the host."""
    return bool(triton.knobs.runtime.interpret)
