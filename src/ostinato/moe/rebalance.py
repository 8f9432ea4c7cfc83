"""Moves experts between ranks while they serve, so that measured load becomes even.

    every so many steps: loads of all ranks ─▶ balance ─▶ weights travel to their new slots ─▶ the map is rewritten

Between two steps, on all ranks at once; requests go on, and so do captured graphs: weights and map stay at their
addresses. Knows nothing of routers or requests. Invariants: all ranks plan from the same gathered loads; an expert's
weights are the same wherever they lie, so outputs do not change; load is kept by expert, however often slots change.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ostinato.moe.balance import Slots, balance, evenness, logical_load
from ostinato.moe.load import ExpertLoad
from ostinato.moe.placement import ExpertPlacement
from ostinato.ops.opset import PackedExperts
from ostinato.parallel.rendezvous import World


@dataclass(slots=True)
class PlacedLayer:
    """Experts of one layer as this rank holds them; `slots` are those of all ranks."""

    layer_id: int
    slots: Slots
    placement: ExpertPlacement
    experts: PackedExperts


class Transfer(NamedTuple):
    """Weights that go from a slot of one expert-parallel rank to one of another, or of its own."""

    source: int
    source_slot: int
    target: int
    target_slot: int


def transfers(before: Slots, after: Slots, num_ranks: int) -> list[Transfer]:
    """What has to move; from the own rank where it has the expert, else from the holder that sends least so far."""
    room = len(before) // num_ranks
    sent = [0] * num_ranks
    found = []
    for i, expert in enumerate(after):
        if before[i] == expert:
            continue
        target = i // room
        holders = [j for j, e in enumerate(before) if e == expert]
        near = [j for j in holders if j // room == target]
        source = near[0] if near else min(holders, key=lambda j: (sent[j // room], j))
        if not near:
            sent[source // room] += 1
        found.append(Transfer(source // room, source % room, target, i % room))
    return found


@dataclass(slots=True)
class Rebalancer:
    """Counts steps, and rebalances after every `interval` of them; 0 for never by itself.

    past: load by expert [layers, experts] of slots that are no more, this rank's own.
    """

    world: World
    load: ExpertLoad
    layers: list[PlacedLayer]
    num_experts: int
    interval: int = 0
    steps: int = 0
    moved: int = 0
    rebalanced: int = 0
    past: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.past = torch.zeros(self.load.counts.shape[0], self.num_experts, dtype=torch.int64)

    def tick(self) -> None:
        """A step begins, on all ranks."""
        if self.interval and self.steps and self.steps % self.interval == 0:
            self.rebalance()
        self.steps += 1

    def rebalance(self) -> None:
        """Gather loads, place experts anew, move weights. All ranks call it together."""
        own = self.load.snapshot()
        parts = torch.empty(self.world.world.size, *own.shape, dtype=own.dtype)
        self.world.world.all_gather(own, parts)
        total = parts.sum(0).tolist()
        self.past += self._by_expert(own)
        self.load.reset()
        ranks = self.world.topology.ep
        for layer in self.layers:
            load = logical_load(total[layer.layer_id], layer.slots, self.num_experts)
            if any(load):
                planned = balance(load, len(layer.slots), ranks, layer.slots)
                if planned.evenness > evenness(load, layer.slots, ranks):
                    self._move(layer, planned.slots)
        self.rebalanced += 1

    def _move(self, layer: PlacedLayer, slots: Slots) -> None:
        topology = self.world.topology
        moves = transfers(layer.slots, slots, topology.ep)
        here = topology.ep_rank
        away = [m for m in moves if m.source == here != m.target]
        away.sort(key=lambda m: m.target)  # stable, so each receiver finds its own in the order of its slots
        coming = [m for m in moves if m.target == here != m.source]
        coming.sort(key=lambda m: m.source)
        within = [m for m in moves if m.target == here == m.source]
        for tensor in layer.experts.by_expert:
            rows = tensor.view(tensor.shape[0], -1)
            # Copies first: a slot may be given away and filled in the same move.
            send = rows[_slots(away, 1)]
            kept = rows[_slots(within, 1)]
            recv = torch.empty(len(coming), rows.shape[1], dtype=rows.dtype)
            self.world.world.all_to_all(send, self._counts(away, 2), recv, self._counts(coming, 0))
            rows[_slots(coming, 3)] = recv
            rows[_slots(within, 3)] = kept
        layer.placement.rewrite(slots)
        layer.slots = slots
        self.moved += sum(m.source != m.target for m in moves)

    def _counts(self, moves: list[Transfer], end: int) -> list[int]:
        """Moves by the rank at their `end` (a field of Transfer) that holds the same slices of experts as this one."""
        topology = self.world.topology
        counts = [0] * topology.tp
        for move in moves:
            counts[move[end] * topology.moe_tp + topology.moe_tp_rank] += 1
        return counts

    def _by_expert(self, counts: torch.Tensor) -> torch.Tensor:
        rows = torch.zeros(counts.shape[0], self.num_experts, dtype=torch.int64)
        for layer in self.layers:
            rows[layer.layer_id] = torch.tensor(
                logical_load(counts[layer.layer_id].tolist(), layer.slots, self.num_experts)
            )
        return rows

    def expert_load(self) -> torch.Tensor:
        """This rank's load by expert [layers, experts] since it started."""
        return self.past + self._by_expert(self.load.snapshot())

    def stats(self) -> dict[str, Any]:
        """Plain values: where experts lie now, how even the load since the last move is, and what was moved."""
        counts, ranks = self.load.snapshot().tolist(), self.world.topology.ep
        even = [
            evenness(logical_load(counts[p.layer_id], p.slots, self.num_experts), p.slots, ranks)
            for p in self.layers
        ]
        return {
            "slots": [list(layer.slots) for layer in self.layers],
            "evenness": even,
            "rebalanced": self.rebalanced,
            "moved": self.moved,
        }


def _slots(moves: list[Transfer], end: int) -> torch.Tensor:
    return torch.tensor([move[end] for move in moves], dtype=torch.int64)
