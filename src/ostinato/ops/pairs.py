"""What a kernel for pairs is: rows travel to experts, and one row with one of its slots is a pair.

    own rows ─ send ─▶ (a transport) ─▶ rows of all ranks ─ pick ─▶ pairs of the experts here; places of own results

Host work on small integers, once a layer, so an op set may compile it; `moe.pairs` has the reference. Knows nothing of
ranks but their number. Invariant: pairs come in the order of rows, then of slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ostinato.errors import ParallelError


@dataclass(frozen=True, slots=True, eq=False)
class RowTensors:
    """Rows as they travel: x [R, H], weights fp32 and ids int32 [R, K]; each contiguous within a row."""

    x: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PairTensors:
    """Fixed memory of a dispatch: `own` rows, those of `all` ranks, `pairs` (K = 1), and `places` int64 [R, K]."""

    own: RowTensors
    all: RowTensors
    pairs: RowTensors
    places: torch.Tensor


@dataclass(frozen=True, slots=True)
class PairRule:
    """Experts first, first + 1, … are here, `per_rank` of them on each of `owners` ranks, each a slice of `slices`.

    weights_on_input: pairs bring their routing weight along, else 1.
    """

    first: int
    per_rank: int
    owners: int
    slices: int = 1
    weights_on_input: bool = False


@dataclass(frozen=True, slots=True)
class Picked:
    """`brought`: pairs here by who brought their row; `home`: own slots by the owner of their expert."""

    brought: list[int]
    home: list[int]


class PairKernel(Protocol):
    """Of one dispatch, over its `PairTensors`."""

    def send(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> None:
        """own = these rows: x [T, H], weights fp32 and ids int32 [T, K]."""
        ...

    def pick(self, sizes: Sequence[int], own: int) -> Picked:
        """From sizes[r] rows of each rank r in `all`, and from the first `own` of the own rows.

        pairs: the row, weight and local id of every slot whose expert is here; ids -1 up to the next round number.
        places: for each own slot, where its result will lie, -1 for nobody. Results lie by owner, `slices` times each,
        then by row and slot. Raises ParallelError for an own id that is no expert.
        """
        ...


def rounded_pairs(n: int) -> int:
    """A number of pairs to run that is one of few: kernels are bound to shapes."""
    step = 8
    while n > 8 * step:
        step *= 2
    return -(-n // step) * step


def no_expert(expert: int, limit: int) -> ParallelError:
    """The error for an id at or past `limit`."""
    return ParallelError(f"expert id {expert} is outside 0..{limit - 1}; the router is broken")
