"""Rows on their way to experts: the parameters of a launch of `moe`, the sorting of slots, phases 0 and 2.

Knows nothing of routing or of products. Invariant: places are sorted by expert, then by row, then by slot, and a slot
of nobody, or of a row past the live count, has none.
"""

from __future__ import annotations

from ostinato.ops.cpu.epilogue import scale_row
from ostinato.ops.cpu.intrinsics import call_prepare
from ostinato.ops.cpu.jit import njit
from ostinato.ops.cpu.launch import FIRST_FIELD, THREADS, draw
from ostinato.ops.cpu.memory import load_i32, load_i64, store_i64

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
    BY_PANEL,  # 1: phases 3 and 4 go panel by panel; set by the entry
    DECODING,  # address of how to decode panels for many rows, or 0; see `panel_words`
    NUM_FIELDS,
) = range(FIRST_FIELD, FIRST_FIELD + 62)


@njit(error_model="numpy")
def _expert_of(p: int, row: int, k: int) -> int:
    """The expert of a slot, -1 for nobody (any id that is no expert)."""
    expert = load_i32(load_i64(p + 8 * IDS) + row * load_i64(p + 8 * IDS_STRIDE) + 4 * k)
    return expert if 0 <= expert < load_i64(p + 8 * EXPERTS) else -1


@njit(error_model="numpy")
def sort_slots(p: int, live: int) -> None:
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
def prepare_inputs(p: int, member: int) -> None:
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
def prepare_hidden(p: int, member: int) -> None:
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
