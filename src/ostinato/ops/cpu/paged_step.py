"""One launch of paged attention: K and V of the step into pages, then every tile, over all threads.

Knows nothing of tensors or of arithmetic (see `paged_attention`). Invariant: who computes a tile or a chunk
is decided by a counter and by the size of the step, and never changes a bit.
"""

from __future__ import annotations

from ostinato.ops.cpu.attention_ir import CHUNK, PAGE, STATE_BYTES
from ostinato.ops.cpu.jit import njit
from ostinato.ops.cpu.launch import COUNTER, TASKS, THREADS, draw, reset_counter, run_worker, wait_for_team
from ostinato.ops.cpu.memory import call_native, fetch_add, load_i64, store_i64, zero_bytes
from ostinato.ops.cpu.paged_attention import (
    AT_ONCE,
    BY_CHUNK,
    CAPACITY,
    CHUNKS_DONE,
    COUNTS,
    DIM,
    FINISH_ROWS,
    ITEMS_PER_THREAD,
    K_NEW,
    K_PAGES,
    K_STRIDE,
    KV_HEADS,
    MERGE_ROWS,
    OUT,
    OUT_ROWS,
    OUT_STRIDE,
    PARTIAL_ROWS,
    PARTIALS,
    PARTIALS_BYTES,
    Q_HEADS,
    REQUESTS,
    ROWS,
    SCRATCH,
    SCRATCH_STRIDE,
    SLOTS,
    TILE_ROWS,
    V_NEW,
    V_PAGES,
    V_STRIDE,
    VALUE_BYTES,
    WRITE_KV_ROW,
    attend_chunk,
    attend_tile,
    first_key,
    set_tile,
    table_row,
)

# Counters of a launch, a cache line each: thread number, rows to write. Tasks are drawn from shares (see `draw`).
_NEXT_THREAD, _NEXT_ROWS = 64, 128
_ROWS_AT_ONCE = 16
_DRAWS_PER_THREAD = 16  # of decode
_ROWS_WRITTEN_FIRST = 32  # so few rows are written before the team starts, which saves it a barrier


@njit(error_model="numpy")
def _write_row(p: int, row: int) -> None:
    """K and V of one row of the step, all heads, into its slot."""
    slot = load_i64(load_i64(p + 8 * SLOTS) + 8 * row)
    dim, value_bytes = load_i64(p + 8 * DIM), load_i64(p + 8 * VALUE_BYTES)
    kv_heads = load_i64(p + 8 * KV_HEADS)
    size = dim * value_bytes * PAGE
    k_new = load_i64(p + 8 * K_NEW) + row * load_i64(p + 8 * K_STRIDE)
    v_new = load_i64(p + 8 * V_NEW) + row * load_i64(p + 8 * V_STRIDE)
    place = slot // PAGE * kv_heads * size
    for head in range(kv_heads):
        call_native(
            load_i64(p + 8 * WRITE_KV_ROW),
            k_new + head * dim * value_bytes,
            v_new + head * dim * value_bytes,
            load_i64(p + 8 * K_PAGES) + place + head * size,
            load_i64(p + 8 * V_PAGES) + place + head * size,
            slot % PAGE,
            dim,
        )


@njit(error_model="numpy")
def _tiles(p: int, request: int) -> int:
    """Tiles of one KV head of a request."""
    requests, capacity = load_i64(p + 8 * REQUESTS), 8 * load_i64(p + 8 * CAPACITY)
    group = load_i64(p + 8 * Q_HEADS) // load_i64(p + 8 * KV_HEADS)
    return (load_i64(requests + capacity + 8 * request) * group + TILE_ROWS - 1) // TILE_ROWS


@njit(error_model="numpy")
def _first_chunk(p: int, request: int) -> int:
    """The first chunk that a row of the request sees."""
    requests, capacity = load_i64(p + 8 * REQUESTS), 8 * load_i64(p + 8 * CAPACITY)
    tokens = load_i64(requests + capacity + 8 * request)
    return first_key(p, load_i64(requests + 2 * capacity + 8 * request) - tokens) // CHUNK


@njit(error_model="numpy")
def _chunks(p: int, request: int) -> int:
    """How many chunks the rows of a request see; 0 for a request without rows."""
    requests, capacity = load_i64(p + 8 * REQUESTS), 8 * load_i64(p + 8 * CAPACITY)
    if load_i64(requests + capacity + 8 * request) == 0:
        return 0
    length = load_i64(requests + 2 * capacity + 8 * request)
    return (length + CHUNK - 1) // CHUNK - _first_chunk(p, request)


@njit(error_model="numpy")
def _partial_bytes(p: int) -> int:
    """Room for the state and then the sums of one tile whose chunks are shared out."""
    return load_i64(p + 8 * PARTIAL_ROWS) * (STATE_BYTES + (load_i64(p + 8 * DIM) + 15) // 16 * 64)


@njit(error_model="numpy")
def _share_out(p: int) -> int:
    """Set the number of tasks and whether each is a chunk or a tile; returns the KV words to be read.

    Chunks are shared out where each request has one tile, tiles are few, and partial sums have room.
    """
    kv_heads, threads = load_i64(p + 8 * KV_HEADS), load_i64(p + 8 * THREADS)
    group = load_i64(p + 8 * Q_HEADS) // kv_heads
    tiles, chunks, work, most = 0, 0, 0, 0
    requests, capacity = load_i64(p + 8 * REQUESTS), 8 * load_i64(p + 8 * CAPACITY)
    for request in range(load_i64(load_i64(p + 8 * COUNTS))):
        mine = _tiles(p, request)
        tiles += mine * kv_heads
        chunks += _chunks(p, request) * kv_heads
        most = max(most, load_i64(requests + capacity + 8 * request) * group)
        work += load_i64(requests + 2 * capacity + 8 * request) * mine
    store_i64(min(most, TILE_ROWS), p + 8 * PARTIAL_ROWS)
    fits = chunks * _partial_bytes(p) <= load_i64(p + 8 * PARTIALS_BYTES)
    by_chunk = (
        most <= TILE_ROWS and fits and threads > 1 and chunks > tiles and tiles < ITEMS_PER_THREAD * threads
    )
    store_i64(1 if by_chunk else 0, p + 8 * BY_CHUNK)
    tasks = chunks if by_chunk else tiles
    store_i64(tasks, p + 8 * TASKS)
    at_once = tasks // (threads * _DRAWS_PER_THREAD) if most <= TILE_ROWS else 1
    store_i64(max(at_once, 1), p + 8 * AT_ONCE)
    return work * kv_heads * load_i64(p + 8 * DIM)


@njit(error_model="numpy")
def _finish_chunk(p: int, scratch: int, n: int, tile: int, chunks: int, partial: int) -> None:
    """Whoever finishes a tile's last chunk merges them all, in order, and writes the rows."""
    if fetch_add(load_i64(p + 8 * CHUNKS_DONE) + 8 * tile, 1) != chunks - 1:
        return
    dim, size = load_i64(p + 8 * DIM), _partial_bytes(p)
    stride = (dim + 15) // 16 * 64
    sums = load_i64(p + 8 * PARTIAL_ROWS) * STATE_BYTES
    for chunk in range(1, chunks):
        more = partial + chunk * size
        call_native(load_i64(p + 8 * MERGE_ROWS), n, partial, partial + sums, more, more + sums, stride)
    call_native(load_i64(p + 8 * FINISH_ROWS), n, dim, partial, partial + sums, stride, scratch + OUT_ROWS)


@njit(error_model="numpy")
def _attend_chunks(p: int, scratch: int, member: int) -> None:
    """Take chunks until none is left; each request has one tile for a KV head.

    A thread goes on with the neighbours of what it had, since each task asks memory for the pages of the next.
    """
    kv_heads, threads = load_i64(p + 8 * KV_HEADS), load_i64(p + 8 * THREADS)
    tasks, size = load_i64(p + 8 * TASKS), _partial_bytes(p)
    sums = load_i64(p + 8 * PARTIAL_ROWS) * STATE_BYTES
    request, begin, chunks, end, tile = -1, 0, 0, 0, 0
    at_once = load_i64(p + 8 * AT_ONCE)
    draws = (tasks + at_once - 1) // at_once
    for turn in range(threads):
        drawn = draw(p, 0, (member + turn) % threads, draws)
        while drawn >= 0:
            for task in range(drawn * at_once, min(drawn * at_once + at_once, tasks)):
                if task < begin:  # somebody else's share lies before ours
                    request, begin, chunks, end, tile = -1, 0, 0, 0, 0
                while task >= end:
                    tile += kv_heads if chunks > 0 else 0
                    begin = end
                    request += 1
                    chunks = _chunks(p, request)
                    end = begin + chunks * kv_heads
                head, chunk = (task - begin) // chunks, (task - begin) % chunks
                partial = load_i64(p + 8 * PARTIALS) + task * size
                n = set_tile(p, scratch, request, head, 0)
                start = (_first_chunk(p, request) + chunk) * CHUNK
                attend_chunk(p, scratch, n, table_row(p, request), head, start, partial, partial + sums)
                _finish_chunk(p, scratch, n, tile + head, chunks, partial - chunk * size)
            drawn = draw(p, 0, (member + turn) % threads, draws)


@njit(error_model="numpy")
def _attend_tiles(p: int, scratch: int, member: int) -> None:
    """Take tiles until none is left. The last tiles of a request see most keys and come first."""
    kv_heads, threads = load_i64(p + 8 * KV_HEADS), load_i64(p + 8 * THREADS)
    tasks, at_once = load_i64(p + 8 * TASKS), load_i64(p + 8 * AT_ONCE)
    request, begin, tiles, end = -1, 0, 0, 0
    draws = (tasks + at_once - 1) // at_once
    for turn in range(threads):
        drawn = draw(p, 0, (member + turn) % threads, draws)
        while drawn >= 0:
            for task in range(drawn * at_once, min(drawn * at_once + at_once, tasks)):
                if task < begin:
                    request, begin, tiles, end = -1, 0, 0, 0
                while task >= end:
                    begin = end
                    request += 1
                    tiles = _tiles(p, request)
                    end = begin + tiles * kv_heads
                tile = tiles - 1 - (task - begin) // kv_heads
                attend_tile(p, scratch, request, (task - begin) % kv_heads, tile * TILE_ROWS)
            drawn = draw(p, 0, (member + turn) % threads, draws)


@njit(error_model="numpy")
def _write_rows(p: int, rows: int) -> None:
    """Take blocks of rows and write their K and V until none is left."""
    counter = load_i64(p + 8 * COUNTER) + _NEXT_ROWS
    start = fetch_add(counter, _ROWS_AT_ONCE)
    while start < rows:
        for row in range(start, min(start + _ROWS_AT_ONCE, rows)):
            _write_row(p, row)
        start = fetch_add(counter, _ROWS_AT_ONCE)


def attention_worker(p: int) -> None:
    """Each thread: write K and V of many rows and wait for the others, then attend."""
    scratch = load_i64(p + 8 * SCRATCH)
    thread = fetch_add(load_i64(p + 8 * COUNTER) + _NEXT_THREAD, 1)
    scratch += thread * load_i64(p + 8 * SCRATCH_STRIDE)
    rows = load_i64(load_i64(p + 8 * COUNTS) + 8)
    if rows > _ROWS_WRITTEN_FIRST:
        _write_rows(p, rows)
        wait_for_team(p)
    if load_i64(p + 8 * BY_CHUNK):
        _attend_chunks(p, scratch, thread)
    else:
        _attend_tiles(p, scratch, thread)


def attention_entry(p: int) -> None:
    """Write the step's K and V, attend, and zero the rows past the count."""
    reset_counter(p)
    rows, work = load_i64(load_i64(p + 8 * COUNTS) + 8), _share_out(p)
    if rows <= _ROWS_WRITTEN_FIRST:
        _write_rows(p, rows)
    for tile in range(load_i64(p + 8 * THREADS) * ITEMS_PER_THREAD):
        store_i64(0, load_i64(p + 8 * CHUNKS_DONE) + 8 * tile)
    out, out_stride = load_i64(p + 8 * OUT), load_i64(p + 8 * OUT_STRIDE)
    row_bytes = load_i64(p + 8 * Q_HEADS) * load_i64(p + 8 * DIM) * load_i64(p + 8 * VALUE_BYTES)
    for row in range(rows, load_i64(p + 8 * ROWS)):
        zero_bytes(out + row * out_stride, row_bytes)
    run_worker(p, work)
