"""All experts of a layer in one launch: sort rows by expert, gate and up, SiLU, down, weighted sum.

    entry    slots (row, k) -> places sorted by expert; -1 goes nowhere and costs nothing
    phase 0  rows are prepared for the product where need be; times weights, by place, with weights on the input
    phase 1  tasks (active expert, panels): hidden[place] = silu(gate) * up
    phase 2  hidden rows are prepared where need be
    phase 3  tasks (active expert, panels): results[panel][place] = down, fp32
    phase 4  out[row] = sum over k, in slot order, of weight * results[place of (row, k)]
    or, for many rows, phases 3 and 4 as one: tasks are panels, and a thread keeps one panel's results

Knows nothing of routing. Invariant: a row's bits depend on its own slots alone; rows nobody works on come out
zero and are never read; tasks are drawn by experts that have rows, so pads change neither cost nor result.
"""

from __future__ import annotations

from ostinato.ops.cpu.epilogue import FP32_OUT, GATED, combine_slots, store_tile
from ostinato.ops.cpu.gemm import AHEAD, SUMS, live_rows, tiles_of
from ostinato.ops.cpu.intrinsics import call_tile, stack_scratch
from ostinato.ops.cpu.jit import njit
from ostinato.ops.cpu.launch import (
    THREADS,
    draw,
    join_team,
    reset_counter,
    run_worker,
    wait_for_team,
)
from ostinato.ops.cpu.memory import claim_rows, load_i64, store_i64
from ostinato.ops.cpu.moe_rows import (
    ACTIVE,
    BY_PANEL,
    CAPACITY,
    COUNT,
    DECODING,
    DOWN,
    DOWN_BYTES,
    DOWN_GROUP,
    DOWN_PANEL_BYTES,
    DOWN_PANELS,
    DOWN_ROWS,
    DOWN_STARTS,
    DOWN_STRIDE,
    GATE_UP,
    GATE_UP_BYTES,
    GATE_UP_GROUP,
    GATE_UP_PANEL_BYTES,
    GATE_UP_PANELS,
    HIDDEN,
    HIDDEN_SIZE,
    HIDDEN_STRIDE,
    INTERMEDIATE,
    NUM_ACTIVE,
    NUM_PLACES,
    ON_INPUT,
    ONES,
    OUT,
    OUT_BYTES,
    OUT_KIND,
    OUT_STRIDE,
    PLACE_ROW,
    PREPARE,
    PREPARE_HIDDEN,
    PRODUCT_ROWS,
    PRODUCT_STRIDE,
    RESULTS,
    ROWS,
    SLOT_PLACE,
    SLOTS,
    STARTS,
    TILE,
    TILE_ROWS,
    VALUE_BYTES,
    WEIGHTS,
    WEIGHTS_STRIDE,
    ZEROS,
    prepare_hidden,
    prepare_inputs,
    sort_slots,
)
from ostinato.ops.cpu.panel_words import (
    DECODED_ROWS,
    PLAIN_TILE,
    decode_group,
    panel_at,
    panel_group,
    plain_bytes,
)
from ostinato.ops.cpu.tiles import PANEL, STEP_BYTES

TASKS_PER_THREAD = 16
COMBINE_PANELS = 8  # panels of one row in a task of phase 4
COMBINE_AHEAD = 4  # panels that phase 4 asks for its results ahead
PANEL_ROWS = 24  # of an expert beyond which phases 3 and 4 go panel by panel
PANEL_BYTES = (
    2**20
)  # of one panel's results: with more, they would not stay near their core until they are summed
TURNS = 4  # panels for each thread, at least, or threads would wait for the last of them


@njit(error_model="numpy")
def _product_rows(p: int, phase: int, place: int, count: int, rows: int) -> None:
    """Write the addresses of the rows at `count` places to `rows`."""
    base = load_i64(p + 8 * (PRODUCT_ROWS if phase == 1 else DOWN_ROWS))
    stride = load_i64(p + 8 * (PRODUCT_STRIDE if phase == 1 else DOWN_STRIDE))
    by_place = phase != 1 or load_i64(p + 8 * ON_INPUT) != 0
    for i in range(count):
        row = place + i if by_place else load_i64(load_i64(p + 8 * PLACE_ROW) + 8 * (place + i))
        store_i64(base + row * stride, rows + 8 * i)


@njit(error_model="numpy")
def _store_hidden(p: int, place: int, count: int, panel: int, sums: int) -> None:
    """hidden = silu(gate) * up for one tile."""
    size, stride = load_i64(p + 8 * VALUE_BYTES), load_i64(p + 8 * HIDDEN_STRIDE)
    column = panel * (PANEL // 2)
    out = load_i64(p + 8 * HIDDEN) + place * stride + column * size
    width = load_i64(p + 8 * INTERMEDIATE) - column
    kind = GATED | FP32_OUT if size == 4 else GATED
    store_tile(kind, count, sums, load_i64(p + 8 * ZEROS), out, stride, width)


@njit(error_model="numpy")
def _results_of(p: int, panel: int) -> int:
    """Where the results of a panel lie."""
    return load_i64(p + 8 * RESULTS) + panel * load_i64(p + 8 * CAPACITY) * 4 * PANEL


@njit(error_model="numpy")
def _decoded(p: int, w: int, member: int, rows: int, first: int, count: int) -> int:
    """Where a group of panels is decoded for an expert's `rows`; 0: not worth it. `first`: counted over all experts."""
    decoding = load_i64(p + 8 * DECODING)
    if decoding == 0 or rows <= DECODED_ROWS:
        return 0
    columns = 2 * load_i64(w + 32) + load_i64(w + 40)
    return decode_group(decoding, member, load_i64(w), load_i64(w + 48), first, count, columns)


@njit(error_model="numpy")
def _run_group(
    p: int,
    phase: int,
    scratch: int,
    member: int,
    expert: int,
    first: int,
    last: int,
    further: int,
    results: int,
) -> None:
    """A group of panels of one expert, for all of its rows; `results`: where those of the first panel go, by place.

    Rows of one tile stream: they ask for their panel shortly ahead. Otherwise the tiles share out asking for
    the panels that come next, `further` bytes from these.
    """
    # The fields of GATE_UP and DOWN lie in the same order.
    w = p + 8 * (GATE_UP if phase == 1 else DOWN)
    panel_bytes = load_i64(w + 24)
    begin = load_i64(load_i64(p + 8 * STARTS) + 8 * expert)
    end = load_i64(load_i64(p + 8 * STARTS) + 8 * expert + 8)
    rows = end - begin
    alone = rows <= load_i64(p + 8 * TILE_ROWS)
    words = _decoded(p, w, member, rows, expert * load_i64(w + 16) + first, last - first)
    tile = load_i64(p + 8 * TILE) if words == 0 else load_i64(load_i64(p + 8 * DECODING) + 8 * PLAIN_TILE)
    size = plain_bytes(2 * load_i64(w + 32) + load_i64(w + 40))
    place, tiles = begin, tiles_of(rows, load_i64(p + 8 * TILE_ROWS))
    while place < end:
        n = (end - place + tiles - 1) // tiles
        tiles -= 1
        _product_rows(p, phase, place, n, scratch)
        for panel in range(first, last):
            at = panel_at(load_i64(w), load_i64(w + 48), expert * load_i64(w + 16) + panel, panel_bytes)
            sums = scratch + SUMS
            if phase != 1:
                sums = results + ((panel - first) * load_i64(p + 8 * CAPACITY) + place) * 4 * PANEL
                claim_rows(sums, 4 * PANEL, n, 4 * PANEL // 64)
            ahead, pace = at + AHEAD, STEP_BYTES
            if not alone:
                ahead = at + further + panel_bytes // rows * (place - begin)
                pace = (STEP_BYTES * n + rows - 1) // rows
            call_tile(
                tile,
                scratch,
                n,
                at if words == 0 else words + (panel - first) * size,
                load_i64(w + 32),
                load_i64(w + 40),
                sums,
                ahead,
                pace,
            )
            if phase == 1:
                _store_hidden(p, place, n, panel, sums)
        place += n


@njit(error_model="numpy")
def _run_experts(p: int, phase: int, scratch: int, member: int) -> None:
    """Phase 1 (gate, up) or 3 (down): tasks are groups of panels of one active expert."""
    threads = load_i64(p + 8 * THREADS)
    panels = load_i64(p + 8 * (GATE_UP_PANELS if phase == 1 else DOWN_PANELS))
    group = load_i64(p + 8 * (GATE_UP_GROUP if phase == 1 else DOWN_GROUP))
    panel_bytes = load_i64(p + 8 * (GATE_UP_PANEL_BYTES if phase == 1 else DOWN_PANEL_BYTES))
    groups = (panels + group - 1) // group
    tasks = load_i64(p + 8 * NUM_ACTIVE) * groups
    for turn in range(threads):
        task = draw(p, phase, (member + turn) % threads, tasks)
        while task >= 0:
            expert = load_i64(load_i64(p + 8 * ACTIVE) + 8 * (task // groups))
            first = task % groups * group
            last = min(first + group, panels)
            results = _results_of(p, first)
            _run_group(p, phase, scratch, member, expert, first, last, (last - first) * panel_bytes, results)
            task = draw(p, phase, (member + turn) % threads, tasks)


@njit(error_model="numpy")
def _combine_row(p: int, row: int, first: int, last: int, results: int, ahead: int) -> None:
    """Some panels of one row of the output; `results`: those of the first panel, `ahead`: see `combine_slots`."""
    weights = load_i64(p + 8 * WEIGHTS) + row * load_i64(p + 8 * WEIGHTS_STRIDE)
    if load_i64(p + 8 * ON_INPUT) != 0:
        weights = load_i64(p + 8 * ONES)
    slots = load_i64(p + 8 * SLOTS)
    out = load_i64(p + 8 * OUT) + row * load_i64(p + 8 * OUT_STRIDE)
    for panel in range(first, last):
        combine_slots(
            load_i64(p + 8 * OUT_KIND),
            load_i64(p + 8 * SLOT_PLACE) + 8 * row * slots,
            weights,
            slots,
            results + (panel - first) * load_i64(p + 8 * CAPACITY) * 4 * PANEL,
            ahead,
            out + panel * PANEL * load_i64(p + 8 * OUT_BYTES),
            load_i64(p + 8 * HIDDEN_SIZE) - panel * PANEL,
        )


@njit(error_model="numpy")
def _combine(p: int, member: int) -> None:
    """Phase 4: tasks are a row and some panels."""
    threads, panels = load_i64(p + 8 * THREADS), load_i64(p + 8 * DOWN_PANELS)
    parts = (panels + COMBINE_PANELS - 1) // COMBINE_PANELS
    ahead = COMBINE_AHEAD * load_i64(p + 8 * CAPACITY) * 4 * PANEL
    tasks = load_i64(p + 8 * ROWS) * parts
    for turn in range(threads):
        task = draw(p, 4, (member + turn) % threads, tasks)
        while task >= 0:
            first = task % parts * COMBINE_PANELS
            last = min(first + COMBINE_PANELS, panels)
            _combine_row(p, task // parts, first, last, _results_of(p, first), ahead)
            task = draw(p, 4, (member + turn) % threads, tasks)


@njit(error_model="numpy")
def _down_panel(p: int, scratch: int, member: int, panel: int, results: int) -> None:
    """One panel of the way down for all rows of all experts, and the weighted sum of what came of it."""
    active, panels = load_i64(p + 8 * NUM_ACTIVE), load_i64(p + 8 * DOWN_PANELS)
    weight, starts = load_i64(p + 8 * DOWN), load_i64(p + 8 * DOWN_STARTS)
    panel_bytes = load_i64(p + 8 * DOWN_PANEL_BYTES)
    expert = load_i64(load_i64(p + 8 * ACTIVE))
    at = panel_at(weight, starts, expert * panels + panel, panel_bytes)
    for i in range(active):
        wraps = i + 1 == active
        following = load_i64(load_i64(p + 8 * ACTIVE) + 8 * (0 if wraps else i + 1))
        column = min(panel + 1, panels - 1) if wraps else panel
        after = panel_at(weight, starts, following * panels + column, panel_bytes)
        _run_group(p, 3, scratch, member, expert, panel, panel + 1, after - at, results)
        expert, at = following, after
    for row in range(load_i64(p + 8 * ROWS)):
        _combine_row(p, row, panel, panel + 1, results, 0)


@njit(error_model="numpy")
def _down_by_panel(p: int, scratch: int, member: int) -> None:
    """Phases 3 and 4 at once: tasks are panels, and a thread has one place for the results of its panels."""
    threads, panels = load_i64(p + 8 * THREADS), load_i64(p + 8 * DOWN_PANELS)
    results = _results_of(p, member)
    for turn in range(threads):
        panel = draw(p, 3, (member + turn) % threads, panels)
        while panel >= 0:
            _down_panel(p, scratch, member, panel, results)
            panel = draw(p, 3, (member + turn) % threads, panels)


def moe_worker(p: int) -> None:
    """The phases, with the team waiting between them."""
    scratch, member = stack_scratch(), join_team(p)
    if load_i64(p + 8 * NUM_ACTIVE) > 0:
        if load_i64(p + 8 * ON_INPUT) != 0 or load_i64(p + 8 * PREPARE) != 0:
            prepare_inputs(p, member)
            wait_for_team(p)
        _run_experts(p, 1, scratch, member)
        wait_for_team(p)
        if load_i64(p + 8 * PREPARE_HIDDEN) != 0:
            prepare_hidden(p, member)
            wait_for_team(p)
        if load_i64(p + 8 * BY_PANEL) != 0:
            _down_by_panel(p, scratch, member)
            return
        _run_experts(p, 3, scratch, member)
        wait_for_team(p)
    _combine(p, member)


@njit(error_model="numpy")
def _goes_by_panel(p: int, rows: int) -> bool:
    """Whether down and the sum go panel by panel, for all experts, of `rows` rows each.

    Results of many rows then never leave a core's cache; hidden rows are read once for each panel instead.
    """
    many = rows > PANEL_ROWS
    near = load_i64(p + 8 * NUM_PLACES) * 4 * PANEL <= PANEL_BYTES
    return many and near and load_i64(p + 8 * DOWN_PANELS) >= TURNS * load_i64(p + 8 * THREADS)


def moe_entry(p: int) -> None:
    """Sort the slots, choose the size of tasks, and run the team."""
    reset_counter(p)
    if load_i64(p + 8 * ROWS) == 0:
        return
    sort_slots(p, live_rows(load_i64(p + 8 * ROWS), load_i64(p + 8 * COUNT)))
    active = max(load_i64(p + 8 * NUM_ACTIVE), 1)
    rows = (load_i64(p + 8 * NUM_PLACES) + active - 1) // active
    share = max(load_i64(p + 8 * THREADS) * TASKS_PER_THREAD // active, 1)
    tile_rows = load_i64(p + 8 * TILE_ROWS)
    gate_up, down = load_i64(p + 8 * GATE_UP_PANELS), load_i64(p + 8 * DOWN_PANELS)
    group = panel_group(rows, tile_rows, gate_up, load_i64(p + 8 * GATE_UP_PANEL_BYTES), share)
    store_i64(group, p + 8 * GATE_UP_GROUP)
    group = panel_group(rows, tile_rows, down, load_i64(p + 8 * DOWN_PANEL_BYTES), share)
    store_i64(group, p + 8 * DOWN_GROUP)
    store_i64(1 if _goes_by_panel(p, rows) else 0, p + 8 * BY_PANEL)
    run_worker(
        p,
        load_i64(p + 8 * NUM_ACTIVE) * (load_i64(p + 8 * GATE_UP_BYTES) + load_i64(p + 8 * DOWN_BYTES)) // 4,
    )
