"""Scores and selections shared by all routers: what a logit is worth, and which experts win.

Plain functions of fp32 tensors, in operations that a fused kernel can repeat bit for bit (see `ops.exact`). Knows
nothing of padding. Invariant: ties go to the lowest expert id; a row depends on itself alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from ostinato.ops.exact import sigmoid, softmax, softplus, sqrt

_TINY = torch.finfo(torch.float32).tiny


def sqrtsoftplus(x: torch.Tensor) -> torch.Tensor:
    """sqrt(log(1 + exp(x))), elementwise."""
    return sqrt(softplus(x))


def raw_logits(x: torch.Tensor) -> torch.Tensor:
    """The logits themselves choose; what they weigh is decided by `raw_logits_weights`."""
    return x


SCORING_FUNCS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = MappingProxyType(
    {"softmax": softmax, "sigmoid": sigmoid, "sqrtsoftplus": sqrtsoftplus, "raw_logits": raw_logits}
)


def top_k_ids(choice: torch.Tensor, k: int) -> torch.Tensor:
    """Ids int64 [N, k] of the k largest of `choice` [N, E], in descending order.

    Deterministic: ties go to the lowest id, NaN counts as the largest value. torch.topk promises neither. The
    ids of a row are k distinct experts whatever the row holds, NaN included.
    """
    return torch.sort(choice, dim=-1, descending=True, stable=True).indices[:, :k]


def slot_sum(weights: torch.Tensor) -> torch.Tensor:
    """Sum over the slots of [N, K] -> [N, 1], in slot order, so that every kernel can repeat its bits."""
    total = weights[:, :1]
    for slot in range(1, weights.shape[1]):
        total = total + weights[:, slot : slot + 1]
    return total


def divide_by_sum(weights: torch.Tensor) -> torch.Tensor:
    """Weights [N, K] divided by their sum; rows of zeros stay zeros."""
    return weights / slot_sum(weights).clamp_min(_TINY)


def raw_logits_weights(x: torch.Tensor, ids: torch.Tensor, *, renormalize: bool) -> torch.Tensor:
    """Weights of raw-logit selection: softmax over the chosen logits, or over ALL experts and then gathered.

    Never the signed logits themselves, which would scale every layer (behaviour reference, section 4.1).
    """
    if renormalize:
        return softmax(x.gather(-1, ids))
    return softmax(x).gather(-1, ids)


def keep_best_groups(
    choice: torch.Tensor, *, num_groups: int, num_kept: int, best_pair: bool
) -> torch.Tensor:
    """`choice` [N, E] with every expert outside the `num_kept` best of `num_groups` equal groups at -inf.

    A group is worth its largest entry, or with `best_pair` the sum of its two largest (DeepSeek-V3, with
    correction bias). One group, or all kept: `choice` as it is.
    """
    if num_kept == num_groups:
        return choice
    rows, num_experts = choice.shape
    groups = choice.view(rows, num_groups, num_experts // num_groups)
    if best_pair:
        ordered = torch.sort(groups, dim=-1, descending=True).values
        worth = ordered[..., 0] + ordered[..., 1] if ordered.shape[-1] > 1 else ordered[..., 0]
    else:
        worth = groups.amax(dim=-1)
    kept = top_k_ids(worth, num_kept)
    dropped = torch.ones_like(worth, dtype=torch.bool).scatter_(1, kept, False)
    return groups.masked_fill(dropped.unsqueeze(-1), float("-inf")).view(rows, num_experts)
