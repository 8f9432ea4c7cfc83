"""What a static input buffer is: its name, axis, padding policy and where its rows come from.

Plain values, read by `GraphBufferRegistry` and written by whoever describes the inputs of a callable. Knows
nothing of what the buffers mean. Invariant: a slot says by itself what its tail holds, so no reader of a
buffer has to know which step wrote it last.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from ostinato.padding import StepShape

Axis = Literal["bs", "tokens", "none"]


class PaddingPolicy(enum.Enum):
    """What the tail rows [raw, padded) of a buffer hold when a step starts."""

    KEEP_PAD = "keep_pad"
    """Whatever was there: stale. Only for buffers that nobody reads past the real rows."""
    FOREACH_COPY = "foreach_copy"
    """As KEEP_PAD; the default of slots that are merely copied."""
    ZERO = "zero"
    """Zero, at every step."""
    FILL_SENTINEL = "fill_sentinel"
    """`pad_value`, at every step."""
    FILL_ONCE = "fill_once"
    """`pad_value` in the whole buffer when it is allocated, never reset."""


@dataclass(frozen=True, slots=True)
class FillContext:
    """The widths of one step: real (`raw_*`) and executed (`padded_*`), in requests and in rows."""

    raw_bs: int
    padded_bs: int
    raw_num_tokens: int
    padded_num_tokens: int
    pp_proxy_tensors: Mapping[str, torch.Tensor] | None = None

    @classmethod
    def of(cls, shape: StepShape, pp_proxy_tensors: Mapping[str, torch.Tensor] | None = None) -> FillContext:
        """The widths that `shape` decided."""
        return cls(shape.bs, shape.padded_bs, shape.raw_num_tokens, shape.padded_num_tokens, pp_proxy_tensors)

    def real(self) -> FillContext:
        """The same step without its pads: a view extracted with it narrows all row fields together."""
        return FillContext(
            self.raw_bs, self.raw_bs, self.raw_num_tokens, self.raw_num_tokens, self.pp_proxy_tensors
        )

    def rows(self, axis: Axis) -> tuple[int, int]:
        """`(raw, padded)` along `axis`: requests for "bs", else rows."""
        if axis == "bs":
            return self.raw_bs, self.padded_bs
        return self.raw_num_tokens, self.padded_num_tokens


ShapeFn = Callable[[int, int], tuple[int, ...]]
"""(max_bs, max_tokens) -> shape of the buffer."""
PostFill = Callable[[torch.Tensor, Any, FillContext], None]
"""(whole buffer, batch, ctx): writes the buffer after all copies of the step."""
SliceFn = Callable[[torch.Tensor, int], torch.Tensor]
"""(buffer, n) -> view of its leading n rows; needed where rows are not the first dimension."""
SourceFn = Callable[[Any, FillContext], "torch.Tensor | None"]
"""(batch, ctx) -> the rows to copy, or None to leave the buffer alone."""


@dataclass(frozen=True, slots=True)
class GraphSlot:
    """One static input buffer.

    name: attribute of the batch it is copied from and appears as; a dotted name ("proxy.hidden") needs
        `source_fn` and is not part of the view.
    shape_fn: (max_bs, max_tokens) -> shape. axis: which of the two widths its rows follow.
    device: None for the registry's; "cpu" for a host buffer beside a device registry.
    copy_from_fb: False when the buffer is computed (by `post_fill`, or inside the graph) instead of copied.

    Raises ValueError for an unknown axis, and for a dotted name without `source_fn`.
    """

    name: str
    shape_fn: ShapeFn
    dtype: torch.dtype
    axis: Axis
    device: torch.device | str | None = None
    padding_policy: PaddingPolicy = PaddingPolicy.FOREACH_COPY
    pad_value: float | None = None
    enabled: bool = True
    copy_from_fb: bool = True
    post_fill: PostFill | None = None
    slice_fn: SliceFn | None = None
    source_fn: SourceFn | None = None

    def __post_init__(self) -> None:
        if self.axis not in get_args(Axis):
            raise ValueError(f"slot {self.name!r} has axis {self.axis!r}; use one of {get_args(Axis)}")
        if self.dotted and self.copy_from_fb and self.source_fn is None:
            raise ValueError(f"slot {self.name!r} has a dotted name; give it a source_fn")

    @property
    def dotted(self) -> bool:
        return "." in self.name

    @property
    def computed(self) -> bool:
        """True when the buffer is more than a copy of a batch attribute; the view then always shows it."""
        return self.post_fill is not None or not self.copy_from_fb

    def head(self, buffer: torch.Tensor, n: int) -> torch.Tensor:
        """The leading `n` rows of `buffer`; all of it when the slot has no row axis."""
        if self.axis == "none":
            return buffer
        return buffer[:n] if self.slice_fn is None else self.slice_fn(buffer, n)

    def tail(self, buffer: torch.Tensor, raw: int, padded: int) -> torch.Tensor:
        """Rows [raw, padded), taken off the padded view, never off the whole buffer."""
        rows = self.head(buffer, padded)
        if self.slice_fn is not None and rows.dim() == 2:
            return rows[:, raw:]
        return rows[raw:]
