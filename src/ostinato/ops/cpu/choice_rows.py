"""Choosing tokens row by row: the driver of the kernel, over the vector parts in `choice_ir`.

Weights are whole numbers, so the best few are found by partition, not by sorting, and the token by its running sum of
blocks; tokens so far from the best that no filter can keep them are never looked at. Knows nothing of requests.
Invariant: the token that `ops.choice.choose` finds; rows at or past the live count come out 0.
"""

from __future__ import annotations

import math

import numpy as np

from ostinato.ops.choice import GOLDEN, MIX_1, MIX_2, ONE, TINY
from ostinato.ops.cpu.choice_ir import BLOCK
from ostinato.ops.cpu.gemm import live_rows
from ostinato.ops.cpu.jit import njit
from ostinato.ops.cpu.launch import COUNTER, FIRST_FIELD, join_team, reset_counter, run_worker
from ostinato.ops.cpu.memory import call_native, fetch_add, load_f64, load_i32, load_i64, store_f32, store_i64

# Fields after those of every launch. Addresses and strides are in bytes.
(
    LOGITS,  # fp32 [rows, tokens]
    LOGITS_STRIDE,
    ROWS,
    COUNT,  # address of the live count (int32), or 0: all rows
    TOKENS,
    RULES,  # fp64 [rows, 4]: temperature, top-k, top-p, min-p
    SEEDS,  # int64 [rows]
    POSITIONS,  # int64 [rows]: of the row; the token chosen is the next one
    OUT,  # int64 [rows]
    WEIGH,  # addresses of functions
    COLLECT,
    SCRATCH,
    SCRATCH_STRIDE,  # of a thread
    NUM_FIELDS,
) = range(FIRST_FIELD, FIRST_FIELD + 14)

# A thread's scratch: per token d (4 bytes), q and a key (8 bytes each); per block a sum, a key (8) and the best d (4).
_INFINITY = 0x7F800000
_WORK_OF_A_VALUE = 8  # words of memory that a logit's way is worth
_NO_KEYS = -1
_GOLDEN, _MIX_1, _MIX_2 = (x - (1 << 64) for x in (GOLDEN, MIX_1, MIX_2))  # as int64, which wraps
_ONE, _TINY = float(ONE), np.float32(TINY)


def scratch_bytes(tokens: int) -> int:
    """Bytes of a thread's scratch."""
    blocks = -(-tokens // BLOCK) + 1
    return 20 * BLOCK * (blocks + 1) + 20 * blocks + 64


@njit(error_model="numpy")
def _blocks(p: int) -> int:
    return (load_i64(p + 8 * TOKENS) + BLOCK - 1) // BLOCK


@njit(error_model="numpy")
def _area(p: int, scratch: int, index: int) -> int:
    """Addresses: 0 q, 1 keys (with room for 16 more), 2 sums, 3 keys of blocks, 4 d, 5 the best d of blocks."""
    blocks = _blocks(p) + 1
    at = scratch
    if index > 0:
        at += 8 * BLOCK * blocks
    if index > 1:
        at += 8 * BLOCK * blocks
    if index > 2:
        at += 8 * blocks
    if index > 3:
        at += 8 * blocks
    if index > 4:
        at += 4 * BLOCK * blocks
    return at


@njit(error_model="numpy")
def _mixed(z: int) -> int:
    """The finaliser of splitmix64; shifts are logical."""
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * _MIX_1
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * _MIX_2
    return z ^ ((z >> 31) & ((1 << 33) - 1))


@njit(error_model="numpy")
def _uniform(seed: int, position: int) -> float:
    state = _mixed(seed + _GOLDEN)
    state = _mixed(state + position + _GOLDEN)
    return float((state >> 11) & ((1 << 53) - 1)) * 2.0**-53


@njit(error_model="numpy")
def _weight(q: int, key: int, least: int) -> int:
    """What a key adds to a running sum: its token's weight if that reaches `least`; 1 without weights (q 0)."""
    if q == 0:
        return 1
    found = load_i64(q + 8 * (key & 0xFFFFFFFF))
    return found if found >= least else 0


@njit(error_model="numpy")
def _middle(keys: int, first: int, last: int) -> int:
    """The median of the first, middle and last of keys [first, last)."""
    a, b = load_i64(keys + 8 * first), load_i64(keys + 8 * ((first + last) // 2))
    c = load_i64(keys + 8 * (last - 1))
    return max(min(a, b), min(max(a, b), c))


@njit(error_model="numpy")
def _partition(keys: int, count: int, need: int, q: int, least: int) -> int:
    """How many of the smallest keys weigh `need` together; these stand first afterwards. All must weigh that much."""
    first, last, before = 0, count, 0
    while last - first > 1:
        pivot = _middle(keys, first, last)
        place, weight = first, 0
        for i in range(first, last):
            key = load_i64(keys + 8 * i)
            if key < pivot:
                store_i64(load_i64(keys + 8 * place), keys + 8 * i)
                store_i64(key, keys + 8 * place)
                weight += _weight(q, key, least)
                place += 1
        if place > first:
            if before + weight >= need:
                last = place
            else:
                first, before = place, before + weight
            continue
        # The pivot is the smallest of them: it goes first, and counts by itself.
        at = first
        while load_i64(keys + 8 * at) != pivot:
            at += 1
        store_i64(load_i64(keys + 8 * first), keys + 8 * at)
        store_i64(pivot, keys + 8 * first)
        before += _weight(q, pivot, least)
        first += 1
        if before >= need:
            return first
    return last


@njit(error_model="numpy")
def _near_enough(p: int, scratch: int, top_k: int, top_p: float, total: int) -> int:
    """Bits of a d past which no token can be kept; every token nearer is looked at."""
    blocks, bests = _blocks(p), _area(p, scratch, 5)
    if 0 < top_k <= blocks:
        # So many blocks have a token at least this near.
        keys = _area(p, scratch, 3)
        for i in range(blocks):
            store_i64((load_i32(bests + 4 * i) << 32) + i, keys + 8 * i)
        _partition(keys, blocks, top_k, 0, 0)
        most = 0
        for i in range(top_k):
            most = max(most, load_i64(keys + 8 * i) >> 32)
        return most
    if top_k > 0:
        return _INFINITY
    # All tokens past this weigh less than half of what may be left out; a little more, for the rounding of exp.
    thin = float(total) * (1.0 - top_p) / (2.0 * load_i64(p + 8 * TOKENS))
    place = _area(p, scratch, 3)
    store_f32(np.float32(max(math.log(_ONE / max(thin, 1.0)), 0.0) * 1.001 + 0.01), place)
    return load_i32(place)


@njit(error_model="numpy")
def _sum(p: int, scratch: int) -> int:
    total, sums = 0, _area(p, scratch, 2)
    for i in range(_blocks(p)):
        total += load_i64(sums + 8 * i)
    return total


@njit(error_model="numpy")
def _filter(p: int, scratch: int, top_k: int, top_p: float) -> int:
    """Put the keys of the tokens that top-k and top-p keep first; their number."""
    q, keys, found = _area(p, scratch, 0), _area(p, scratch, 1), _area(p, scratch, 3)
    total = _sum(p, scratch)
    limit = _near_enough(p, scratch, top_k, top_p, total)
    call_native(load_i64(p + 8 * COLLECT), _area(p, scratch, 4), load_i64(p + 8 * TOKENS), limit, keys, found)
    kept = load_i64(found)
    if top_k > 0:
        kept = _partition(keys, kept, top_k, 0, 0)
        total = 0
        for i in range(kept):
            total += _weight(q, load_i64(keys + 8 * i), 0)
    if top_p < 1.0:
        kept = _partition(keys, kept, max(int(top_p * float(total)), 1), q, 0)
    return kept


@njit(error_model="numpy")
def _drawn(p: int, scratch: int, kept: int, least: int, noise: float) -> int:
    """The first of the kept tokens, by id, whose running weight passes the share `noise` of their whole."""
    q, keys, whole = _area(p, scratch, 0), _area(p, scratch, 1), 0
    if kept != _NO_KEYS:
        for i in range(kept):
            key = load_i64(keys + 8 * i) & 0xFFFFFFFF
            store_i64(key, keys + 8 * i)
            whole += _weight(q, key, least)
        target = min(int(noise * float(whole)), whole - 1)
        smallest = _partition(keys, kept, target + 1, q, least)
        token = 0
        for i in range(smallest):
            token = max(token, load_i64(keys + 8 * i))
        return token
    whole, sums = _sum(p, scratch), _area(p, scratch, 2)
    target = min(int(noise * float(whole)), whole - 1)
    block, reached = 0, load_i64(sums)
    while reached <= target:
        block += 1
        reached += load_i64(sums + 8 * block)
    token = BLOCK * block
    reached += _weight(q, token, least) - load_i64(sums + 8 * block)
    while reached <= target:
        token += 1
        reached += _weight(q, token, least)
    return token


@njit(error_model="numpy")
def _choose_row(p: int, scratch: int, row: int) -> None:
    rule = load_i64(p + 8 * RULES) + 32 * row
    temperature, tokens = load_f64(rule), load_i64(p + 8 * TOKENS)
    top_k, top_p = int(load_f64(rule + 8)), load_f64(rule + 16)
    least = int(load_f64(rule + 24) * _ONE)
    if temperature == 0.0:
        temperature, top_k = 1.0, 1
    if top_k >= tokens or top_k < 0:
        top_k = 0
    plain = top_k == 0 and top_p >= 1.0
    heat = max(np.float32(temperature), _TINY)
    place = _area(p, scratch, 3)
    store_f32(heat, place)
    x = load_i64(p + 8 * LOGITS) + row * load_i64(p + 8 * LOGITS_STRIDE)
    call_native(
        load_i64(p + 8 * WEIGH),
        x,
        tokens,
        load_i32(place),
        least if plain else 0,
        _area(p, scratch, 4),
        _area(p, scratch, 0),
        _area(p, scratch, 2),
        _area(p, scratch, 5),
    )
    kept = _NO_KEYS if plain else _filter(p, scratch, top_k, top_p)
    position = load_i64(load_i64(p + 8 * POSITIONS) + 8 * row) + 1
    noise = _uniform(load_i64(load_i64(p + 8 * SEEDS) + 8 * row), position)
    store_i64(_drawn(p, scratch, kept, least, noise), load_i64(p + 8 * OUT) + 8 * row)


def choice_worker(p: int) -> None:
    """Draw rows until none is left."""
    live = live_rows(load_i64(p + 8 * ROWS), load_i64(p + 8 * COUNT))
    scratch = load_i64(p + 8 * SCRATCH) + join_team(p) * load_i64(p + 8 * SCRATCH_STRIDE)
    row = fetch_add(load_i64(p + 8 * COUNTER), 1)
    while row < live:
        _choose_row(p, scratch, row)
        row = fetch_add(load_i64(p + 8 * COUNTER), 1)


def choice_entry(p: int) -> None:
    """Run the live rows over the team, or here when they are few; the others come out 0."""
    reset_counter(p)
    rows = load_i64(p + 8 * ROWS)
    live = live_rows(rows, load_i64(p + 8 * COUNT))
    for row in range(live, rows):
        store_i64(0, load_i64(p + 8 * OUT) + 8 * row)
    if live > 0:
        run_worker(p, live * load_i64(p + 8 * TOKENS) * _WORK_OF_A_VALUE if live > 1 else 0)
