"""The kernel that chooses tokens, as seen from outside: checks, and binding to tensors.

Knows nothing of requests. Invariant: twin of `ops.choice.choose`, token for token; a launch touches the tensors it was
bound to and the scratch of its op set, nothing else.
"""

from __future__ import annotations

from typing import Any

import torch

from ostinato.ops.choice import MOST_TOKENS
from ostinato.ops.cpu import choice_rows as field
from ostinato.ops.cpu.choice_ir import CHOICE_FUNCTIONS
from ostinato.ops.cpu.lane_kinds import Float32
from ostinato.ops.cpu.launch import Launch, LaunchCache, Runtime
from ostinato.ops.cpu.linear import check_rows, stride_bytes
from ostinato.ops.cpu.native import NativeLibrary
from ostinato.ops.cpu.row_ops import live_count_address
from ostinato.ops.cpu.scratch import Scratch


class Sample:
    """`sample(x, rules, seeds, positions, out, live)` of the op set."""

    __slots__ = ("_calls", "_library", "_runtime", "_scratch")

    def __init__(self, runtime: Runtime, scratch: Scratch) -> None:
        self._runtime = runtime
        self._scratch = scratch
        self._library: NativeLibrary | None = None
        self._calls = LaunchCache()

    def __call__(self, *args: Any) -> None:
        self._calls.run(self._launch, *args)

    def bind(self, *args: Any) -> Launch:
        """The launch for these tensors, which it keeps alive. Raises ValueError for what does not fit."""
        launch = self._launch(*args)
        launch.kept = (*launch.kept, *args)
        return launch

    def _launch(
        self,
        x: torch.Tensor,
        rules: torch.Tensor,
        seeds: torch.Tensor,
        positions: torch.Tensor,
        out: torch.Tensor,
        live: torch.Tensor | None = None,
    ) -> Launch:
        if x.dim() != 2 or not 0 < x.shape[1] <= MOST_TOKENS:
            raise ValueError(f"logits must be [rows, 1 to {MOST_TOKENS} tokens], got {tuple(x.shape)}")
        check_rows("logits", x, x.shape[1], torch.float32)
        rows = x.shape[0]
        if rules.dtype != torch.float64 or rules.shape != (rows, 4) or not rules.is_contiguous():
            raise ValueError(
                f"rules must be contiguous float64 ({rows}, 4), got {tuple(rules.shape)} {rules.dtype}"
            )
        for name, values in (("seeds", seeds), ("positions", positions), ("choices", out)):
            if values.dtype != torch.int64 or values.shape != (rows,) or not values.is_contiguous():
                raise ValueError(
                    f"{name} must be contiguous int64 ({rows},), got {tuple(values.shape)} {values.dtype}"
                )
        if self._library is None:
            self._library = NativeLibrary("choice", CHOICE_FUNCTIONS, Float32(), self._runtime.compiler)
        stride = -(-field.scratch_bytes(x.shape[1]) // 64) * 64
        scratch = self._scratch.take("choice", self._runtime.pool.num_threads * stride)
        fields = {
            field.LOGITS: x.data_ptr(),
            field.LOGITS_STRIDE: stride_bytes(x),
            field.ROWS: rows,
            field.COUNT: live_count_address(live),
            field.TOKENS: x.shape[1],
            field.RULES: rules.data_ptr(),
            field.SEEDS: seeds.data_ptr(),
            field.POSITIONS: positions.data_ptr(),
            field.OUT: out.data_ptr(),
            field.WEIGH: self._library.addresses["weigh"],
            field.COLLECT: self._library.addresses["collect"],
            field.SCRATCH: scratch.data_ptr(),
            field.SCRATCH_STRIDE: stride,
        }
        return self._runtime.launch(
            field.choice_entry, field.choice_worker, fields, field.NUM_FIELDS, (self._library, scratch)
        )
