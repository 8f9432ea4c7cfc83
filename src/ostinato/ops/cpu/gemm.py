"""Packed matrix products: out = x @ weight.T + bias, with SiLU times up, or added to what `out` holds.

Tasks are blocks of rows times groups of panels: few rows stream every panel once from memory, many rows pass
over a group of panels that stays in the L2 cache. Knows nothing of layers. Invariant: a row's bits depend on
that row and the weights alone (see `tiles`), whatever the number of rows, their place, the tasks or the
threads.

    group 0: rows 0-47 | rows 48-95 | ...     group 1: rows 0-47 | ...       each task: rows x 32 columns x
    panels
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from numba import njit

from ostinato.ops.cpu.epilogue import ADD_TO_OUT, FP32_OUT, GATED, store_tile
from ostinato.ops.cpu.intrinsics import call_tile, stack_scratch
from ostinato.ops.cpu.launch import (
    COUNTER,
    FIRST_FIELD,
    TASKS,
    THREADS,
    Launch,
    Runtime,
    reset_counter,
    run_worker,
)
from ostinato.ops.cpu.memory import fetch_add, load_i32, load_i64, store_i64, zero_bytes
from ostinato.ops.cpu.packing import Panels
from ostinato.ops.cpu.tiles import PANEL, TILE_ARGUMENTS, tile_function

L2_BYTES = 384 * 1024  # of panels that many rows pass over
STREAM_BYTES = 64 * 1024  # of panels in a task of few rows
TILES_PER_TASK = 4
TASKS_PER_THREAD = 8
SUMS = 128  # offset of the sums in a worker's scratch, behind the row addresses

(
    TILE,  # address of the tile function
    TILE_ROWS,
    X,
    X_STRIDE,  # strides are in bytes
    ROWS,
    COUNT,  # address of the live count (int32), or 0: all rows
    LIVE,  # rows to compute: set by the entry
    WEIGHT,
    PANELS,
    PANEL_BYTES,
    STEPS,
    ODD,
    BIAS,  # address of fp32 [panels, 32]
    KIND,
    OUT,
    OUT_STRIDE,
    OUT_BYTES,  # of one value
    OUTPUTS,
    GROUP,  # panels of a task: set by the entry, as is the next
    BLOCK,  # rows of a task
    NUM_FIELDS,
) = range(FIRST_FIELD, FIRST_FIELD + 21)


@njit(error_model="numpy")
def live_rows(rows: int, count: int) -> int:
    """Rows to compute: all, or as many as the int32 at `count` says."""
    return rows if count == 0 else min(max(load_i32(count), 0), rows)


@njit(error_model="numpy")
def panel_group(rows: int, tile_rows: int, panels: int, panel_bytes: int, share: int) -> int:
    """Panels of one task: what stays in L2 for many rows, else enough to be worth a draw; `share` tasks at
    least.
    """
    size = L2_BYTES if rows > tile_rows else STREAM_BYTES
    return max(1, min(size // panel_bytes, panels // share))


def gemm_worker(p: int) -> None:
    """Tasks until none is left."""
    scratch = stack_scratch()
    groups = (load_i64(p + 8 * PANELS) + load_i64(p + 8 * GROUP) - 1) // load_i64(p + 8 * GROUP)
    tasks = load_i64(p + 8 * TASKS)
    blocks = tasks // groups
    live, rows, block_rows = load_i64(p + 8 * LIVE), load_i64(p + 8 * ROWS), load_i64(p + 8 * BLOCK)
    gated = load_i64(p + 8 * KIND) >= GATED
    across = PANEL // 2 if gated else PANEL
    size = load_i64(p + 8 * OUT_BYTES)
    task = fetch_add(load_i64(p + 8 * COUNTER), 1)
    while task < tasks:
        first = task // blocks * load_i64(p + 8 * GROUP)
        last = min(first + load_i64(p + 8 * GROUP), load_i64(p + 8 * PANELS))
        begin = task % blocks * block_rows
        end = min(begin + block_rows, live)
        row = begin
        while row < end:
            n = min(load_i64(p + 8 * TILE_ROWS), end - row)
            for i in range(n):
                store_i64(load_i64(p + 8 * X) + (row + i) * load_i64(p + 8 * X_STRIDE), scratch + 8 * i)
            for panel in range(first, last):
                call_tile(
                    load_i64(p + 8 * TILE),
                    scratch,
                    n,
                    load_i64(p + 8 * WEIGHT) + panel * load_i64(p + 8 * PANEL_BYTES),
                    load_i64(p + 8 * STEPS),
                    load_i64(p + 8 * ODD),
                    scratch + SUMS,
                )
                store_tile(
                    load_i64(p + 8 * KIND),
                    n,
                    scratch + SUMS,
                    load_i64(p + 8 * BIAS) + panel * 4 * PANEL,
                    load_i64(p + 8 * OUT) + row * load_i64(p + 8 * OUT_STRIDE) + panel * across * size,
                    load_i64(p + 8 * OUT_STRIDE),
                    load_i64(p + 8 * OUTPUTS) - panel * across,
                )
            row += n
        if task % blocks == blocks - 1:  # rows that nobody asked for
            width = min(last * across, load_i64(p + 8 * OUTPUTS)) - first * across
            for row in range(live, rows):
                at = load_i64(p + 8 * OUT) + row * load_i64(p + 8 * OUT_STRIDE)
                zero_bytes(at + first * across * size, width * size)
        task = fetch_add(load_i64(p + 8 * COUNTER), 1)


def gemm_entry(p: int) -> None:
    """Read the live count, cut the work into tasks, and run the team."""
    reset_counter(p)
    rows, panels, threads = load_i64(p + 8 * ROWS), load_i64(p + 8 * PANELS), load_i64(p + 8 * THREADS)
    if rows == 0 or panels == 0:
        return
    live = live_rows(rows, load_i64(p + 8 * COUNT))
    tile_rows = load_i64(p + 8 * TILE_ROWS)
    block = tile_rows if live <= tile_rows else tile_rows * TILES_PER_TASK
    blocks = max((live + block - 1) // block, 1)
    share = max(threads * TASKS_PER_THREAD // blocks, 1)
    group = panel_group(live, tile_rows, panels, load_i64(p + 8 * PANEL_BYTES), share)
    store_i64(live, p + 8 * LIVE)
    store_i64(group, p + 8 * GROUP)
    store_i64(block, p + 8 * BLOCK)
    store_i64((panels + group - 1) // group * blocks, p + 8 * TASKS)
    run_worker(p, panels * load_i64(p + 8 * PANEL_BYTES) // 4 * max(blocks, 1))


@dataclass(frozen=True, slots=True)
class LinearWeights:
    """A packed linear layer: panels of one matrix, bias by panel (fp32), and the dtype of its outputs."""

    panels: Panels
    bias: torch.Tensor
    out_dtype: torch.dtype

    @property
    def in_features(self) -> int:
        return self.panels.columns

    @property
    def out_features(self) -> int:
        """Outputs; of a gated layer half the rows of its weight."""
        return self.panels.outputs


def check_rows(name: str, x: torch.Tensor, columns: int, dtype: torch.dtype) -> None:
    """Raises ValueError unless x is [T, columns] of `dtype`, contiguous in its last dimension."""
    if x.dim() != 2 or x.shape[1] != columns or x.dtype != dtype:
        raise ValueError(f"{name} must be [rows, {columns}] {dtype}, got {tuple(x.shape)} {x.dtype}")
    if x.shape[1] > 1 and x.stride(1) != 1:
        raise ValueError(f"{name} must be contiguous in its last dimension, got strides {x.stride()}")


def stride_bytes(x: torch.Tensor) -> int:
    """Bytes from one row to the next."""
    return x.stride(0) * x.element_size()


class Linear:
    """The kernel `linear(x, weight, out)`; `add=True` adds the product to what `out` holds (residual)."""

    __slots__ = ("_add", "_runtime")

    def __init__(self, runtime: Runtime, *, add: bool = False) -> None:
        self._runtime = runtime
        self._add = add

    def __call__(
        self, x: torch.Tensor, weight: LinearWeights, out: torch.Tensor, live: torch.Tensor | None = None
    ) -> None:
        self.bind(x, weight, out, live)()

    def bind(
        self, x: torch.Tensor, weight: LinearWeights, out: torch.Tensor, live: torch.Tensor | None = None
    ) -> Launch:
        """The launch for these tensors: x [T, K], out [T, N] bf16 or fp32, `live` an int32 count of leading
        rows.

        Rows past the count are neither read nor computed and come out zero. Raises ValueError on a shape or
        dtype that does not fit.
        """
        panels, runtime = weight.panels, self._runtime
        check_rows("x", x, panels.columns, panels.dtype)
        check_rows("out", out, weight.out_features, out.dtype)
        if out.dtype not in (torch.bfloat16, torch.float32) or out.shape[0] != x.shape[0]:
            raise ValueError(f"out {tuple(out.shape)} {out.dtype} does not fit x {tuple(x.shape)}")
        if live is not None and live.dtype != torch.int32:
            raise ValueError(f"the live count must be int32, got {live.dtype}")
        kind = FP32_OUT if out.dtype == torch.float32 else 0
        kind |= ADD_TO_OUT if self._add else 0
        kind |= GATED if panels.gated else 0
        values = {
            TILE: runtime.compiler.address(tile_function(panels.dtype, runtime.isa), TILE_ARGUMENTS),
            TILE_ROWS: runtime.isa.tile_rows,
            X: x.data_ptr(),
            X_STRIDE: stride_bytes(x),
            ROWS: x.shape[0],
            COUNT: 0 if live is None else live.data_ptr(),
            WEIGHT: panels.words.data_ptr(),
            PANELS: panels.num_panels,
            PANEL_BYTES: panels.panel_bytes,
            STEPS: panels.whole_steps,
            ODD: panels.odd_step,
            BIAS: weight.bias.data_ptr(),
            KIND: kind,
            OUT: out.data_ptr(),
            OUT_STRIDE: stride_bytes(out),
            OUT_BYTES: out.element_size(),
            OUTPUTS: weight.out_features,
        }
        return runtime.launch(gemm_entry, gemm_worker, values, NUM_FIELDS, (x, weight, out, live))
