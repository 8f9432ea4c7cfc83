"""Packs bf16 weights coded: plain panels in passing, each coded as soon as all of its rows are there.

Plain panels of one matrix lie in memory that is given back block by block as they are coded, so a loader that hands
over rows in order never holds a matrix twice. Knows nothing of files. Invariant: what is coded decodes to the panels
that `packing` would have made.
"""

from __future__ import annotations

import torch

from ostinato.ops.cpu import coding
from ostinato.ops.cpu.huge_pages import give_back, mapped_zeros
from ostinato.ops.cpu.launch import TASKS, Runtime
from ostinato.ops.cpu.packing import HALF, Packer, Panels, empty_panels
from ostinato.ops.cpu.tiles import PANEL
from ostinato.ops.opset import Weight, pieces_of

_BLOCK_BYTES = 8 << 20  # of plain panels that are coded in one launch
_WORD = 4


class CodedPacker(Packer):
    """Packs bf16 weights coded and all others plain."""

    def pack(self, weight: Weight, *, gated: bool = False, dtype: torch.dtype | None = None) -> Panels:
        if (dtype or weight.dtype) != torch.bfloat16:
            return super().pack(weight, gated=gated, dtype=dtype)
        rows, columns = weight.shape[-2:]
        count = weight.shape[0] if len(weight.shape) == 3 else 1
        coded = _Coded(self._runtime, count, rows, columns, gated)
        current, come = -1, 0  # matrix, and rows of it that came in order from its beginning on
        for matrix, first, piece in pieces_of(weight):
            if matrix != current:
                coded.begin(matrix)
                current, come = matrix, 0
            self.write_rows(coded.plain, coded.slot, piece, first)
            if come == first:
                come += len(piece)
                coded.advance(_whole_panels(coded.plain, come))
        coded.flush()
        panels = coded.panels()
        self._count(panels.nbytes, count * coded.plain.matrix_bytes)
        return panels


def _whole_panels(panels: Panels, rows: int) -> int:
    """Panels of which the first so many rows are all there is."""
    if rows == panels.rows:
        return panels.num_panels
    if panels.gated:
        return max(0, rows - panels.rows // 2) // HALF
    return rows // PANEL


class _Coded:
    """Coded matrices in the making. `plain`: room for as many of them as make a block, or one, in plain panels."""

    def __init__(self, runtime: Runtime, count: int, rows: int, columns: int, gated: bool) -> None:
        one = empty_panels(1, rows, columns, torch.bfloat16, gated=gated)
        batch = min(count, max(1, _BLOCK_BYTES // max(one.matrix_bytes, 1)))
        self.plain = one if batch == 1 else empty_panels(batch, rows, columns, torch.bfloat16, gated=gated)
        self._runtime = runtime
        self._batch = batch
        self._block = max(1, _BLOCK_BYTES // max(one.panel_bytes, 1))
        self._starts = torch.zeros(count, one.num_panels, dtype=torch.int64)
        most = count * (one.matrix_bytes + one.num_panels * coding.HEADER_BYTES)
        self._words = mapped_zeros((most // _WORD + 16,), torch.int32, huge=True)
        self._words = self._words[-self._words.data_ptr() % 64 // _WORD :]
        self._used = 0  # bytes of it
        self._matrices: list[int] = []  # in the plain panels
        self._done = 0  # plain panels that are coded
        self._left = set(range(count))

    @property
    def slot(self) -> int:
        """Where in the plain panels the matrix in work lies."""
        return len(self._matrices) - 1

    def begin(self, matrix: int) -> None:
        """What comes next is of another matrix; nothing more comes of the last."""
        assert matrix in self._left, f"the pieces of matrix {matrix} do not come together"
        if len(self._matrices) == self._batch:
            self.flush()
        self._left.remove(matrix)
        self._matrices.append(matrix)

    def advance(self, panels: int) -> None:
        """Code whole blocks of what is there: the first so many panels of the matrix in work, and all before."""
        there = self.slot * self.plain.num_panels + panels
        while there - self._done >= self._block:
            self._code(self._done + self._block)

    def flush(self) -> None:
        """Code all that is left; the plain panels are free again."""
        there = len(self._matrices) * self.plain.num_panels
        while self._done < there:
            self._code(min(self._done + self._block, there))
        self._matrices, self._done = [], 0

    def _code(self, end: int) -> None:
        """Code the plain panels up to `end`."""
        runtime, plain, first = self._runtime, self.plain, self._done
        source = plain.words.flatten(0, 1)[first:end]
        plans = _aligned_bytes((end - first) * coding.PLAN_SIZE)
        values = {
            coding.SOURCE: source.data_ptr(),
            coding.PANEL_BYTES: plain.panel_bytes,
            coding.STEPS: plain.whole_steps,
            coding.PLANS: plans.data_ptr(),
            TASKS: end - first,
        }
        kept: tuple[torch.Tensor, ...] = (source, plans)
        runtime.launch(coding.coding_entry, coding.plan_worker, values, coding.NUM_FIELDS, kept)()
        sizes = plans.view(end - first, coding.PLAN_SIZE)[:, coding.PLAN_BYTES_NEEDED :][:, :8]
        ends = sizes.contiguous().view(torch.int64).flatten().cumsum(0) + self._used
        starts = torch.cat([torch.tensor([self._used]), ends[:-1]])
        panels = torch.arange(first, end)
        matrices = torch.tensor(self._matrices)[panels // plain.num_panels]
        self._starts[matrices, panels % plain.num_panels] = starts
        targets = starts + self._words.data_ptr()
        values[coding.TARGETS] = targets.data_ptr()
        kept = (*kept, targets, self._words)
        runtime.launch(coding.coding_entry, coding.code_worker, values, coding.NUM_FIELDS, kept)()
        self._used = int(ends[-1])
        self._done = end
        give_back(source)

    def panels(self) -> Panels:
        """All matrices."""
        plain = self.plain
        assert not self._left or not plain.num_panels, f"matrices {sorted(self._left)} never came"
        words = self._words[: self._used // _WORD]
        return Panels(words, plain.rows, plain.columns, plain.dtype, plain.gated, self._starts)


def _aligned_bytes(size: int) -> torch.Tensor:
    """Zeroed bytes whose address is a multiple of 64."""
    memory = torch.zeros(size + 64, dtype=torch.uint8)
    return memory[-memory.data_ptr() % 64 :][:size]
