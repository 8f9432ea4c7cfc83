"""All experts of a layer in one launch: sort rows by expert, gate and up, SiLU, down, weighted sum.

    entry    slots (row, k) -> places sorted by expert; -1 goes nowhere and costs nothing
    phase 0  (weights on input only) rows times weights, by place
    phase 1  tasks (active expert, panels): hidden[place] = silu(gate) * up
    phase 2  tasks (active expert, panels): results[panel][place] = down, fp32
    phase 3  out[row] = sum over k, in slot order, of weight * results[place of (row, k)]

Knows nothing of routing. Invariant: a row's bits depend on its own slots alone; rows nobody works on come out
zero and are never read; tasks are drawn by experts that have rows, so pads change neither cost nor result.
"""

from __future__ import annotations

from numba import njit

from ostinato.ops.cpu.epilogue import FP32_OUT, GATED, combine_slots, scale_row, store_tile
from ostinato.ops.cpu.gemm import SUMS, live_rows, panel_group
from ostinato.ops.cpu.intrinsics import call_barrier, call_tile, stack_scratch
from ostinato.ops.cpu.launch import (
    BARRIER,
    COUNTER,
    FIRST_FIELD,
    THREADS,
    reset_counter,
    run_worker,
)
from ostinato.ops.cpu.memory import fetch_add, load_i32, load_i64, store_i64
from ostinato.ops.cpu.tiles import PANEL

TASKS_PER_THREAD = 16
COMBINE_PANELS = 8  # panels of one row in a task of phase 3

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
    DOWN,
    DOWN_BYTES,
    DOWN_PANELS,
    DOWN_PANEL_BYTES,
    DOWN_STEPS,
    DOWN_ODD,
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
    HIDDEN,  # by place
    HIDDEN_STRIDE,
    RESULTS,  # fp32 [panels][capacity][32]
    CAPACITY,
    ONES,  # address of fp32 ones [SLOTS]
    ZEROS,  # address of fp32 zeros [32]
    GATE_UP_GROUP,
    DOWN_GROUP,
    NUM_FIELDS,
) = range(FIRST_FIELD, FIRST_FIELD + 50)


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
def _draw(p: int, phase: int) -> int:
    """The next task number of a phase."""
    return fetch_add(load_i64(p + 8 * COUNTER) + 64 * phase, 1)


@njit(error_model="numpy")
def _scale_inputs(p: int) -> None:
    """Phase 0: scaled[place] = x[row] * weight."""
    places = load_i64(p + 8 * NUM_PLACES)
    slots = load_i64(p + 8 * SLOTS)
    place = _draw(p, 0)
    while place < places:
        slot = load_i64(load_i64(p + 8 * PLACE_SLOT) + 8 * place)
        row = slot // slots
        weights = load_i64(p + 8 * WEIGHTS) + row * load_i64(p + 8 * WEIGHTS_STRIDE)
        scale_row(
            load_i64(p + 8 * X) + row * load_i64(p + 8 * X_STRIDE),
            weights + 4 * (slot % slots),
            load_i64(p + 8 * SCALED) + place * load_i64(p + 8 * SCALED_STRIDE),
            load_i64(p + 8 * VALUE_BYTES) // 4,
            load_i64(p + 8 * HIDDEN_SIZE),
        )
        place = _draw(p, 0)


@njit(error_model="numpy")
def _source_rows(p: int, phase: int, place: int, count: int, rows: int) -> None:
    """Write the addresses of the rows at `count` places to `rows`."""
    on_input = load_i64(p + 8 * ON_INPUT)
    for i in range(count):
        if phase == 2:
            at = load_i64(p + 8 * HIDDEN) + (place + i) * load_i64(p + 8 * HIDDEN_STRIDE)
        elif on_input != 0:
            at = load_i64(p + 8 * SCALED) + (place + i) * load_i64(p + 8 * SCALED_STRIDE)
        else:
            row = load_i64(load_i64(p + 8 * PLACE_ROW) + 8 * (place + i))
            at = load_i64(p + 8 * X) + row * load_i64(p + 8 * X_STRIDE)
        store_i64(at, rows + 8 * i)


@njit(error_model="numpy")
def _run_experts(p: int, phase: int, scratch: int) -> None:
    """Phase 1 (gate, up) or 2 (down): tasks are groups of panels of one active expert."""
    # The fields of GATE_UP and DOWN lie in the same order.
    w = p + 8 * (GATE_UP if phase == 1 else DOWN)
    weight, expert_bytes, panels, panel_bytes = (
        load_i64(w),
        load_i64(w + 8),
        load_i64(w + 16),
        load_i64(w + 24),
    )
    steps, odd = load_i64(w + 32), load_i64(w + 40)
    group = load_i64(p + 8 * (GATE_UP_GROUP if phase == 1 else DOWN_GROUP))
    groups = (panels + group - 1) // group
    tasks = load_i64(p + 8 * NUM_ACTIVE) * groups
    size = load_i64(p + 8 * VALUE_BYTES)
    kind = GATED | FP32_OUT if size == 4 else GATED
    task = _draw(p, phase)
    while task < tasks:
        expert = load_i64(load_i64(p + 8 * ACTIVE) + 8 * (task // groups))
        first = task % groups * group
        place = load_i64(load_i64(p + 8 * STARTS) + 8 * expert)
        end = load_i64(load_i64(p + 8 * STARTS) + 8 * expert + 8)
        while place < end:
            n = min(load_i64(p + 8 * TILE_ROWS), end - place)
            _source_rows(p, phase, place, n, scratch)
            for panel in range(first, min(first + group, panels)):
                at = weight + expert * expert_bytes + panel * panel_bytes
                sums = scratch + SUMS
                if phase == 2:
                    sums = (
                        load_i64(p + 8 * RESULTS) + (panel * load_i64(p + 8 * CAPACITY) + place) * 4 * PANEL
                    )
                call_tile(load_i64(p + 8 * TILE), scratch, n, at, steps, odd, sums)
                if phase == 1:
                    stride = load_i64(p + 8 * HIDDEN_STRIDE)
                    column = panel * (PANEL // 2)
                    out = load_i64(p + 8 * HIDDEN) + place * stride + column * size
                    width = load_i64(p + 8 * INTERMEDIATE) - column
                    store_tile(kind, n, sums, load_i64(p + 8 * ZEROS), out, stride, width)
            place += n
        task = _draw(p, phase)


@njit(error_model="numpy")
def _combine(p: int) -> None:
    """Phase 3: tasks are a row and some panels."""
    panels, slots = load_i64(p + 8 * DOWN_PANELS), load_i64(p + 8 * SLOTS)
    parts = (panels + COMBINE_PANELS - 1) // COMBINE_PANELS
    tasks = load_i64(p + 8 * ROWS) * parts
    task = _draw(p, 3)
    while task < tasks:
        row = task // parts
        first = task % parts * COMBINE_PANELS
        weights = load_i64(p + 8 * WEIGHTS) + row * load_i64(p + 8 * WEIGHTS_STRIDE)
        if load_i64(p + 8 * ON_INPUT) != 0:
            weights = load_i64(p + 8 * ONES)
        out = load_i64(p + 8 * OUT) + row * load_i64(p + 8 * OUT_STRIDE)
        for panel in range(first, min(first + COMBINE_PANELS, panels)):
            combine_slots(
                load_i64(p + 8 * OUT_KIND),
                load_i64(p + 8 * SLOT_PLACE) + 8 * row * slots,
                weights,
                slots,
                load_i64(p + 8 * RESULTS) + panel * load_i64(p + 8 * CAPACITY) * 4 * PANEL,
                out + panel * PANEL * load_i64(p + 8 * OUT_BYTES),
                load_i64(p + 8 * HIDDEN_SIZE) - panel * PANEL,
            )
        task = _draw(p, 3)


def moe_worker(p: int) -> None:
    """The phases, with the team waiting between them."""
    scratch = stack_scratch()
    barrier = load_i64(p + 8 * BARRIER)
    if load_i64(p + 8 * NUM_ACTIVE) > 0:
        if load_i64(p + 8 * ON_INPUT) != 0:
            _scale_inputs(p)
            call_barrier(barrier)
        for phase in range(1, 3):
            _run_experts(p, phase, scratch)
            call_barrier(barrier)
    _combine(p)


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
