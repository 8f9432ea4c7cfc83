"""All experts of a layer in one launch: sort rows by expert, gate and up, SiLU, down, weighted sum.

    entry    slots (row, k) -> places sorted by expert; -1 goes nowhere and costs nothing
    phase 0  rows are prepared for the product where need be; times weights, by place, with weights on the
    input phase 1  tasks (active expert, panels): hidden[place] = silu(gate) * up phase 2  hidden rows are
    prepared where need be phase 3  tasks (active expert, panels): results[panel][place] = down, fp32 phase 4
    out[row] = sum over k, in slot order, of weight * results[place of (row, k)]

Knows nothing of routing. Invariant: a row's bits depend on its own slots alone; rows nobody works on come out
zero and are never read; tasks are drawn by experts that have rows, so pads change neither cost nor result.
"""

from __future__ import annotations

from ostinato.ops.cpu.epilogue import FP32_OUT, GATED, combine_slots, scale_row, store_tile
from ostinato.ops.cpu.gemm import AHEAD, SUMS, live_rows, panel_at, panel_group, tiles_of
from ostinato.ops.cpu.intrinsics import call_prepare, call_tile, stack_scratch
from ostinato.ops.cpu.jit import njit
from ostinato.ops.cpu.launch import (
    FIRST_FIELD,
    THREADS,
    draw,
    join_team,
    reset_counter,
    run_worker,
    wait_for_team,
)
from ostinato.ops.cpu.memory import claim_rows, load_i32, load_i64, store_i64
from ostinato.ops.cpu.tiles import PANEL, STEP_BYTES

TASKS_PER_THREAD = 16
COMBINE_PANELS = 8  # panels of one row in a task of phase 4
COMBINE_AHEAD = 4  # panels that phase 4 asks for its results ahead

(
    TILE,
    TILE_ROWS,
    VALUE_BYTES,  # of x and hidden
    X,
    X_STRIDE,  # strides are in bytes
    ROWS,
    COUNT,  # address of the live count (int32), or 0
    IDS,  # int32
    IDS_STRIDE,
    WEIGHTS,  # fp32
    WEIGHTS_STRIDE,
    SLOTS,  # slots of a row
    ON_INPUT,  # 1: weights scale the rows, not the results
    EXPERTS,
    GATE_UP,
    GATE_UP_BYTES,  # of one expert
    GATE_UP_PANELS,
    GATE_UP_PANEL_BYTES,
    GATE_UP_STEPS,
    GATE_UP_ODD,
    GATE_UP_STARTS,  # address of int64 [experts, panels], or 0; see `gemm`
    DOWN,
    DOWN_BYTES,
    DOWN_PANELS,
    DOWN_PANEL_BYTES,
    DOWN_STEPS,
    DOWN_ODD,
    DOWN_STARTS,
    HIDDEN_SIZE,
    INTERMEDIATE,
    OUT,
    OUT_STRIDE,
    OUT_BYTES,
    OUT_KIND,
    STARTS,  # int64 [experts + 1]: first place of each expert
    ACTIVE,  # int64 [experts]: experts with rows; set by the entry, as are the places
    NUM_ACTIVE,
    PLACE_ROW,  # int64 [slots]: row of each place
    PLACE_SLOT,  # int64 [slots]: its slot, row * SLOTS + k
    SLOT_PLACE,  # int64 [rows * SLOTS]: place of each slot, -1 for nobody
    NUM_PLACES,
    SCALED,  # rows times weights, by place
    SCALED_STRIDE,
    PREPARE,  # address of the function that makes PREPARED of X or SCALED, or 0
    PREPARED,
    PREPARED_STRIDE,
    PRODUCT_ROWS,  # what gate and up read: X, SCALED or PREPARED
    PRODUCT_STRIDE,
    HIDDEN,  # by place
    HIDDEN_STRIDE,
    PREPARE_HIDDEN,  # address of the function that makes DOWN_ROWS of HIDDEN, or 0
    DOWN_ROWS,  # what down reads, by place
    DOWN_STRIDE,
    RESULTS,  # fp32 [panels][capacity][32]
    CAPACITY,
    ONES,  # address of fp32 ones [SLOTS]
    ZEROS,  # address of fp32 zeros [32]
    GATE_UP_GROUP,
    DOWN_GROUP,
    NUM_FIELDS,
) = range(FIRST_FIELD, FIRST_FIELD + 60)


@njit(error_model="numpy")
def _expert_of(p: int, row: int, k: int) -> int:
    """The expert of a slot, -1 for nobody (any id that is no expert)."""
    expert = load_i32(load_i64(p + 8 * IDS) + row * load_i64(p + 8 * IDS_STRIDE) + 4 * k)
    return expert if 0 <= expert < load_i64(p + 8 * EXPERTS) else -1


@njit(error_model="numpy")
def _sort_slots(p: int, live: int) -> None:
    """Give every live slot a place: by expert, then by row, then by slot (a counting sort)."""
    starts, active = load_i64(p + 8 * STARTS), load_i64(p + 8 * ACTIVE)
    slots, experts = load_i64(p + 8 * SLOTS), load_i64(p + 8 * EXPERTS)
    for e in range(experts + 1):
        store_i64(0, starts + 8 * e)
    for row in range(live):
        for k in range(slots):
            e = _expert_of(p, row, k)
            if e >= 0:
                store_i64(load_i64(starts + 8 * e + 8) + 1, starts + 8 * e + 8)
    found = 0
    for e in range(experts):
        n = load_i64(starts + 8 * e + 8)
        if n > 0:
            store_i64(e, active + 8 * found)
            found += 1
        store_i64(load_i64(starts + 8 * e) + n, starts + 8 * e + 8)
    store_i64(found, p + 8 * NUM_ACTIVE)
    store_i64(load_i64(starts + 8 * experts), p + 8 * NUM_PLACES)
    places, rows = load_i64(p + 8 * SLOT_PLACE), load_i64(p + 8 * ROWS)
    for row in range(rows):
        for k in range(slots):
            slot = row * slots + k
            e = _expert_of(p, row, k) if row < live else -1
            place = -1
            if e >= 0:
                # starts[e] is the next free place of e for now; it ends as starts[e + 1]
                place = load_i64(starts + 8 * e)
                store_i64(place + 1, starts + 8 * e)
                store_i64(row, load_i64(p + 8 * PLACE_ROW) + 8 * place)
                store_i64(slot, load_i64(p + 8 * PLACE_SLOT) + 8 * place)
            store_i64(place, places + 8 * slot)
    for e in range(experts, 0, -1):
        store_i64(load_i64(starts + 8 * e - 8), starts + 8 * e)
    store_i64(0, starts)


@njit(error_model="numpy")
def _prepare_row(p: int, row: int) -> None:
    """Phase 0 without weights on the input: prepared[row] of x[row], if anybody works on the row."""
    slots, busy = load_i64(p + 8 * SLOTS), False
    for k in range(slots):
        busy = busy or load_i64(load_i64(p + 8 * SLOT_PLACE) + 8 * (row * slots + k)) >= 0
    if busy:
        call_prepare(
            load_i64(p + 8 * PREPARE),
            load_i64(p + 8 * X) + row * load_i64(p + 8 * X_STRIDE),
            load_i64(p + 8 * PREPARED) + row * load_i64(p + 8 * PREPARED_STRIDE),
            load_i64(p + 8 * HIDDEN_SIZE),
        )


@njit(error_model="numpy")
def _scale_row(p: int, place: int) -> None:
    """Phase 0 with weights on the input: scaled[place] = x[row] * weight, then prepared."""
    slots = load_i64(p + 8 * SLOTS)
    slot = load_i64(load_i64(p + 8 * PLACE_SLOT) + 8 * place)
    row = slot // slots
    weights = load_i64(p + 8 * WEIGHTS) + row * load_i64(p + 8 * WEIGHTS_STRIDE)
    scaled = load_i64(p + 8 * SCALED) + place * load_i64(p + 8 * SCALED_STRIDE)
    columns = load_i64(p + 8 * HIDDEN_SIZE)
    scale_row(
        load_i64(p + 8 * X) + row * load_i64(p + 8 * X_STRIDE),
        weights + 4 * (slot % slots),
        scaled,
        load_i64(p + 8 * VALUE_BYTES) // 4,
        columns,
    )
    if load_i64(p + 8 * PREPARE) != 0:
        prepared = load_i64(p + 8 * PREPARED) + place * load_i64(p + 8 * PREPARED_STRIDE)
        call_prepare(load_i64(p + 8 * PREPARE), scaled, prepared, columns)


@njit(error_model="numpy")
def _prepare_inputs(p: int, member: int) -> None:
    """Phase 0."""
    threads, on_input = load_i64(p + 8 * THREADS), load_i64(p + 8 * ON_INPUT) != 0
    tasks = load_i64(p + 8 * (NUM_PLACES if on_input else ROWS))
    for turn in range(threads):
        task = draw(p, 0, (member + turn) % threads, tasks)
        while task >= 0:
            if on_input:
                _scale_row(p, task)
            else:
                _prepare_row(p, task)
            task = draw(p, 0, (member + turn) % threads, tasks)


@njit(error_model="numpy")
def _prepare_hidden(p: int, member: int) -> None:
    """Phase 2."""
    threads, places = load_i64(p + 8 * THREADS), load_i64(p + 8 * NUM_PLACES)
    for turn in range(threads):
        place = draw(p, 2, (member + turn) % threads, places)
        while place >= 0:
            call_prepare(
                load_i64(p + 8 * PREPARE_HIDDEN),
                load_i64(p + 8 * HIDDEN) + place * load_i64(p + 8 * HIDDEN_STRIDE),
                load_i64(p + 8 * DOWN_ROWS) + place * load_i64(p + 8 * DOWN_STRIDE),
                load_i64(p + 8 * INTERMEDIATE),
            )
            place = draw(p, 2, (member + turn) % threads, places)


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
def _run_group(p: int, phase: int, scratch: int, expert: int, first: int, last: int) -> None:
    """A group of panels of one expert, for all of its rows.

    Rows of one tile stream: they ask for their panel shortly ahead. Otherwise the tiles share out asking for
    the group that follows in memory.
    """
    # The fields of GATE_UP and DOWN lie in the same order.
    w = p + 8 * (GATE_UP if phase == 1 else DOWN)
    panel_bytes = load_i64(w + 24)
    begin = load_i64(load_i64(p + 8 * STARTS) + 8 * expert)
    end = load_i64(load_i64(p + 8 * STARTS) + 8 * expert + 8)
    rows = end - begin
    alone = rows <= load_i64(p + 8 * TILE_ROWS)
    place, tiles = begin, tiles_of(rows, load_i64(p + 8 * TILE_ROWS))
    while place < end:
        n = (end - place + tiles - 1) // tiles
        tiles -= 1
        _product_rows(p, phase, place, n, scratch)
        for panel in range(first, last):
            at = panel_at(load_i64(w), load_i64(w + 48), expert * load_i64(w + 16) + panel, panel_bytes)
            sums = scratch + SUMS
            if phase != 1:
                sums = load_i64(p + 8 * RESULTS) + (panel * load_i64(p + 8 * CAPACITY) + place) * 4 * PANEL
                claim_rows(sums, 4 * PANEL, n, 4 * PANEL // 64)
            ahead, pace = at + AHEAD, STEP_BYTES
            if not alone:
                ahead = at + (last - first) * panel_bytes + panel_bytes // rows * (place - begin)
                pace = (STEP_BYTES * n + rows - 1) // rows
            call_tile(
                load_i64(p + 8 * TILE),
                scratch,
                n,
                at,
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
    groups = (panels + group - 1) // group
    tasks = load_i64(p + 8 * NUM_ACTIVE) * groups
    for turn in range(threads):
        task = draw(p, phase, (member + turn) % threads, tasks)
        while task >= 0:
            expert = load_i64(load_i64(p + 8 * ACTIVE) + 8 * (task // groups))
            first = task % groups * group
            _run_group(p, phase, scratch, expert, first, min(first + group, panels))
            task = draw(p, phase, (member + turn) % threads, tasks)


@njit(error_model="numpy")
def _combine_row(p: int, row: int, first: int, last: int) -> None:
    """Some panels of one row of the output."""
    weights = load_i64(p + 8 * WEIGHTS) + row * load_i64(p + 8 * WEIGHTS_STRIDE)
    if load_i64(p + 8 * ON_INPUT) != 0:
        weights = load_i64(p + 8 * ONES)
    slots = load_i64(p + 8 * SLOTS)
    out = load_i64(p + 8 * OUT) + row * load_i64(p + 8 * OUT_STRIDE)
    results = load_i64(p + 8 * CAPACITY) * 4 * PANEL  # bytes of a panel's
    for panel in range(first, last):
        combine_slots(
            load_i64(p + 8 * OUT_KIND),
            load_i64(p + 8 * SLOT_PLACE) + 8 * row * slots,
            weights,
            slots,
            load_i64(p + 8 * RESULTS) + panel * results,
            COMBINE_AHEAD * results,
            out + panel * PANEL * load_i64(p + 8 * OUT_BYTES),
            load_i64(p + 8 * HIDDEN_SIZE) - panel * PANEL,
        )


@njit(error_model="numpy")
def _combine(p: int, member: int) -> None:
    """Phase 4: tasks are a row and some panels."""
    threads, panels = load_i64(p + 8 * THREADS), load_i64(p + 8 * DOWN_PANELS)
    parts = (panels + COMBINE_PANELS - 1) // COMBINE_PANELS
    tasks = load_i64(p + 8 * ROWS) * parts
    for turn in range(threads):
        task = draw(p, 4, (member + turn) % threads, tasks)
        while task >= 0:
            first = task % parts * COMBINE_PANELS
            _combine_row(p, task // parts, first, min(first + COMBINE_PANELS, panels))
            task = draw(p, 4, (member + turn) % threads, tasks)


def moe_worker(p: int) -> None:
    """The phases, with the team waiting between them."""
    scratch, member = stack_scratch(), join_team(p)
    if load_i64(p + 8 * NUM_ACTIVE) > 0:
        if load_i64(p + 8 * ON_INPUT) != 0 or load_i64(p + 8 * PREPARE) != 0:
            _prepare_inputs(p, member)
            wait_for_team(p)
        _run_experts(p, 1, scratch, member)
        wait_for_team(p)
        if load_i64(p + 8 * PREPARE_HIDDEN) != 0:
            _prepare_hidden(p, member)
            wait_for_team(p)
        _run_experts(p, 3, scratch, member)
        wait_for_team(p)
    _combine(p, member)


def moe_entry(p: int) -> None:
    """Sort the slots, choose the size of tasks, and run the team."""
    reset_counter(p)
    if load_i64(p + 8 * ROWS) == 0:
        return
    _sort_slots(p, live_rows(load_i64(p + 8 * ROWS), load_i64(p + 8 * COUNT)))
    active = max(load_i64(p + 8 * NUM_ACTIVE), 1)
    rows = (load_i64(p + 8 * NUM_PLACES) + active - 1) // active
    share = max(load_i64(p + 8 * THREADS) * TASKS_PER_THREAD // active, 1)
    tile_rows = load_i64(p + 8 * TILE_ROWS)
    gate_up, down = load_i64(p + 8 * GATE_UP_PANELS), load_i64(p + 8 * DOWN_PANELS)
    group = panel_group(rows, tile_rows, gate_up, load_i64(p + 8 * GATE_UP_PANEL_BYTES), share)
    store_i64(group, p + 8 * GATE_UP_GROUP)
    group = panel_group(rows, tile_rows, down, load_i64(p + 8 * DOWN_PANEL_BYTES), share)
    store_i64(group, p + 8 * DOWN_GROUP)
    run_worker(
        p,
        load_i64(p + 8 * NUM_ACTIVE) * (load_i64(p + 8 * GATE_UP_BYTES) + load_i64(p + 8 * DOWN_BYTES)) // 4,
    )
