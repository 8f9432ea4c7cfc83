"""Pairs of rows and slots, planned and moved by compiled code: the twin of `moe.pairs.ReferencePairs`.

A step plans once for each sparse layer, on a handful of integers, while the caches hold weights: what costs is less the
work than each line of code that has to come from memory, so all of it is one short function. Serial. Knows nothing of
transports. Invariant: the same bits in the same places as the twin's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from ostinato.ops.cpu.jit import njit
from ostinato.ops.cpu.launch import FIRST_FIELD, Runtime
from ostinato.ops.cpu.memory import load_i32, load_i64, store_i32, store_i64
from ostinato.ops.cpu.prepare import copy_bytes
from ostinato.ops.pairs import PairRule, PairTensors, Picked, RowTensors, no_expert, rounded_pairs

# Addresses and strides in bytes; three tensors of rows each.
(
    X,  # what is sent
    X_STRIDE,
    WEIGHTS,
    WEIGHTS_STRIDE,
    IDS,
    IDS_STRIDE,
    ROWS,  # own rows
    SLOTS,
    ROW_BYTES,  # of x
    OWN_X,
    OWN_WEIGHTS,
    OWN_IDS,
    OWN_STRIDE,
    ALL_X,
    ALL_WEIGHTS,
    ALL_IDS,
    ALL_STRIDE,
    PAIR_X,
    PAIR_WEIGHTS,
    PAIR_IDS,
    PAIR_STRIDE,
    FROM,  # address of int64 [pairs]: rows of pairs, where they are not copied here; else 0
    PLACES,
    FIRST,
    PER_RANK,
    OWNERS,
    SLICES,
    WEIGHTS_ON_INPUT,
    OPERATION,
    WRONG,  # out: an own id that is no expert, or -1
    RANKS,
    TABLE,  # sizes by rank; out: brought by rank, home by owner, a cursor for each owner
) = range(FIRST_FIELD, FIRST_FIELD + 32)
SEND, PICK = range(2)

_ONE = 0x3F800000  # fp32 bits of 1
_MOST_COPIED = 1 << 20
"""Bytes of rows that are copied here, on one thread; more are left to torch, which has others."""

_rounded = njit(error_model="numpy")(rounded_pairs)


@njit(error_model="numpy")
def _send(p: int) -> None:
    """Copy own rows to where they travel from."""
    slots, row_bytes = load_i64(p + 8 * SLOTS), load_i64(p + 8 * ROW_BYTES)
    for row in range(load_i64(p + 8 * ROWS)):
        to = row * load_i64(p + 8 * OWN_STRIDE)
        x = load_i64(p + 8 * X) + row * load_i64(p + 8 * X_STRIDE)
        weights = load_i64(p + 8 * WEIGHTS) + row * load_i64(p + 8 * WEIGHTS_STRIDE)
        ids = load_i64(p + 8 * IDS) + row * load_i64(p + 8 * IDS_STRIDE)
        copy_bytes(x, load_i64(p + 8 * OWN_X) + to, row_bytes)
        copy_bytes(weights, load_i64(p + 8 * OWN_WEIGHTS) + to, 4 * slots)
        copy_bytes(ids, load_i64(p + 8 * OWN_IDS) + to, 4 * slots)


@njit(error_model="numpy")
def _pick_row(p: int, row: int, n: int) -> int:
    """Make pairs n, n + 1, … of one row's slots whose expert is here; returns how many there are then."""
    at, stride = row * load_i64(p + 8 * ALL_STRIDE), load_i64(p + 8 * PAIR_STRIDE)
    first, per_rank = load_i64(p + 8 * FIRST), load_i64(p + 8 * PER_RANK)
    rows, row_bytes = load_i64(p + 8 * FROM), load_i64(p + 8 * ROW_BYTES)
    for k in range(load_i64(p + 8 * SLOTS)):
        local = load_i32(load_i64(p + 8 * ALL_IDS) + at + 4 * k) - first
        if local < 0 or local >= per_rank:
            continue
        weight = _ONE
        if load_i64(p + 8 * WEIGHTS_ON_INPUT) != 0:
            weight = load_i32(load_i64(p + 8 * ALL_WEIGHTS) + at + 4 * k)
        store_i32(local, load_i64(p + 8 * PAIR_IDS) + n * stride)
        store_i32(weight, load_i64(p + 8 * PAIR_WEIGHTS) + n * stride)
        if rows != 0:
            store_i64(row, rows + 8 * n)
        else:
            copy_bytes(load_i64(p + 8 * ALL_X) + at, load_i64(p + 8 * PAIR_X) + n * stride, row_bytes)
        n += 1
    return n


@njit(error_model="numpy")
def _owner(p: int, row: int, slot: int) -> int:
    """Who holds the expert of an own slot; -1 for nobody."""
    expert = load_i32(load_i64(p + 8 * OWN_IDS) + row * load_i64(p + 8 * OWN_STRIDE) + 4 * slot)
    return expert // load_i64(p + 8 * PER_RANK) if expert >= 0 else -1


@njit(error_model="numpy")
def _plan_home(p: int) -> None:
    """Count own slots by owner, then give each its place."""
    rows, slots, owners = load_i64(p + 8 * ROWS), load_i64(p + 8 * SLOTS), load_i64(p + 8 * OWNERS)
    home = p + 8 * (TABLE + 2 * load_i64(p + 8 * RANKS))
    cursors, start = home + 8 * owners, 0
    for owner in range(owners):
        store_i64(0, home + 8 * owner)
    for row in range(rows):
        for k in range(slots):
            owner = _owner(p, row, k)
            if owner >= owners:
                store_i64(
                    load_i32(load_i64(p + 8 * OWN_IDS) + row * load_i64(p + 8 * OWN_STRIDE) + 4 * k),
                    p + 8 * WRONG,
                )
                return
            if owner >= 0:
                store_i64(load_i64(home + 8 * owner) + 1, home + 8 * owner)
    for owner in range(owners):
        store_i64(start, cursors + 8 * owner)
        start += load_i64(home + 8 * owner) * load_i64(p + 8 * SLICES)
    for row in range(rows):
        for k in range(slots):
            owner, place = _owner(p, row, k), -1
            if owner >= 0:
                place = load_i64(cursors + 8 * owner)
                store_i64(place + 1, cursors + 8 * owner)
            store_i64(place, load_i64(p + 8 * PLACES) + 8 * (row * slots + k))


@njit(error_model="numpy")
def _pick(p: int) -> None:
    """Pairs of the experts here, from the rows of all ranks; then where own results will lie."""
    n, row, ranks = 0, 0, load_i64(p + 8 * RANKS)
    for rank in range(ranks):
        before = n
        for _ in range(load_i64(p + 8 * (TABLE + rank))):
            n = _pick_row(p, row, n)
            row += 1
        store_i64(n - before, p + 8 * (TABLE + ranks + rank))
    for pair in range(n, _rounded(n)):
        store_i32(-1, load_i64(p + 8 * PAIR_IDS) + pair * load_i64(p + 8 * PAIR_STRIDE))
    store_i64(-1, p + 8 * WRONG)
    _plan_home(p)


def pairs_entry(p: int) -> None:
    """One of the two."""
    if load_i64(p + 8 * OPERATION) == SEND:
        _send(p)
    else:
        _pick(p)


class CompiledPairs:
    """`PairKernel` over these tensors, which it keeps alive; `ranks` bring rows. Raises ValueError for wrong dtypes."""

    __slots__ = ("_from", "_launch", "_limit", "_memory", "_ranks", "_words")

    def __init__(self, runtime: Runtime, memory: PairTensors, rule: PairRule, ranks: int) -> None:
        self._memory, self._ranks = memory, ranks
        self._limit = rule.per_rank * rule.owners
        self._from = torch.empty(len(memory.pairs.x), dtype=torch.int64)
        places = memory.places
        if places.dtype != torch.int64 or not places.is_contiguous():
            raise ValueError(f"places must be contiguous int64, got {places.dtype}")
        values = {
            SLOTS: places.shape[1],
            ROW_BYTES: memory.own.x.shape[1] * memory.own.x.element_size(),
            **_fields(memory.own, OWN_X),
            **_fields(memory.all, ALL_X),
            **_fields(memory.pairs, PAIR_X),
            PLACES: places.data_ptr(),
            FIRST: rule.first,
            PER_RANK: rule.per_rank,
            OWNERS: rule.owners,
            SLICES: rule.slices,
            WEIGHTS_ON_INPUT: int(rule.weights_on_input),
            RANKS: ranks,
        }
        size = TABLE + 2 * ranks + 2 * rule.owners
        # There is no team to enter, so the entry stands in for the worker as well.
        self._launch = runtime.launch(pairs_entry, pairs_entry, values, size, (memory, self._from))
        self._words: Any = memoryview(cast("Any", self._launch.block.numpy()))

    def send(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> None:
        own, words = self._memory.own, self._words
        for given, travels in ((x, own.x), (weights, own.weights), (ids, own.ids)):
            if given.dtype != travels.dtype or given.shape[1:] != travels.shape[1:] or given.stride(1) != 1:
                raise ValueError(
                    f"rows must be {travels.dtype} {tuple(travels.shape)}, got {tuple(given.shape)}"
                )
        if len(x) > len(own.x) or not len(x) == len(weights) == len(ids):
            raise ValueError(
                f"{len(x)} rows, {len(weights)} of weights and {len(ids)} of ids; there is room for {len(own.x)}"
            )
        words[X], words[X_STRIDE] = x.data_ptr(), x.stride(0) * x.element_size()
        words[WEIGHTS], words[WEIGHTS_STRIDE] = weights.data_ptr(), weights.stride(0) * 4
        words[IDS], words[IDS_STRIDE] = ids.data_ptr(), ids.stride(0) * 4
        words[ROWS], words[OPERATION] = len(x), SEND
        self._launch()

    def pick(self, sizes: Sequence[int], own: int) -> Picked:
        words, memory, ranks = self._words, self._memory, self._ranks
        rows = sum(sizes)
        if rows > len(memory.all.x) or own > len(memory.own.x):
            raise ValueError(
                f"{rows} rows of all ranks and {own} own ones; there is room for {len(memory.all.x)} "
                f"and {len(memory.own.x)}"
            )
        for rank, size in enumerate(sizes):
            words[TABLE + rank] = size
        copied = rows * words[SLOTS] * words[ROW_BYTES] <= _MOST_COPIED
        words[ROWS], words[OPERATION] = own, PICK
        words[FROM] = 0 if copied else self._from.data_ptr()
        self._launch()
        if words[WRONG] >= 0:
            raise no_expert(words[WRONG], self._limit)
        brought = words[TABLE + ranks : TABLE + 2 * ranks].tolist()
        home = words[TABLE + 2 * ranks : TABLE + 2 * ranks + words[OWNERS]].tolist()
        if not copied:
            n = sum(brought)
            torch.index_select(memory.all.x, 0, self._from[:n], out=memory.pairs.x[:n])
        return Picked(brought, home)


def _fields(rows: RowTensors, first: int) -> dict[int, int]:
    """Addresses of x, weights and ids from field `first` on, and the stride that they share."""
    if rows.weights.dtype != torch.float32 or rows.ids.dtype != torch.int32:
        raise ValueError(
            f"weights and ids must be fp32 and int32, got {rows.weights.dtype}, {rows.ids.dtype}"
        )
    strides = {t.stride(0) * t.element_size() for t in (rows.x, rows.weights, rows.ids)}
    assert len(strides) == 1, "rows travel whole"
    addresses = (rows.x, rows.weights, rows.ids)
    return {first + i: t.data_ptr() for i, t in enumerate(addresses)} | {first + 3: strides.pop()}
