"""The contract between a decoder and whatever attends over the paged KV cache.

A backend plans on the host (outside graphs, into buffers of its own at fixed addresses) and runs on the
device. It knows nothing of weights or schedulers. Invariant: keys and values are always read back from the
pages, also those of the current step, so a decoded row and the same row prefilled again see the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ostinato.graphs.stream import Stream
from ostinato.padding import PadContract, StepMode, StepShape


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """What one layer asks of the backend. All positions are absolute within the sequence.

    A query at position p sees keys at j <= p; with `sliding_window` W only j > p - W; with
    `attention_chunk_size` C only j // C == p // C. `scale` multiplies the scores. `is_last`: of a step that names its
    `logit_rows` only those go on, so that other rows of `out` may hold anything; their keys and values are cached all
    the same.
    """

    layer_id: int
    scale: float
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class CaptureLimits:
    """What a captured prefill can hold of a backend's attention; the default: everything, the plan is read at replay.

    request_slots: it launches work for each request slot, used or not, so there should be few.
    max_context: longest KV of a request in it; None for any.
    prefix_chunks: it does fixed work over the cached prefix, in so many chunks of `max_num_tokens // slots` keys for
        each request, so that there must be a graph for each of these numbers; `StepShape.variant` says which.
    """

    request_slots: bool = False
    max_context: int | None = None
    prefix_chunks: tuple[int, ...] = ()


class KVCache(Protocol):
    """The KV pool on the device, as attention sees it. Slot = page * page_size + offset; page 0 is trash."""

    @property
    def k(self) -> Sequence[torch.Tensor]:
        """Keys of each layer, [num_slots, kv_heads, head_dim]."""
        ...

    @property
    def v(self) -> Sequence[torch.Tensor]:
        """Values of each layer, [num_slots, kv_heads, head_dim]."""
        ...

    @property
    def page_table(self) -> torch.Tensor:
        """int32 [max_requests + 1, max_pages_per_request]; row 0 and unused entries are page 0."""
        ...

    @property
    def page_size(self) -> int: ...


class AttentionView(Protocol):
    """The fields of a (padded) batch that attention reads; see `ForwardBatch` for their meaning."""

    @property
    def mode(self) -> StepMode: ...
    @property
    def out_cache_loc(self) -> torch.Tensor: ...
    @property
    def req_pool_indices(self) -> torch.Tensor: ...
    @property
    def seq_lens(self) -> torch.Tensor: ...
    @property
    def seq_lens_cpu(self) -> torch.Tensor: ...
    @property
    def extend_seq_lens(self) -> torch.Tensor | None: ...
    @property
    def extend_start_loc(self) -> torch.Tensor | None: ...
    @property
    def logit_rows(self) -> torch.Tensor | None: ...
    @property
    def num_logit_rows(self) -> torch.Tensor | None: ...


class AttentionBackend(Protocol):
    """Paged attention: `plan` per step on the host, `forward` per layer on the device."""

    @property
    def name(self) -> str: ...

    @property
    def pad_contract(self) -> PadContract:
        """Rows past the count must come out as zeros and write no live page."""
        ...

    @property
    def seq_len_fill_value(self) -> int:
        """Sequence length of pad rows: 1, or 0 only where an empty row is known to give zeros, not NaN."""
        ...

    def can_capture(self, mode: StepMode) -> bool:
        """Whether `forward` may be captured for steps of this mode."""
        ...

    @property
    def capture_limits(self) -> CaptureLimits:
        """What captured prefills, attention inside, cannot do; only where `can_capture` allows them."""
        ...

    def init_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate the plan's buffers, once, before any capture."""
        ...

    def plan(self, view: AttentionView, shape: StepShape) -> None:
        """Host part of a step: describe its real requests in the fixed buffers. Runs before every step."""
        ...

    @property
    def planned_lens(self) -> torch.Tensor | None:
        """KV lengths int64 [max_bs] that `plan` wrote, at a fixed address, where adding one to each plans the next
        decode step of the same requests; None where only `plan` can.
        """
        ...

    def forward(
        self,
        stream: Stream,
        layer: AttentionLayer,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        view: AttentionView,
        out: torch.Tensor,
    ) -> None:
        """Write k and v [T, Hkv, D] at `view.out_cache_loc`, then attend with q [T, Hq, D] into out [T, Hq,
        D].
        """
        ...
