"""Where experts live: logical expert -> physical slot, replicas, and the slots of fused shared experts.

Three id spaces, three types, so that a remap cannot happen twice:

    LogicalIds  --to_physical-->  PhysicalIds  --to_slots-->  SlotIds
    what the router says          routed slots,               what the experts kernel indexes:
                                  what load is counted on     shared slots in between

Knows nothing of routers or padding. Invariant: a negative id comes through every step as exactly itself, and
never indexes a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch

from ostinato.errors import ConfigError

OUT_OF_TABLE: Final = torch.iinfo(torch.int32).max
"""Physical id of a logical id past the table: no kernel can mistake it for an expert."""


@dataclass(frozen=True, slots=True, eq=False)
class LogicalIds:
    """Expert ids [N, K] in the model's numbering; -1 for nobody."""

    ids: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PhysicalIds:
    """Ids [N, K] of physical routed experts, shared slots not counted; -1 for nobody."""

    ids: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class SlotIds:
    """Ids [N, K] of expert slots as laid out in memory, shared slots in between; -1 for nobody."""

    ids: torch.Tensor


@dataclass(frozen=True, slots=True)
class SharedSlots:
    """Each of `ep_size` ranks keeps its own copies of the `num_shared` shared experts after its routed ones.

    With L = physical routed / ep_size: routed e -> e + (e // L) * S; shared i of rank r -> r * (L + S) + L +
    i.
    """

    ep_size: int
    num_shared: int

    def routed_slot(self, physical: PhysicalIds, num_physical: int) -> SlotIds:
        per_rank = num_physical // self.ep_size
        ids = physical.ids
        rank = torch.div(ids, per_rank, rounding_mode="floor")
        return SlotIds(torch.where(ids < 0, ids, ids + rank * self.num_shared))

    def shared_slot(self, index: int, rank: int, num_physical: int) -> int:
        per_rank = num_physical // self.ep_size
        return rank * (per_rank + self.num_shared) + per_rank + index


@dataclass(frozen=True, slots=True, eq=False)
class ExpertPlacement:
    """The map of one layer's experts; make it with `identity`, `static` or `dynamic`.

    table: int32 [num_logical, max replicas] of physical ids, rows repeated cyclically past their own
    replicas;
        None for the identity.
    num_replicas: int64 [num_logical]; None where every expert has one.
    ep_rank: the rank whose copies of the shared experts this rank's tokens use; one for all ranks that have
    the same rows.
    shared_weight_scale: factor on the weight of shared experts; 1 / ep_size where a later all-reduce sums
    them
        ep_size times.
    """

    num_logical: int
    num_physical: int
    table: torch.Tensor | None = None
    num_replicas: torch.Tensor | None = None
    shared_slots: SharedSlots | None = None
    ep_rank: int = 0
    shared_weight_scale: float = 1.0

    @classmethod
    def identity(cls, num_experts: int) -> ExpertPlacement:
        """Physical id = logical id."""
        return cls(num_experts, num_experts)

    @classmethod
    def static(
        cls, logical_to_physical: Sequence[int], *, num_physical: int, device: torch.device | str = "cpu"
    ) -> ExpertPlacement:
        """One physical expert for each logical one, the nearest replica of this rank for example."""
        return cls.dynamic([[p] for p in logical_to_physical], num_physical=num_physical, device=device)

    @classmethod
    def dynamic(
        cls, replicas: Sequence[Sequence[int]], *, num_physical: int, device: torch.device | str = "cpu"
    ) -> ExpertPlacement:
        """Rows spread over the replicas of an expert by a hash of the row index.

        Ranks that see the same rows pick the same replica, so outputs summed over ranks count an expert once.
        Raises ConfigError for an expert without a replica, or a physical id out of range or given twice.
        """
        listed = [p for row in replicas for p in row]
        wrong = sorted({p for p in listed if not 0 <= p < num_physical or listed.count(p) > 1})
        if wrong:
            raise ConfigError(f"physical experts {wrong} are outside 0..{num_physical - 1} or placed twice")
        empty = [e for e, row in enumerate(replicas) if not row]
        if empty:
            raise ConfigError(f"logical experts {empty} have no physical expert; give each at least one")
        width = max(len(row) for row in replicas)
        table = [[row[i % len(row)] for i in range(width)] for row in replicas]
        return cls(
            num_logical=len(replicas),
            num_physical=num_physical,
            table=torch.tensor(table, dtype=torch.int32, device=device),
            num_replicas=torch.tensor([len(r) for r in replicas], device=device) if width > 1 else None,
        )

    @classmethod
    def of_slots(cls, slots: Sequence[int], num_logical: int) -> ExpertPlacement:
        """From the logical expert of each physical one; `rewrite` may change it later, at the same addresses."""
        made = cls.dynamic(_replicas(slots, num_logical), num_physical=len(slots))
        assert made.table is not None
        # Room for as many replicas as any expert could have.
        width = len(slots) - num_logical + 1
        table = torch.zeros(num_logical, width, dtype=torch.int32)
        counts = torch.ones(num_logical, dtype=torch.int64)
        placed = cls(num_logical, len(slots), table, counts)
        placed.rewrite(slots)
        return placed

    def rewrite(self, slots: Sequence[int]) -> None:
        """Map to other slots from now on, captured graphs included. Host code: call it between steps."""
        assert self.table is not None
        assert self.num_replicas is not None
        rows, width = _replicas(slots, self.num_logical), self.table.shape[1]
        self.table.copy_(torch.tensor([[row[i % len(row)] for i in range(width)] for row in rows]))
        self.num_replicas.copy_(torch.tensor([len(row) for row in rows]))

    def with_shared_slots(
        self, *, ep_size: int, ep_rank: int, num_shared: int, weight_scale: float = 1.0
    ) -> ExpertPlacement:
        """The same routed map, with each rank's shared experts in slots of their own."""
        if not 0 <= ep_rank < ep_size or self.num_physical % ep_size:
            raise ConfigError(
                f"rank {ep_rank} of {ep_size} cannot hold an equal share of {self.num_physical} physical "
                "experts"
            )
        slots = SharedSlots(ep_size, num_shared)
        return replace(self, shared_slots=slots, ep_rank=ep_rank, shared_weight_scale=weight_scale)

    def to_physical(self, logical: LogicalIds) -> PhysicalIds:
        """Physical routed ids int32 [N, K]: new memory, except for the identity, which hands its input on.

        Whatever an id is, the table is indexed within its bounds: pads may hold anything before they are
        masked. Negative ids stay as they are; ids past the table become `OUT_OF_TABLE`.
        """
        if not isinstance(logical, LogicalIds):
            raise TypeError(
                f"to_physical takes LogicalIds, got {type(logical).__name__}: ids are remapped once"
            )
        if self.table is None:
            return PhysicalIds(logical.ids)
        ids = logical.ids.long()
        known = (ids >= 0) & (ids < self.num_logical)
        index = torch.where(known, ids, 0)
        choice = self._replica_choice(index)
        found = self.table.view(-1)[index * self.table.shape[1] + choice]
        missing = torch.where(ids < 0, logical.ids, OUT_OF_TABLE)
        return PhysicalIds(torch.where(known, found, missing).to(torch.int32))

    def to_slots(self, physical: PhysicalIds) -> SlotIds:
        """Slots int32 [N, K] of routed experts; equal to the physical ids unless shared slots lie in
        between."""
        if not isinstance(physical, PhysicalIds):
            raise TypeError(
                f"to_slots takes PhysicalIds, got {type(physical).__name__}: remap the ids first, once"
            )
        if self.shared_slots is None:
            return SlotIds(physical.ids)
        return self.shared_slots.routed_slot(physical, self.num_physical)

    def shared_slot(self, index: int) -> int:
        """Slot of shared expert `index` for the tokens of this rank; past the routed ones without shared
        slots."""
        if self.shared_slots is None:
            return self.num_physical + index
        if not 0 <= index < self.shared_slots.num_shared:
            raise ValueError(f"shared expert {index} is outside 0..{self.shared_slots.num_shared - 1}")
        return self.shared_slots.shared_slot(index, self.ep_rank, self.num_physical)

    def _replica_choice(self, index: torch.Tensor) -> torch.Tensor | int:
        """Which replica each slot [N, K] takes: a hash of the row index (Knuth's multiplicative one) mod
        replicas."""
        if self.num_replicas is None:
            return 0
        row = torch.arange(index.shape[0], device=index.device).unsqueeze(1)
        noise = ((row + 1) * 2654435761 % (1 << 32)) >> 15
        return noise % self.num_replicas[index]


def _replicas(slots: Sequence[int], num_logical: int) -> list[list[int]]:
    """Physical ids of each logical expert."""
    rows: list[list[int]] = [[] for _ in range(num_logical)]
    for physical, logical in enumerate(slots):
        rows[logical].append(physical)
    return rows
