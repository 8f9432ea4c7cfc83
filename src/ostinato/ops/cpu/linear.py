"""The matrix product as seen from outside: packed weights, checks, and binding to tensors.

`gemm` computes; this module fills in its parameter block. Knows nothing of layers. Invariant: a launch
touches the tensors it was bound to and the scratch of its op set, nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ostinato.ops.cpu import gemm
from ostinato.ops.cpu.epilogue import FP32_OUT, GATED
from ostinato.ops.cpu.launch import Launch, LaunchCache, Runtime, Streamed
from ostinato.ops.cpu.packing import Panels
from ostinato.ops.cpu.panel_words import decoding_block
from ostinato.ops.cpu.prepare import PREPARE_ARGUMENTS, RowFunction, row_function, spread_stride
from ostinato.ops.cpu.scratch import Scratch
from ostinato.ops.cpu.tile_choice import tile_function, tile_rows
from ostinato.ops.cpu.tiles import TILE_ARGUMENTS
from ostinato.ops.opset import PackedLinear


@dataclass(frozen=True, slots=True, eq=False)
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


def activation_dtype(panels: Panels, x: torch.Tensor) -> torch.dtype:
    """The dtype that x must have: the weights' own; int8 weights take bf16 and fp32 alike."""
    if panels.dtype == torch.int8:
        return x.dtype if x.dtype == torch.float32 else torch.bfloat16
    return panels.dtype


def stride_bytes(x: torch.Tensor) -> int:
    """Bytes from one row to the next."""
    return x.stride(0) * x.element_size()


class Linear:
    """The kernel `linear(x, weight, out)`."""

    __slots__ = ("_calls", "_runtime", "_scratch")

    def __init__(self, runtime: Runtime, scratch: Scratch) -> None:
        self._runtime = runtime
        self._scratch = scratch
        self._calls = LaunchCache()

    def __call__(
        self, x: torch.Tensor, weight: PackedLinear, out: torch.Tensor, live: torch.Tensor | None = None
    ) -> None:
        self._calls.run(self._free_launch, x, weight, out, live)

    def bind(
        self, x: torch.Tensor, weight: PackedLinear, out: torch.Tensor, live: torch.Tensor | None = None
    ) -> Launch:
        """The launch for these tensors: x [T, K], out [T, N] bf16 or fp32, `live` an int32 count of leading
        rows.

        Rows past the count are neither read nor computed and come out zero. Raises ValueError on a shape or
        dtype that does not fit.
        """
        launch = self._free_launch(x, weight, out, live)
        launch.kept = (*launch.kept, x, out, live)
        return launch

    def _free_launch(
        self, x: torch.Tensor, weight: PackedLinear, out: torch.Tensor, live: torch.Tensor | None
    ) -> Launch:
        """The launch, which does not keep x, out and the count alive."""
        assert isinstance(weight, LinearWeights), "weights packed by another op set"
        panels, runtime = weight.panels, self._runtime
        check_rows("x", x, panels.columns, activation_dtype(panels, x))
        check_rows("out", out, weight.out_features, out.dtype)
        if out.dtype not in (torch.bfloat16, torch.float32) or out.shape[0] != x.shape[0]:
            raise ValueError(f"out {tuple(out.shape)} {out.dtype} does not fit x {tuple(x.shape)}")
        if live is not None and live.dtype != torch.int32:
            raise ValueError(f"the live count must be int32, got {live.dtype}")
        kind = FP32_OUT if out.dtype == torch.float32 else 0
        kind |= GATED if panels.gated else 0
        prepare = row_function(panels.dtype, x.dtype, stride_bytes(x), x.shape[0])
        fields = {
            gemm.SOURCE: x.data_ptr(),
            gemm.SOURCE_STRIDE: stride_bytes(x),
            gemm.ROWS: x.shape[0],
            gemm.COUNT: 0 if live is None else live.data_ptr(),
            gemm.BIAS: weight.bias.data_ptr(),
            gemm.KIND: kind,
            gemm.OUT: out.data_ptr(),
            gemm.OUT_STRIDE: stride_bytes(out),
            gemm.OUT_BYTES: out.element_size(),
            gemm.OUTPUTS: weight.out_features,
        }
        rows, scratch = self._row_fields(x, panels, prepare)
        fields |= rows | self._panel_fields(panels)
        fields[gemm.DECODING], kept = decoding_block(runtime, self._scratch, len(x), panels)
        owned = (weight, scratch, *kept)
        launch = runtime.launch(gemm.gemm_entry, gemm.gemm_worker, fields, gemm.NUM_FIELDS, owned)
        share = -(-panels.num_panels // runtime.pool.num_threads) * panels.panel_bytes
        launch.streamed = Streamed(panels.words.data_ptr(), share)
        return launch

    def _panel_fields(self, panels: Panels) -> dict[int, int]:
        runtime = self._runtime
        tile = tile_function(panels.dtype, runtime.isa, coded=panels.coded)
        return {
            gemm.TILE: runtime.compiler.address(tile, TILE_ARGUMENTS),
            gemm.TILE_ROWS: tile_rows(runtime.isa, coded=panels.coded),
            gemm.WEIGHT: panels.words.data_ptr(),
            gemm.PANELS: panels.num_panels,
            gemm.PANEL_BYTES: panels.panel_bytes,
            gemm.STARTS: panels.start_address,
            gemm.STEPS: panels.whole_steps,
            gemm.ODD: panels.odd_step,
        }

    def _row_fields(
        self, x: torch.Tensor, panels: Panels, prepare: RowFunction | None
    ) -> tuple[dict[int, int], torch.Tensor | None]:
        """Where tiles find their rows: x itself, or what `prepare` makes of it in scratch."""
        if prepare is None:
            return {gemm.X: x.data_ptr(), gemm.X_STRIDE: stride_bytes(x)}, None
        stride = spread_stride(panels.row_bytes)
        buffer = self._scratch.take("linear.rows", x.shape[0] * stride)
        fields = {
            gemm.PREPARE: self._runtime.compiler.address(prepare, PREPARE_ARGUMENTS),
            gemm.COLUMNS: panels.columns,
            gemm.X: buffer.data_ptr(),
            gemm.X_STRIDE: stride,
        }
        return fields, buffer
