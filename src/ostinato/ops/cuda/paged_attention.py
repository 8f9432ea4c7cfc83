"""Attention over KV pages in Triton: one arithmetic for decode and prefill, in two shapes of launch.

Rows of a tile are (query, head) pairs of one KV head. The keys of a row are cut at fixed absolute positions into
chunks, each chunk into blocks; a chunk's sums start from nothing, and chunks are merged in order of position. Prefill
merges as it goes, decode gives each chunk a program and merges behind. Knows nothing of plans or layers. Invariant: a
row's bits depend on its query and keys alone, not on the tile, the launch or the batch it stands in; rows past the
count write no page and come out zero.
"""

from __future__ import annotations

import triton
import triton.language as tl

MINUS_INFINITY = tl.constexpr(float("-inf"))
START, ROWS, KV_LEN, PAGE_ROW = (tl.constexpr(i) for i in range(4))
"""Rows of a plan, int64 [4, capacity]: first query row, query rows, KV length, row of the page table."""


@triton.jit
def store_kv_kernel(
    k: tl.tensor,
    v: tl.tensor,
    slots: tl.tensor,
    k_pages: tl.tensor,
    v_pages: tl.tensor,
    out: tl.tensor,
    counts: tl.tensor,
    k_row: tl.tensor,
    k_head: tl.tensor,
    v_row: tl.tensor,
    v_head: tl.tensor,
    out_row: tl.tensor,
    KV_WIDTH: tl.constexpr,
    OUT_WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    OUT_BLOCK: tl.constexpr,
) -> None:
    """Real rows go into their slots; of the others, `out` becomes zero."""
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(counts + 1):
        column = tl.arange(0, KV_BLOCK)
        there = column < KV_WIDTH
        head, d = column // DIM, column % DIM
        page = tl.load(slots + row) * KV_WIDTH + column
        tl.store(k_pages + page, tl.load(k + row * k_row + head * k_head + d, mask=there), mask=there)
        tl.store(v_pages + page, tl.load(v + row * v_row + head * v_head + d, mask=there), mask=there)
    else:
        place = tl.arange(0, OUT_BLOCK)
        nothing = tl.zeros((OUT_BLOCK,), out.dtype.element_ty)
        tl.store(out + row * out_row + place, nothing, mask=place < OUT_WIDTH)


@triton.jit
def _first_key(position: tl.tensor, WINDOW: tl.constexpr, SPAN: tl.constexpr) -> tl.tensor:
    """The first key that a query at `position`, or any later one, can see."""
    first = position * 0
    if WINDOW > 0:
        first = tl.maximum(first, position - WINDOW + 1)
    if SPAN > 0:
        first = tl.maximum(first, position // SPAN * SPAN)
    return first


@triton.jit
def _attend_chunk(
    q: tl.tensor,
    k_pages: tl.tensor,
    v_pages: tl.tensor,
    table: tl.tensor,
    position: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    factor: tl.tensor,
    KV_WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SPAN: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Largest score, sum and mixed values of the keys [first, last) of one chunk, `first` at the start of a block."""
    d = tl.arange(0, DIM_BLOCK)[None, :]
    most = tl.full((BM,), MINUS_INFINITY, tl.float32)
    total = tl.zeros((BM,), tl.float32)
    mixed = tl.zeros((BM, DIM_BLOCK), tl.float32)
    for start in range(first, last, BN):
        key = start + tl.arange(0, BN)
        inside = key < last
        page = tl.load(table + key // PAGE, mask=inside, other=0).to(tl.int64)
        # What is not a key of this request is zero: a masked score times stale NaN would still be NaN.
        place = ((page * PAGE + key % PAGE) * KV_WIDTH)[:, None] + d
        here = inside[:, None] & (d < DIM)
        keys = tl.load(k_pages + place, mask=here, other=0.0)
        scores = tl.dot(q, tl.trans(keys), input_precision=PRECISION) * factor
        visible = (key[None, :] <= position[:, None]) & inside[None, :]
        if WINDOW > 0:
            visible = visible & (key[None, :] > position[:, None] - WINDOW)
        if SPAN > 0:
            visible = visible & (key[None, :] // SPAN == position[:, None] // SPAN)
        scores = tl.where(visible, scores, MINUS_INFINITY)
        peak = tl.maximum(most, tl.max(scores, axis=1))
        base = tl.where(peak == MINUS_INFINITY, 0.0, peak)
        powers = tl.exp2(scores - base[:, None])
        fade = tl.exp2(most - base)
        total = total * fade + tl.sum(powers, axis=1)
        values = tl.load(v_pages + place, mask=here, other=0.0)
        mixed = tl.dot(powers.to(values.dtype), values, mixed * fade[:, None], input_precision=PRECISION)
        most = peak
    return most, total, mixed


@triton.jit
def _merge_scales(most: tl.tensor, other: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The larger of two largest scores, and what the sums under each are multiplied with."""
    peak = tl.maximum(most, other)
    base = tl.where(peak == MINUS_INFINITY, 0.0, peak)
    return peak, tl.exp2(most - base), tl.exp2(other - base)


@triton.jit
def _attend(
    q: tl.tensor,
    k_pages: tl.tensor,
    v_pages: tl.tensor,
    table: tl.tensor,
    position: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    factor: tl.tensor,
    KV_WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SPAN: tl.constexpr,
    PRECISION: tl.constexpr,
    CHUNK: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Sum and mixed values of the keys [first, last), chunk after chunk."""
    most = tl.full((BM,), MINUS_INFINITY, tl.float32)
    total = tl.zeros((BM,), tl.float32)
    mixed = tl.zeros((BM, DIM_BLOCK), tl.float32)
    for chunk in range(first // CHUNK, (last + CHUNK - 1) // CHUNK):
        peak, one, part = _attend_chunk(
            q, k_pages, v_pages, table, position,
            tl.maximum(first, chunk * CHUNK), tl.minimum(last, chunk * CHUNK + CHUNK), factor,
            KV_WIDTH, DIM, PAGE, WINDOW, SPAN, PRECISION, BM, BN, DIM_BLOCK,
        )  # fmt: skip
        most, left, right = _merge_scales(most, peak)
        total = total * left + one * right
        mixed = mixed * left[:, None] + part * right[:, None]
    return total, mixed


@triton.jit
def prefill_kernel(
    q: tl.tensor,
    k_pages: tl.tensor,
    v_pages: tl.tensor,
    page_table: tl.tensor,
    plan: tl.tensor,
    counts: tl.tensor,
    out: tl.tensor,
    capacity: tl.tensor,
    table_row: tl.tensor,
    q_row: tl.tensor,
    q_head: tl.tensor,
    out_row: tl.tensor,
    factor: tl.tensor,
    GROUP: tl.constexpr,
    KV_WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SPAN: tl.constexpr,
    PRECISION: tl.constexpr,
    CHUNK: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    REQUESTS_BLOCK: tl.constexpr,
) -> None:
    """One tile of one KV head; tiles of all requests stand one behind the other, their number known here alone."""
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    request, bs = tl.arange(0, REQUESTS_BLOCK), tl.load(counts)
    lens = tl.load(plan + ROWS * capacity + request, mask=request < bs, other=0).to(tl.int32)
    tiles = (lens * GROUP + BM - 1) // BM
    ends = tl.cumsum(tiles, axis=0)
    if tile < tl.sum(tiles, axis=0):
        mine = tl.sum((ends <= tile).to(tl.int32), axis=0)
        before = tl.sum(tl.where(request < mine, tiles, 0), axis=0)
        rows = tl.load(plan + ROWS * capacity + mine).to(tl.int32)
        kv_len = tl.load(plan + KV_LEN * capacity + mine).to(tl.int32)
        table = page_table + tl.load(plan + PAGE_ROW * capacity + mine) * table_row
        flat = (tile - before) * BM + tl.arange(0, BM)
        query = flat // GROUP
        position = kv_len - rows + query
        row = tl.load(plan + START * capacity + mine) + query
        d = tl.arange(0, DIM_BLOCK)[None, :]
        here = (query < rows)[:, None] & (d < DIM)
        head = kv_head * GROUP + flat % GROUP
        queries = tl.load(q + (row * q_row + head * q_head)[:, None] + d, mask=here, other=0.0)
        lowest = kv_len - rows + (tile - before) * BM // GROUP
        last = tl.minimum(kv_len, lowest + (BM + GROUP - 1) // GROUP + 1)
        first = _first_key(lowest, WINDOW, SPAN) // BN * BN
        total, mixed = _attend(
            queries, k_pages + kv_head * DIM, v_pages + kv_head * DIM, table, position, first, last, factor,
            KV_WIDTH, DIM, PAGE, WINDOW, SPAN, PRECISION, CHUNK, BM, BN, DIM_BLOCK,
        )  # fmt: skip
        value = tl.div_rn(mixed, tl.zeros((BM, DIM_BLOCK), tl.float32) + total[:, None])
        target = out + (row * out_row + head * DIM)[:, None] + d
        tl.store(target, value.to(out.dtype.element_ty), mask=here)


@triton.jit
def decode_kernel(
    q: tl.tensor,
    k_pages: tl.tensor,
    v_pages: tl.tensor,
    page_table: tl.tensor,
    plan: tl.tensor,
    counts: tl.tensor,
    mixed: tl.tensor,
    sums: tl.tensor,
    capacity: tl.tensor,
    table_row: tl.tensor,
    q_row: tl.tensor,
    q_head: tl.tensor,
    factor: tl.tensor,
    Q_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KV_WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SPAN: tl.constexpr,
    PRECISION: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
) -> None:
    """One chunk of one request: mixed fp32 [rows, heads, CHUNKS, DIM_BLOCK], sums [rows, heads, CHUNKS, 2]."""
    request, chunk = tl.program_id(0), tl.program_id(2)
    tiles: tl.constexpr = (GROUP + BM - 1) // BM
    kv_head, tile = tl.program_id(1) // tiles, tl.program_id(1) % tiles
    if request < tl.load(counts):
        last = tl.load(plan + KV_LEN * capacity + request).to(tl.int32)
        first = _first_key(last - 1, WINDOW, SPAN) // BN * BN
        if (chunk >= first // CHUNK) & (chunk * CHUNK < last):
            row = tl.load(plan + START * capacity + request)
            table = page_table + tl.load(plan + PAGE_ROW * capacity + request) * table_row
            flat = tile * BM + tl.arange(0, BM)
            real = flat < GROUP
            d = tl.arange(0, DIM_BLOCK)[None, :]
            head = kv_head * GROUP + flat
            place = (row * q_row + head * q_head)[:, None] + d
            queries = tl.load(q + place, mask=real[:, None] & (d < DIM), other=0.0)
            position = tl.zeros((BM,), tl.int32) + last - 1
            peak, one, part = _attend_chunk(
                queries, k_pages + kv_head * DIM, v_pages + kv_head * DIM, table, position,
                tl.maximum(first, chunk * CHUNK), tl.minimum(last, chunk * CHUNK + CHUNK), factor,
                KV_WIDTH, DIM, PAGE, WINDOW, SPAN, PRECISION, BM, BN, DIM_BLOCK,
            )  # fmt: skip
            target = (request.to(tl.int64) * Q_HEADS + head) * CHUNKS + chunk
            tl.store(mixed + target[:, None] * DIM_BLOCK + d, part, mask=real[:, None])
            tl.store(sums + target * 2, peak, mask=real)
            tl.store(sums + target * 2 + 1, one, mask=real)


@triton.jit
def merge_kernel(
    mixed: tl.tensor,
    sums: tl.tensor,
    plan: tl.tensor,
    counts: tl.tensor,
    out: tl.tensor,
    capacity: tl.tensor,
    out_row: tl.tensor,
    Q_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    SPAN: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    BN: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
) -> None:
    """The chunks of one head of one request, in order of position."""
    request, head = tl.program_id(0), tl.program_id(1)
    if request < tl.load(counts):
        last = tl.load(plan + KV_LEN * capacity + request).to(tl.int32)
        first = _first_key(last - 1, WINDOW, SPAN) // BN * BN
        row = tl.load(plan + START * capacity + request)
        d = tl.arange(0, DIM_BLOCK)
        # Vectors of one value: the same operations as on the rows of a tile.
        most = tl.full((1,), MINUS_INFINITY, tl.float32)
        total = tl.zeros((1,), tl.float32)
        whole = tl.zeros((1, DIM_BLOCK), tl.float32)
        for chunk in range(first // CHUNK, (last + CHUNK - 1) // CHUNK):
            source = (request.to(tl.int64) * Q_HEADS + head) * CHUNKS + chunk + tl.zeros((1,), tl.int64)
            peak = tl.load(sums + source * 2)
            one = tl.load(sums + source * 2 + 1)
            part = tl.load(mixed + source[:, None] * DIM_BLOCK + d[None, :])
            most, left, right = _merge_scales(most, peak)
            total = total * left + one * right
            whole = whole * left[:, None] + part * right[:, None]
        value = tl.div_rn(whole, tl.zeros((1, DIM_BLOCK), tl.float32) + total[:, None])
        target = out + row * out_row + head * DIM + d[None, :]
        tl.store(target, value.to(out.dtype.element_ty), mask=d[None, :] < DIM)
