"""Writing K and V of a step's rows into their pages.

Where every row of a step belongs to a request that attends in tasks of one chunk, each task writes what is new in its
own chunk, of its own heads: nobody else reads that. Else all rows are written before anyone attends. Knows nothing of
arithmetic. Invariant: a row is written once, before it is read.
"""

from __future__ import annotations

from ostinato.ops.cpu.attention_fields import (
    CAPACITY,
    DIM,
    K_NEW,
    K_PAGES,
    K_STRIDE,
    KV_HEADS,
    REQUESTS,
    SLOTS,
    V_NEW,
    V_PAGES,
    V_STRIDE,
    VALUE_BYTES,
    WRITE_KV_ROW,
    head_bytes,
)
from ostinato.ops.cpu.attention_ir import PAGE
from ostinato.ops.cpu.jit import njit
from ostinato.ops.cpu.memory import call_native, load_i64, prefetch_to_write


@njit(error_model="numpy")
def _slot(p: int, row: int) -> int:
    return load_i64(load_i64(p + 8 * SLOTS) + 8 * row)


@njit(error_model="numpy")
def write_row(p: int, row: int, first: int, heads: int) -> None:
    """K and V of one row of the step, `heads` KV heads from `first` on, into its slot."""
    slot, size = _slot(p, row), head_bytes(p)
    row_bytes = load_i64(p + 8 * DIM) * load_i64(p + 8 * VALUE_BYTES)
    k_new = load_i64(p + 8 * K_NEW) + row * load_i64(p + 8 * K_STRIDE)
    v_new = load_i64(p + 8 * V_NEW) + row * load_i64(p + 8 * V_STRIDE)
    place = slot // PAGE * load_i64(p + 8 * KV_HEADS) * size
    for head in range(first, first + heads):
        call_native(
            load_i64(p + 8 * WRITE_KV_ROW),
            k_new + head * row_bytes,
            v_new + head * row_bytes,
            load_i64(p + 8 * K_PAGES) + place + head * size,
            load_i64(p + 8 * V_PAGES) + place + head * size,
            slot % PAGE,
            load_i64(p + 8 * DIM),
        )


@njit(error_model="numpy")
def _new_rows(p: int, request: int, low: int, high: int) -> tuple[int, int]:
    """The rows (first, end) of the step that are a request's positions [low, high)."""
    requests, capacity = load_i64(p + 8 * REQUESTS), 8 * load_i64(p + 8 * CAPACITY)
    token, tokens = load_i64(requests + 8 * request), load_i64(requests + capacity + 8 * request)
    position = load_i64(requests + 2 * capacity + 8 * request) - tokens
    return token + max(low - position, 0), token + min(high - position, tokens)


@njit(error_model="numpy")
def ask_for_new(p: int, request: int, first: int, heads: int, low: int, high: int) -> None:
    """Ask for the pages that `write_new` will write: every line of K's, since a position is a word of each, and of V's.

    Without it a row waits some 1.5 us for memory.
    """
    row, end = _new_rows(p, request, low, high)
    size = head_bytes(p)
    asked = -1
    while row < end:
        page = _slot(p, row) // PAGE
        if page != asked:
            place = (page * load_i64(p + 8 * KV_HEADS) + first) * size
            for line in range(0, heads * size, 64):
                prefetch_to_write(load_i64(p + 8 * K_PAGES) + place + line)
                prefetch_to_write(load_i64(p + 8 * V_PAGES) + place + line)
            asked = page
        row += 1


@njit(error_model="numpy")
def write_new(p: int, request: int, first: int, heads: int, low: int, high: int) -> None:
    """Write K and V of a request's rows at positions [low, high), `heads` KV heads from `first` on."""
    row, end = _new_rows(p, request, low, high)
    while row < end:
        write_row(p, row, first, heads)
        row += 1
