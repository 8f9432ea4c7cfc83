"""From router logits to experts and weights, row by row: the driver of the routing kernel.

    score -> add the bias -> keep the best groups -> choose the largest -> weigh -> scale -> count

The fused twin of what `moe.routing` does by torch ops, its mask of pads included: a row at or past the live count is
never looked at and comes out with id -1 and weight 0. Knows nothing of models. Invariant: the twin's bits, whatever a
row holds: NaN counts as the largest score, ties go to the lowest id, ids of a real row are distinct experts.
"""

from __future__ import annotations

import numpy as np

from ostinato.ops.cpu.gemm import live_rows
from ostinato.ops.cpu.jit import njit
from ostinato.ops.cpu.launch import COUNTER, FIRST_FIELD, join_team, reset_counter, run_worker
from ostinato.ops.cpu.memory import (
    call_native,
    fetch_add,
    load_f32,
    load_i32,
    load_i64,
    store_f32,
    store_i32,
    store_i64,
)

# Fields after those of every launch. Addresses and strides are in bytes.
(
    LOGITS,  # fp32 [rows, experts]
    LOGITS_STRIDE,
    ROWS,
    COUNT,  # address of the live count (int32), or 0: all rows
    EXPERTS,
    ROUTED,  # experts chosen for a row
    SHARED,  # columns behind them, of experts that every row uses: ids from EXPERTS on
    SCORE,  # address of the score function, or 0: logits are scores
    WEIGH,  # address of softmax where logits are scores, else 0
    BIAS,  # address of fp32 [experts] added to choose, or 0
    GROUPS,
    KEPT,  # groups that experts are chosen from
    RENORMALIZE,
    SCALE,  # fp32 bits
    SHARED_WEIGHT,  # fp32 bits
    WEIGHTS,  # fp32 [rows, ROUTED + SHARED]
    WEIGHTS_STRIDE,
    IDS,  # int32 [rows, ROUTED + SHARED]
    IDS_STRIDE,
    LOAD,  # address of int64 [experts], or 0
    LOAD_LIVE,  # address of an int64: what a choice counts
    SCRATCH,
    SCRATCH_STRIDE,  # of a thread
    NUM_FIELDS,
) = range(FIRST_FIELD, FIRST_FIELD + 24)

# A thread's scratch: areas of VECTOR * 16 values that hold a row's experts each, then the best found so far.
SCORES, CHOICE, KEYS, BEST_KEYS, BEST_IDS, AREAS = range(6)
_NAN_KEY = 0x7FFFFFFF
_LOWEST_KEY = -(1 << 31)
_INFINITY = 0x7F800000
_MINUS_INFINITY = 0xFF800000 - (1 << 32)
_TINY = np.float32(np.finfo(np.float32).tiny)
_ROWS_AT_ONCE = 4
_WORK_OF_A_VALUE = 4  # words of memory that a logit's way is worth


def area_bytes(experts: int) -> int:
    """Bytes of one area of scratch: whole vectors of 8 bytes a value."""
    return -(-experts // 16) * 128


@njit(error_model="numpy")
def _area(p: int, scratch: int, index: int) -> int:
    return scratch + index * ((load_i64(p + 8 * EXPERTS) + 15) // 16 * 128)


@njit(error_model="numpy")
def _key(address: int) -> int:
    """An integer that orders fp32 values as they are, with NaN on top and both zeros alike."""
    bits = load_i32(address)
    size = bits & 0x7FFFFFFF
    if size > _INFINITY:
        return _NAN_KEY
    return 0 if size == 0 else bits ^ ((bits >> 63) & 0x7FFFFFFF)


@njit(error_model="numpy")
def _choose(keys: int, count: int, k: int, best_keys: int, best_ids: int) -> None:
    """The k largest of int64 keys, in descending order, the first of equals first."""
    found = 0
    for i in range(count):
        key = load_i64(keys + 8 * i)
        if found == k and key <= load_i64(best_keys + 8 * (k - 1)):
            continue
        place = found if found < k else k - 1
        while place > 0 and load_i64(best_keys + 8 * (place - 1)) < key:
            store_i64(load_i64(best_keys + 8 * (place - 1)), best_keys + 8 * place)
            store_i64(load_i64(best_ids + 8 * (place - 1)), best_ids + 8 * place)
            place -= 1
        store_i64(key, best_keys + 8 * place)
        store_i64(i, best_ids + 8 * place)
        found = min(found + 1, k)


@njit(error_model="numpy")
def _group_key(p: int, scratch: int, choice: int, first: int, size: int) -> int:
    """What a group is worth: its largest entry, or with a bias the sum of its two largest."""
    most, second, at, after = _LOWEST_KEY, _LOWEST_KEY, -1, -1
    for e in range(first, first + size):
        key = _key(choice + 4 * e)
        if key > most:
            second, after, most, at = most, at, key, e
        elif key > second:
            second, after = key, e
    if load_i64(p + 8 * BIAS) == 0 or size == 1:
        return most
    place = _area(p, scratch, KEYS) + 8 * (load_i64(p + 8 * GROUPS) + 1)
    store_f32(load_f32(choice + 4 * at) + load_f32(choice + 4 * after), place)
    return _key(place)


@njit(error_model="numpy")
def _drop_groups(p: int, scratch: int, choice: int) -> None:
    """Put experts outside the best groups at -inf."""
    groups, kept = load_i64(p + 8 * GROUPS), load_i64(p + 8 * KEPT)
    size = load_i64(p + 8 * EXPERTS) // groups
    keys, best_ids = _area(p, scratch, KEYS), _area(p, scratch, BEST_IDS)
    for g in range(groups):
        store_i64(_group_key(p, scratch, choice, g * size, size), keys + 8 * g)
    _choose(keys, groups, kept, _area(p, scratch, BEST_KEYS), best_ids)
    for g in range(groups):
        found = False
        for i in range(kept):
            found = found or load_i64(best_ids + 8 * i) == g
        if not found:
            for e in range(g * size, g * size + size):
                store_i32(_MINUS_INFINITY, choice + 4 * e)


@njit(error_model="numpy")
def _choice(p: int, scratch: int, scores: int) -> int:
    """Address of what experts are chosen by: scores, plus the bias, in the best groups."""
    bias, experts = load_i64(p + 8 * BIAS), load_i64(p + 8 * EXPERTS)
    grouped = load_i64(p + 8 * KEPT) < load_i64(p + 8 * GROUPS)
    if bias == 0 and not grouped:
        return scores
    choice = _area(p, scratch, CHOICE)
    for e in range(experts):
        value = load_f32(scores + 4 * e)
        store_f32(value if bias == 0 else value + load_f32(bias + 4 * e), choice + 4 * e)
    if grouped:
        _drop_groups(p, scratch, choice)
    return choice


@njit(error_model="numpy")
def _weigh(p: int, scratch: int, logits: int, scores: int, weights: int) -> None:
    """Weights of the chosen experts, not scaled yet."""
    routed, weigh = load_i64(p + 8 * ROUTED), load_i64(p + 8 * WEIGH)
    best_ids, renormalize = _area(p, scratch, BEST_IDS), load_i64(p + 8 * RENORMALIZE) != 0
    if weigh != 0 and not renormalize:
        scores = _area(p, scratch, SCORES)
        call_native(weigh, logits, scores, load_i64(p + 8 * EXPERTS))
    for k in range(routed):
        store_f32(load_f32(scores + 4 * load_i64(best_ids + 8 * k)), weights + 4 * k)
    if not renormalize:
        return
    if weigh != 0:
        shares = _area(p, scratch, CHOICE)
        call_native(weigh, weights, shares, routed)
        for k in range(routed):
            store_f32(load_f32(shares + 4 * k), weights + 4 * k)
        return
    total = _sum(weights, routed)
    if total < _TINY:
        total = _TINY
    for k in range(routed):
        store_f32(load_f32(weights + 4 * k) / total, weights + 4 * k)


@njit(error_model="numpy")
def _sum(weights: int, count: int) -> np.float32:
    total = load_f32(weights)
    for k in range(1, count):
        total = total + load_f32(weights + 4 * k)
    return total


@njit(error_model="numpy")
def _finish(p: int, scratch: int, weights: int, ids: int) -> None:
    """Shared columns, the scale, ids, and the load of the chosen experts."""
    experts, routed = load_i64(p + 8 * EXPERTS), load_i64(p + 8 * ROUTED)
    shared = load_f32(p + 8 * SHARED_WEIGHT)
    if load_i64(p + 8 * RENORMALIZE) == 0:
        shared = _sum(weights, routed) * shared
    scale, best_ids = load_f32(p + 8 * SCALE), _area(p, scratch, BEST_IDS)
    load, step = load_i64(p + 8 * LOAD), 0
    if load != 0:
        step = load_i64(load_i64(p + 8 * LOAD_LIVE))
    for k in range(routed):
        expert = load_i64(best_ids + 8 * k)
        store_f32(load_f32(weights + 4 * k) * scale, weights + 4 * k)
        store_i32(expert, ids + 4 * k)
        if step != 0:
            fetch_add(load + 8 * expert, step)
    for k in range(load_i64(p + 8 * SHARED)):
        store_f32(shared, weights + 4 * (routed + k))
        store_i32(experts + k, ids + 4 * (routed + k))


@njit(error_model="numpy")
def _route_row(p: int, scratch: int, row: int) -> None:
    logits = load_i64(p + 8 * LOGITS) + row * load_i64(p + 8 * LOGITS_STRIDE)
    weights = load_i64(p + 8 * WEIGHTS) + row * load_i64(p + 8 * WEIGHTS_STRIDE)
    ids = load_i64(p + 8 * IDS) + row * load_i64(p + 8 * IDS_STRIDE)
    if row >= live_rows(load_i64(p + 8 * ROWS), load_i64(p + 8 * COUNT)):
        for k in range(load_i64(p + 8 * ROUTED) + load_i64(p + 8 * SHARED)):
            store_i32(-1, ids + 4 * k)
            store_i32(0, weights + 4 * k)
        return
    experts, scores = load_i64(p + 8 * EXPERTS), logits
    if load_i64(p + 8 * SCORE) != 0:
        scores = _area(p, scratch, SCORES)
        call_native(load_i64(p + 8 * SCORE), logits, scores, experts)
    choice, keys = _choice(p, scratch, scores), _area(p, scratch, KEYS)
    for e in range(experts):
        store_i64(_key(choice + 4 * e), keys + 8 * e)
    best_keys, best_ids = _area(p, scratch, BEST_KEYS), _area(p, scratch, BEST_IDS)
    _choose(keys, experts, load_i64(p + 8 * ROUTED), best_keys, best_ids)
    _weigh(p, scratch, logits, scores, weights)
    _finish(p, scratch, weights, ids)


def routing_worker(p: int) -> None:
    """Draw blocks of rows until none is left."""
    rows = load_i64(p + 8 * ROWS)
    scratch = load_i64(p + 8 * SCRATCH) + join_team(p) * load_i64(p + 8 * SCRATCH_STRIDE)
    first = fetch_add(load_i64(p + 8 * COUNTER), _ROWS_AT_ONCE)
    while first < rows:
        for row in range(first, min(first + _ROWS_AT_ONCE, rows)):
            _route_row(p, scratch, row)
        first = fetch_add(load_i64(p + 8 * COUNTER), _ROWS_AT_ONCE)


def routing_entry(p: int) -> None:
    """Run all rows over the team, or here when they are few."""
    reset_counter(p)
    live = live_rows(load_i64(p + 8 * ROWS), load_i64(p + 8 * COUNT))
    run_worker(p, live * load_i64(p + 8 * EXPERTS) * _WORK_OF_A_VALUE)
