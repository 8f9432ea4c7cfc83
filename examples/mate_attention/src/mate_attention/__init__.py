"""An attention backend as a MUSA device with the MATE library would need one, which also runs on a CPU.

What such a backend is about: a table of capabilities, a schedule computed once per step in `plan` (not at the first
layer met) into fixed buffers, and kernels that leave pads out. `_library` stands for MATE; here it is a little torch.
"""

from __future__ import annotations

from typing import Any

import torch

from mate_attention import _library
from ostinato.attention import AttentionLayer, AttentionView, KVCache
from ostinato.attention.capabilities import AttentionCapabilities, AttentionNeeds
from ostinato.graphs import Stream
from ostinato.padding import StepMode, StepShape

CAPABILITIES = AttentionCapabilities(
    name="mate",
    devices=("cpu", "musa"),
    dtypes=(torch.float32, torch.float16, torch.bfloat16),
    head_dims=(64, 80, 96, 128, 256),
    page_multiple=16,
    max_context=1 << 20,
    sliding_window=True,
    captures=frozenset({StepMode.DECODE}),
    honours_count=True,
    writes_zeros=True,
    needs_cpu_seq_lens=True,
)


class MateAttention:
    """The kernels over one KV cache; all that they read of a step is in fixed buffers."""

    def __init__(self, kv: KVCache, needs: AttentionNeeds) -> None:
        self._kv = kv
        self._num_heads = needs.num_heads
        self.schedules = 0
        self.init_graph_state(0, 0)

    def init_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        device = self._kv.page_table.device
        self._requests = torch.zeros(4, max_bs, dtype=torch.int64, device=device)
        self._counts = torch.zeros(2, dtype=torch.int64, device=device)
        self._schedule = torch.zeros(_library.schedule_size(max_bs), dtype=torch.int32, device=device)

    def plan(self, view: AttentionView, shape: StepShape) -> None:
        """Before every step: its real requests, and the tile schedule that all layers share."""
        bs = shape.bs
        lens = view.seq_lens_cpu[:bs]
        rows = torch.ones_like(lens) if view.extend_seq_lens is None else view.extend_seq_lens[:bs].cpu()
        described = torch.stack((rows.cumsum(0) - rows, rows, lens, view.req_pool_indices[:bs].cpu()))
        self._requests[:, :bs].copy_(described)
        self._counts.copy_(torch.tensor((bs, shape.raw_num_tokens)))
        # A fresh schedule into the old buffer: captured calls keep its address, and its semaphore is reset.
        fresh = _library.get_scheduler_metadata(lens, self._num_heads)
        self._schedule[: len(fresh)].copy_(fresh)
        self.schedules += 1

    @property
    def planned_lens(self) -> torch.Tensor:
        return self._requests[2]

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
        stream.launch(self._run, layer, q, k, v, view.out_cache_loc, out)

    def _run(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        slots: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        keys, values = self._kv.k[layer.layer_id], self._kv.v[layer.layer_id]
        cache: Any = (keys, values, self._kv.page_table, self._kv.page_size)
        _library.write_kv(k, v, slots, keys, values, self._counts)
        _library.attend(
            q, cache, self._requests, self._counts, self._schedule, layer.scale, layer.sliding_window, out
        )


class Plugin:
    """What the entry point names."""

    capabilities = CAPABILITIES

    def build(self, kv: KVCache, needs: AttentionNeeds) -> MateAttention:
        return MateAttention(kv, needs)


PLUGIN = Plugin()
