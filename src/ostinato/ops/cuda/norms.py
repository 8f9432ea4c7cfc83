"""Norms over rows, alone or with the residual added first: one program a row, the whole row in one block.

Knows nothing of layers. Invariant: a row's bits depend on that row and its width alone; rows at or past the live count
are never read and come out zero.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ostinato.ops.cuda.launching import MOST_IN_A_BLOCK, count_argument, power_of_two, run


@triton.jit
def norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    live: tl.tensor,
    eps: tl.tensor,
    width: tl.tensor,
    heads: tl.tensor,
    x_row: tl.tensor,
    x_head: tl.tensor,
    residual_row: tl.tensor,
    out_row: tl.tensor,
    out_head: tl.tensor,
    HAS_LIVE: tl.constexpr,
    ADD: tl.constexpr,
    CENTRED: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """RMS norm, or layer norm (CENTRED, with bias); ADD: residual += x first, and the norm is of that."""
    program = tl.program_id(0).to(tl.int64)
    row, head = program // heads, program % heads
    columns = tl.arange(0, BLOCK)
    there = columns < width
    target = out + row * out_row + head * out_head + columns
    if HAS_LIVE:
        real = row < tl.load(live)
    else:
        real = row >= 0
    here = there & real
    value = tl.load(x + row * x_row + head * x_head + columns, mask=here, other=0.0)
    if ADD:
        place = residual + row * residual_row + columns
        before = tl.load(place, mask=here, other=0.0)
        value = (before.to(tl.float32) + value.to(tl.float32)).to(before.dtype)
        tl.store(place, value, mask=here)
    wide = value.to(tl.float32)
    if CENTRED:
        wide = tl.where(there, wide - tl.sum(wide, axis=0) / width, 0.0)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
    normed = wide * scale
    if CENTRED:
        gain = tl.load(weight + columns, mask=there, other=0.0).to(tl.float32)
        shift = tl.load(bias + columns, mask=there, other=0.0).to(tl.float32)
        normed = normed * gain + shift
    else:
        # Cast before it is scaled, as the checkpoints' own code does.
        normed = normed.to(value.dtype).to(tl.float32)
        if SCALED:
            normed = normed * tl.load(weight + columns, mask=there, other=0.0).to(tl.float32)
    tl.store(target, tl.where(real, normed, 0.0).to(out.dtype.element_ty), mask=there)


def _norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    out: torch.Tensor,
    live: torch.Tensor | None,
) -> None:
    width = x.shape[-1]
    if width > MOST_IN_A_BLOCK:
        raise ValueError(f"a row of {width} values is more than the norm kernel's {MOST_IN_A_BLOCK}")
    heads = x.shape[1] if x.dim() == 3 else 1
    if not x.shape[0]:
        return
    run(
        norm_kernel,
        (x.shape[0] * heads,),
        x,
        x if residual is None else residual,
        x if weight is None else weight,
        x if bias is None else bias,
        out,
        count_argument(live, x),
        eps,
        width,
        heads,
        x.stride(0),
        x.stride(1) if x.dim() == 3 else 0,
        0 if residual is None else residual.stride(0),
        out.stride(0),
        out.stride(1) if out.dim() == 3 else 0,
        HAS_LIVE=live is not None,
        ADD=residual is not None,
        CENTRED=bias is not None,
        SCALED=weight is not None,
        BLOCK=power_of_two(width),
        num_warps=4 if width <= 4096 else 8,
    )


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    out: torch.Tensor,
    live: torch.Tensor | None = None,
) -> None:
    """`OpSet.rms_norm`."""
    _norm(x, None, weight, None, eps, out, live)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    live: torch.Tensor | None = None,
) -> None:
    """`OpSet.add_rms_norm`."""
    _norm(x, residual, weight, None, eps, out, live)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    live: torch.Tensor | None = None,
) -> None:
    """`OpSet.layer_norm`."""
    _norm(x, None, weight, bias, eps, out, live)


def add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    live: torch.Tensor | None = None,
) -> None:
    """`OpSet.add_layer_norm`."""
    _norm(x, residual, weight, bias, eps, out, live)
