"""Paged attention in Triton: plans into fixed buffers on the device, launches the kernels of `ops/cuda`.

Knows nothing of weights or schedulers. Invariant: a step is described in fixed buffers, and how many requests, rows
and tiles there are is read from them by the kernels, so a captured launch serves every later step of its shape.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ostinato.attention.backend import AttentionLayer, AttentionView, CaptureLimits, KVCache
from ostinato.graphs.stream import Stream
from ostinato.ops.cuda import paged_attention as kernels
from ostinato.ops.cuda.gemm import precision
from ostinato.ops.cuda.launching import cdiv, interpreted, power_of_two, run
from ostinato.ops.cuda.scratch import Scratch
from ostinato.padding import PadContract, StepMode, StepShape

CHUNK = 512
"""Keys whose sums are made from nothing: where the KV axis may be cut."""
BLOCK = 64
GPU_ROWS, INTERPRETER_ROWS = 16, 8
"""Rows of a tile; numpy's products, of which the interpreter is made, treat all of 8 alike."""


class TritonAttention:
    """`AttentionBackend` over one `KVCache`, which says by its tensors which device this is."""

    def __init__(self, kv: KVCache, *, chunk: int = CHUNK) -> None:
        self._kv = kv
        self._chunk = chunk
        self._device = kv.k[0].device
        self._scratch = Scratch(self._device)
        self._rows = INTERPRETER_ROWS if interpreted() else GPU_ROWS
        self._counts = torch.zeros(2, dtype=torch.int32, device=self._device)  # real requests, real rows
        self.init_graph_state(0, 0)

    @property
    def name(self) -> str:
        return "triton"

    @property
    def pad_contract(self) -> PadContract:
        return PadContract("triton attention", honours_count=True, writes_zeros=True)

    @property
    def seq_len_fill_value(self) -> int:
        return 1

    def can_capture(self, mode: StepMode) -> bool:
        return True

    @property
    def capture_limits(self) -> CaptureLimits:
        return CaptureLimits()

    def init_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        # Rows of the plan: first query row, query rows, KV length, row of the page table; a column a request.
        self._requests = torch.zeros(4, max_bs, dtype=torch.int64, device=self._device)
        self._one_row_each = torch.stack((torch.arange(max_bs), torch.ones(max_bs, dtype=torch.int64)))
        self._one_row_each = self._one_row_each.to(self._device)

    def plan(self, view: AttentionView, shape: StepShape) -> None:
        bs = shape.bs
        if bs > self._requests.shape[1]:
            raise ValueError(
                f"attention is planned for {self._requests.shape[1]} requests, the step has {bs}"
            )
        plan = self._requests[:, :bs]
        if view.mode.is_extend:
            assert view.extend_seq_lens is not None
            lens = view.extend_seq_lens[:bs].to(self._device, non_blocking=True)
            plan[0] = lens.cumsum(0) - lens
            plan[1] = lens
        else:
            plan[:2] = self._one_row_each[:, :bs]
        plan[2].copy_(view.seq_lens[:bs], non_blocking=True)
        plan[3].copy_(view.req_pool_indices[:bs], non_blocking=True)
        self._counts.copy_(torch.tensor((bs, shape.raw_num_tokens), dtype=torch.int32), non_blocking=True)

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
        for name, part in (("q", q), ("k", k), ("v", v), ("out", out)):
            if part.stride(2) != 1 or part.dtype != self._kv.k[0].dtype:
                raise ValueError(
                    f"attention needs {name} in {self._kv.k[0].dtype} with contiguous values, got {part.dtype} with "
                    f"strides {part.stride()}"
                )
        stream.launch(self._store, layer.layer_id, k, v, view.out_cache_loc, out)
        if view.mode.is_extend:
            stream.launch(self._prefill, layer, q, view.req_pool_indices.shape[0], out)
        else:
            stream.launch(self._decode, layer, q, out)

    def _store(
        self, layer_id: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Keys and values of real rows into their pages; zeros into `out` of the others."""
        if not len(k):
            return
        kv_heads, dim = self._kv.k[0].shape[1:]
        width = out.shape[1] * out.shape[2]
        run(
            kernels.store_kv_kernel,
            (len(k),),
            k,
            v,
            slots,
            self._kv.k[layer_id],
            self._kv.v[layer_id],
            out,
            self._counts,
            k.stride(0),
            k.stride(1),
            v.stride(0),
            v.stride(1),
            out.stride(0),
            KV_WIDTH=kv_heads * dim,
            OUT_WIDTH=width,
            DIM=dim,
            KV_BLOCK=power_of_two(kv_heads * dim),
            OUT_BLOCK=power_of_two(width),
        )

    def _prefill(self, layer: AttentionLayer, q: torch.Tensor, bs: int, out: torch.Tensor) -> None:
        kv_heads = self._kv.k[0].shape[1]
        group, capacity = q.shape[1] // kv_heads, self._requests.shape[1]
        most_tiles = len(q) * group // self._rows + min(bs, len(q))
        if most_tiles:
            run(
                kernels.prefill_kernel,
                (most_tiles, kv_heads),
                q,
                *self._pages(layer),
                out,
                capacity,
                self._kv.page_table.stride(0),
                q.stride(0),
                q.stride(1),
                out.stride(0),
                layer.scale * math.log2(math.e),
                **self._constants(layer, q),
                CHUNK=self._chunk,
                REQUESTS_BLOCK=power_of_two(capacity),
            )

    def _decode(self, layer: AttentionLayer, q: torch.Tensor, out: torch.Tensor) -> None:
        rows, heads = q.shape[:2]
        if not rows:
            return
        constants, capacity = self._constants(layer, q), self._requests.shape[1]
        group, wide = constants["GROUP"], constants["DIM_BLOCK"]
        chunks = cdiv(self._kv.page_table.shape[1] * self._kv.page_size, self._chunk)
        parts = max(capacity, rows) * heads * chunks
        mixed = self._scratch.take("mixed", parts * wide, torch.float32)
        sums = self._scratch.take("sums", parts * 2, torch.float32)
        run(
            kernels.decode_kernel,
            (rows, heads // group * cdiv(group, self._rows), chunks),
            q,
            *self._pages(layer),
            mixed,
            sums,
            capacity,
            self._kv.page_table.stride(0),
            q.stride(0),
            q.stride(1),
            layer.scale * math.log2(math.e),
            **constants,
            Q_HEADS=heads,
            CHUNK=self._chunk,
            CHUNKS=chunks,
        )
        shared = {name: constants[name] for name in ("DIM", "WINDOW", "SPAN", "BN", "DIM_BLOCK")}
        plan = mixed, sums, self._requests, self._counts, out, capacity, out.stride(0)
        sizes = {"Q_HEADS": heads, "CHUNK": self._chunk, "CHUNKS": chunks}
        run(kernels.merge_kernel, (rows, heads), *plan, **shared, **sizes)

    def _pages(self, layer: AttentionLayer) -> tuple[torch.Tensor, ...]:
        kv, i = self._kv, layer.layer_id
        return kv.k[i], kv.v[i], kv.page_table, self._requests, self._counts

    def _constants(self, layer: AttentionLayer, q: torch.Tensor) -> dict[str, Any]:
        kv_heads, dim = self._kv.k[0].shape[1:]
        return {
            "GROUP": q.shape[1] // kv_heads,
            "KV_WIDTH": kv_heads * dim,
            "DIM": dim,
            "PAGE": self._kv.page_size,
            "WINDOW": layer.sliding_window or 0,
            "SPAN": layer.attention_chunk_size or 0,
            "PRECISION": precision(q.dtype),
            "BM": self._rows,
            "BN": BLOCK,
            "DIM_BLOCK": power_of_two(dim, 16),
        }
