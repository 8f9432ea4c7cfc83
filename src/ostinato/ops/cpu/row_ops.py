"""Kernel objects of the row-wise ops: norms, rotary embedding, greedy choice. Same signatures as the op set.

Each checks its tensors and describes them in a parameter block; `bind` fixes the tensors and returns a launch, a
plain call keeps launches by address, so a repeated call costs little more than the bound one. An int32 tensor of one
element behind the arguments of an op is its count of live rows. Knows nothing of arithmetic. Invariant: twins of
`ops/reference.py`, within rounding.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ostinato.ops.cpu import rows as field
from ostinato.ops.cpu.lane_kinds import Kind, kind_for
from ostinato.ops.cpu.launch import Launch, LaunchCache, Runtime
from ostinato.ops.cpu.native import NativeFunction, NativeLibrary
from ostinato.ops.cpu.rope_ir import ROW_FUNCTIONS

Fields = Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Rows:
    """What a launch computes: a function of the library, and its fields."""

    function: str
    dtype: torch.dtype
    fields: Fields


class RowKernel:
    """One op. `describe` maps the call's arguments to `Rows`, or raises ValueError."""

    __slots__ = ("_calls", "_describe", "_libraries", "_runtime")

    def __init__(self, runtime: Runtime, libraries: RowLibraries, describe: Callable[..., Rows]) -> None:
        self._runtime = runtime
        self._libraries = libraries
        self._describe = describe
        self._calls = LaunchCache()

    def __call__(self, *args: Any) -> None:
        self._calls.run(self._launch, *args)

    def bind(self, *args: Any) -> Launch:
        """The launch for these arguments; keeps its tensors alive."""
        launch = self._launch(*args)
        launch.kept = (*launch.kept, *args)
        return launch

    def _launch(self, *args: Any) -> Launch:
        rows = self._describe(*args)
        library = self._libraries.of(rows.dtype)
        fields = {**rows.fields, field.FUNCTION: library.addresses[rows.function]}
        launch = self._runtime.launch(
            field.rows_entry, field.rows_worker, fields, field.NUM_FIELDS, (library,)
        )
        launch.touched = _touched(rows)
        return launch


def _touched(rows: Rows) -> tuple[tuple[int, int], ...]:
    """Places that the first row touches, but for a table, whose row is known when it runs."""
    fields = rows.fields
    vector = fields[field.DIM] * rows.dtype.itemsize
    row = fields.get(field.X_HEADS, 0) * vector
    sizes = {
        field.COUNT: 4,
        field.POSITIONS: 8,
        field.WEIGHT: vector,
        field.BIAS: vector,
        field.Y_WEIGHT: vector,
        field.X: row,
        field.Y: fields.get(field.Y_HEADS, 1) * vector,
        field.OUT: row,
    }
    return tuple((fields[index], size) for index, size in sizes.items() if fields.get(index, 0) and size)


class RowLibraries:
    """The compiled row functions of each dtype, made when first asked for."""

    __slots__ = ("_functions", "_libraries", "_name", "_runtime")

    def __init__(
        self,
        runtime: Runtime,
        name: str = "rows",
        functions: Mapping[str, NativeFunction] = ROW_FUNCTIONS,
    ) -> None:
        self._runtime = runtime
        self._name = name
        self._functions = functions
        self._libraries: dict[str, NativeLibrary] = {}

    def of(self, dtype: torch.dtype) -> NativeLibrary:
        kind: Kind = kind_for(dtype, self._runtime.isa)
        if kind.name not in self._libraries:
            compiler = self._runtime.compiler
            self._libraries[kind.name] = NativeLibrary(self._name, self._functions, kind, compiler)
        return self._libraries[kind.name]


class RowOps:
    """All row-wise ops of one runtime."""

    __slots__ = (
        "add_layer_norm",
        "add_rms_norm",
        "argmax",
        "layer_norm",
        "norm_rope",
        "rms_norm",
        "rope",
    )

    def __init__(self, runtime: Runtime) -> None:
        libraries = RowLibraries(runtime)
        self.rms_norm = RowKernel(runtime, libraries, _rms_norm)
        self.add_rms_norm = RowKernel(runtime, libraries, _add_rms_norm)
        self.layer_norm = RowKernel(runtime, libraries, _layer_norm)
        self.add_layer_norm = RowKernel(runtime, libraries, _add_layer_norm)
        self.rope = RowKernel(runtime, libraries, _rope)
        self.norm_rope = RowKernel(runtime, libraries, _norm_rope)
        self.argmax = RowKernel(runtime, libraries, _argmax)


def fp32_bits(value: float) -> int:
    """fp32 bits of a number."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def live_count_address(live: torch.Tensor | None) -> int:
    """The live count's address; 0 without one: all rows are computed."""
    if live is None:
        return 0
    if live.dtype != torch.int32 or live.numel() != 1:
        raise _fail("the live count must be one int32", live)
    return live.data_ptr()


def live_count(live: torch.Tensor | None) -> dict[int, int]:
    """The live count's field."""
    return {} if live is None else {field.COUNT: live_count_address(live)}


def _fail(what: str, x: torch.Tensor) -> ValueError:
    return ValueError(f"{what}, got {tuple(x.shape)} {x.dtype} with strides {x.stride()}")


def _place(x: torch.Tensor, address: int, stride: int) -> dict[int, int]:
    """Address and row stride of [T, D] or [T, heads, D]; rows may be strided, what is in a row may not."""
    inner = x.shape[-1] if x.dim() == 3 else 1
    if (
        x.dim() not in (2, 3)
        or x.stride(-1) != 1
        or (x.dim() == 3 and x.shape[1] > 1 and x.stride(1) != inner)
    ):
        raise _fail("rows must be contiguous [T, D] or [T, heads, D]", x)
    return {address: x.data_ptr(), stride: x.stride(0) * x.element_size()}


def _vector(x: torch.Tensor, like: torch.Tensor) -> int:
    """Address of a weight or bias of the rows' last dimension, in their dtype."""
    if tuple(x.shape) != (like.shape[-1],) or x.dtype != like.dtype or not x.is_contiguous():
        raise _fail(f"a weight must be contiguous [{like.shape[-1]}] {like.dtype}", x)
    return x.data_ptr()


def _norm_fields(x: torch.Tensor, out: torch.Tensor, eps: float, live: torch.Tensor | None) -> dict[int, int]:
    if out.shape != x.shape or out.dtype != x.dtype:
        raise _fail(f"the output must be {tuple(x.shape)} {x.dtype}", out)
    heads = x.shape[1] if x.dim() == 3 else 1
    return {
        **_place(x, field.X, field.X_STRIDE),
        **_place(out, field.OUT, field.OUT_STRIDE),
        **live_count(live),
        field.ROWS: x.shape[0],
        field.CLEAR_BYTES: heads * x.shape[-1] * x.element_size(),
        field.ROW_WORDS: heads * x.shape[-1],
        field.DIM: x.shape[-1],
        field.X_HEADS: heads,
        field.EPS: fp32_bits(eps),
    }


def _rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    out: torch.Tensor,
    live: torch.Tensor | None = None,
) -> Rows:
    fields = _norm_fields(x, out, eps, live)
    if weight is None:
        return Rows("rms_norm_plain", x.dtype, fields)
    return Rows("rms_norm", x.dtype, {**fields, field.WEIGHT: _vector(weight, x)})


def _residual(x: torch.Tensor, residual: torch.Tensor) -> dict[int, int]:
    if x.dim() != 2 or residual.shape != x.shape or residual.dtype != x.dtype:
        raise _fail(f"the residual must be {tuple(x.shape)} {x.dtype}", residual)
    return _place(residual, field.Y, field.Y_STRIDE)


def _add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    live: torch.Tensor | None = None,
) -> Rows:
    fields = {**_norm_fields(x, out, eps, live), **_residual(x, residual), field.WEIGHT: _vector(weight, x)}
    return Rows("add_rms_norm", x.dtype, fields)


def _layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    live: torch.Tensor | None = None,
) -> Rows:
    affine = {field.WEIGHT: _vector(weight, x), field.BIAS: _vector(bias, x)}
    return Rows("layer_norm", x.dtype, {**_norm_fields(x, out, eps, live), **affine})


def _add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    live: torch.Tensor | None = None,
) -> Rows:
    plain = _layer_norm(x, weight, bias, eps, out, live)
    return Rows("add_layer_norm", x.dtype, {**plain.fields, **_residual(x, residual)})


def _rope(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    interleaved: bool,
    live: torch.Tensor | None = None,
) -> Rows:
    if q.dim() != 3 or k.dim() != 3 or k.shape[0] != q.shape[0] or k.shape[2] != q.shape[2]:
        raise _fail(f"keys must be [{q.shape[0]}, heads, {q.shape[-1]}]", k)
    if k.dtype != q.dtype or table.dtype != torch.float32 or not table.is_contiguous():
        raise _fail("the table must be contiguous fp32 and q and k of one dtype", table)
    if positions.dtype != torch.int64 or positions.shape != q.shape[:1] or not positions.is_contiguous():
        raise _fail(f"positions must be contiguous int64 [{q.shape[0]}]", positions)
    if table.shape[1] % 2 or table.shape[1] > q.shape[2]:
        raise _fail(f"the table must have an even number of at most {q.shape[2]} columns", table)
    fields = {
        **_place(q, field.X, field.X_STRIDE),
        **_place(k, field.Y, field.Y_STRIDE),
        **live_count(live),
        field.ROWS: q.shape[0],
        field.ROW_WORDS: (q.shape[1] + k.shape[1]) * q.shape[2],
        field.DIM: q.shape[2],
        field.X_HEADS: q.shape[1],
        field.Y_HEADS: k.shape[1],
        field.POSITIONS: positions.data_ptr(),
        field.TABLE: table.data_ptr(),
        field.TABLE_ROWS: table.shape[0],
        field.HALF: table.shape[1] // 2,
    }
    return Rows("rope_neighbours" if interleaved else "rope", q.dtype, fields)


def _norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    positions: torch.Tensor,
    table: torch.Tensor,
    interleaved: bool,
    live: torch.Tensor | None = None,
) -> Rows:
    """RMS norm of every head of q and k, then `rope`, in place: one launch, the bits of three."""
    rope = _rope(q, k, positions, table, interleaved, live)
    weights = {field.WEIGHT: _vector(q_weight, q), field.Y_WEIGHT: _vector(k_weight, k)}
    return Rows(f"norm_{rope.function}", q.dtype, {**rope.fields, **weights, field.EPS: fp32_bits(eps)})


def _argmax(x: torch.Tensor, out: torch.Tensor, live: torch.Tensor | None = None) -> Rows:
    """out[t] (int64 [T]) = index of the largest value of x [T, V]: the lowest among equals, NaN never."""
    if out.dtype != torch.int64 or out.shape != x.shape[:1] or x.dim() != 2 or x.shape[1] == 0:
        raise _fail(f"choices must be int64 [{x.shape[0]}] of a row of at least one value", out)
    fields = {
        **_place(x, field.X, field.X_STRIDE),
        field.OUT: out.data_ptr(),
        field.OUT_STRIDE: out.stride(0) * 8,
        field.CLEAR_BYTES: 8,
        **live_count(live),
        field.ROWS: x.shape[0],
        field.ROW_WORDS: x.shape[1],
        field.DIM: x.shape[1],
    }
    return Rows("argmax", x.dtype, fields)
