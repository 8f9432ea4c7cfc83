"""Pads in the form that kernels which crash on negative ids take (aiter on ROCm): id 0, weight 0.

An adapter between `select_experts` and such a kernel, which asks for it by the declaration `accepts_zero_weight` of its
`PadContract`; nothing else in the package leaves the sentinel form.
Load statistics and exports have been taken by then, so expert 0 is not counted for pads.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ostinato.ops.opset import PackedExperts
from ostinato.padding import PadContract

ExpertsKernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, PackedExperts, bool, torch.Tensor], None]
"""`OpSet.moe_experts`."""


def hip_pad_form(
    topk_ids: torch.Tensor, topk_weights: torch.Tensor, *, mask_weights: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, weights) [N, K], new tensors, with every slot of nobody (id < 0) as id 0 and weight 0.

    `mask_weights=False` leaves the weights alone, for a kernel that skips rows past the count by itself. The
    weight
    is selected, not multiplied: NaN does not survive.
    """
    nobody = topk_ids < 0
    ids = topk_ids.masked_fill(nobody, 0)
    weights = topk_weights.masked_fill(nobody, 0.0) if mask_weights else topk_weights.clone()
    return ids, weights


def experts_kernel(kernel: ExpertsKernel, contract: PadContract) -> ExpertsKernel:
    """The kernel as it is, or behind the translation where its contract says that it needs one."""
    if contract.accepts_sentinel or not contract.accepts_zero_weight:
        return kernel
    return ZeroWeightExperts(kernel)


class ZeroWeightExperts:
    """An experts' kernel that is shown ids that exist: slots of nobody become expert 0 with weight 0.

    What it makes of rows without any expert is not looked at: they come out zero.
    """

    __slots__ = ("_kernel",)

    def __init__(self, kernel: ExpertsKernel) -> None:
        self._kernel = kernel

    def __call__(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        experts: PackedExperts,
        weights_on_input: bool,
        out: torch.Tensor,
    ) -> None:
        ids, weights = hip_pad_form(topk_ids, topk_weights)
        self._kernel(x, weights, ids, experts, weights_on_input, out)
        out.masked_fill_((topk_ids < 0).all(1, keepdim=True), 0.0)
