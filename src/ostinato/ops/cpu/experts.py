"""The MoE kernel as seen from outside: packed experts, scratch, and binding to tensors.

`moe` computes; this module checks shapes, finds scratch memory and fills in the parameter block. Knows
nothing of routing. Invariant: scratch is shared by all launches of one op set, which run one after another.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ostinato.ops.cpu import moe, moe_rows
from ostinato.ops.cpu.epilogue import FP32_OUT
from ostinato.ops.cpu.launch import UNKNOWN, Launch, LaunchCache, Runtime
from ostinato.ops.cpu.linear import activation_dtype, check_rows, stride_bytes
from ostinato.ops.cpu.packing import Panels
from ostinato.ops.cpu.panel_words import decoding_block
from ostinato.ops.cpu.prepare import PREPARE_ARGUMENTS, row_function, spread_stride
from ostinato.ops.cpu.scratch import Scratch
from ostinato.ops.cpu.tile_choice import tile_function, tile_rows
from ostinato.ops.cpu.tiles import PANEL, TILE_ARGUMENTS
from ostinato.ops.opset import PackedExperts


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWeights:
    """Packed experts of one layer: gated panels [E, 2I, H] and plain panels [E, H, I]."""

    gate_up: Panels
    down: Panels

    def __post_init__(self) -> None:
        gate_up, down = self.gate_up, self.down
        if (down.rows, down.columns, down.count) != (gate_up.columns, gate_up.outputs, gate_up.count):
            raise ValueError(
                f"experts do not fit together: gate_up {gate_up.count} x [{gate_up.rows}, "
                f"{gate_up.columns}], down {down.count} x [{down.rows}, {down.columns}]"
            )
        assert down.coded == gate_up.coded, "one kind of tile runs both"

    @property
    def num_experts(self) -> int:
        return self.down.count

    @property
    def by_expert(self) -> tuple[torch.Tensor, ...]:
        assert not self.down.coded, "coded experts have no fixed size; those that move are packed plain"
        return self.gate_up.words, self.down.words

    @property
    def dtype(self) -> torch.dtype:
        return self.down.dtype

    @property
    def hidden_size(self) -> int:
        return self.down.rows

    @property
    def intermediate_size(self) -> int:
        return self.down.columns


def _matrix_fields(first: int, panels: Panels) -> dict[int, int]:
    """The seven fields that describe the panels of all experts."""
    values = (
        panels.words.data_ptr(),
        panels.matrix_bytes,
        panels.num_panels,
        panels.panel_bytes,
        panels.whole_steps,
        panels.odd_step,
        panels.start_address,
    )
    return {first + i: value for i, value in enumerate(values)}


class MoeExperts:
    """The kernel `moe_experts(x, topk_weights, topk_ids, experts, weights_on_input, out)`."""

    __slots__ = ("_calls", "_runtime", "_scratch")

    def __init__(self, runtime: Runtime, scratch: Scratch) -> None:
        self._runtime = runtime
        self._scratch = scratch
        self._calls = LaunchCache()

    def __call__(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        experts: PackedExperts,
        weights_on_input: bool,
        out: torch.Tensor,
        live: torch.Tensor | None = None,
    ) -> None:
        self._calls.run(self._free_launch, x, topk_weights, topk_ids, experts, weights_on_input, out, live)

    def bind(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        experts: PackedExperts,
        weights_on_input: bool,
        out: torch.Tensor,
        live: torch.Tensor | None = None,
    ) -> Launch:
        """The launch for these tensors: x [T, H] in the experts' dtype, weights fp32 and ids int32 [T, K].

        Ids outside 0..E-1 are nobody. `live` is an int32 count of leading rows; rows past it go nowhere.
        Raises ValueError on a shape or dtype that does not fit.
        """
        launch = self._free_launch(x, topk_weights, topk_ids, experts, weights_on_input, out, live)
        launch.kept = (*launch.kept, x, topk_weights, topk_ids, out, live)
        return launch

    def _free_launch(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        experts: PackedExperts,
        weights_on_input: bool,
        out: torch.Tensor,
        live: torch.Tensor | None,
    ) -> Launch:
        """The launch, which keeps none of the call's tensors alive."""
        assert isinstance(experts, ExpertWeights), "experts packed by another op set"
        _check(x, topk_weights, topk_ids, experts, out, live)
        fields = {
            moe_rows.VALUE_BYTES: x.element_size(),
            moe_rows.X: x.data_ptr(),
            moe_rows.X_STRIDE: stride_bytes(x),
            moe_rows.ROWS: x.shape[0],
            moe_rows.COUNT: 0 if live is None else live.data_ptr(),
            moe_rows.IDS: topk_ids.data_ptr(),
            moe_rows.IDS_STRIDE: stride_bytes(topk_ids),
            moe_rows.WEIGHTS: topk_weights.data_ptr(),
            moe_rows.WEIGHTS_STRIDE: stride_bytes(topk_weights),
            moe_rows.SLOTS: topk_ids.shape[1],
            moe_rows.ON_INPUT: int(weights_on_input),
            moe_rows.OUT: out.data_ptr(),
            moe_rows.OUT_STRIDE: stride_bytes(out),
            moe_rows.OUT_BYTES: out.element_size(),
            moe_rows.OUT_KIND: FP32_OUT if out.dtype == torch.float32 else 0,
        }
        fields |= self._expert_fields(experts)
        scratch, kept = self._scratch_fields(x, topk_ids.shape[1], experts)
        rows, buffers = self._row_fields(x, topk_ids.shape[1], experts, weights_on_input)
        fields |= scratch | rows
        decoding, words = decoding_block(self._runtime, self._scratch, len(x), experts.gate_up, experts.down)
        fields[moe_rows.DECODING] = decoding
        owned = (*kept, *buffers, *words, experts)
        launch = self._runtime.launch(moe.moe_entry, moe.moe_worker, fields, moe_rows.NUM_FIELDS, owned)
        launch.streamed = UNKNOWN  # which experts is known when the rows are routed
        return launch

    def _expert_fields(self, experts: ExpertWeights) -> dict[int, int]:
        runtime = self._runtime
        tile = tile_function(experts.dtype, runtime.isa, coded=experts.down.coded)
        return {
            moe_rows.TILE: runtime.compiler.address(tile, TILE_ARGUMENTS),
            moe_rows.TILE_ROWS: tile_rows(runtime.isa, coded=experts.down.coded),
            moe_rows.EXPERTS: experts.num_experts,
            moe_rows.HIDDEN_SIZE: experts.hidden_size,
            moe_rows.INTERMEDIATE: experts.intermediate_size,
            **_matrix_fields(moe_rows.GATE_UP, experts.gate_up),
            **_matrix_fields(moe_rows.DOWN, experts.down),
        }

    def _scratch_fields(
        self, x: torch.Tensor, slots: int, experts: ExpertWeights
    ) -> tuple[dict[int, int], tuple[torch.Tensor, ...]]:
        """Memory for sorting, hidden rows and results, with a place for every slot."""
        capacity = x.shape[0] * slots
        hidden_stride = spread_stride(experts.intermediate_size * x.element_size())
        down_stride = spread_stride(experts.down.row_bytes)
        quantise = row_function(experts.dtype, x.dtype, hidden_stride, capacity)
        sizes = {
            moe_rows.STARTS: 8 * (experts.num_experts + 1),
            moe_rows.ACTIVE: 8 * experts.num_experts,
            moe_rows.PLACE_ROW: 8 * capacity,
            moe_rows.PLACE_SLOT: 8 * capacity,
            moe_rows.SLOT_PLACE: 8 * capacity,
            moe_rows.HIDDEN: capacity * hidden_stride,
            moe_rows.RESULTS: capacity * experts.down.num_panels * 4 * PANEL,
            moe_rows.DOWN_ROWS: 0 if quantise is None else capacity * down_stride,
        }
        buffers = {field: self._scratch.take(f"moe.{field}", n) for field, n in sizes.items()}
        ones, zeros = torch.ones(slots), torch.zeros(PANEL)
        fields = {field: buffer.data_ptr() for field, buffer in buffers.items()}
        fields |= {
            moe_rows.HIDDEN_STRIDE: hidden_stride,
            moe_rows.DOWN_STRIDE: down_stride,
            moe_rows.CAPACITY: capacity,
            moe_rows.ONES: ones.data_ptr(),
            moe_rows.ZEROS: zeros.data_ptr(),
        }
        if quantise is None:
            fields |= {moe_rows.DOWN_ROWS: fields[moe_rows.HIDDEN], moe_rows.DOWN_STRIDE: hidden_stride}
        else:
            fields[moe_rows.PREPARE_HIDDEN] = self._runtime.compiler.address(quantise, PREPARE_ARGUMENTS)
        return fields, (*buffers.values(), ones, zeros)

    def _row_fields(
        self, x: torch.Tensor, slots: int, experts: ExpertWeights, on_input: bool
    ) -> tuple[dict[int, int], tuple[torch.Tensor, ...]]:
        """What gate and up read: x, x times weights by place, or what is prepared of either."""
        places = len(x) * slots if on_input else len(x)
        fields = {moe_rows.PRODUCT_ROWS: x.data_ptr(), moe_rows.PRODUCT_STRIDE: stride_bytes(x)}
        buffers = []
        if on_input:
            stride = spread_stride(experts.hidden_size * x.element_size())
            scaled = self._scratch.take("moe.scaled", places * stride)
            fields |= {moe_rows.SCALED: scaled.data_ptr(), moe_rows.SCALED_STRIDE: stride}
            fields |= {moe_rows.PRODUCT_ROWS: scaled.data_ptr(), moe_rows.PRODUCT_STRIDE: stride}
            buffers.append(scaled)
        prepare = row_function(experts.dtype, x.dtype, fields[moe_rows.PRODUCT_STRIDE], places)
        if prepare is not None:
            stride = spread_stride(experts.gate_up.row_bytes)
            prepared = self._scratch.take("moe.prepared", places * stride)
            fields |= {
                moe_rows.PREPARE: self._runtime.compiler.address(prepare, PREPARE_ARGUMENTS),
                moe_rows.PREPARED: prepared.data_ptr(),
                moe_rows.PREPARED_STRIDE: stride,
                moe_rows.PRODUCT_ROWS: prepared.data_ptr(),
                moe_rows.PRODUCT_STRIDE: stride,
            }
            buffers.append(prepared)
        return fields, tuple(buffers)


def _check(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    experts: ExpertWeights,
    out: torch.Tensor,
    live: torch.Tensor | None,
) -> None:
    check_rows("x", x, experts.hidden_size, activation_dtype(experts.down, x))
    check_rows("out", out, experts.hidden_size, out.dtype)
    slots = topk_ids.shape[-1]
    check_rows("topk_ids", topk_ids, slots, torch.int32)
    check_rows("topk_weights", topk_weights, slots, torch.float32)
    if out.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"out must be bfloat16 or float32, got {out.dtype}")
    if not len(x) == len(out) == len(topk_ids) == len(topk_weights):
        lengths = [len(t) for t in (x, topk_weights, topk_ids, out)]
        raise ValueError(f"x, topk_weights, topk_ids and out must have as many rows, got {lengths}")
    if live is not None and live.dtype != torch.int32:
        raise ValueError(f"the live count must be int32, got {live.dtype}")
