"""Kernel objects of the elementwise ops; the same signatures as the op set.

Each checks its tensors and describes them for the driver of rows, as `row_ops` does. Knows nothing of arithmetic.
Invariant: twins of `ops/reference.py`, within rounding.
"""

from __future__ import annotations

import torch

from ostinato.ops.cpu import rows as field
from ostinato.ops.cpu.elementwise_ir import ELEMENTWISE_FUNCTIONS
from ostinato.ops.cpu.launch import Runtime
from ostinato.ops.cpu.linear import LinearWeights
from ostinato.ops.cpu.row_ops import RowKernel, RowLibraries, Rows, fp32_bits
from ostinato.ops.opset import EmbeddingTable


class ElementwiseOps:
    """All elementwise ops of one runtime."""

    __slots__ = ("add", "clamp", "combine_slots", "embedding", "gather_rows", "sigmoid_gated_add")

    def __init__(self, runtime: Runtime) -> None:
        libraries = RowLibraries(runtime, "elementwise", ELEMENTWISE_FUNCTIONS)
        self.add = RowKernel(runtime, libraries, _add)
        self.sigmoid_gated_add = RowKernel(runtime, libraries, _sigmoid_gated_add)
        self.clamp = RowKernel(runtime, libraries, _clamp)
        self.embedding = RowKernel(runtime, libraries, _embedding)
        self.gather_rows = RowKernel(runtime, libraries, _gather_rows)
        self.combine_slots = RowKernel(runtime, libraries, _combine_slots)


def _matrix(
    name: str, x: torch.Tensor, like: torch.Tensor | None, address: int, stride: int
) -> dict[int, int]:
    """Address and row stride of [T, N], contiguous in its rows, of the shape and dtype of `like` if given."""
    fits = x.dim() == 2 and (x.shape[1] < 2 or x.stride(1) == 1)
    if not fits or (like is not None and (x.shape != like.shape or x.dtype != like.dtype)):
        wanted = "[rows, N]" if like is None else f"{tuple(like.shape)} {like.dtype}"
        raise ValueError(
            f"{name} must be {wanted} with contiguous rows, got {tuple(x.shape)} {x.dtype}, strides {x.stride()}"
        )
    return {address: x.data_ptr(), stride: x.stride(0) * x.element_size()}


def _size(x: torch.Tensor) -> dict[int, int]:
    return {field.ROWS: x.shape[0], field.ROW_WORDS: x.shape[1], field.DIM: x.shape[1]}


def _add(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> Rows:
    fields = {
        **_matrix("x", x, out, field.X, field.X_STRIDE),
        **_matrix("y", y, out, field.Y, field.Y_STRIDE),
        **_matrix("out", out, None, field.OUT, field.OUT_STRIDE),
        **_size(out),
    }
    return Rows("add", out.dtype, fields)


def _sigmoid_gated_add(x: torch.Tensor, gate: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> Rows:
    if gate.dtype != torch.float32 or gate.shape != (out.shape[0], 1):
        raise ValueError(
            f"the gate must be float32 [{out.shape[0]}, 1], got {tuple(gate.shape)} {gate.dtype}"
        )
    added = _add(x, y, out)
    gates = {field.WEIGHT: gate.data_ptr(), field.BIAS: gate.stride(0) * 4}
    return Rows("sigmoid_gated_add", out.dtype, {**added.fields, **gates})


def _clamp(x: torch.Tensor, limit: float) -> Rows:
    fields = {**_matrix("x", x, None, field.X, field.X_STRIDE), **_size(x), field.EPS: fp32_bits(limit)}
    return Rows("clamp", x.dtype, fields)


def _gather_rows(x: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> Rows:
    if rows.dtype != torch.int64 or rows.shape != out.shape[:1] or not rows.is_contiguous():
        raise ValueError(
            f"indices must be contiguous int64 [{out.shape[0]}], got {tuple(rows.shape)} {rows.dtype}"
        )
    if x.shape[1:] != out.shape[1:] or x.dtype != out.dtype or (len(x) == 0 and len(out) > 0):
        raise ValueError(f"rows of {tuple(x.shape)} {x.dtype} do not fit into {tuple(out.shape)} {out.dtype}")
    fields = {
        **_matrix("x", x, None, field.X, field.X_STRIDE),
        **_matrix("out", out, None, field.OUT, field.OUT_STRIDE),
        **_size(out),
        field.DIM: out.shape[1] * out.element_size(),
        field.POSITIONS: rows.data_ptr(),
        field.TABLE_ROWS: x.shape[0],
    }
    return Rows("copy_rows", torch.float32, fields)


def _embedding(ids: torch.Tensor, table: EmbeddingTable, out: torch.Tensor) -> Rows:
    if isinstance(table, torch.Tensor):
        return _gather_rows(table, ids, out)
    assert isinstance(table, LinearWeights), "weights packed by another op set"
    panels = table.panels
    if ids.dtype != torch.int64 or ids.shape != out.shape[:1] or not ids.is_contiguous():
        raise ValueError(f"ids must be contiguous int64 [{out.shape[0]}], got {tuple(ids.shape)} {ids.dtype}")
    if out.shape[1:] != (panels.columns,) or out.dtype != panels.dtype:
        raise ValueError(
            f"packed rows of {panels.columns} {panels.dtype} do not fit into {tuple(out.shape)} {out.dtype}"
        )
    fields = {
        **_matrix("out", out, None, field.OUT, field.OUT_STRIDE),
        **_size(out),
        field.X: panels.words.data_ptr(),
        field.Y: panels.start_address,
        field.Y_STRIDE: panels.panel_bytes,
        field.DIM: panels.whole_steps,
        field.HALF: panels.odd_step,
        field.POSITIONS: ids.data_ptr(),
        field.TABLE_ROWS: panels.rows,
    }
    return Rows("copy_coded_rows" if panels.coded else "copy_panel_rows", torch.float32, fields)


def _combine_slots(
    results: torch.Tensor, places: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
) -> Rows:
    slots = (out.shape[0], places.shape[-1])
    if places.dtype != torch.int64 or places.shape != slots or not places.is_contiguous():
        raise ValueError(f"places must be contiguous int64 {slots}, got {tuple(places.shape)} {places.dtype}")
    if weights.dtype != torch.float32 or weights.shape != slots or weights.stride(1) != 1:
        raise ValueError(f"weights must be float32 {slots}, got {tuple(weights.shape)} {weights.dtype}")
    if results.dtype != torch.float32 or results.shape[1:] != out.shape[1:]:
        raise ValueError(f"results {tuple(results.shape)} {results.dtype} do not fit {tuple(out.shape)}")
    fields = {
        **_matrix("results", results, None, field.X, field.X_STRIDE),
        **_matrix("out", out, None, field.OUT, field.OUT_STRIDE),
        **_size(out),
        field.X_HEADS: slots[1],
        field.POSITIONS: places.data_ptr(),
        field.WEIGHT: weights.data_ptr(),
        field.BIAS: weights.stride(0) * 4,
    }
    return Rows("combine_slots", out.dtype, fields)
