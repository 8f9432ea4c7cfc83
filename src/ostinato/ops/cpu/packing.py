"""Weights in the order in which matrix tiles read them.

A panel holds 32 outputs. Per step of K it holds one 4-byte word for each of them, so a tile reads it front to
back:
    bf16  [ceil(N / 32), ceil(K / 2), 32, 2]        fp32  [ceil(N / 32), K, 32]        int8  see `int8`
Gated panels hold 16 gate outputs beside the 16 up outputs of the same places. Packing writes rows into panels
that are there already, so a loader packs shard by shard. Knows nothing of files. Invariant: padding is zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ostinato.ops.cpu.huge_pages import mapped_zeros
from ostinato.ops.cpu.int8 import TRAILER_WORDS, quantise_weight, row_bytes
from ostinato.ops.cpu.launch import (
    COUNTER,
    FIRST_FIELD,
    TASKS,
    Runtime,
    reset_counter,
    run_worker,
)
from ostinato.ops.cpu.memory import fetch_add, load_i64
from ostinato.ops.cpu.tiles import PANEL
from ostinato.ops.cpu.transpose import transpose_words
from ostinato.ops.opset import PackedSize, Weight, pieces_of

HALF = PANEL // 2
PACKED_DTYPES = (torch.bfloat16, torch.float32, torch.int8)
SOURCE, START, STOP, STEPS, TARGET, HALVES, PANEL_STRIDE, NUM_FIELDS = range(FIRST_FIELD, FIRST_FIELD + 8)


def values_per_word(dtype: torch.dtype) -> int:
    """Values of K in one 4-byte word."""
    return 4 // dtype.itemsize


def words_of(columns: int, dtype: torch.dtype) -> int:
    """4-byte words that `columns` values fill."""
    return -(-columns // values_per_word(dtype))


@dataclass(frozen=True, slots=True, eq=False)
class Panels:
    """Packed matrices [count, rows, columns]; `words` is int32 [count, panels, ceil(columns / per word), 32].

    `gated`: the rows are pairs; row r of the first half (gate) lies beside row r of the second half (up).
    `starts`: None, or the panels are coded (`coding`) and lie where int64 [count, panels] says, in bytes of `words`,
    which then is int32 [words].
    """

    words: torch.Tensor
    rows: int
    columns: int
    dtype: torch.dtype
    gated: bool = False
    starts: torch.Tensor | None = None

    @property
    def coded(self) -> bool:
        return self.starts is not None

    @property
    def count(self) -> int:
        return len(self.words if self.starts is None else self.starts)

    @property
    def num_panels(self) -> int:
        return (self.words if self.starts is None else self.starts).shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices as they are stored."""
        return self.words.nbytes

    @property
    def panel_bytes(self) -> int:
        """Bytes of a panel; of coded ones on average, in whole cache lines."""
        if self.starts is None:
            return self.words.shape[2] * 4 * PANEL
        return max(self.words.nbytes // max(self.starts.numel(), 1) // 64, 1) * 64

    @property
    def start_address(self) -> int:
        """Address of the table of starts, 0 without one."""
        return 0 if self.starts is None else self.starts.data_ptr()

    @property
    def row_bytes(self) -> int:
        """Bytes of a row that a product with these weights reads."""
        return row_bytes(self.columns) if self.dtype == torch.int8 else self.columns * self.dtype.itemsize

    @property
    def matrix_bytes(self) -> int:
        return self.num_panels * self.panel_bytes

    @property
    def whole_steps(self) -> int:
        """Steps of K of which every value is real; for int8 all, as its padding counts for nothing."""
        if self.dtype == torch.int8:
            return words_of(self.columns, self.dtype)
        return self.columns // values_per_word(self.dtype)

    @property
    def odd_step(self) -> int:
        """1 when one bf16 value is left after the whole steps."""
        return words_of(self.columns, self.dtype) - self.whole_steps

    @property
    def outputs(self) -> int:
        """Outputs of a product with one matrix: half the rows where they are pairs."""
        return self.rows // 2 if self.gated else self.rows


def empty_panels(count: int, rows: int, columns: int, dtype: torch.dtype, *, gated: bool = False) -> Panels:
    """Zeroed panels for `count` matrices [rows, columns].

    Raises ValueError for another dtype than bf16, fp32 or int8, or for an odd number of gated rows.
    """
    if dtype not in PACKED_DTYPES:
        raise ValueError(f"weights must be bfloat16, float32 or int8, got {dtype}; cast them first")
    if gated and rows % 2:
        raise ValueError(f"gate and up need an even number of rows, got {rows}")
    panels = -(-rows // 2 // HALF) if gated else -(-rows // PANEL)
    steps = words_of(columns, dtype) + (TRAILER_WORDS if dtype == torch.int8 else 0)
    words = mapped_zeros((count, panels, steps, PANEL), torch.int32, huge=True)
    return Panels(words, rows, columns, dtype, gated)


def _as_words(weight: torch.Tensor) -> torch.Tensor:
    """int32 [rows, words] of the last dimension, padded by zero."""
    per_word = values_per_word(weight.dtype)
    if weight.shape[-1] % per_word:
        weight = torch.nn.functional.pad(weight, (0, -weight.shape[-1] % per_word))
    return weight.contiguous().view(torch.int32)


def pack_worker(p: int) -> None:
    """Blocks of 16 rows: transposed, 16 words at a time, into the half panel that holds these rows."""
    start, stop = load_i64(p + 8 * START), load_i64(p + 8 * STOP)
    steps, halves = load_i64(p + 8 * STEPS), load_i64(p + 8 * HALVES)
    tasks = load_i64(p + 8 * TASKS)
    task = fetch_add(load_i64(p + 8 * COUNTER), 1)
    while task < tasks:
        block = start // HALF + task
        first, last = max(start, HALF * block), min(stop, HALF * block + HALF)
        source = load_i64(p + 8 * SOURCE) + 4 * steps * (first - start)
        target = load_i64(p + 8 * TARGET) + block // halves * load_i64(p + 8 * PANEL_STRIDE)
        target += 4 * HALF * (block % halves) + 4 * (first - HALF * block)
        transpose_words(source, 4 * steps, target, 4 * PANEL, last - first, steps)
        task = fetch_add(load_i64(p + 8 * COUNTER), 1)


def pack_entry(p: int) -> None:
    """Share the blocks out over the team."""
    reset_counter(p)
    run_worker(p, load_i64(p + 8 * STEPS) * (load_i64(p + 8 * STOP) - load_i64(p + 8 * START)))


class Packer:
    """Packs with all threads of a runtime. `size`: of all that `pack` made."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.size = PackedSize()

    def write_rows(self, panels: Panels, matrix: int, weight: torch.Tensor, start: int = 0) -> None:
        """Pack `weight` [n, K] as rows start..start+n of one matrix.

        Rows of gated panels count gates first: [0, rows / 2) are gates, the rest ups. Floating-point rows are
        quantised into int8 panels. Raises ValueError when the shape or dtype does not fit.
        """
        count, columns = weight.shape
        fits = columns == panels.columns and start >= 0 and start + count <= panels.rows
        quantised = panels.dtype == torch.int8 and weight.is_floating_point()
        if not fits or (weight.dtype != panels.dtype and not quantised):
            raise ValueError(
                f"rows {start}..{start + count} of {columns} {weight.dtype} values do not fit into packed "
                f"weights of {panels.rows} rows of {panels.columns} {panels.dtype} values"
            )
        words = quantise_weight(weight) if quantised else _as_words(weight)
        target = panels.words[matrix].data_ptr()
        if not panels.gated:
            self._write(panels, target, 2, words, start)
            return
        gates = panels.rows // 2
        ours = min(max(gates - start, 0), count)
        self._write(panels, target, 1, words[:ours], start)
        self._write(panels, target + 4 * HALF, 1, words[ours:], max(start - gates, 0))

    def _write(self, panels: Panels, target: int, halves: int, words: torch.Tensor, start: int) -> None:
        """Rows into half panels from `target` on, of which `halves` in every panel take rows in turn."""
        if words.numel() == 0:
            return
        runtime = self._runtime
        steps = words.shape[1]
        values = {
            SOURCE: words.data_ptr(),
            START: start,
            STOP: start + words.shape[0],
            STEPS: steps,
            TARGET: target,
            HALVES: halves,
            PANEL_STRIDE: panels.panel_bytes,
            TASKS: (start + words.shape[0] - 1) // HALF - start // HALF + 1,
        }
        runtime.launch(pack_entry, pack_worker, values, NUM_FIELDS, (words, panels.words))()

    def pack(self, weight: Weight, *, gated: bool = False, dtype: torch.dtype | None = None) -> Panels:
        """Panels of `weight` [N, K] or [E, N, K], in its own dtype or quantised to int8."""
        rows, columns = weight.shape[-2:]
        count = weight.shape[0] if len(weight.shape) == 3 else 1
        panels = empty_panels(count, rows, columns, dtype or weight.dtype, gated=gated)
        for matrix, first, piece in pieces_of(weight):
            self.write_rows(panels, matrix, piece, first)
        self._count(panels.nbytes, panels.nbytes)
        return panels

    def _count(self, stored: int, uncoded: int) -> None:
        self.size = PackedSize(self.size.stored + stored, self.size.uncoded + uncoded)


def pack_bias(bias: torch.Tensor | None, panels: Panels) -> torch.Tensor:
    """fp32 [panels, 32] in the order of the panels' sums; zeros without a bias."""
    packed = torch.zeros(panels.num_panels, PANEL)
    if bias is None:
        return packed
    if bias.shape != (panels.rows,):
        raise ValueError(f"bias has shape {tuple(bias.shape)}, the weight has {panels.rows} rows")
    parts = bias.float().chunk(2) if panels.gated else (bias.float(),)
    width = PANEL // len(parts)
    for i, part in enumerate(parts):
        padded = torch.nn.functional.pad(part, (0, panels.num_panels * width - part.shape[0]))
        packed[:, i * width : (i + 1) * width] = padded.view(-1, width)
    return packed
