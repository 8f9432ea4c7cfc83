"""Which count of real rows a MoE layer may hand its router: the one that describes the rows the router sees.

A table (behaviour reference, section 1.5) over how those rows came about. It computes no count; padding.py
does. Invariant: where the real rows are not a leading part of the router's rows, the answer is None, never a
wrong count.
"""

from __future__ import annotations

import enum

import torch


class RouterRows(enum.Enum):
    """Where the rows at the router come from."""

    OWN_SLICE = "own slice"  # what this rank owns: an all-to-all dispatcher moves rows later
    MOE_CP_GATHERED = "gathered over context-parallel ranks"
    FFN_GATHERED = "gathered over attention ranks"


def moe_num_token_non_padded(
    rows: RouterRows,
    *,
    local: torch.Tensor | None,
    global_count: torch.Tensor | None,
    cp_prefill: bool = False,
    attn_dp_size: int = 1,
    sharded: bool = False,
) -> torch.Tensor | None:
    """The count to pass to `select_experts`, or None when no count fits.

    `local` and `global_count` are the batch's two counts; `cp_prefill` says that this forward is a
    context-parallel prefill, `sharded` that attention-TP ranks own slices of the rows. With several
    data-parallel ranks gathered the
    real rows are no prefix: pass `gathered_counts` to the router instead.
    """
    if local is None:
        return None
    if rows is RouterRows.OWN_SLICE:
        return local
    if cp_prefill or attn_dp_size > 1:
        return None
    return global_count if sharded else local
