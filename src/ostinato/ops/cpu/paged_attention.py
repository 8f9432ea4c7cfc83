"""Paged attention on CPU: writing K and V into pages, attending over them, one way for every kind of step.

Pages are stored for dot products (words of 4 bytes, see `lane_kinds`; a block of 16 positions of one KV
head):
    K  [slots / 16, kv_heads, D * bytes / 4 words, 16 positions]      V  [slots / 16, kv_heads, 16 * bytes / 4
    words, D]
Knows nothing of requests beyond the plan's four numbers each. Invariant: a row's sums run over blocks of 128
and chunks of 512 positions at fixed absolute places, merged in order, whatever tile, thread or step computes
them.

    request --> tiles of TILE_ROWS rows (token, head of the group) of one KV head --> chunks --> blocks of 128
    keys
"""

from __future__ import annotations

from ostinato.ops.cpu.attention_fields import (
    BOUNDS,
    CAPACITY,
    CLEAN_PAGE,
    CLEAR_ROWS,
    COUNTS,
    DIM,
    FACTOR,
    FINISH_ROWS,
    GROWING,
    K_PAGES,
    KV_HEADS,
    MERGE_ROWS,
    MIX_ROWS,
    MIX_STREAM,
    MORE_STATE,
    ORIGINALS,
    OUT,
    OUT_ROWS,
    OUT_STRIDE,
    PAGE_BLOCKS,
    PAGES,
    PROBS,
    Q_HEADS,
    Q_STRIDE,
    QUERY_ROWS,
    REQUESTS,
    SCORE_ROWS,
    SCORE_STREAM,
    SCORES,
    SOFTMAX_ROWS,
    SOFTMAX_STREAM,
    STATE,
    TILE_ROWS,
    V_PAGES,
    VALUE_BYTES,
    VALUES,
    Q,
    first_key,
    head_bytes,
    table_row,
)
from ostinato.ops.cpu.attention_ir import BLOCK, CHUNK, PAGE, STATE_BYTES
from ostinato.ops.cpu.attention_stream_ir import AHEAD, STREAM_ROWS
from ostinato.ops.cpu.jit import njit
from ostinato.ops.cpu.kv_rows import ask_for_new, write_new
from ostinato.ops.cpu.memory import call_native, load_i32, load_i64, prefetch_line, store_i64

_FIRST_BYTES = 8192  # of V that a chunk asks for before its scores
PARTS_PER_THREAD = 3  # of decode: heads of a chunk are parted until there are so many tasks a thread


@njit(error_model="numpy")
def _find_pages(p: int, table: int, head: int, start: int, stop: int, pages: int) -> None:
    """Addresses of `head` in the 8 K and V pages of the block at `start`; those past `stop` repeat the last one."""
    per_page = load_i64(p + 8 * PAGE_BLOCKS)
    size = head_bytes(p)
    whole = load_i64(p + 8 * KV_HEADS) * size
    k_pages = load_i64(p + 8 * K_PAGES) + head * size
    v_pages = load_i64(p + 8 * V_PAGES) + head * size
    last = (stop - 1) // PAGE
    for j in range(BLOCK // PAGE):
        block = min(start // PAGE + j, last)
        place = load_i32(table + 4 * (block // per_page)) * per_page + block % per_page
        store_i64(k_pages + place * whole, pages + 8 * j)
        store_i64(v_pages + place * whole, pages + 64 + 8 * j)


@njit(error_model="numpy")
def _find_next(
    p: int, request: int, head: int, heads: int, at: int, seen_low: int, seen_high: int, pages: int
) -> None:
    """Pages to ask memory for during the block at `at`: the next block's, then the first of the next heads or of
    the next request.
    """
    if at + BLOCK < seen_high:
        _find_pages(p, table_row(p, request), head, at + BLOCK, seen_high, pages)
    elif head + heads < load_i64(p + 8 * KV_HEADS):
        _find_pages(p, table_row(p, request), head + heads, seen_low // BLOCK * BLOCK, seen_high, pages)
    else:
        request = min(request + 1, load_i64(load_i64(p + 8 * COUNTS)) - 1)
        capacity = 8 * load_i64(p + 8 * CAPACITY)
        tokens = load_i64(p + 8 * REQUESTS) + capacity + 8 * request
        length = load_i64(tokens + capacity)
        start = first_key(p, length - load_i64(tokens)) // BLOCK * BLOCK
        _find_pages(p, table_row(p, request), 0, start, length, pages)


@njit(error_model="numpy")
def _clean(p: int, scratch: int, start: int, j: int, low: int, high: int, found: int) -> int:
    """Clean page `j` of the block at `start` for the visible range [low, high); returns the copy's address."""
    dim = load_i64(p + 8 * DIM)
    target = scratch + GROWING + 2 * TILE_ROWS * ((dim + 15) // 16 * 64)
    target += j * dim * load_i64(p + 8 * VALUE_BYTES) * PAGE
    page = load_i64(scratch + ORIGINALS + 8 * j)
    at = start + PAGE * j
    call_native(load_i64(p + 8 * CLEAN_PAGE), page, target, low - at, high - at, dim, found)
    return target


@njit(error_model="numpy")
def _clean_block(p: int, scratch: int, n: int, start: int, low: int, high: int, pages: int) -> int:
    """Put clean copies in the place of pages that not every row of the tile sees in full.

    Returns whether an infinity or NaN is left that some rows must not see.
    """
    bounds, found = scratch + BOUNDS, scratch + ORIGINALS + 64
    seen_low, seen_high = load_i64(bounds), load_i64(bounds + 16 * (n - 1) + 8)
    all_low, all_high = load_i64(bounds + 16 * (n - 1)), load_i64(bounds + 8)
    store_i64(0, found)
    for j in range(low, high):
        store_i64(load_i64(pages + 8 * j), scratch + ORIGINALS + 8 * j)
        at = start + PAGE * j
        if all_low > at or all_high < at + PAGE:
            store_i64(_clean(p, scratch, start, j, seen_low, seen_high, found), pages + 8 * j)
    return load_i64(found) if seen_low != all_low or seen_high != all_high else 0


@njit(error_model="numpy")
def _mix(p: int, probs: int, n: int, low: int, high: int, state: int, acc: int, pages: int) -> None:
    """Add the values of one head's pages [low, high) to the sums of its rows."""
    dim = load_i64(p + 8 * DIM)
    stride = (dim + 15) // 16 * 64
    call_native(load_i64(p + 8 * MIX_ROWS), probs, n, pages, pages + 128, low, high, dim, acc, stride, state)


@njit(error_model="numpy")
def _mix_one_by_one(
    p: int, scratch: int, n: int, first: int, start: int, low: int, high: int, state: int, acc: int
) -> None:
    """The same for rows from `first` on, with pages cleaned for each row: what a row must not see is not finite."""
    stride = (load_i64(p + 8 * DIM) + 15) // 16 * 64
    pages, found = scratch + VALUES, scratch + ORIGINALS + 64
    for r in range(n):
        row = scratch + BOUNDS + 16 * (first + r)
        for j in range(low, high):
            copy = _clean(p, scratch, start, j, load_i64(row), load_i64(row + 8), found)
            store_i64(copy, pages + 8 * j)
        probs, sums, here = (
            scratch + PROBS + 4 * BLOCK * (first + r),
            acc + stride * r,
            state + STATE_BYTES * r,
        )
        _mix(p, probs, 1, low, high, here, sums, pages)


@njit(error_model="numpy")
def _streams(p: int, n: int, heads: int) -> bool:
    """Whether pages are read in the order of memory: for few rows, whose time is that of memory. One head of several
    is a short run of each page, and four pages at a time then give memory more to do at once.
    """
    return n <= STREAM_ROWS and (heads > 1 or load_i64(p + 8 * KV_HEADS) == 1)


@njit(error_model="numpy")
def _score(p: int, scratch: int, n: int, heads: int, low: int, high: int) -> None:
    """Scores of a block's pages [low, high)."""
    words = load_i64(p + 8 * DIM) * load_i64(p + 8 * VALUE_BYTES) // 4
    rows, pages, scores = scratch + QUERY_ROWS, scratch + PAGES, scratch + SCORES
    if _streams(p, n, heads):
        call_native(load_i64(p + 8 * SCORE_STREAM), rows, n, heads, pages, low, high, words, scores)
    else:
        for half in range(2):
            if low < 4 * half + 4 and high > 4 * half:
                keys = pages + 32 * half
                score_rows = load_i64(p + 8 * SCORE_ROWS)
                call_native(score_rows, rows, n, keys, keys + 128, words, scores + 256 * half)


@njit(error_model="numpy")
def _softmax(
    p: int, scratch: int, n: int, heads: int, start: int, low: int, high: int, partly: bool, state: int
) -> None:
    """Probabilities of a block's pages [low, high); `partly`: rows see not all of them."""
    scores, probs, bounds, factor = scratch + SCORES, scratch + PROBS, scratch + BOUNDS, p + 8 * FACTOR
    rows, masked = n * heads, 1 if partly else 0
    if _streams(p, n, heads):
        softmax = load_i64(p + 8 * SOFTMAX_STREAM)
        values, part = scratch + PAGES + 64, head_bytes(p)
        size, asked = heads * part, AHEAD[0] * part
        call_native(
            softmax, scores, probs, rows, low, high, masked, bounds, start, state, factor, values, size, asked
        )
    else:
        softmax = load_i64(p + 8 * SOFTMAX_ROWS)
        call_native(softmax, scores, probs, rows, low, high, masked, bounds, start, state, factor)


@njit(error_model="numpy")
def _mix_all(p: int, scratch: int, n: int, heads: int, low: int, high: int, state: int, acc: int) -> None:
    """Add the values of a block's pages [low, high), which all rows see in full."""
    dim = load_i64(p + 8 * DIM)
    stride = (dim + 15) // 16 * 64
    probs, pages = scratch + PROBS, scratch + PAGES + 64
    if _streams(p, n, heads):
        mix = load_i64(p + 8 * MIX_STREAM)
        call_native(mix, probs, n, heads, pages, low, high, dim, acc, stride, state)
    else:
        _mix(p, probs, n, low, high, state, acc, pages)


@njit(error_model="numpy")
def _mix_partly(
    p: int, scratch: int, n: int, heads: int, at: int, low: int, high: int, state: int, acc: int
) -> None:
    """The same where rows differ in what they see of the pages, or see a part: head by head, from clean copies."""
    values = scratch + PAGES + 64
    stride = (load_i64(p + 8 * DIM) + 15) // 16 * 64
    for head in range(heads):
        row = head * n
        for j in range(8):
            store_i64(load_i64(values + 8 * j) + head * head_bytes(p), scratch + VALUES + 8 * j)
        unseen = _clean_block(p, scratch, n, at, low, high, scratch + VALUES)
        here, sums = state + STATE_BYTES * row, acc + stride * row
        if unseen:
            _mix_one_by_one(p, scratch, n, row, at, low, high, here, sums)
        else:
            _mix(p, scratch + PROBS + 4 * BLOCK * row, n, low, high, here, sums, scratch + VALUES)


@njit(error_model="numpy")
def _ask_for_values(p: int, pages: int, at: int, stop: int, heads: int) -> None:
    """Ask for V of a chunk's first block, or what of it comes while scores wait for K: nothing did so before."""
    left, size = _FIRST_BYTES, heads * head_bytes(p)
    for j in range(min((stop - at + PAGE - 1) // PAGE, BLOCK // PAGE)):
        page = load_i64(pages + 8 * j)
        for line in range(0, min(size, left), 64):
            prefetch_line(page + line)
        left -= size


@njit(error_model="numpy")
def attend_chunk(
    p: int,
    scratch: int,
    n: int,
    request: int,
    head: int,
    heads: int,
    start: int,
    state: int,
    acc: int,
    writes: bool,
) -> None:
    """Set state and sums to one chunk of keys, for the tile whose queries and bounds stand in `scratch`: `n` rows
    of each of `heads` KV heads from `head` on; `writes`: K and V of what is new in it first.
    """
    stride = (load_i64(p + 8 * DIM) + 15) // 16 * 64
    bounds, pages = scratch + BOUNDS, scratch + PAGES
    seen_low, seen_high = load_i64(bounds), load_i64(bounds + 16 * (n - 1) + 8)
    all_low, all_high = load_i64(bounds + 16 * (n - 1)), load_i64(bounds + 8)
    call_native(load_i64(p + 8 * CLEAR_ROWS), n * heads, state, acc, stride)
    at = max(start, seen_low // BLOCK * BLOCK)
    stop = min(start + CHUNK, seen_high)
    _find_pages(p, table_row(p, request), head, at, seen_high, pages)
    if n <= STREAM_ROWS:
        _ask_for_values(p, pages + 64, at, stop, heads)
    if writes:
        ask_for_new(p, request, head, heads, at, stop)
    while at < stop:
        _find_next(p, request, head, heads, at, seen_low, seen_high, pages + 128)
        if writes:
            write_new(p, request, head, heads, at, min(at + BLOCK, stop))
        low = max(0, (seen_low - at) // PAGE)
        high = min(BLOCK // PAGE, (seen_high - at + PAGE - 1) // PAGE)
        _score(p, scratch, n, heads, low, high)
        partly = all_low > at + PAGE * low or all_high < at + PAGE * high
        _softmax(p, scratch, n, heads, at, low, high, partly, state)
        if partly:
            _mix_partly(p, scratch, n, heads, at, low, high, state, acc)
        else:
            _mix_all(p, scratch, n, heads, low, high, state, acc)
        for j in range(16):
            store_i64(load_i64(pages + 128 + 8 * j), pages + 8 * j)
        at += BLOCK


@njit(error_model="numpy")
def set_tile(p: int, scratch: int, request: int, head: int, heads: int, first: int) -> int:
    """Addresses and visible ranges of a tile's rows (token, head of the group), for each of `heads` KV heads.

    Returns how many rows a KV head has.
    """
    group = load_i64(p + 8 * Q_HEADS) // load_i64(p + 8 * KV_HEADS)
    requests, capacity = load_i64(p + 8 * REQUESTS), 8 * load_i64(p + 8 * CAPACITY)
    token, tokens = load_i64(requests + 8 * request), load_i64(requests + capacity + 8 * request)
    position = load_i64(requests + 2 * capacity + 8 * request) - tokens
    row_bytes = load_i64(p + 8 * DIM) * load_i64(p + 8 * VALUE_BYTES)
    q, q_stride = load_i64(p + 8 * Q), load_i64(p + 8 * Q_STRIDE)
    out, out_stride = load_i64(p + 8 * OUT), load_i64(p + 8 * OUT_STRIDE)
    n = min(TILE_ROWS, tokens * group - first)
    for i in range(n * heads):
        r = first + i % n
        step = r // group
        offset = ((head + i // n) * group + r % group) * row_bytes
        store_i64(q + (token + step) * q_stride + offset, scratch + QUERY_ROWS + 8 * i)
        store_i64(out + (token + step) * out_stride + offset, scratch + OUT_ROWS + 8 * i)
        store_i64(first_key(p, position + step), scratch + BOUNDS + 16 * i)
        store_i64(position + step + 1, scratch + BOUNDS + 16 * i + 8)
    return n


@njit(error_model="numpy")
def attend_tile(p: int, scratch: int, request: int, head: int, first: int) -> None:
    """A tile from its first key to its last: chunk after chunk, merged in order."""
    dim = load_i64(p + 8 * DIM)
    stride = (dim + 15) // 16 * 64
    n = set_tile(p, scratch, request, head, 1, first)
    bounds = scratch + BOUNDS
    start = load_i64(bounds) // CHUNK * CHUNK
    stop = load_i64(bounds + 16 * (n - 1) + 8)
    state, acc = scratch + STATE, scratch + GROWING
    more, more_acc = scratch + MORE_STATE, acc + TILE_ROWS * stride
    attend_chunk(p, scratch, n, request, head, 1, start, state, acc, False)
    for at in range(start + CHUNK, stop, CHUNK):
        attend_chunk(p, scratch, n, request, head, 1, at, more, more_acc, False)
        call_native(load_i64(p + 8 * MERGE_ROWS), n, state, acc, more, more_acc, stride)
    call_native(load_i64(p + 8 * FINISH_ROWS), n, dim, state, acc, stride, scratch + OUT_ROWS)
