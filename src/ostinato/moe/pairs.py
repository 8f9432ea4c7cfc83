"""Work for experts as pairs: one row and one of its slots, so that results can be added at home in slot order.

    ids [T, K] ──▶ pairs sorted by the rank that holds the expert ──▶ results [pair, H] fp32 ──▶ combine_slots at home

A rank's sum over its own experts would be rounded in another order than the sum over all of them; results of single
pairs are not added before they are all at home, so every layout has the bits of one rank. Host arithmetic on small
integer arrays; knows nothing of transports. Invariant: a pair is computed by one expert-parallel rank, once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import numpy as np
import torch

from ostinato.errors import ParallelError
from ostinato.moe.load import ExpertRows
from ostinato.ops.pairs import PairRule, PairTensors, Picked, RowTensors, no_expert, rounded_pairs
from ostinato.parallel.topology import Topology

Array = np.ndarray[Any, Any]
_LINE = 64


@dataclass(slots=True)
class StepWidths:
    """Rows of every data-parallel rank in the step in hand; the one who plans steps sets them, before each."""

    rows: tuple[int, ...] = (0,)


@dataclass(frozen=True, slots=True)
class ExpertShare:
    """Which physical experts are where: `per_rank` of them on each expert-parallel rank, in order."""

    topology: Topology
    per_rank: int

    @property
    def first(self) -> int:
        """This rank's first physical expert."""
        return self.topology.ep_rank * self.per_rank

    def owners(self, ids: Array) -> Array:
        """Expert-parallel rank of each id, -1 for nobody. Raises ParallelError for an id that is no expert."""
        limit = self.per_rank * self.topology.ep
        if ids.size and int(ids.max()) >= limit:
            raise no_expert(int(ids.max()), limit)
        return cast("Array", ids // self.per_rank)  # which leaves -1 as it is


def check_distinct(ids: Array) -> None:
    """Raise ParallelError when a row [K] of ids [T, K] names an expert twice: buffers are sized for distinct ones."""
    ordered = np.sort(ids, axis=1)
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if twice.any():
        row = int(twice.any(axis=1).argmax())
        raise ParallelError(
            f"row {row} is routed to an expert twice: {ids[row].tolist()}; the router is broken"
        )


@dataclass(frozen=True, slots=True)
class Homecoming:
    """How results come home: `counts` of them from each expert-parallel rank, each sent by its `moe_tp` ranks.

    order [n]: flat slots row * K + k, by owner, then by row and slot. places [T, K]: where a slot's result will lie,
    -1 for nobody; results lie by world rank, so those of one owner `moe_tp` times behind each other.
    """

    counts: tuple[int, ...]
    order: Array
    places: Array


def plan_home(owners: Array, topology: Topology) -> Homecoming:
    """From the owners [T, K] of a rank's own slots."""
    flat = owners.reshape(-1)
    counts = np.bincount(flat[flat >= 0], minlength=topology.ep)
    order = np.argsort(flat, kind="stable")[len(flat) - int(counts.sum()) :]
    starts = np.concatenate(([0], np.cumsum(counts)[:-1]))
    behind = starts * (topology.moe_tp - 1)  # the copies of the owners before
    places = np.full(len(flat), -1, dtype=np.int64)
    places[order] = np.arange(len(order)) + behind[flat[order]]
    return Homecoming(tuple(counts.tolist()), order, places.reshape(owners.shape))


def add_slices(home: torch.Tensor, counts: Sequence[int], moe_tp: int) -> None:
    """Add the results of ranks that hold slices of the same experts, in rank order, into the first's."""
    if moe_tp == 1:
        return
    start = 0
    for count in counts:
        for i in range(1, moe_tp):
            home[start : start + count] += home[start + i * count : start + (i + 1) * count]
        start += count * moe_tp


@dataclass(slots=True)
class Parcel:
    """Rows of x, weights and ids side by side in one buffer of bytes, so that one collective moves them all."""

    data: torch.Tensor
    x: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor
    ids_host: Array = field(repr=False)
    weights_host: Array = field(repr=False)

    @property
    def rows(self) -> RowTensors:
        """Its three tensors."""
        return RowTensors(self.x, self.weights, self.ids)

    @classmethod
    def reserve(cls, rows: int, hidden_size: int, slots: int, dtype: torch.dtype) -> Parcel:
        wide = hidden_size * dtype.itemsize
        wide += -wide % 4
        size = -(-(wide + 8 * slots) // _LINE) * _LINE
        # Untouched memory costs nothing: buffers are as large as the worst routing could need.
        data = torch.empty(max(rows, 1), size, dtype=torch.uint8)
        x = data[:, : hidden_size * dtype.itemsize].view(dtype)
        weights = data[:, wide : wide + 4 * slots].view(torch.float32)
        ids = data[:, wide + 4 * slots : wide + 8 * slots].view(torch.int32)
        return cls(data, x, weights, ids, ids.numpy(), weights.numpy())


@dataclass(slots=True)
class PairBuffers:
    """Everything that dispatch and combine write, shared by all layers: one layer runs after the other.

    send holds own rows; gathered the rows of all ranks, or the slots that go out; pairs the work that landed here;
    results theirs, which go to home. computed: where pairs are counted.
    """

    send: Parcel
    gathered: Parcel
    pairs: Parcel
    results: torch.Tensor
    staged: torch.Tensor
    home: torch.Tensor
    places: torch.Tensor
    ones: torch.Tensor
    num_pairs: int = 0
    overflows: int = 0
    most_slots: int = 0  # that one rank ever had for another
    counts_out: list[int] = field(default_factory=list)
    counts_home: list[int] = field(default_factory=list)
    owner_counts: tuple[int, ...] = ()
    computed: ExpertRows = field(default_factory=ExpertRows)

    @classmethod
    def reserve(
        cls,
        topology: Topology,
        *,
        max_rows: int,
        hidden_size: int,
        top_k: int,
        dtype: torch.dtype,
        all_to_all: bool = False,
        capacity: int | None = None,
        computed: ExpertRows | None = None,
    ) -> PairBuffers:
        """Buffers for steps of up to `max_rows` rows on each data-parallel rank; by `all_to_all`, slots travel instead
        of rows, `capacity` of them between two ranks if given.
        """
        everything = max_rows * topology.dp * top_k
        slots = max_rows * top_k * topology.moe_tp
        if capacity is not None:
            everything = slots = capacity * topology.tp
        pairs = rounded_pairs(everything)
        copies = 0 if all_to_all or topology.attn_tp == 1 else pairs * topology.attn_tp
        travelling = (slots, 1) if all_to_all else (max_rows * topology.dp, top_k)
        return cls(
            send=Parcel.reserve(max_rows, hidden_size, top_k, dtype),
            gathered=Parcel.reserve(travelling[0], hidden_size, travelling[1], dtype),
            pairs=Parcel.reserve(pairs, hidden_size, 1, dtype),
            results=torch.empty(pairs, hidden_size),
            staged=torch.empty(copies, hidden_size),
            home=torch.empty(max(slots, 1), hidden_size),
            places=torch.empty(max_rows, top_k, dtype=torch.int64),
            ones=torch.ones(max_rows, top_k),
            computed=computed or ExpertRows(),
        )

    @property
    def memory(self) -> PairTensors:
        """What a `PairKernel` works on."""
        return PairTensors(self.send.rows, self.gathered.rows, self.pairs.rows, self.places)

    def close_pairs(self, n: int) -> None:
        """Say that the first n pairs are work; those up to the next round number are nobody's."""
        self.num_pairs = n
        cast("Any", self.pairs.ids_host)[n : rounded_pairs(n)] = _NOBODY


_NOBODY = np.int32(-1)
_MOST_CALLS = 256


@dataclass(frozen=True, slots=True, eq=False)
class ReferencePairs:
    """`PairKernel` by NumPy."""

    buffers: PairBuffers
    share: ExpertShare
    rule: PairRule

    def send(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> None:
        own, n = self.buffers.send, len(x)
        own.x[:n].copy_(x)
        own.weights[:n].copy_(weights)
        own.ids[:n].copy_(ids)

    def pick(self, sizes: Sequence[int], own: int) -> Picked:
        b = self.buffers
        local = b.gathered.ids_host[: sum(sizes)] - self.rule.first
        found = np.flatnonzero(local.view(np.uint32) < self.rule.per_rank)  # below 0 is far above
        n, slots = len(found), local.shape[1]
        at = found // slots
        b.pairs.ids_host[:n, 0] = local.reshape(-1)[found]
        weights = b.gathered.weights_host[at, found % slots] if self.rule.weights_on_input else 1.0
        b.pairs.weights_host[:n, 0] = weights
        torch.index_select(b.gathered.x, 0, torch.from_numpy(at), out=b.pairs.x[:n])
        b.close_pairs(n)
        ends = np.searchsorted(at, np.cumsum(sizes)).tolist()
        home = plan_home(self.share.owners(b.send.ids_host[:own]), self.share.topology)
        cast("Any", b.places.numpy())[:own] = home.places
        return Picked(
            [end - begin for begin, end in zip([0, *ends[:-1]], ends, strict=True)], list(home.counts)
        )


class BoundCalls:
    """Calls of one kernel on memory that stays where it is, each bound once to its tensors where the kernel can be."""

    __slots__ = ("_calls", "_kernel")

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._calls: dict[object, Callable[[], object]] = {}

    def run(self, key: object, arguments: Callable[[], tuple[Any, ...]]) -> None:
        """Call it with the arguments that `key` stands for; they are asked for the first time."""
        call = self._calls.get(key)
        if call is None:
            if len(self._calls) >= _MOST_CALLS:
                self._calls.clear()
            bind = getattr(self._kernel, "bind", None)
            made = arguments()
            call = self._calls[key] = bind(*made) if callable(bind) else partial(self._kernel, *made)
        call()


class PairsKernel:
    """The experts' kernel over the pairs there are: their number is known when it runs, not when it is captured."""

    __slots__ = ("_buffers", "_experts")

    def __init__(self, buffers: PairBuffers, experts: Any) -> None:
        self._buffers = buffers
        self._experts = experts

    def __call__(self, *args: Any) -> None:
        """Of x, weights, ids, experts, weights_on_input, out."""
        n = rounded_pairs(self._buffers.num_pairs)
        if n:
            self._experts(*_first_rows(args, n))

    def bind(self, *args: Any) -> BoundPairs:
        """The kernel over these tensors, as many rows of them as there are pairs at each call."""
        return BoundPairs(self._buffers, self._experts, args)


class BoundPairs:
    """A `PairsKernel` bound to tensors that all pairs fit in."""

    __slots__ = ("_arguments", "_buffers", "_calls")

    def __init__(self, buffers: PairBuffers, experts: Any, arguments: tuple[Any, ...]) -> None:
        self._buffers = buffers
        self._arguments = arguments
        self._calls = BoundCalls(experts)

    def __call__(self) -> None:
        n = rounded_pairs(self._buffers.num_pairs)
        if n:
            self._calls.run(n, lambda: _first_rows(self._arguments, n))


def _first_rows(arguments: tuple[Any, ...], n: int) -> tuple[Any, ...]:
    """A kernel's arguments, tensors cut to their first n rows."""
    return tuple(a[:n] if isinstance(a, torch.Tensor) else a for a in arguments)
