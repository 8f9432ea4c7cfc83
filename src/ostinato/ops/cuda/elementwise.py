"""What is done to each value or row by itself: gated addition, rows by index, the inputs of the next decode step.

Plain additions and clamps are torch's. Knows nothing of layers. Invariant: nothing is read on the host, and no output
is allocated, so all of it may be captured.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ostinato.ops.cuda.arithmetic import sigmoid
from ostinato.ops.cuda.launching import cdiv, count_argument, run

_BLOCK = 1024
_ROWS = 128
_MOST_LENGTHS = 4


@triton.jit
def rows_kernel(
    table: tl.tensor,
    rows: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    width: tl.tensor,
    table_row: tl.tensor,
    out_row: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """out[i] = table[rows[i]], the index clamped into the table: pads may hold anything."""
    target = tl.program_id(0).to(tl.int64)
    source = tl.minimum(tl.maximum(tl.load(rows + target), 0), num_rows - 1)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(table + source * table_row + columns, mask=columns < width)
    tl.store(out + target * out_row + columns, value, mask=columns < width)


@triton.jit
def gated_add_kernel(
    x: tl.tensor,
    gate: tl.tensor,
    y: tl.tensor,
    out: tl.tensor,
    width: tl.tensor,
    x_row: tl.tensor,
    gate_row: tl.tensor,
    y_row: tl.tensor,
    out_row: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = columns < width
    share = sigmoid(tl.load(gate + row * gate_row + tl.zeros((BLOCK,), tl.int32)))
    left = tl.load(x + row * x_row + columns, mask=there).to(tl.float32)
    right = tl.load(y + row * y_row + columns, mask=there).to(tl.float32)
    tl.store(out + row * out_row + columns, (left + share * right).to(out.dtype.element_ty), mask=there)


@triton.jit
def mask_kernel(
    x: tl.tensor, live: tl.tensor, width: tl.tensor, x_row: tl.tensor, BLOCK: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    nothing = tl.zeros((BLOCK,), x.dtype.element_ty)
    tl.store(x + row * x_row + columns, nothing, mask=(columns < width) & (row >= tl.load(live)))


# One form for all sizes: it is first launched while a graph is captured, where nothing may be compiled.
@triton.jit(do_not_specialize=["num_rows", "table_row", "num_pages", "page_size"])
def advance_kernel(
    choice: tl.tensor,
    tokens: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    requests: tl.tensor,
    page_table: tl.tensor,
    length_0: tl.tensor,
    length_1: tl.tensor,
    length_2: tl.tensor,
    length_3: tl.tensor,
    live: tl.tensor,
    num_rows: tl.tensor,
    table_row: tl.tensor,
    num_pages: tl.tensor,
    page_size: tl.tensor,
    HAS_LIVE: tl.constexpr,
    LENGTHS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = row < num_rows
    if HAS_LIVE:
        real = real & (row < tl.load(live))
    tl.store(tokens + row, tl.load(choice + row, mask=real), mask=real)
    where = tl.load(positions + row, mask=real, other=0) + 1
    tl.store(positions + row, where, mask=real)
    if LENGTHS > 0:
        tl.store(length_0 + row, tl.load(length_0 + row, mask=real) + 1, mask=real)
    if LENGTHS > 1:
        tl.store(length_1 + row, tl.load(length_1 + row, mask=real) + 1, mask=real)
    if LENGTHS > 2:
        tl.store(length_2 + row, tl.load(length_2 + row, mask=real) + 1, mask=real)
    if LENGTHS > 3:
        tl.store(length_3 + row, tl.load(length_3 + row, mask=real) + 1, mask=real)
    request = tl.load(requests + row, mask=real, other=0)
    page = tl.minimum(where // page_size, num_pages - 1)
    entry = tl.load(page_table + request * table_row + page, mask=real, other=0).to(tl.int64)
    tl.store(slots + row, entry * page_size + where % page_size, mask=real)


def embedding(ids: torch.Tensor, table: torch.Tensor, out: torch.Tensor) -> None:
    """`OpSet.embedding`."""
    if not len(ids):
        return
    grid = len(ids), cdiv(table.shape[1], _BLOCK)
    run(rows_kernel, grid, table, ids, out, *table.shape, table.stride(0), out.stride(0), BLOCK=_BLOCK)


def gather_rows(x: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> None:
    """`OpSet.gather_rows`."""
    embedding(rows, x, out)


def add(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> None:
    """`OpSet.add`."""
    torch.add(x, y, out=out)


def sigmoid_gated_add(x: torch.Tensor, gate: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> None:
    """`OpSet.sigmoid_gated_add`."""
    if not len(x):
        return
    strides = x.stride(0), gate.stride(0), y.stride(0), out.stride(0)
    grid = len(x), cdiv(x.shape[1], _BLOCK)
    run(gated_add_kernel, grid, x, gate, y, out, x.shape[1], *strides, BLOCK=_BLOCK)


def mask_rows(x: torch.Tensor, live: torch.Tensor | None) -> None:
    """Zero the rows of x [T, N] at or past the live count."""
    if live is not None and len(x):
        count_argument(live, x)
        run(mask_kernel, (len(x), cdiv(x.shape[1], _BLOCK)), x, live, x.shape[1], x.stride(0), BLOCK=_BLOCK)


def clamp(x: torch.Tensor, limit: float) -> None:
    """`OpSet.clamp`."""
    x.clamp_(-limit, limit)


def advance(
    choice: torch.Tensor,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    out_cache_loc: torch.Tensor,
    req_pool_indices: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    lengths: Sequence[torch.Tensor],
    live: torch.Tensor | None = None,
) -> None:
    """`OpSet.advance`."""
    rows = len(input_ids)
    if len(lengths) > _MOST_LENGTHS:
        raise ValueError(f"advance takes at most {_MOST_LENGTHS} lengths, got {len(lengths)}")
    if not rows:
        return
    padded = [*lengths, *[positions] * (_MOST_LENGTHS - len(lengths))]
    run(
        advance_kernel,
        (cdiv(rows, _ROWS),),
        choice,
        input_ids,
        positions,
        out_cache_loc,
        req_pool_indices,
        page_table,
        *padded,
        count_argument(live, positions),
        rows,
        page_table.stride(0),
        page_table.shape[1],
        page_size,
        HAS_LIVE=live is not None,
        LENGTHS=len(lengths),
        BLOCK=_ROWS,
    )
