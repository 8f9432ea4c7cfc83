"""Linear layers split by columns: each rank computes some outputs in full, then all of them are put side by side.

    x (whole, on every rank) ──own rows of the weight──▶ own columns ──all-gather──▶ all columns, on every rank

Nothing is ever summed over ranks, so an output has the bits that one rank alone would give it; a row-split layer (the
usual second half of a pair) would have to add partial sums, and to gather them first to add them in order. Knows
nothing of models. Invariant: what is gathered was computed by one rank in full.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ostinato.graphs.stream import Stream
from ostinato.graphs.workspace import Workspace
from ostinato.parallel.collectives import Group, all_gather_columns, all_gather_parts

_SCRATCH = "columns.scratch"


@dataclass(frozen=True, slots=True, eq=False)
class ColumnGather:
    """Puts the columns of the ranks of `group` side by side, through buffers of `workspace`."""

    group: Group
    workspace: Workspace

    def reserve(self, rows: int, widths: dict[str, tuple[int, torch.dtype]], *, logit_rows: int = 0) -> None:
        """Reserve a buffer for the own columns under each name: `widths` are those of all columns together.

        Names that begin with "logits" have `logit_rows` rows, others `rows`. Once per workspace.
        """
        most = 0
        for name, (width, dtype) in widths.items():
            count = logit_rows if name.startswith("logits") else rows
            self.workspace.reserve(f"{name}.own", (count, width // self.group.size), dtype)
            most = max(most, count * width * dtype.itemsize)
        self.workspace.reserve(_SCRATCH, (most,), torch.uint8)

    def own(self, name: str, rows: int, width: int) -> torch.Tensor:
        """Where to write the own columns of `name`, [rows, width / ranks]."""
        return self.workspace.take(f"{name}.own", rows, width // self.group.size)

    def gather(self, stream: Stream, own: torch.Tensor, out: torch.Tensor) -> None:
        """out [T, ranks * w] = the columns [T, w] of all ranks."""
        scratch = self.workspace.take(_SCRATCH, out.numel() * out.element_size()).view(out.dtype)
        stream.launch(all_gather_columns, self.group, own, out, scratch)

    def gather_parts(
        self, stream: Stream, own: torch.Tensor, widths: Sequence[int], outs: Sequence[torch.Tensor]
    ) -> None:
        """outs[i] = part i of the columns of all ranks; own [T, >= sum(widths)] holds own parts one behind the other.

        An out that is narrower than all parts together takes each of them once: ranks next to each other have the same.
        """
        scratch = self.workspace.take(_SCRATCH, self.group.size * own.numel() * own.element_size())
        stream.launch(all_gather_parts, self.group, own, tuple(widths), tuple(outs), scratch.view(own.dtype))
