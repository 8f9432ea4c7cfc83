"""What an attention backend can do, as a frozen declaration, and whether that is enough for a model and a deployment.

One table a backend, read at load; no forked runner, no flag asked in the middle of a step. Knows nothing of kernels.
Invariant: a pair that does not fit is refused at load, with both sides and what is missing named.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ostinato.attention.backend import CaptureLimits
from ostinato.errors import ConfigError
from ostinato.padding import PadContract, StepMode


@dataclass(frozen=True, slots=True)
class AttentionCapabilities:
    """A declaration; what is left out is not there.

    devices: torch device types it runs on. dtypes: of queries and pages. head_dims: those it has kernels for, None for
        any. page_multiple: page sizes are multiples of it. max_context: longest KV of a request, None for any.
    sliding_window, attention_chunks: whether layers may have them.
    captures: kinds of step whose `forward` may be captured; the others run between graph segments, or eagerly.
        capture_limits: what captured prefills cannot do.
    honours_count, writes_zeros: pad rows write no page, and come out zero. Both are needed.
    seq_len_fill_value: KV length of pad requests: 1, or 0 where `empty_row_gives_zeros` (on some kernels a softmax over
        nothing is 0/0).
    needs_cpu_seq_lens: `plan` or `forward` reads `view.seq_lens_cpu`.
    plan_advances: adding one to each of `planned_lens` is all the planning that the next decode step needs.

    Raises ConfigError for a fill value that the rest does not allow.
    """

    name: str
    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    head_dims: tuple[int, ...] | None = None
    page_multiple: int = 1
    max_context: int | None = None
    sliding_window: bool = False
    attention_chunks: bool = False
    captures: frozenset[StepMode] = frozenset()
    capture_limits: CaptureLimits = field(default_factory=CaptureLimits)
    honours_count: bool = False
    writes_zeros: bool = False
    seq_len_fill_value: int = 1
    empty_row_gives_zeros: bool = False
    needs_cpu_seq_lens: bool = False
    plan_advances: bool = False

    def __post_init__(self) -> None:
        allowed = (0, 1) if self.empty_row_gives_zeros else (1,)
        if self.seq_len_fill_value not in allowed:
            raise ConfigError(
                f"attention {self.name!r} declares seq_len_fill_value {self.seq_len_fill_value}; use 1, or 0 together "
                "with empty_row_gives_zeros"
            )

    @property
    def pad_contract(self) -> PadContract:
        return PadContract(
            f"{self.name} attention", honours_count=self.honours_count, writes_zeros=self.writes_zeros
        )

    def can_advance(self, device: torch.device) -> bool:
        """Whether a decode step may follow from the last one by launches alone, without a plan on the host."""
        return self.plan_advances and not (self.needs_cpu_seq_lens and device.type != "cpu")


@dataclass(frozen=True, slots=True)
class AttentionNeeds:
    """What a model in a deployment asks of its attention; num_heads: query heads of this rank."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    page_size: int
    context_length: int
    num_heads: int
    sliding_window: bool = False
    attention_chunks: bool = False


def check_fit(can: AttentionCapabilities, needs: AttentionNeeds) -> None:
    """Raise ConfigError for the first need that the declaration does not cover."""
    dtypes = ", ".join(map(str, can.dtypes))
    for refused, lack in (
        (
            needs.device.type not in can.devices,
            f"runs on {', '.join(can.devices)}, not on {needs.device.type}",
        ),
        (
            needs.dtype not in can.dtypes,
            f"computes in {dtypes}, the dtype is {needs.dtype}",
        ),
        (
            can.head_dims is not None and needs.head_dim not in can.head_dims,
            f"has heads of {can.head_dims}, the model's are {needs.head_dim}",
        ),
        (
            needs.page_size % can.page_multiple != 0,
            f"needs pages of a multiple of {can.page_multiple} tokens, page_size is {needs.page_size}",
        ),
        (
            can.max_context is not None and needs.context_length > can.max_context,
            f"takes contexts up to {can.max_context}, context_length is {needs.context_length}",
        ),
        (
            needs.sliding_window and not can.sliding_window,
            "has no sliding windows, which the model's layers have",
        ),
        (
            needs.attention_chunks and not can.attention_chunks,
            "has no chunked attention, which the model's layers have",
        ),
        (not can.honours_count, "does not declare that pad rows write no page (honours_count)"),
        (not can.writes_zeros, "does not declare that pad rows come out zero (writes_zeros)"),
    ):
        if refused:
            raise ConfigError(
                f"attention backend {can.name!r} {lack}; change that, or use another attention_backend"
            )
