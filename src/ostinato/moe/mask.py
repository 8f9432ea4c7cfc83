"""The pad mask over rows of expert ids or routing weights: the op, and the sentinel it writes.

Which rows are pads is decided by padding.py; this module turns a device count into a select over whole rows,
in place. It knows nothing of routers. Invariant: no host read, no data-dependent shape, idempotent; a select
and never a product, since NaN * 0 is NaN.
"""

from __future__ import annotations

import torch

from ostinato.padding import gathered_row_mask, real_row_mask

SENTINEL = -1
"""The expert id that means "this slot goes nowhere"."""


def pad_rows(
    num_rows: int,
    num_token_non_padded: torch.Tensor | None,
    gathered_counts: torch.Tensor | None = None,
    rows_per_slot: int | None = None,
) -> torch.Tensor | None:
    """Bool [num_rows, 1], True for pad rows; None when nothing is known to be padded.

    Either a count of leading real rows, `num_token_non_padded`: integer tensor of one element; or, for a
    buffer gathered over data-parallel ranks in slots of `rows_per_slot` rows, `gathered_counts`: integer
    tensor [dp] of UNPADDED counts. Real rows of a gathered buffer are not a prefix of it, so giving both is
    an error. A gathered count on a buffer of another size (exact offsets, no padding) masks nothing.

    Raises TypeError for a count that is no integer tensor and ValueError for one of a wrong size.
    """
    if gathered_counts is not None:
        if num_token_non_padded is not None:
            raise ValueError(
                "both num_token_non_padded and gathered_counts are given; real rows of a gathered buffer are "
                "not a prefix of it, so pass gathered_counts alone there"
            )
        if rows_per_slot is None or rows_per_slot < 1:
            raise ValueError(f"gathered_counts needs rows_per_slot >= 1, got {rows_per_slot}")
        _check_integers("gathered_counts", gathered_counts)
        if num_rows != gathered_counts.numel() * rows_per_slot:
            return None
        return gathered_row_mask(gathered_counts.reshape(-1), rows_per_slot).logical_not_().unsqueeze(1)
    if num_token_non_padded is None:
        return None
    _check_integers("num_token_non_padded", num_token_non_padded)
    if num_token_non_padded.numel() != 1:
        raise ValueError(
            f"num_token_non_padded must have one element, got shape {tuple(num_token_non_padded.shape)}; the "
            "counts of several ranks are gathered_counts"
        )
    return real_row_mask(num_token_non_padded.reshape(1), num_rows).logical_not_().unsqueeze(1)


def mask_pad_rows_(
    rows: torch.Tensor,
    num_token_non_padded: torch.Tensor | None,
    fill: float,
    gathered_counts: torch.Tensor | None = None,
    rows_per_slot: int | None = None,
) -> None:
    """Overwrite the rows [N, K] at or past the count with `fill`, in place.

    `rows` may have any dtype and any strides. The count is a one-element integer tensor on the same device;
    None, or a count of N or more, changes nothing. Raises as `pad_rows`, and ValueError for a count on
    another device.
    """
    pads = pad_rows(rows.shape[0], num_token_non_padded, gathered_counts, rows_per_slot)
    if pads is not None:
        fill_pad_rows_(rows, pads, fill)


def fill_pad_rows_(rows: torch.Tensor, pads: torch.Tensor, fill: float) -> None:
    """The select itself: `rows` [N, K] becomes `fill` where `pads` bool [N, 1] is True."""
    if rows.device != pads.device:
        raise ValueError(
            f"the count of real rows is on {pads.device}, the rows on {rows.device}; keep both on one device"
        )
    rows.masked_fill_(pads, fill)


def _check_integers(name: str, count: object) -> None:
    if not isinstance(count, torch.Tensor):
        raise TypeError(
            f"{name} must be an integer tensor on the device of the rows, got {type(count).__name__}; a host "
            "number would be frozen into a captured graph"
        )
    if count.dtype == torch.bool or count.is_floating_point() or count.is_complex():
        raise TypeError(f"{name} must hold integers, got {count.dtype}")
