"""Weights that are read from the checkpoint while they are packed, tensor by tensor and block by block.

The one place that knows where in a packed weight a tensor of the checkpoint goes. Knows nothing of names or
families. Invariant: at any time one block is in memory beside what is packed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

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


Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Cut:
    """The part of a weight that one rank holds.

    rows: spans of the weight's rows, kept one behind the other. columns: a span, None for all. matrices: which matrices
    of [E, N, K] are kept, in order and perhaps several times; None for all.
    """

    rows: tuple[Span, ...]
    columns: Span | None = None
    matrices: tuple[int, ...] | None = None

    @property
    def num_rows(self) -> int:
        return sum(last - first for first, last in self.rows)

    def targets(self, matrix: int) -> list[int]:
        """Where a matrix goes."""
        if self.matrices is None:
            return [matrix]
        return [i for i, kept in enumerate(self.matrices) if kept == matrix]

    def spans(self, first: int, count: int) -> Iterator[tuple[int, int, int]]:
        """(from, to, target row) of what is kept of rows [first, first + count), counted from `first`."""
        target = 0
        for low, high in self.rows:
            begin, end = max(low, first), min(high, first + count)
            if begin < end:
                yield begin - first, end - first, target + begin - low
            target += high - low

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """The rows kept of a tensor [N, ...] in memory."""
        return torch.cat([values[first:last] for first, last in self.rows])


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """`WeightPieces` of a checkpoint: a weight [N, K] or [E, N, K] in `dtype`, made of `parts`, or a cut of it."""

    source: WeightSource
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[Part, ...]
    selected: Cut | None = None

    def cut(self, cut: Cut) -> StoredWeight:
        """The part of this weight that `cut` names; nothing else of the file will be read."""
        assert self.selected is None, "a weight is cut once"
        columns = self.shape[-1] if cut.columns is None else cut.columns[1] - cut.columns[0]
        matrices = self.shape[:-2] if cut.matrices is None else (len(cut.matrices),)
        return replace(self, shape=(*matrices, cut.num_rows, columns), selected=cut)

    def read(self) -> torch.Tensor:
        """The weight as it is, in memory."""
        out = torch.empty(self.shape, dtype=self.dtype)
        matrices = out if out.dim() == 3 else out.unsqueeze(0)
        for matrix, first, block in self.pieces():
            matrices[matrix, first : first + len(block)] = block
        return out

    def pieces(self) -> Iterator[tuple[int, int, torch.Tensor]]:
        for part in self.parts:
            if self._wants(part):
                with self.source.open(part.name, part.shape) as stored:
                    yield from self._blocks(part, stored)
            else:
                self.source.leave(part.name, part.shape)

    def _wants(self, part: Part) -> bool:
        cut = self.selected
        if cut is None:
            return True
        *matrices, rows, columns = part.shape
        count = columns if part.transposed else rows
        here = range(part.matrix, part.matrix + (matrices[0] if matrices else 1))
        return any(True for _ in cut.spans(part.first, count)) and any(cut.targets(m) for m in here)

    def _blocks(self, part: Part, stored: StoredTensor) -> Iterator[tuple[int, int, torch.Tensor]]:
        matrices = stored.values if stored.values.dim() == 3 else stored.values.unsqueeze(0)
        for i, matrix in enumerate(matrices):
            rows = matrix.t() if part.transposed else matrix
            if self.selected is None:
                for first, block in stored.blocks(rows):
                    yield part.matrix + i, part.first + first, block.to(self.dtype)
            else:
                yield from self._kept(self.selected, part, part.matrix + i, rows, stored)

    def _kept(
        self, cut: Cut, part: Part, matrix: int, rows: torch.Tensor, stored: StoredTensor
    ) -> Iterator[tuple[int, int, torch.Tensor]]:
        columns = slice(None) if cut.columns is None else slice(*cut.columns)
        for target in cut.targets(matrix):
            for begin, end, at in cut.spans(part.first, rows.shape[0]):
                for first, block in stored.blocks(rows[begin:end, columns]):
                    yield target, at + first, block.to(self.dtype)
