"""Pads in the form that kernels which crash on negative ids take (aiter on ROCm): id 0, weight 0.

An adapter between `select_experts` and such a kernel; nothing else in the package leaves the sentinel form.
Load statistics and exports have been taken by then, so expert 0 is not counted for pads.
"""

from __future__ import annotations

import torch


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
