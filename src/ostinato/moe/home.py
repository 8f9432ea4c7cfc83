"""A rank's own rows: which of them it brings to a dispatch, and how their results come home.

    own slice of the rows ──▶ (some way to the experts and back) ──all_to_all──▶ own slots, in order ──combine──▶ out

What all dispatchers between ranks have in common; they differ in how rows get to the experts. Knows nothing of routers.
Invariant: a slot's result is added here exactly once, in slot order, whatever way it came.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ostinato.graphs.stream import Kernel
from ostinato.moe.pairs import (
    BoundCalls,
    ExpertShare,
    PairBuffers,
    PairsKernel,
    ReferencePairs,
    StepWidths,
    add_slices,
)
from ostinato.ops.opset import OpSet
from ostinato.ops.pairs import PairKernel, PairRule
from ostinato.padding import attn_tp_shard_bounds
from ostinato.parallel.collectives import Group
from ostinato.parallel.topology import Topology


@dataclass(frozen=True, slots=True, eq=False)
class Home:
    """The parts of a dispatch over all ranks of `world`; `attn` are those that share this rank's rows.

    weights_on_input: routing weights scale the experts' inputs, so results are added as they are. sharded: ranks that
    share rows each bring and fetch their own slice of them, and then give it to each other.
    """

    world: Group
    attn: Group
    share: ExpertShare
    ops: OpSet
    buffers: PairBuffers
    widths: StepWidths
    weights_on_input: bool = False
    sharded: bool = False
    pairs: PairKernel = field(init=False)
    combine: BoundCalls = field(init=False)

    def __post_init__(self) -> None:
        share, topology = self.share, self.share.topology
        rule = PairRule(share.first, share.per_rank, topology.ep, topology.moe_tp, self.weights_on_input)
        made = self.ops.pair_kernel(self.buffers.memory, rule, topology.tp)
        object.__setattr__(self, "combine", BoundCalls(self.ops.combine_slots))
        object.__setattr__(self, "pairs", made or ReferencePairs(self.buffers, share, rule))

    @property
    def topology(self) -> Topology:
        return self.share.topology

    def kernel(self, experts: Kernel) -> Kernel:
        """The experts' kernel over as many pairs as arrive."""
        return PairsKernel(self.buffers, experts)

    def own_rows(self, rows: int) -> tuple[int, int]:
        """(first, count) of the rows that this rank brings, among those that it shares."""
        topology = self.topology
        return attn_tp_shard_bounds(
            rows, attn_tp_rank=topology.attn_tp_rank, attn_tp_size=topology.attn_tp, sharded=self.sharded
        )

    def bring(self, results: torch.Tensor, out: torch.Tensor) -> None:
        """`results` [pairs, H] go home by the counts in `buffers`; those of own rows are summed into out [T, H]."""
        b = self.buffers
        start, count = self.own_rows(len(out))
        self.world.all_to_all(results, b.counts_out, b.home, b.counts_home)
        add_slices(b.home, b.owner_counts, self.topology.moe_tp)
        self.combine.run((out.data_ptr(), len(out)), lambda: self._own_slots(out[start : start + count]))
        if self.sharded and self.attn.size > 1:
            self.attn.all_gather_rows(out[start : start + count], [count] * self.attn.size, out)

    def _own_slots(self, own: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What `combine_slots` takes to sum the results of own rows into `own`."""
        b, count = self.buffers, len(own)
        weights = b.ones[:count] if self.weights_on_input else b.send.weights[:count]
        return b.home, b.places[:count], weights, own
