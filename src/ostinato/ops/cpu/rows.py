"""Kernels that work row by row: one driver for all of them, and the parameter block they share.

A function of the native library computes rows [first, last) of a launch; threads draw blocks of rows. Rows at or past
the live count are not computed: outputs of their own come out zero, what is changed in place stays. Knows nothing of
what a row's function does. Invariant: a row is computed by one thread from its own inputs alone.
"""

from __future__ import annotations

from ostinato.ops.cpu.gemm import live_rows
from ostinato.ops.cpu.jit import njit
from ostinato.ops.cpu.launch import COUNTER, FIRST_FIELD, THREADS, reset_counter, run_worker
from ostinato.ops.cpu.memory import call_native, fetch_add, load_i64, store_i64, zero_bytes

# Fields after those of every launch. Addresses and strides are in bytes; a function reads those it needs.
(
    ROWS,
    COUNT,  # address of the live count (int32), or 0: all rows
    LIVE,  # rows to compute: set by the entry
    CLEAR_BYTES,  # of OUT, in rows past the live ones
    ROW_WORDS,  # 4-byte words that a row touches
    FUNCTION,  # address of f(p, first, last)
    X,
    X_STRIDE,
    Y,  # residual, or keys
    Y_STRIDE,
    OUT,
    OUT_STRIDE,
    WEIGHT,
    BIAS,
    Y_WEIGHT,
    EPS,  # fp32 bits
    DIM,  # values of a vector: a row, or a head of it
    X_HEADS,  # vectors of a row, one behind the other
    Y_HEADS,
    POSITIONS,  # address of int64 [rows]
    TABLE,  # address of fp32 [positions, 2 * half]: cosines, then sines
    TABLE_ROWS,
    HALF,  # pairs that rotary embedding turns
    NUM_FIELDS,
) = range(FIRST_FIELD, FIRST_FIELD + 24)

_BLOCKS_PER_THREAD = 4


@njit(error_model="numpy")
def _rows_at_once(p: int) -> int:
    """Rows of a draw: a few draws for every thread."""
    share = load_i64(p + 8 * THREADS) * _BLOCKS_PER_THREAD
    return (load_i64(p + 8 * LIVE) + share - 1) // share


def rows_worker(p: int) -> None:
    """Draw blocks of rows until none is left."""
    rows, size = load_i64(p + 8 * LIVE), _rows_at_once(p)
    first = fetch_add(load_i64(p + 8 * COUNTER), size)
    while first < rows:
        call_native(load_i64(p + 8 * FUNCTION), p, first, min(first + size, rows))
        first = fetch_add(load_i64(p + 8 * COUNTER), size)


def rows_entry(p: int) -> None:
    """Run the live rows over the team, or here when they are few, and clear the others."""
    reset_counter(p)
    rows, size = load_i64(p + 8 * ROWS), load_i64(p + 8 * CLEAR_BYTES)
    live = live_rows(rows, load_i64(p + 8 * COUNT))
    store_i64(live, p + 8 * LIVE)
    if live > 0:
        run_worker(p, live * load_i64(p + 8 * ROW_WORDS))
    for row in range(live, rows):
        zero_bytes(load_i64(p + 8 * OUT) + row * load_i64(p + 8 * OUT_STRIDE), size)
