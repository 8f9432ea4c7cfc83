"""The routing kernel as seen from outside: a rule turned into fields, checks, and binding to tensors.

`routing_rows` chooses and weighs, `routing_ir` scores. Knows nothing of experts. Invariant: twin of `moe.routing`, bit
for bit; a launch touches the tensors it was bound to and the scratch of its op set, nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ostinato.ops.cpu import routing_rows as field
from ostinato.ops.cpu.launch import Launch, LaunchCache, Runtime
from ostinato.ops.cpu.linear import check_rows, stride_bytes
from ostinato.ops.cpu.native import NativeLibrary
from ostinato.ops.cpu.routing_ir import SCORE_FUNCTIONS, SCORE_KIND
from ostinato.ops.cpu.row_ops import fp32_bits
from ostinato.ops.cpu.scratch import Scratch
from ostinato.ops.opset import RoutingRule

MOST_EXPERTS = 4096  # more go the way of torch ops: a row's scratch should stay in the L2 cache


class Routing:
    """The kernel `routing(logits, topk_weights, topk_ids, live, load, load_live)` of one rule; see `RoutingKernel`."""

    __slots__ = ("_calls", "_fixed", "_library", "_rule", "_runtime", "_scratch")

    def __init__(self, runtime: Runtime, scratch: Scratch, library: NativeLibrary, rule: RoutingRule) -> None:
        self._runtime = runtime
        self._scratch = scratch
        self._rule = rule
        self._library = library  # its addresses are good as long as it lives
        self._fixed = _rule_fields(rule, library.addresses)
        self._calls = LaunchCache()

    def __call__(
        self,
        logits: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        live: torch.Tensor | None,
        load: torch.Tensor | None,
        load_live: torch.Tensor | None,
        /,
    ) -> None:
        self._calls.run(self._launch, logits, topk_weights, topk_ids, live, load, load_live)

    def bind(self, *args: torch.Tensor | None) -> Launch:
        """The launch for these tensors, which it keeps alive. Raises ValueError on a shape or dtype that does not
        fit.
        """
        launch = self._launch(*args)
        launch.kept = (*launch.kept, *args)
        return launch

    def _launch(self, *args: torch.Tensor | None) -> Launch:
        logits, weights, ids, live, load, load_live = args
        assert logits is not None
        assert weights is not None
        assert ids is not None
        self._check(logits, weights, ids, live, load, load_live)
        threads = self._runtime.pool.num_threads
        stride = field.AREAS * field.area_bytes(self._rule.num_experts)
        scratch = self._scratch.take("routing", threads * stride)
        fields = {
            **self._fixed,
            field.LOGITS: logits.data_ptr(),
            field.LOGITS_STRIDE: stride_bytes(logits),
            field.ROWS: logits.shape[0],
            field.COUNT: 0 if live is None else live.data_ptr(),
            field.WEIGHTS: weights.data_ptr(),
            field.WEIGHTS_STRIDE: stride_bytes(weights),
            field.IDS: ids.data_ptr(),
            field.IDS_STRIDE: stride_bytes(ids),
            field.LOAD: 0 if load is None else load.data_ptr(),
            field.LOAD_LIVE: 0 if load_live is None else load_live.data_ptr(),
            field.SCRATCH: scratch.data_ptr(),
            field.SCRATCH_STRIDE: stride,
        }
        launch = self._runtime.launch(
            field.routing_entry, field.routing_worker, fields, field.NUM_FIELDS, (self, scratch)
        )
        launch.touched = tuple((x.data_ptr(), stride_bytes(x)) for x in (logits, weights, ids) if len(x))
        return launch

    def _check(
        self,
        logits: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        live: torch.Tensor | None,
        load: torch.Tensor | None,
        load_live: torch.Tensor | None,
    ) -> None:
        rule = self._rule
        columns = rule.num_routed + rule.num_shared
        check_rows("logits", logits, rule.num_experts, torch.float32)
        check_rows("topk_weights", weights, columns, torch.float32)
        check_rows("topk_ids", ids, columns, torch.int32)
        if not len(logits) == len(weights) == len(ids):
            raise ValueError(
                f"{len(logits)} rows of logits got {len(weights)} of weights and {len(ids)} of ids"
            )
        if live is not None and (live.dtype != torch.int32 or live.numel() != 1):
            raise ValueError(f"the live count must be one int32, got {tuple(live.shape)} {live.dtype}")
        if (load is None) != (load_live is None):
            raise ValueError("load and load_live come together or not at all")
        for name, counter, size in (("load", load, rule.num_experts), ("load_live", load_live, 1)):
            if counter is None:
                continue
            if counter.dtype != torch.int64 or counter.numel() < size or not counter.is_contiguous():
                raise ValueError(
                    f"{name} must be {size} contiguous int64, got {tuple(counter.shape)} {counter.dtype}"
                )


def score_library(runtime: Runtime) -> NativeLibrary:
    """The score functions, compiled or from disk."""
    return NativeLibrary("routing", SCORE_FUNCTIONS, SCORE_KIND, runtime.compiler)


def _rule_fields(rule: RoutingRule, functions: Mapping[str, int]) -> dict[int, int]:
    raw = rule.scoring_func == "raw_logits"
    bias = rule.correction_bias
    return {
        field.EXPERTS: rule.num_experts,
        field.ROUTED: rule.num_routed,
        field.SHARED: rule.num_shared,
        field.SCORE: 0 if raw else functions[rule.scoring_func],
        field.WEIGH: functions["softmax"] if raw else 0,
        field.BIAS: 0 if bias is None else bias.data_ptr(),
        field.GROUPS: rule.num_groups,
        field.KEPT: rule.num_kept_groups,
        field.RENORMALIZE: int(rule.renormalize),
        field.SCALE: fp32_bits(rule.scale),
        field.SHARED_WEIGHT: fp32_bits(rule.shared_weight),
    }


def supports(rule: RoutingRule) -> bool:
    """Whether the kernel runs by this rule."""
    bias = rule.correction_bias
    known = rule.scoring_func == "raw_logits" or rule.scoring_func in SCORE_FUNCTIONS
    plain_bias = bias is None or (bias.device.type == "cpu" and bias.is_contiguous())
    return known and plain_bias and rule.num_experts <= MOST_EXPERTS
