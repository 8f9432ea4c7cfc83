"""The MoE kernel as seen from outside: packed experts, scratch, and binding to tensors.

`moe` computes; this module checks shapes, finds scratch memory and fills in the parameter block. Knows
nothing of routing. Invariant: scratch is shared by all launches of one op set, which run one after another.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ostinato.ops.cpu import moe
from ostinato.ops.cpu.epilogue import ADD_TO_OUT, FP32_OUT
from ostinato.ops.cpu.gemm import check_rows, stride_bytes
from ostinato.ops.cpu.launch import Launch, Runtime
from ostinato.ops.cpu.packing import Panels
from ostinato.ops.cpu.tiles import PANEL, TILE_ARGUMENTS, tile_function

_LINE = 64


class Scratch:
    """Bytes by name, shared by launches; a buffer that is too small is replaced by one twice as large.

    Launches keep the buffer they were bound to.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def take(self, name: str, num_bytes: int) -> torch.Tensor:
        """At least `num_bytes` bytes, aligned to a cache line."""
        found = self._buffers.get(name)
        if found is None or found.numel() < num_bytes:
            size = max(num_bytes, _LINE, 0 if found is None else 2 * found.numel())
            found = torch.empty(size + _LINE, dtype=torch.uint8)
            found = found[-found.data_ptr() % _LINE :]
            self._buffers[name] = found
        return found

    @property
    def nbytes(self) -> int:
        """What all buffers hold."""
        return sum(buffer.numel() for buffer in self._buffers.values())


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Packed experts of one layer: gated panels [E, 2I, H] and plain panels [E, H, I]."""

    gate_up: Panels
    down: Panels

    def __post_init__(self) -> None:
        gate_up, down = self.gate_up, self.down
        if (down.rows, down.columns) != (gate_up.columns, gate_up.outputs) or len(down.words) != len(
            gate_up.words
        ):
            raise ValueError(
                f"experts do not fit together: gate_up {len(gate_up.words)} x [{gate_up.rows}, "
                f"{gate_up.columns}], down {len(down.words)} x [{down.rows}, {down.columns}]"
            )

    @property
    def num_experts(self) -> int:
        return self.down.words.shape[0]

    @property
    def hidden_size(self) -> int:
        return self.down.rows

    @property
    def intermediate_size(self) -> int:
        return self.down.columns


def _matrix_fields(first: int, panels: Panels) -> dict[int, int]:
    """The six fields that describe the panels of all experts."""
    values = (
        panels.words.data_ptr(),
        panels.matrix_bytes,
        panels.num_panels,
        panels.panel_bytes,
        panels.whole_steps,
        panels.odd_step,
    )
    return {first + i: value for i, value in enumerate(values)}


class MoeExperts:
    """The kernel `moe_experts(x, topk_weights, topk_ids, experts, weights_on_input, out)`.

    `add=True` adds the result to what `out` holds; a row without experts then keeps its value.
    """

    __slots__ = ("_add", "_runtime", "_scratch")

    def __init__(self, runtime: Runtime, scratch: Scratch, *, add: bool = False) -> None:
        self._runtime = runtime
        self._scratch = scratch
        self._add = add

    def __call__(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        experts: ExpertWeights,
        weights_on_input: bool,
        out: torch.Tensor,
        live: torch.Tensor | None = None,
    ) -> None:
        self.bind(x, topk_weights, topk_ids, experts, weights_on_input, out, live)()

    def bind(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        experts: ExpertWeights,
        weights_on_input: bool,
        out: torch.Tensor,
        live: torch.Tensor | None = None,
    ) -> Launch:
        """The launch for these tensors: x [T, H] in the experts' dtype, weights fp32 and ids int32 [T, K].

        Ids outside 0..E-1 are nobody. `live` is an int32 count of leading rows; rows past it go nowhere.
        Raises ValueError on a shape or dtype that does not fit.
        """
        _check(x, topk_weights, topk_ids, experts, out, live)
        fields = {
            moe.X: x.data_ptr(),
            moe.X_STRIDE: stride_bytes(x),
            moe.ROWS: x.shape[0],
            moe.COUNT: 0 if live is None else live.data_ptr(),
            moe.IDS: topk_ids.data_ptr(),
            moe.IDS_STRIDE: stride_bytes(topk_ids),
            moe.WEIGHTS: topk_weights.data_ptr(),
            moe.WEIGHTS_STRIDE: stride_bytes(topk_weights),
            moe.SLOTS: topk_ids.shape[1],
            moe.ON_INPUT: int(weights_on_input),
            moe.OUT: out.data_ptr(),
            moe.OUT_STRIDE: stride_bytes(out),
            moe.OUT_BYTES: out.element_size(),
            moe.OUT_KIND: (FP32_OUT if out.dtype == torch.float32 else 0) | (ADD_TO_OUT if self._add else 0),
        }
        fields |= self._expert_fields(experts)
        scratch, kept = self._scratch_fields(x.shape[0], topk_ids.shape[1], experts, weights_on_input)
        fields |= scratch
        owned = (*kept, x, topk_weights, topk_ids, experts, out, live)
        return self._runtime.launch(moe.moe_entry, moe.moe_worker, fields, moe.NUM_FIELDS, owned)

    def _expert_fields(self, experts: ExpertWeights) -> dict[int, int]:
        runtime, dtype = self._runtime, experts.down.dtype
        return {
            moe.TILE: runtime.compiler.address(tile_function(dtype, runtime.isa), TILE_ARGUMENTS),
            moe.TILE_ROWS: runtime.isa.tile_rows,
            moe.VALUE_BYTES: dtype.itemsize,
            moe.EXPERTS: experts.num_experts,
            moe.HIDDEN_SIZE: experts.hidden_size,
            moe.INTERMEDIATE: experts.intermediate_size,
            **_matrix_fields(moe.GATE_UP, experts.gate_up),
            **_matrix_fields(moe.DOWN, experts.down),
        }

    def _scratch_fields(
        self, rows: int, slots: int, experts: ExpertWeights, on_input: bool
    ) -> tuple[dict[int, int], tuple[torch.Tensor, ...]]:
        capacity, size = rows * slots, experts.down.dtype.itemsize
        scaled_stride = -(-experts.hidden_size * size // _LINE) * _LINE if on_input else 0
        hidden_stride = -(-experts.intermediate_size * size // _LINE) * _LINE
        sizes = {
            moe.STARTS: 8 * (experts.num_experts + 1),
            moe.ACTIVE: 8 * experts.num_experts,
            moe.PLACE_ROW: 8 * capacity,
            moe.PLACE_SLOT: 8 * capacity,
            moe.SLOT_PLACE: 8 * capacity,
            moe.SCALED: capacity * scaled_stride,
            moe.HIDDEN: capacity * hidden_stride,
            moe.RESULTS: capacity * experts.down.num_panels * 4 * PANEL,
        }
        buffers = {field: self._scratch.take(f"moe.{field}", n) for field, n in sizes.items()}
        ones, zeros = torch.ones(slots), torch.zeros(PANEL)
        fields = {field: buffer.data_ptr() for field, buffer in buffers.items()}
        fields |= {
            moe.SCALED_STRIDE: scaled_stride,
            moe.HIDDEN_STRIDE: hidden_stride,
            moe.CAPACITY: capacity,
            moe.ONES: ones.data_ptr(),
            moe.ZEROS: zeros.data_ptr(),
        }
        return fields, (*buffers.values(), ones, zeros)


def _check(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    experts: ExpertWeights,
    out: torch.Tensor,
    live: torch.Tensor | None,
) -> None:
    check_rows("x", x, experts.hidden_size, experts.down.dtype)
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
