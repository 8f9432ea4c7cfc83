"""Rotation of queries and keys in place, with the norm of each head before it where a family has one.

One program a row, all its heads at once. Knows nothing of layers. Invariant: a row's bits depend on that row and its
position alone; positions are clamped into the table, so those of pads may hold anything; rows at or past the live
count stay as they are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ostinato.ops.cuda.launching import count_argument, power_of_two, run


@triton.jit
def _rotate(
    x: tl.tensor,
    weight: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    head_stride: tl.tensor,
    eps: tl.tensor,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
) -> None:
    """All heads of one row of one tensor."""
    head = tl.arange(0, HEADS_BLOCK)[:, None]
    pair = tl.arange(0, HALF_BLOCK)[None, :]
    here = (head < HEADS) & (pair < HALF)
    if INTERLEAVED:
        left, right = 2 * pair, 2 * pair + 1
    else:
        left, right = pair, pair + HALF
    base = x + head * head_stride
    first = tl.load(base + left, mask=here, other=0.0).to(tl.float32)
    second = tl.load(base + right, mask=here, other=0.0).to(tl.float32)
    if NORM:
        dtype = x.dtype.element_ty
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        if DIM > 2 * HALF:
            past = 2 * HALF + tl.arange(0, REST_BLOCK)[None, :]
            beyond = (head < HEADS) & (past < DIM)
            rest = tl.load(base + past, mask=beyond, other=0.0).to(tl.float32)
            squares += tl.sum(rest * rest, axis=1)
        scale = tl.rsqrt(squares / DIM + eps)[:, None]
        gain = tl.load(weight + left, mask=pair < HALF, other=0.0).to(tl.float32)
        first = ((first * scale).to(dtype).to(tl.float32) * gain).to(dtype).to(tl.float32)
        gain = tl.load(weight + right, mask=pair < HALF, other=0.0).to(tl.float32)
        second = ((second * scale).to(dtype).to(tl.float32) * gain).to(dtype).to(tl.float32)
        if DIM > 2 * HALF:
            gain = tl.load(weight + past, mask=past < DIM, other=0.0).to(tl.float32)
            rest = (rest * scale).to(dtype).to(tl.float32) * gain
            tl.store(base + past, rest.to(dtype), mask=beyond)
    turned = first * cos - second * sin
    other = second * cos + first * sin
    tl.store(base + left, turned.to(x.dtype.element_ty), mask=here)
    tl.store(base + right, other.to(x.dtype.element_ty), mask=here)


@triton.jit
def rope_kernel(
    q: tl.tensor,
    k: tl.tensor,
    q_weight: tl.tensor,
    k_weight: tl.tensor,
    positions: tl.tensor,
    table: tl.tensor,
    live: tl.tensor,
    eps: tl.tensor,
    num_positions: tl.tensor,
    table_row: tl.tensor,
    q_row: tl.tensor,
    q_head: tl.tensor,
    k_row: tl.tensor,
    k_head: tl.tensor,
    HAS_LIVE: tl.constexpr,
    NORM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    if HAS_LIVE:
        real = row < tl.load(live)
    else:
        real = row >= 0
    if real:
        position = tl.minimum(tl.maximum(tl.load(positions + row), 0), num_positions - 1)
        pair = tl.arange(0, HALF_BLOCK)[None, :]
        angles = table + position * table_row + pair
        cos = tl.load(angles, mask=pair < HALF, other=0.0)
        sin = tl.load(angles + HALF, mask=pair < HALF, other=0.0)
        # fmt: off
        _rotate(q + row * q_row, q_weight, cos, sin, q_head, eps, Q_HEADS, DIM, HALF, INTERLEAVED, NORM,
                Q_BLOCK, HALF_BLOCK, REST_BLOCK)
        _rotate(k + row * k_row, k_weight, cos, sin, k_head, eps, K_HEADS, DIM, HALF, INTERLEAVED, NORM,
                K_BLOCK, HALF_BLOCK, REST_BLOCK)
        # fmt: on


def _launch(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    positions: torch.Tensor,
    table: torch.Tensor,
    interleaved: bool,
    live: torch.Tensor | None,
) -> None:
    dim, half = q.shape[2], table.shape[1] // 2
    if not q.shape[0]:
        return
    q_weight, k_weight = (q, k) if weights is None else weights
    run(
        rope_kernel,
        (q.shape[0],),
        q,
        k,
        q_weight,
        k_weight,
        positions,
        table,
        count_argument(live, q),
        eps,
        table.shape[0],
        table.stride(0),
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        HAS_LIVE=live is not None,
        NORM=weights is not None,
        INTERLEAVED=interleaved,
        Q_HEADS=q.shape[1],
        K_HEADS=k.shape[1],
        DIM=dim,
        HALF=half,
        Q_BLOCK=power_of_two(q.shape[1]),
        K_BLOCK=power_of_two(k.shape[1]),
        HALF_BLOCK=power_of_two(half),
        REST_BLOCK=power_of_two(dim - 2 * half),
    )


def rope(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    interleaved: bool,
    live: torch.Tensor | None = None,
) -> None:
    """`OpSet.rope`."""
    _launch(q, k, None, 0.0, positions, table, interleaved, live)


def norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    positions: torch.Tensor,
    table: torch.Tensor,
    interleaved: bool,
    live: torch.Tensor | None = None,
) -> None:
    """`OpSet.norm_rope`."""
    _launch(q, k, (q_weight, k_weight), eps, positions, table, interleaved, live)
