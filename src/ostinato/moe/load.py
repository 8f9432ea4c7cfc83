"""Expert load: how many (row, slot) pairs each physical expert was given, counted on device inside the graph; and, on
ranks that exchange rows, how many each rank computes.

The counters see what the post-process hands over after the mask, so pads never count; a device flag decides
whether a step counts at all, so warm-up, capture and dummy steps are left out although the captured graph is
frozen. Knows nothing of routers. Invariant: per layer, the sum of counts is real rows * routed experts per
token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ostinato.moe.placement import PhysicalIds


@dataclass(slots=True)
class ExpertRows:
    """Pairs of one rank, all layers together, that dispatchers count while `live`; pads are in neither.

    computed: those that its experts ran, wherever their rows live. fetched: those whose results came home to it.
    """

    computed: int = 0
    fetched: int = 0
    live: bool = False

    def count(self, computed: int, fetched: int) -> None:
        if self.live:
            self.computed += computed
            self.fetched += fetched

    def as_dict(self) -> dict[str, int]:
        """Plain numbers for `stats()`."""
        return {"computed": self.computed, "fetched": self.fetched}


class ExpertLoad:
    """Counters int64 [num_layers, num_experts] (physical routed experts) at a fixed address.

    Starts switched off: what runs before serving is never counted. `rows`: what this rank computes, with ranks beside
    it. leads: of ranks that share rows one counts their pairs.
    """

    def __init__(
        self, num_layers: int, num_experts: int, device: torch.device | str = "cpu", *, leads: bool = True
    ) -> None:
        self.counts = torch.zeros(num_layers, num_experts, dtype=torch.int64, device=device)
        self.live = torch.zeros((), dtype=torch.int64, device=device)
        self.rows = ExpertRows()
        self._leads = leads
        self._wanted = False

    def set_live(self, live: bool) -> None:
        """Count the steps launched from now on, or not. Host code: call it between steps, not inside a
        graph."""
        self._wanted = live
        self._switch(live)

    def rehearse(self, on: bool) -> None:
        """What runs until it is called again with False is no step and is not counted, whatever `set_live` said."""
        self._switch(self._wanted and not on)

    def _switch(self, live: bool) -> None:
        self.live.fill_(int(live and self._leads))
        self.rows.live = live

    def record(self, layer_id: int, routed: PhysicalIds) -> None:
        """Add one layer's routed ids [N, K]; -1 counts for nobody. Device code: no host read, fixed
        shapes."""
        if not isinstance(routed, PhysicalIds):
            raise TypeError(
                f"load is counted on PhysicalIds, got {type(routed).__name__}; record after the remap"
            )
        ids = routed.ids.reshape(-1).long()
        one_or_none = (ids >= 0).long() * self.live
        self.counts[layer_id].scatter_add_(0, ids.clamp_min(0), one_or_none)

    def snapshot(self) -> torch.Tensor:
        """A copy of the counters on the host."""
        return self.counts.to("cpu", copy=True)

    def reset(self) -> None:
        """Set all counters to zero, at the same address."""
        self.counts.zero_()
