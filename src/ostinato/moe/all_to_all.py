"""Dispatch all-to-all: each row travels only to the ranks that hold its experts, and results travel back.

    own slots, sorted by owner ──all_to_all──▶ pairs here ──experts──▶ results ──all_to_all──▶ own slots, in order

Two forms: uneven, by the counts that ranks tell each other first, and of fixed `capacity`, where every rank sends as
many slots to every other, unused ones marked -1, so that all shapes are fixed. Ranks that share rows each send a slice
of them. Knows nothing of routers. Invariant: ids of a row are distinct before anything is written, and what does not
fit is counted and raised on every rank, never written over a neighbour.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch

from ostinato.errors import ParallelError
from ostinato.graphs.stream import Kernel, Stream
from ostinato.moe.dispatch import Dispatched
from ostinato.moe.pairs import (
    ExpertShare,
    Homecoming,
    PairBuffers,
    PairsKernel,
    StepWidths,
    add_slices,
    check_distinct,
    plan_home,
    rounded_pairs,
)
from ostinato.ops.opset import OpSet
from ostinato.padding import attn_tp_shard_bounds
from ostinato.parallel.collectives import Group

_NOBODY = np.int32(-1)


@dataclass(frozen=True, slots=True, eq=False)
class AllToAllDispatcher:
    """`Dispatcher` over all ranks of `world`; `attn` are those that share this rank's rows.

    capacity: slots that each rank may send to each other in a step; None to tell the counts first. Raises ParallelError
    when a step needs more, with the number that did not fit; `buffers.overflows` adds them up.
    """

    world: Group
    attn: Group
    share: ExpertShare
    ops: OpSet
    buffers: PairBuffers
    widths: StepWidths
    weights_on_input: bool = False
    capacity: int | None = None
    _ep_ranks: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_ep_ranks", self.share.topology.ep_rank_of_each())

    def kernel(self, experts: Kernel) -> Kernel:
        return PairsKernel(self.buffers, experts)

    def dispatch(
        self,
        stream: Stream,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        out: torch.Tensor,
    ) -> Dispatched:
        stream.outside(self._send, x, topk_weights, topk_ids)
        pairs, topology = self.buffers.pairs, self.share.topology
        if self.capacity is None:
            n = rounded_pairs(sum(self.widths.rows) * topk_ids.shape[1])
        else:
            n = rounded_pairs(self.capacity * topology.tp)
        return Dispatched(pairs.x[:n], pairs.weights[:n], pairs.ids[:n], self.buffers.results[:n])

    def combine(self, stream: Stream, dispatched: Dispatched, out: torch.Tensor) -> None:
        stream.outside(self._bring_home, out)

    def _own_rows(self, rows: int) -> tuple[int, int]:
        topology = self.share.topology
        return attn_tp_shard_bounds(
            rows, attn_tp_rank=topology.attn_tp_rank, attn_tp_size=topology.attn_tp, sharded=True
        )

    def _send(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> None:
        b, topology = self.buffers, self.share.topology
        start, count = self._own_rows(len(x))
        own = np.ascontiguousarray(ids[start : start + count].numpy())
        check_distinct(own)
        home = plan_home(self.share.owners(own), topology)
        # Told first, checked after: a rank that raised before the collective would leave the others waiting.
        outgoing = [home.counts[ep_rank] for ep_rank in self._ep_ranks]
        told = torch.empty(topology.tp, topology.tp, dtype=torch.int64)
        counts = torch.tensor(outgoing, dtype=torch.int64)
        self.world.all_gather(counts, told)
        self._check_room(told)
        order = self._layout(home, outgoing)
        self._pack(x[start : start + count], weights[start : start + count], own, order)
        sent = [self.capacity] * topology.tp if self.capacity is not None else outgoing
        arriving = (
            [self.capacity] * topology.tp if self.capacity is not None else told[:, topology.rank].tolist()
        )
        self.world.all_to_all(self._parcel(sent), sent, b.pairs.data, arriving)
        b.close_pairs(sum(arriving))
        self._plan(home, own, weights[start : start + count], sent, arriving)
        b.computed.count(int(told[:, topology.rank].sum()), len(home.order))

    def _check_room(self, told: torch.Tensor) -> None:
        """Refuse, on every rank alike, a step in which some rank gets more than there is room for."""
        b = self.buffers
        room = len(b.pairs.data) if self.capacity is None else self.capacity
        needed = told.sum(0) if self.capacity is None else told
        over = int((needed - room).clamp_min(0).sum())
        if over:
            b.overflows += over
            where = int((needed - room).reshape(-1, needed.shape[-1]).amax(0).argmax())
            raise ParallelError(
                f"{over} slots do not fit: rank {where} gets up to {int(needed.max())}, there is room for {room}; "
                "give the dispatcher more capacity"
            )

    def _layout(self, home: Homecoming, outgoing: list[int]) -> Any:
        """Flat slot at each place of the outgoing buffer, -1 for unused ones."""
        topology = self.share.topology
        starts = np.concatenate(([0], np.cumsum(home.counts))).tolist()
        parts = []
        for rank in range(topology.tp):
            owner = self._ep_ranks[rank]
            part = home.order[starts[owner] : starts[owner + 1]]
            if self.capacity is not None:
                unused = np.full(self.capacity - outgoing[rank], _NOBODY, dtype=part.dtype)
                part = np.concatenate((part, unused))
            parts.append(part)
        return np.concatenate(parts)

    def _pack(self, x: torch.Tensor, weights: torch.Tensor, own: Any, order: Any) -> None:
        """Write the outgoing slots; `own` [count, K] are ids, `order` their flat slots."""
        b, n, slots = self.buffers, len(order), own.shape[1]
        parcel = b.gathered
        flat = np.where(order < 0, 0, order)
        if n and len(own):
            local = own.reshape(-1)[flat] % self.share.per_rank
            parcel.ids_host[:n, 0] = np.where(order < 0, _NOBODY, local)
            scale = weights.numpy().reshape(-1)[flat] if self.weights_on_input else 1.0
            parcel.weights_host[:n, 0] = scale
            parcel.x[:n] = x[torch.from_numpy(flat // slots)]
        elif n:
            parcel.ids_host[:n] = _NOBODY

    def _parcel(self, sent: list[int]) -> torch.Tensor:
        return self.buffers.gathered.data[: sum(sent)]

    def _plan(
        self, home: Homecoming, own: Any, weights: torch.Tensor, sent: list[int], arriving: list[int]
    ) -> None:
        """What goes back is what came, so the counts change sides."""
        b, topology = self.buffers, self.share.topology
        places = home.places
        if self.capacity is not None:  # results of owner e lie from its first rank's share on
            owners = self.share.owners(own)
            starts = np.concatenate(([0], np.cumsum(home.counts)[:-1])) * topology.moe_tp
            within = places - starts[owners]
            places = np.where(owners < 0, -1, within + owners * topology.moe_tp * self.capacity)
            b.owner_counts = (self.capacity,) * topology.ep
        else:
            b.owner_counts = home.counts
        cast("Any", b.places.numpy())[: len(own)] = places
        b.send.weights[: len(own)] = weights
        b.counts_out, b.counts_home = arriving, sent

    def _bring_home(self, out: torch.Tensor) -> None:
        b = self.buffers
        start, count = self._own_rows(len(out))
        self.world.all_to_all(b.results, b.counts_out, b.home, b.counts_home)
        add_slices(b.home, b.owner_counts, self.share.topology.moe_tp)
        weights = b.ones[:count] if self.weights_on_input else b.send.weights[:count]
        own = out[start : start + count]
        self.ops.combine_slots(b.home, b.places[:count], weights, own)
        if self.attn.size > 1:
            self.attn.all_gather_rows(own, [count] * self.attn.size, out)
