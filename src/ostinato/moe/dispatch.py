"""How rows travel between the router and the experts: the seam between MoE layers and parallel layouts.

A dispatcher gets the rows of this rank with their masked ids and hands out the rows that this rank's experts
compute; combine brings the results home. Knows nothing of routers or weights. Invariant: id -1 goes nowhere,
so pads cost no transfer, and the buffers it hands out stay at fixed addresses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from ostinato.graphs.stream import Kernel, Stream


@dataclass(frozen=True, slots=True, eq=False)
class Dispatched:
    """Work for this rank's experts: x [N, H], topk_weights fp32 [N, K], topk_ids int32 [N, K] -> out [N,
    H]."""

    x: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    out: torch.Tensor


class Dispatcher(Protocol):
    """Moves rows to the ranks that hold their experts, and the results back."""

    def dispatch(
        self,
        stream: Stream,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        out: torch.Tensor,
    ) -> Dispatched:
        """Send x [T, H] by topk_ids [T, K]; `out` [T, H] is where the combined result will be wanted."""
        ...

    def kernel(self, experts: Kernel) -> Kernel:
        """What to launch over the work handed out: `experts`, the op set's kernel, or something around it."""
        ...

    def combine(self, stream: Stream, dispatched: Dispatched, out: torch.Tensor) -> None:
        """Bring `dispatched.out` home into `out` [T, H], summed over slots; rows that went nowhere are
        zero."""
        ...

    def stats(self) -> dict[str, int]:
        """What was counted: most_slots of one rank for another in a step, overflows, capacity; where there are."""
        ...


@dataclass(frozen=True, slots=True)
class LocalDispatcher:
    """All experts are here: nothing moves, and the experts write straight into the final buffer."""

    def dispatch(
        self,
        stream: Stream,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        out: torch.Tensor,
    ) -> Dispatched:
        return Dispatched(x, topk_weights, topk_ids, out)

    def kernel(self, experts: Kernel) -> Kernel:
        return experts

    def combine(self, stream: Stream, dispatched: Dispatched, out: torch.Tensor) -> None:
        assert dispatched.out is out, "the experts wrote elsewhere"

    def stats(self) -> dict[str, int]:
        return {}
