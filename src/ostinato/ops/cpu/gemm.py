"""Packed matrix products: out = x @ weight.T + bias, with SiLU times up, or added to what `out` holds.

Tasks are blocks of rows times groups of panels: few rows stream every panel once from memory, many rows pass
over a group of panels that stays in the L2 cache while the next group is fetched. Knows nothing of layers.
Invariant: a row's bits depend on that row and the weights alone (see `tiles`), whatever the number of rows,
their place, the tasks or the threads.

    group 0: rows 0-47 | rows 48-95 | ...     group 1: rows 0-47 | ...       each task: rows x 32 columns x
    panels
"""

from __future__ import annotations

from ostinato.ops.cpu.epilogue import GATED, store_tile
from ostinato.ops.cpu.intrinsics import call_prepare, call_tile, stack_scratch
from ostinato.ops.cpu.isa import MOST_TILE_ROWS
from ostinato.ops.cpu.jit import njit
from ostinato.ops.cpu.launch import (
    FIRST_FIELD,
    TASKS,
    THREADS,
    draw,
    join_team,
    reset_counter,
    run_worker,
    wait_for_team,
)
from ostinato.ops.cpu.memory import claim_rows, load_i32, load_i64, store_i64, zero_bytes
from ostinato.ops.cpu.panel_words import (
    DECODED_ROWS,
    PLAIN_TILE,
    decode_group,
    panel_at,
    panel_group,
    plain_bytes,
)
from ostinato.ops.cpu.tiles import PANEL, STEP_BYTES

AHEAD = 6144  # bytes that a streamed panel is asked for ahead of use
BLOCK_ROWS = 48  # of a task of many rows; those of one tile where it has more
TASKS_PER_THREAD = 8
SUMS = 8 * MOST_TILE_ROWS  # offset of the sums in a worker's scratch, behind the row addresses

(
    TILE,  # address of the tile function
    TILE_ROWS,
    SOURCE,  # rows as they come; strides are in bytes
    SOURCE_STRIDE,
    PREPARE,  # address of the function that makes X of SOURCE row by row, or 0: X is SOURCE
    COLUMNS,
    X,
    X_STRIDE,
    ROWS,
    COUNT,  # address of the live count (int32), or 0: all rows
    LIVE,  # rows to compute: set by the entry
    WEIGHT,
    PANELS,
    PANEL_BYTES,
    STARTS,  # address of int64 [panels]: where each begins, in bytes from WEIGHT; 0: PANEL_BYTES apart
    STEPS,
    ODD,
    BIAS,  # address of fp32 [panels, 32]
    KIND,
    OUT,
    OUT_STRIDE,
    OUT_BYTES,  # of one value
    OUTPUTS,
    GROUP,  # panels of a task: set by the entry, as is the next
    BLOCK,  # rows of a task
    DECODING,  # address of how to decode panels for many rows, or 0; see `panel_words`
    NUM_FIELDS,
) = range(FIRST_FIELD, FIRST_FIELD + 27)


@njit(error_model="numpy")
def live_rows(rows: int, count: int) -> int:
    """Rows to compute: all, or as many as the int32 at `count` says."""
    return rows if count == 0 else min(max(load_i32(count), 0), rows)


@njit(error_model="numpy")
def tiles_of(rows: int, tile_rows: int) -> int:
    """Tiles that `rows` are shared out to evenly. A small one at the end, with too few sums to hide their own latency,
    would take as long as six rows.
    """
    return (rows + tile_rows - 1) // tile_rows


@njit(error_model="numpy")
def _multiply(p: int, scratch: int, first: int, last: int, row: int, n: int, words: int) -> None:
    """One tile of `n` rows from `row` on, for each panel of a group; `words`: 0, or where the group is decoded.

    A tile that is alone streams: it asks for its panel shortly ahead. Otherwise the tiles of a group share
    out asking for the group that follows in memory.
    """
    live, panel_bytes = load_i64(p + 8 * LIVE), load_i64(p + 8 * PANEL_BYTES)
    kind, size, stride = load_i64(p + 8 * KIND), load_i64(p + 8 * OUT_BYTES), load_i64(p + 8 * OUT_STRIDE)
    across = PANEL // 2 if kind >= GATED else PANEL
    alone = live <= load_i64(p + 8 * TILE_ROWS)
    follows = last + last - first <= load_i64(p + 8 * PANELS)
    tile = load_i64(p + 8 * TILE) if words == 0 else load_i64(load_i64(p + 8 * DECODING) + 8 * PLAIN_TILE)
    for i in range(n):
        store_i64(load_i64(p + 8 * X) + (row + i) * load_i64(p + 8 * X_STRIDE), scratch + 8 * i)
    for panel in range(first, last):
        at = panel_at(load_i64(p + 8 * WEIGHT), load_i64(p + 8 * STARTS), panel, panel_bytes)
        ahead, pace = at + AHEAD, STEP_BYTES
        if not alone and follows and not (first == 0 and row == 0):
            ahead = at + (last - first) * panel_bytes + panel_bytes // live * row
            pace = (STEP_BYTES * n + live - 1) // live
        out = load_i64(p + 8 * OUT) + row * stride + panel * across * size
        if size == 4 and not alone:  # twice the lines of bf16, whose stores hold up nothing
            claim_rows(out, stride, n, across * size // 64)
        if words != 0:
            at = words + (panel - first) * plain_bytes(_columns(p))
        call_tile(
            tile,
            scratch,
            n,
            at,
            load_i64(p + 8 * STEPS),
            load_i64(p + 8 * ODD),
            scratch + SUMS,
            ahead,
            pace,
        )
        store_tile(
            kind,
            n,
            scratch + SUMS,
            load_i64(p + 8 * BIAS) + panel * 4 * PANEL,
            out,
            stride,
            load_i64(p + 8 * OUTPUTS) - panel * across,
        )


@njit(error_model="numpy")
def _columns(p: int) -> int:
    """Values of a bf16 panel's row."""
    return 2 * load_i64(p + 8 * STEPS) + load_i64(p + 8 * ODD)


@njit(error_model="numpy")
def _clear_rest(p: int, first: int, last: int) -> None:
    """Zero the outputs of some panels in the rows that nobody asked for."""
    across = PANEL // 2 if load_i64(p + 8 * KIND) >= GATED else PANEL
    size = load_i64(p + 8 * OUT_BYTES)
    width = min(last * across, load_i64(p + 8 * OUTPUTS)) - first * across
    for row in range(load_i64(p + 8 * LIVE), load_i64(p + 8 * ROWS)):
        at = load_i64(p + 8 * OUT) + row * load_i64(p + 8 * OUT_STRIDE)
        zero_bytes(at + first * across * size, width * size)


@njit(error_model="numpy")
def _prepare_rows(p: int, member: int) -> None:
    """Phase 0: X of SOURCE, row by row."""
    live, threads = load_i64(p + 8 * LIVE), load_i64(p + 8 * THREADS)
    for turn in range(threads):
        row = draw(p, 0, (member + turn) % threads, live)
        while row >= 0:
            call_prepare(
                load_i64(p + 8 * PREPARE),
                load_i64(p + 8 * SOURCE) + row * load_i64(p + 8 * SOURCE_STRIDE),
                load_i64(p + 8 * X) + row * load_i64(p + 8 * X_STRIDE),
                load_i64(p + 8 * COLUMNS),
            )
            row = draw(p, 0, (member + turn) % threads, live)


@njit(error_model="numpy")
def _decode(p: int, member: int, first: int, count: int) -> int:
    """Decode a group of panels; where their words are."""
    weight, starts = load_i64(p + 8 * WEIGHT), load_i64(p + 8 * STARTS)
    return decode_group(load_i64(p + 8 * DECODING), member, weight, starts, first, count, _columns(p))


def gemm_worker(p: int) -> None:
    """Rows are prepared if need be, then tasks until none is left."""
    scratch = stack_scratch()
    threads, member = load_i64(p + 8 * THREADS), join_team(p)
    if load_i64(p + 8 * PREPARE) != 0:
        _prepare_rows(p, member)
        wait_for_team(p)
    panels, group = load_i64(p + 8 * PANELS), load_i64(p + 8 * GROUP)
    tasks = load_i64(p + 8 * TASKS)
    blocks = tasks // ((panels + group - 1) // group)
    live, block_rows = load_i64(p + 8 * LIVE), load_i64(p + 8 * BLOCK)
    decodes = live > DECODED_ROWS and load_i64(p + 8 * DECODING) != 0
    words, decoded = 0, -1
    for turn in range(threads):
        owner = (member + turn) % threads
        task = draw(p, 1, owner, tasks)
        while task >= 0:
            first = task // blocks * group
            last = min(first + group, panels)
            if decodes and decoded != first:
                words, decoded = _decode(p, member, first, last - first), first
            row = task % blocks * block_rows
            end = min(row + block_rows, live)
            tiles = tiles_of(end - row, load_i64(p + 8 * TILE_ROWS))
            while row < end:
                n = (end - row + tiles - 1) // tiles
                _multiply(p, scratch, first, last, row, n, words)
                row += n
                tiles -= 1
            if task % blocks == blocks - 1:
                _clear_rest(p, first, last)
            task = draw(p, 1, owner, tasks)


def gemm_entry(p: int) -> None:
    """Read the live count, cut the work into tasks, and run the team."""
    reset_counter(p)
    rows, panels, threads = load_i64(p + 8 * ROWS), load_i64(p + 8 * PANELS), load_i64(p + 8 * THREADS)
    if rows == 0 or panels == 0:
        return
    live = live_rows(rows, load_i64(p + 8 * COUNT))
    tile_rows = load_i64(p + 8 * TILE_ROWS)
    tiles = max(tiles_of(live, tile_rows), 1)
    block = (live + tiles - 1) // tiles
    if tiles > 1:
        block *= max(BLOCK_ROWS // tile_rows, 1)
    blocks = (live + block - 1) // block if live > 0 else 1
    share = max(threads * TASKS_PER_THREAD // blocks, 1)
    group = panel_group(live, tile_rows, panels, load_i64(p + 8 * PANEL_BYTES), share)
    store_i64(live, p + 8 * LIVE)
    store_i64(group, p + 8 * GROUP)
    store_i64(block, p + 8 * BLOCK)
    store_i64((panels + group - 1) // group * blocks, p + 8 * TASKS)
    run_worker(p, panels * load_i64(p + 8 * PANEL_BYTES) // 4 * blocks)
