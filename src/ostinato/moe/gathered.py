"""Dispatch by gathering: every rank sees all rows, takes the pairs of its experts, and sends results home.

    own rows ──all_gather_rows──▶ rows of all ranks ──own experts' pairs──▶ experts ──all_to_all──▶ own slots, in order

Rows were routed and masked where they live, so pads arrive with id -1 and cost nothing. With `sharded`, ranks that
share rows each bring and fetch their own slice of them. Knows nothing of routers, nor of how results are added.
Invariant: a pair is computed where its expert is and goes to all that share its row, so nothing is ever reduced twice
or scaled to make up for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ostinato.graphs.stream import Kernel, Stream
from ostinato.moe.dispatch import Dispatched
from ostinato.moe.home import Home
from ostinato.ops.pairs import rounded_pairs


@dataclass(frozen=True, slots=True, eq=False)
class GatheredDispatcher:
    """`Dispatcher` by gathering; `home.sharded` says who brings the rows that ranks share."""

    home: Home
    _ep_ranks: tuple[int, ...] = field(init=False)
    _leaders: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_ep_ranks", self.home.topology.ep_rank_of_each())
        object.__setattr__(self, "_leaders", self.home.topology.leader_of_each())

    def kernel(self, experts: Kernel) -> Kernel:
        return self.home.kernel(experts)

    def stats(self) -> dict[str, int]:
        return {}

    def dispatch(
        self,
        stream: Stream,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        out: torch.Tensor,
    ) -> Dispatched:
        rows, topology = self.home.widths.rows, self.home.topology
        assert rows[topology.attn_dp_rank] == len(x), f"{rows} planned, {len(x)} rows are here"
        stream.outside(self._gather, x, topk_weights, topk_ids, self._sizes(rows))
        b, pairs = self.home.buffers, self.home.buffers.pairs
        n = rounded_pairs(sum(rows) * topk_ids.shape[1])
        return Dispatched(pairs.x[:n], pairs.weights[:n], pairs.ids[:n], b.results[:n])

    def combine(self, stream: Stream, dispatched: Dispatched, out: torch.Tensor) -> None:
        stream.outside(self._bring_home, out)

    def _sizes(self, rows: tuple[int, ...]) -> tuple[int, ...]:
        """Rows that each rank brings to the gather: its slice, or all of them from the leader alone."""
        topology, sizes = self.home.topology, []
        for rank in range(topology.tp):
            there = topology.at(rank)
            shared = rows[there.attn_dp_rank]
            sizes.append(shared // there.attn_tp if self.home.sharded else shared * there.is_leader)
        return tuple(sizes)

    def _gather(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, sizes: tuple[int, ...]
    ) -> None:
        home, b = self.home, self.home.buffers
        start, count = home.own_rows(len(x))
        stop = start + count
        home.pairs.send(x[start:stop], weights[start:stop], ids[start:stop])
        home.world.all_gather_rows(b.send.data, sizes, b.gathered.data)
        picked = home.pairs.pick(sizes, count)
        brought, fetched = picked.brought, picked.home
        b.num_pairs = sum(brought)
        b.computed.count(b.num_pairs, sum(fetched))
        # What a leader brought goes to all that share its rows.
        b.counts_out = brought if home.sharded else [brought[leader] for leader in self._leaders]
        b.owner_counts = tuple(fetched)
        b.counts_home = [fetched[ep_rank] for ep_rank in self._ep_ranks]

    def _bring_home(self, out: torch.Tensor) -> None:
        self.home.bring(self._outgoing(), out)

    def _outgoing(self) -> torch.Tensor:
        """Results in the order of the ranks that get them; ranks that share rows get the same ones."""
        b, topology = self.home.buffers, self.home.topology
        if self.home.sharded or topology.attn_tp == 1:
            return b.results
        begin, to = 0, 0
        for dp_rank in range(topology.dp):
            count = b.counts_out[topology.ranks_of_dp(dp_rank)[0]]
            for _ in range(topology.attn_tp):
                b.staged[to : to + count].copy_(b.results[begin : begin + count])
                to += count
            begin += count
        return b.staged
