"""One launch of paged attention: K and V of the step into pages, then every tile, over all threads.

Knows nothing of tensors or of arithmetic (see `paged_attention`). Invariant: who computes a tile or a chunk
is decided by a counter and by the size of the step, and never changes a bit.
"""

from __future__ import annotations

from ostinato.ops.cpu.attention_fields import (
    AT_ONCE,
    BY_CHUNK,
    CAPACITY,
    CHUNKS_DONE,
    COUNTS,
    DIM,
    FINISH_ROWS,
    KV_HEADS,
    MERGE_ROWS,
    OUT,
    OUT_ROWS,
    OUT_STRIDE,
    PART_HEADS,
    PARTIAL_ROWS,
    PARTIALS,
    PARTIALS_BYTES,
    Q_HEADS,
    REQUESTS,
    ROWS,
    SCRATCH,
    SCRATCH_STRIDE,
    TILE_ROWS,
    VALUE_BYTES,
    WRITES,
    first_key,
)
from ostinato.ops.cpu.attention_ir import CHUNK, STATE_BYTES
from ostinato.ops.cpu.attention_stream_ir import STREAM_ROWS
from ostinato.ops.cpu.jit import njit
from ostinato.ops.cpu.kv_rows import write_row
from ostinato.ops.cpu.launch import COUNTER, TASKS, THREADS, draw, reset_counter, run_worker, wait_for_team
from ostinato.ops.cpu.memory import call_native, fetch_add, load_i64, store_i64, zero_bytes
from ostinato.ops.cpu.paged_attention import PARTS_PER_THREAD, attend_chunk, attend_tile, set_tile

# Counters of a launch, a cache line each: thread number, rows to write. Tasks are drawn from shares (see `draw`).
_NEXT_THREAD, _NEXT_ROWS = 64, 128
_ROWS_AT_ONCE = 16
_DRAWS_PER_THREAD = 16  # of decode
_ROWS_WRITTEN_FIRST = 32  # so few rows are written before the team starts, which saves it a barrier


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
def _part_heads(p: int, rows: int, chunks: int) -> int:
    """KV heads of one task where tasks are chunks: whole pages stream best, if there are tasks for all threads. Few
    tasks are enough for a chunk alone, whose every beginning waits for memory.
    """
    if rows > STREAM_ROWS:
        return 1
    kv_heads, threads = load_i64(p + 8 * KV_HEADS), load_i64(p + 8 * THREADS)
    wanted = threads if chunks == 1 else PARTS_PER_THREAD * threads
    parts = (wanted + chunks - 1) // max(chunks, 1)
    return max(min((kv_heads + parts - 1) // max(parts, 1), TILE_ROWS // max(rows, 1)), 1)


@njit(error_model="numpy")
def _share_out(p: int) -> int:
    """Set the number of tasks, whether each is a chunk or a tile, and whether it writes what is new; returns the KV
    words to be read.

    Tasks are chunks where each request has one tile, as in decode, and partial sums have room. They write K and V
    unless the plan leaves rows out, which no task would write.
    """
    kv_heads, threads = load_i64(p + 8 * KV_HEADS), load_i64(p + 8 * THREADS)
    group = load_i64(p + 8 * Q_HEADS) // kv_heads
    tiles, chunks, work, most, planned = 0, 0, 0, 0, 0
    requests, capacity = load_i64(p + 8 * REQUESTS), 8 * load_i64(p + 8 * CAPACITY)
    for request in range(load_i64(load_i64(p + 8 * COUNTS))):
        mine = _tiles(p, request)
        tiles += mine * kv_heads
        chunks += _chunks(p, request)
        tokens = load_i64(requests + capacity + 8 * request)
        planned += tokens
        most = max(most, tokens * group)
        work += load_i64(requests + 2 * capacity + 8 * request) * mine
    store_i64(min(most, TILE_ROWS), p + 8 * PARTIAL_ROWS)
    fits = chunks * kv_heads * _partial_bytes(p) <= load_i64(p + 8 * PARTIALS_BYTES)
    by_chunk = most <= TILE_ROWS and fits
    heads = _part_heads(p, most, chunks)
    store_i64(heads, p + 8 * PART_HEADS)
    store_i64(1 if by_chunk else 0, p + 8 * BY_CHUNK)
    all_rows = planned == load_i64(load_i64(p + 8 * COUNTS) + 8)
    store_i64(1 if by_chunk and all_rows else 0, p + 8 * WRITES)
    tasks = chunks * ((kv_heads + heads - 1) // heads) if by_chunk else tiles
    store_i64(tasks, p + 8 * TASKS)
    at_once = tasks // (threads * _DRAWS_PER_THREAD) if most <= TILE_ROWS else 1
    store_i64(max(at_once, 1), p + 8 * AT_ONCE)
    return work * kv_heads * load_i64(p + 8 * DIM)


@njit(error_model="numpy")
def _finish_chunk(p: int, scratch: int, rows: int, part: int, chunks: int, first: int, apart: int) -> None:
    """Whoever finishes a part's last chunk merges them all, in order, and writes the rows.

    `first` is the address of the first chunk's states and sums, the others' lie `apart` bytes apart.
    """
    done = load_i64(p + 8 * CHUNKS_DONE) + 8 * part
    if fetch_add(done, 1) != chunks - 1:
        return
    store_i64(0, done)
    dim = load_i64(p + 8 * DIM)
    stride = (dim + 15) // 16 * 64
    sums = rows * STATE_BYTES
    for chunk in range(1, chunks):
        more = first + chunk * apart
        call_native(load_i64(p + 8 * MERGE_ROWS), rows, first, first + sums, more, more + sums, stride)
    call_native(load_i64(p + 8 * FINISH_ROWS), rows, dim, first, first + sums, stride, scratch + OUT_ROWS)


@njit(error_model="numpy")
def _attend_part(p: int, scratch: int, request: int, task: int, chunks: int, chunks_before: int) -> None:
    """Task `task` of a request: one chunk, for the heads of one part."""
    kv_heads, part_heads = load_i64(p + 8 * KV_HEADS), load_i64(p + 8 * PART_HEADS)
    part, chunk = task // chunks, task % chunks
    head = part * part_heads
    heads = min(part_heads, kv_heads - head)
    size = _partial_bytes(p)
    first = load_i64(p + 8 * PARTIALS) + (chunks_before * kv_heads + head) * size
    here = first + chunk * kv_heads * size
    n = set_tile(p, scratch, request, head, heads, 0)
    start = (_first_chunk(p, request) + chunk) * CHUNK
    writes, sums = load_i64(p + 8 * WRITES) != 0, here + n * heads * STATE_BYTES
    attend_chunk(p, scratch, n, request, head, heads, start, here, sums, writes)
    _finish_chunk(p, scratch, n * heads, request * kv_heads + part, chunks, first, kv_heads * size)


@njit(error_model="numpy")
def _attend_chunks(p: int, scratch: int, member: int) -> None:
    """Take chunks until none is left; each request has one tile for a KV head.

    A thread goes on with the neighbours of what it had, since each task asks memory for the pages of the next.
    """
    kv_heads, threads = load_i64(p + 8 * KV_HEADS), load_i64(p + 8 * THREADS)
    parts = (kv_heads + load_i64(p + 8 * PART_HEADS) - 1) // load_i64(p + 8 * PART_HEADS)
    tasks, at_once = load_i64(p + 8 * TASKS), load_i64(p + 8 * AT_ONCE)
    request, before, chunks = -1, 0, 0
    draws = (tasks + at_once - 1) // at_once
    for turn in range(threads):
        drawn = draw(p, 0, (member + turn) % threads, draws)
        while drawn >= 0:
            for task in range(drawn * at_once, min(drawn * at_once + at_once, tasks)):
                if task < before * parts:  # somebody else's share lies before ours
                    request, before, chunks = -1, 0, 0
                while task >= (before + chunks) * parts:
                    before += chunks
                    request += 1
                    chunks = _chunks(p, request)
                _attend_part(p, scratch, request, task - before * parts, chunks, before)
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
            write_row(p, row, 0, load_i64(p + 8 * KV_HEADS))
        start = fetch_add(counter, _ROWS_AT_ONCE)


def attention_worker(p: int) -> None:
    """Each thread: write K and V of many rows and wait for the others, unless tasks write; then attend."""
    scratch = load_i64(p + 8 * SCRATCH)
    thread = fetch_add(load_i64(p + 8 * COUNTER) + _NEXT_THREAD, 1)
    scratch += thread * load_i64(p + 8 * SCRATCH_STRIDE)
    rows = load_i64(load_i64(p + 8 * COUNTS) + 8)
    if rows > _ROWS_WRITTEN_FIRST and not load_i64(p + 8 * WRITES):
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
    if rows <= _ROWS_WRITTEN_FIRST and not load_i64(p + 8 * WRITES):
        _write_rows(p, rows)
    out, out_stride = load_i64(p + 8 * OUT), load_i64(p + 8 * OUT_STRIDE)
    row_bytes = load_i64(p + 8 * Q_HEADS) * load_i64(p + 8 * DIM) * load_i64(p + 8 * VALUE_BYTES)
    for row in range(rows, load_i64(p + 8 * ROWS)):
        zero_bytes(out + row * out_stride, row_bytes)
    run_worker(p, work)
