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
from ostinato.moe.home import Home
from ostinato.moe.pairs import Homecoming, check_distinct, plan_home
from ostinato.ops.pairs import rounded_pairs

_NOBODY = np.int32(-1)


@dataclass(frozen=True, slots=True, eq=False)
class AllToAllDispatcher:
    """`Dispatcher` by sending; `home` is sharded.

    capacity: slots that each rank may send to each other in a step, fewer where the step's rows cannot need as many;
    None to tell the counts first. Raises ParallelError when a step needs more, with the number that did not fit;
    `stats` adds them up.
    """

    home: Home
    capacity: int | None = None
    _ep_ranks: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        assert self.home.sharded, "ranks that share rows each send a slice"
        object.__setattr__(self, "_ep_ranks", self.home.topology.ep_rank_of_each())

    def kernel(self, experts: Kernel) -> Kernel:
        return self.home.kernel(experts)

    def stats(self) -> dict[str, int]:
        b = self.home.buffers
        return {"most_slots": b.most_slots, "overflows": b.overflows} | (
            {} if self.capacity is None else {"capacity": self.capacity}
        )

    def dispatch(
        self,
        stream: Stream,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        out: torch.Tensor,
    ) -> Dispatched:
        b, topology, slots = self.home.buffers, self.home.topology, topk_ids.shape[1]
        room = self._room(slots)
        stream.outside(self._send, x, topk_weights, topk_ids, room)
        n = rounded_pairs(sum(self.home.widths.rows) * slots if room is None else room * topology.tp)
        return Dispatched(b.pairs.x[:n], b.pairs.weights[:n], b.pairs.ids[:n], b.results[:n])

    def combine(self, stream: Stream, dispatched: Dispatched, out: torch.Tensor) -> None:
        stream.outside(self._bring_home, out)

    def _room(self, slots: int) -> int | None:
        """Slots that each rank sends to each other in the step in hand, of `slots` per row; None: as many as it has.

        From the widths of the step, so that it is the same on all ranks, and at each replay of a captured step.
        """
        if self.capacity is None:
            return None
        rows = -(-max(self.home.widths.rows) // self.home.topology.attn_tp)
        return min(self.capacity, most_between(rows, slots, self.home.share.per_rank))

    def _send(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, room: int | None) -> None:
        b, topology = self.home.buffers, self.home.topology
        start, count = self.home.own_rows(len(x))
        own = np.ascontiguousarray(ids[start : start + count].numpy())
        check_distinct(own)
        home = plan_home(self.home.share.owners(own), topology)
        # Told first, checked after: a rank that raised before the collective would leave the others waiting.
        outgoing = [home.counts[ep_rank] for ep_rank in self._ep_ranks]
        told = torch.empty(topology.tp, topology.tp, dtype=torch.int64)
        counts = torch.tensor(outgoing, dtype=torch.int64)
        self.home.world.all_gather(counts, told)
        self._check_room(told, room)
        order = self._layout(home, outgoing, room)
        self._pack(x[start : start + count], weights[start : start + count], own, order)
        sent = outgoing if room is None else [room] * topology.tp
        arriving = told[:, topology.rank].tolist() if room is None else sent
        self.home.world.all_to_all(b.gathered.data[: sum(sent)], sent, b.pairs.data, arriving)
        b.close_pairs(sum(arriving))
        self._plan(home, own, weights[start : start + count], sent, arriving, room)
        b.computed.count(int(told[:, topology.rank].sum()), len(home.order))

    def _check_room(self, told: torch.Tensor, room: int | None) -> None:
        """Refuse, on every rank alike, a step in which some rank gets more than there is room for."""
        b = self.home.buffers
        b.most_slots = max(b.most_slots, int(told.max()))
        needed, there = (told.sum(0), len(b.pairs.data)) if room is None else (told, room)
        over = int((needed - there).clamp_min(0).sum())
        if over:
            b.overflows += over
            where, most = int(needed.reshape(-1, needed.shape[-1]).amax(0).argmax()), int(needed.max())
            raise ParallelError(
                f"{over} slots do not fit: rank {where} gets up to {most}, there is room for {there}; raise "
                f"dispatch_capacity to {most} or more, or leave it out for as many as there can be"
            )

    def _layout(self, home: Homecoming, outgoing: list[int], room: int | None) -> Any:
        """Flat slot at each place of the outgoing buffer, -1 for unused ones."""
        starts = np.concatenate(([0], np.cumsum(home.counts))).tolist()
        parts = []
        for rank, owner in enumerate(self._ep_ranks):
            part = home.order[starts[owner] : starts[owner + 1]]
            if room is not None:
                unused = np.full(room - outgoing[rank], _NOBODY, dtype=part.dtype)
                part = np.concatenate((part, unused))
            parts.append(part)
        return np.concatenate(parts)

    def _pack(self, x: torch.Tensor, weights: torch.Tensor, own: Any, order: Any) -> None:
        """Write the outgoing slots; `own` [count, K] are ids, `order` their flat slots."""
        b, n, slots = self.home.buffers, len(order), own.shape[1]
        parcel = b.gathered
        flat = np.where(order < 0, 0, order)
        if n and len(own):
            local = own.reshape(-1)[flat] % self.home.share.per_rank
            parcel.ids_host[:n, 0] = np.where(order < 0, _NOBODY, local)
            scale = weights.numpy().reshape(-1)[flat] if self.home.weights_on_input else 1.0
            parcel.weights_host[:n, 0] = scale
            torch.index_select(x, 0, torch.from_numpy(flat // slots), out=parcel.x[:n])
        elif n:
            parcel.ids_host[:n] = _NOBODY

    def _plan(
        self,
        home: Homecoming,
        own: Any,
        weights: torch.Tensor,
        sent: list[int],
        arriving: list[int],
        room: int | None,
    ) -> None:
        """What goes back is what came, so the counts change sides."""
        b, topology = self.home.buffers, self.home.topology
        places = home.places
        if room is not None:  # results of owner e lie from its first rank's share on
            owners = self.home.share.owners(own)
            starts = np.concatenate(([0], np.cumsum(home.counts)[:-1])) * topology.moe_tp
            within = places - starts[owners]
            places = np.where(owners < 0, -1, within + owners * topology.moe_tp * room)
            b.owner_counts = (room,) * topology.ep
        else:
            b.owner_counts = home.counts
        cast("Any", b.places.numpy())[: len(own)] = places
        b.send.weights[: len(own)] = weights
        b.counts_out, b.counts_home = arriving, sent

    def _bring_home(self, out: torch.Tensor) -> None:
        self.home.bring(self.home.buffers.results, out)


def most_between(rows: int, top_k: int, per_rank: int) -> int:
    """Slots that `rows` rows can send to one rank: their experts are distinct, and it holds `per_rank` of them."""
    return rows * min(top_k, per_rank)
