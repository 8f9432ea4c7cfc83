"""FlashAttention-3 behind the attention protocol, imported when it is asked for.

The tile schedule of a decode step is the same for all layers without a window: it is computed once per step, outside
the graph, and copied into a buffer at a fixed address, one a batch size, which captured calls read; the copy resets
its semaphore too. The number of splits is fixed when the backend is made, so a schedule from live lengths never
disagrees with the captured call. Knows nothing of graphs. Invariant: what a captured call reads is in fixed buffers
that every plan writes whole, pads included.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from ostinato.attention.backend import AttentionLayer, AttentionView, KVCache
from ostinato.attention.capabilities import AttentionCapabilities, AttentionNeeds
from ostinato.errors import ConfigError
from ostinato.graphs.stream import Stream
from ostinato.padding import StepMode, StepShape, real_row_mask

MODULE = "flash_attn_interface"
NO_WINDOW = (-1, -1)

CAPABILITIES = AttentionCapabilities(
    name="flash",
    devices=("cuda",),
    dtypes=(torch.bfloat16, torch.float16),
    sliding_window=True,
    # A prefill call takes its longest query as a host number, which a graph would freeze.
    captures=frozenset({StepMode.DECODE}),
    honours_count=True,
    writes_zeros=True,
)


class FlashKernels:
    """`AttentionKernels` over the functions of `interface`, a module like flash_attn_interface.

    num_splits: parts that the KV axis of each row is cut into, at places that depend on its length.
    """

    def __init__(self, kv: KVCache, needs: AttentionNeeds, interface: Any, num_splits: int = 1) -> None:
        if num_splits < 1:
            raise ConfigError(
                f"num_splits must be fixed, at least 1, got {num_splits}; 0 lets lengths decide"
            )
        self._kv = kv
        self._needs = needs
        self._flash = interface
        self._num_splits = num_splits
        self._device = kv.page_table.device
        self._max_seqlen_q = 1
        self._schedules: dict[int, torch.Tensor] = {}
        self.init_graph_state(0, 0)

    def init_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self._schedules.clear()
        pages = self._kv.page_table.shape[1]
        self._lens = torch.zeros(max_bs, dtype=torch.int32, device=self._device)
        self._pages = torch.zeros(max_bs, pages, dtype=torch.int32, device=self._device)
        self._first_rows = torch.zeros(max_bs + 1, dtype=torch.int32, device=self._device)
        self._live = torch.zeros(1, dtype=torch.int32, device=self._device)

    def plan(self, view: AttentionView, shape: StepShape) -> None:
        bs = view.req_pool_indices.shape[0]
        if bs > self._lens.shape[0]:
            raise ValueError(f"attention is planned for {self._lens.shape[0]} requests, the step has {bs}")
        self._lens[:bs].copy_(view.seq_lens[:bs])
        rows = view.req_pool_indices.to(self._device)
        torch.index_select(self._kv.page_table, 0, rows, out=self._pages[:bs])
        self._live.fill_(shape.raw_num_tokens)
        if view.mode.is_extend:
            assert view.extend_seq_lens is not None
            self._first_rows[1 : bs + 1] = view.extend_seq_lens[:bs].cumsum(0)
            self._max_seqlen_q = max(shape.raw_num_tokens, 1)
        else:
            self._schedule(bs)

    def _schedule(self, bs: int) -> None:
        """The tile schedule of a decode step, for all layers without a window."""
        layout = self._kv.k[0].shape
        fresh = self._flash.get_scheduler_metadata(
            batch_size=bs,
            max_seqlen_q=1,
            max_seqlen_k=self._pages.shape[1] * self._kv.page_size,
            num_heads_q=self._needs.num_heads,
            num_heads_kv=layout[1],
            headdim=layout[2],
            cache_seqlens=self._lens[:bs],
            qkv_dtype=self._kv.k[0].dtype,
            page_size=self._kv.page_size,
            causal=True,
            window_size=NO_WINDOW,
            num_splits=self._num_splits,
        )
        if bs not in self._schedules:
            self._schedules[bs] = torch.empty_like(fresh)
        self._schedules[bs].copy_(fresh)

    @property
    def planned_lens(self) -> torch.Tensor | None:
        return None  # the schedule follows from the lengths

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
        bs = view.req_pool_indices.shape[0]
        stream.launch(self._store, layer.layer_id, k, v, view.out_cache_loc)
        stream.launch(self._attend, layer, q, bs, view.mode.is_extend, out)

    def _store(self, layer_id: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        """Pads have slot 0, in the trash page."""
        self._kv.k[layer_id].index_copy_(0, slots, k)
        self._kv.v[layer_id].index_copy_(0, slots, v)

    def _attend(
        self, layer: AttentionLayer, q: torch.Tensor, bs: int, extends: bool, out: torch.Tensor
    ) -> None:
        kv, page = self._kv, self._kv.page_size
        k, v = (x[layer.layer_id].view(-1, page, *x[layer.layer_id].shape[1:]) for x in (kv.k, kv.v))
        window = NO_WINDOW if layer.sliding_window is None else (layer.sliding_window - 1, 0)
        lens: dict[str, Any] = {"cache_seqlens": self._lens[:bs], "page_table": self._pages[:bs]}
        if extends:
            lens |= {"cu_seqlens_q": self._first_rows[: bs + 1], "max_seqlen_q": self._max_seqlen_q}
        elif window == NO_WINDOW:
            lens |= {"scheduler_metadata": self._schedules[bs]}
        result = self._flash.flash_attn_with_kvcache(
            q if extends else q.unsqueeze(1),
            k,
            v,
            softmax_scale=layer.scale,
            causal=True,
            window_size=window,
            num_splits=self._num_splits,
            **lens,
        )
        out.copy_(result.view(out.shape))
        out.masked_fill_(~real_row_mask(self._live, len(out)).view(-1, 1, 1), 0.0)


class FlashPlugin:
    """What `attention_backend` "flash" builds."""

    capabilities = CAPABILITIES

    def build(self, kv: KVCache, needs: AttentionNeeds) -> FlashKernels:
        """Raises ConfigError where FlashAttention-3 is not installed."""
        try:
            interface = import_module(MODULE)
        except ImportError as error:
            raise ConfigError(
                f"attention_backend 'flash' needs FlashAttention-3, whose {MODULE} cannot be imported ({error}); "
                "install it, or use attention_backend 'triton'"
            ) from error
        return FlashKernels(kv, needs, interface)
