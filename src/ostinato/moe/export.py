"""Routed expert ids handed out of the graph: which experts each row chose, per layer, in logical numbering.

The buffer lives at a fixed address and is written by the post-process, after the mask. Knows nothing of
routers. Invariant: every row that is not a real row of the last step reads -1, on every device and past the
step's width too.
"""

from __future__ import annotations

import torch

from ostinato.moe.mask import SENTINEL


class RoutedExpertsExport:
    """Logical routed ids int32 [num_layers, max_num_tokens, num_routed] of the last step."""

    def __init__(
        self, num_layers: int, max_num_tokens: int, num_routed: int, device: torch.device | str = "cpu"
    ) -> None:
        shape = (num_layers, max_num_tokens, num_routed)
        self.buffer = torch.full(shape, SENTINEL, dtype=torch.int32, device=device)

    def record(self, layer_id: int, masked: torch.Tensor) -> None:
        """Take over one layer's masked logical ids [N, num_routed]. Device code; raises ValueError if N is
        too large."""
        rows = masked.shape[0]
        layer = self.buffer[layer_id]
        if rows > layer.shape[0]:
            raise ValueError(
                f"the export buffer holds {layer.shape[0]} rows, the step has {rows}; make it larger"
            )
        layer[:rows].copy_(masked)
        layer[rows:].fill_(SENTINEL)

    def read(self, num_tokens: int) -> torch.Tensor:
        """A host copy [num_layers, num_tokens, num_routed] of the leading rows."""
        return self.buffer[:, :num_tokens].to("cpu", copy=True)
