"""What a launch of paged attention is given: its parameter block, and how a thread's scratch memory is laid out.

Knows nothing of arithmetic. Invariant: fields are read through `load_i64(p + 8 * FIELD)` alone.
"""

from __future__ import annotations

from ostinato.ops.cpu.attention_ir import BLOCK, PAGE, STATE_BYTES
from ostinato.ops.cpu.jit import njit
from ostinato.ops.cpu.launch import FIRST_FIELD
from ostinato.ops.cpu.memory import load_i64

TILE_ROWS = 48  # query rows (token, head of the group) of one KV head that are attended together

# The parameter block: int64 fields by index, after those of every launch. Addresses and strides are in bytes.
(
    COUNTS,  # address of int64 [2]: real requests, real rows
    REQUESTS,  # address of int64 [4, capacity]: first row, rows, KV length, row of the page table
    CAPACITY,
    TABLE,  # address of int32 [requests, pages]
    TABLE_STRIDE,
    PAGE_BLOCKS,  # blocks of 16 positions in a page
    Q,
    Q_STRIDE,
    OUT,
    OUT_STRIDE,
    ROWS,  # padded rows of q and out
    Q_HEADS,
    KV_HEADS,
    DIM,
    VALUE_BYTES,
    K_PAGES,
    V_PAGES,
    WINDOW,  # 0: none
    ATTENTION_CHUNK,  # 0: none
    SCRATCH,
    SCRATCH_STRIDE,  # of one thread
    PARTIALS,
    PARTIALS_BYTES,
    CHUNKS_DONE,  # address of int64 [capacity * kv_heads], zeros between launches: finished chunks of each part
    K_NEW,
    V_NEW,
    K_STRIDE,
    V_STRIDE,
    SLOTS,  # address of int64 [rows]: where each row's K and V go
    FACTOR,  # fp32 bits: scores are multiplied by it (the scale times log2 e)
    PARTIAL_ROWS,  # set by the entry: most rows of a KV head where tasks are chunks
    PART_HEADS,  # set by the entry: KV heads of a task that is a chunk
    AT_ONCE,  # set by the entry: tasks of one draw
    BY_CHUNK,  # set by the entry: is a task a chunk of a request, or a whole tile?
    WRITES,  # set by the entry: does each task write K and V of its new positions (or is that done before)?
    SCORE_ROWS,  # addresses of the functions of `attention_state_ir`
    SOFTMAX_ROWS,
    MIX_ROWS,
    SCORE_STREAM,
    SOFTMAX_STREAM,
    MIX_STREAM,
    WRITE_KV_ROW,
    CLEAN_PAGE,
    CLEAR_ROWS,
    MERGE_ROWS,
    FINISH_ROWS,
    NUM_FIELDS,
) = range(FIRST_FIELD, FIRST_FIELD + 47)

# Scratch of one thread: fixed parts first, those that grow with the head dimension last.
QUERY_ROWS = 0
OUT_ROWS = QUERY_ROWS + 8 * TILE_ROWS
BOUNDS = OUT_ROWS + 8 * TILE_ROWS
PAGES = BOUNDS + 16 * TILE_ROWS  # K now, V now, K next, V next: 8 addresses each
VALUES = PAGES + 4 * 64  # one head's V, where copies stand in; what follows is asked for but not read
STATE = VALUES + 3 * 64
MORE_STATE = STATE + STATE_BYTES * TILE_ROWS
ORIGINALS = MORE_STATE + STATE_BYTES * TILE_ROWS  # addresses of 8 V pages, and a flag
SCORES = ORIGINALS + 128
PROBS = SCORES + 4 * BLOCK * TILE_ROWS
GROWING = PROBS + 4 * BLOCK * TILE_ROWS


def acc_stride(dim: int) -> int:
    """Bytes of one row of fp32 sums: whole vectors."""
    return -(-dim // 16) * 64


def scratch_bytes(dim: int) -> int:
    """Scratch of one thread: two tiles of sums and a block of cleaned V pages behind the fixed parts."""
    return GROWING + 2 * TILE_ROWS * acc_stride(dim) + BLOCK * (acc_stride(dim) + 64)


@njit(error_model="numpy")
def first_key(p: int, position: int) -> int:
    """The first position that a query at `position` sees."""
    first = 0
    window = load_i64(p + 8 * WINDOW)
    if window > 0:
        first = max(first, position - window + 1)
    chunk = load_i64(p + 8 * ATTENTION_CHUNK)
    if chunk > 0:
        first = max(first, position // chunk * chunk)
    return first


@njit(error_model="numpy")
def head_bytes(p: int) -> int:
    """Bytes of one KV head in a block of 16 positions, of K as of V."""
    return load_i64(p + 8 * DIM) * load_i64(p + 8 * VALUE_BYTES) * PAGE


@njit(error_model="numpy")
def table_row(p: int, request: int) -> int:
    row = load_i64(load_i64(p + 8 * REQUESTS) + 24 * load_i64(p + 8 * CAPACITY) + 8 * request)
    return load_i64(p + 8 * TABLE) + row * load_i64(p + 8 * TABLE_STRIDE)
