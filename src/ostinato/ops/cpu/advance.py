"""One decode step further, on the static inputs themselves: the twin of the reference's `advance`.

For a batch whose requests stay as they are, the next inputs follow from the last ones and the tokens chosen, so no
host array needs to be made. Serial: a few integers for each row. Knows nothing of buckets. Invariant: rows at or past
the live count are left alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ostinato.ops.cpu.gemm import live_rows
from ostinato.ops.cpu.launch import FIRST_FIELD, Launch, Runtime
from ostinato.ops.cpu.memory import load_i32, load_i64, store_i64
from ostinato.ops.cpu.row_ops import live_count_address

MOST_LENGTHS = 4

(
    ROWS,
    COUNT,  # address of the live count (int32), or 0: all rows
    CHOICE,  # addresses of int64 [rows]
    INPUT_IDS,
    POSITIONS,
    SLOTS,
    REQUESTS,  # row of the page table
    TABLE,  # address of the page table, int32
    TABLE_STRIDE,  # bytes
    COLUMNS,
    PAGE_SIZE,
    NUM_LENGTHS,
    LENGTHS,  # addresses of int64 [rows], MOST_LENGTHS of them
) = range(FIRST_FIELD, FIRST_FIELD + 13)
NUM_FIELDS = LENGTHS + MOST_LENGTHS


def advance_entry(p: int) -> None:
    """Advance the live rows, one after the other."""
    size, columns = load_i64(p + 8 * PAGE_SIZE), load_i64(p + 8 * COLUMNS)
    for row in range(live_rows(load_i64(p + 8 * ROWS), load_i64(p + 8 * COUNT))):
        at = 8 * row
        store_i64(load_i64(load_i64(p + 8 * CHOICE) + at), load_i64(p + 8 * INPUT_IDS) + at)
        position = load_i64(load_i64(p + 8 * POSITIONS) + at) + 1
        store_i64(position, load_i64(p + 8 * POSITIONS) + at)
        for i in range(load_i64(p + 8 * NUM_LENGTHS)):
            length = load_i64(p + 8 * (LENGTHS + i)) + at
            store_i64(load_i64(length) + 1, length)
        pages = load_i64(p + 8 * TABLE)
        pages += load_i64(load_i64(p + 8 * REQUESTS) + at) * load_i64(p + 8 * TABLE_STRIDE)
        page = load_i32(pages + 4 * min(position // size, columns - 1))
        store_i64(page * size + position % size, load_i64(p + 8 * SLOTS) + at)


class Advance:
    """The kernel; `bind` fixes its tensors. Raises ValueError on a shape or dtype that does not fit."""

    __slots__ = ("_runtime",)

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def __call__(self, *args: Any) -> None:
        self.bind(*args)()

    def bind(
        self,
        choice: torch.Tensor,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        out_cache_loc: torch.Tensor,
        req_pool_indices: torch.Tensor,
        page_table: torch.Tensor,
        page_size: int,
        lengths: Sequence[torch.Tensor],
        live: torch.Tensor | None = None,
    ) -> Launch:
        """The launch for these tensors, which it keeps alive."""
        rows = (choice, input_ids, positions, out_cache_loc, req_pool_indices, *lengths)
        for x in rows:
            if x.dtype != torch.int64 or x.shape != input_ids.shape or x.dim() != 1 or not x.is_contiguous():
                raise ValueError(
                    f"inputs must be contiguous int64 {tuple(input_ids.shape)}, got {tuple(x.shape)} {x.dtype}"
                )
        if page_table.dtype != torch.int32 or page_table.dim() != 2 or page_table.stride(1) != 1:
            raise ValueError(f"the page table must be int32 [requests, pages], got {page_table.dtype}")
        if len(lengths) > MOST_LENGTHS:
            raise ValueError(f"{len(lengths)} buffers of lengths, at most {MOST_LENGTHS} can be advanced")
        values = {
            ROWS: input_ids.shape[0],
            COUNT: live_count_address(live),
            CHOICE: choice.data_ptr(),
            INPUT_IDS: input_ids.data_ptr(),
            POSITIONS: positions.data_ptr(),
            SLOTS: out_cache_loc.data_ptr(),
            REQUESTS: req_pool_indices.data_ptr(),
            TABLE: page_table.data_ptr(),
            TABLE_STRIDE: page_table.stride(0) * 4,
            COLUMNS: page_table.shape[1],
            PAGE_SIZE: page_size,
            NUM_LENGTHS: len(lengths),
            **{LENGTHS + i: x.data_ptr() for i, x in enumerate(lengths)},
        }
        # There is no team to enter, so the entry stands in for the worker as well.
        return self._runtime.launch(
            advance_entry, advance_entry, values, NUM_FIELDS, (*rows, page_table, live)
        )
