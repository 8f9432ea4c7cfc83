"""Weights that are read from the checkpoint while they are packed, tensor by tensor and block by block.

The one place that knows where in a packed weight a tensor of the checkpoint goes. Knows nothing of names or
families. Invariant: at any time one block is in memory beside what is packed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ostinato.models.loader import StoredTensor, WeightSource


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of the checkpoint and its place: a matrix whose rows are rows first.. of matrix `matrix`, or all
    matrices [E, N, K] of the weight. `transposed`: the file has columns for rows. `shape` is that in the file.
    """

    name: str
    shape: tuple[int, ...]
    matrix: int = 0
    first: int = 0
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """`WeightPieces` of a checkpoint: a weight [N, K] or [E, N, K] in `dtype`, made of `parts`."""

    source: WeightSource
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[Part, ...]

    def pieces(self) -> Iterator[tuple[int, int, torch.Tensor]]:
        for part in self.parts:
            with self.source.open(part.name, part.shape) as stored:
                yield from self._blocks(part, stored)

    def _blocks(self, part: Part, stored: StoredTensor) -> Iterator[tuple[int, int, torch.Tensor]]:
        matrices = stored.values if stored.values.dim() == 3 else stored.values.unsqueeze(0)
        for i, matrix in enumerate(matrices):
            rows = matrix.t() if part.transposed else matrix
            for first, block in stored.blocks(rows):
                yield part.matrix + i, part.first + first, block.to(self.dtype)
