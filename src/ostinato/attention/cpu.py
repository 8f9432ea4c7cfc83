"""Paged attention on CPU: plans on the host, launches the kernels of `ops/cpu`.

Lays out the KV pool's memory for dot products, by itself: whoever else reads the pool's tensors sees permuted
values. Knows nothing of arithmetic. Invariant: a step is described in fixed buffers, so a captured launch
serves every later step of its shape; a row's bits do not depend on the step it is part of.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from ostinato.attention.backend import AttentionLayer, AttentionView, CaptureLimits, KVCache
from ostinato.errors import ConfigError
from ostinato.graphs.stream import Stream
from ostinato.ops.cpu import attention_fields as field
from ostinato.ops.cpu.attention_ir import PAGE
from ostinato.ops.cpu.attention_state_ir import ATTENTION_FUNCTIONS
from ostinato.ops.cpu.lane_kinds import kind_for
from ostinato.ops.cpu.launch import UNKNOWN, Launch, Runtime
from ostinato.ops.cpu.native import NativeLibrary
from ostinato.ops.cpu.paged_step import attention_entry, attention_worker
from ostinato.padding import PadContract, StepMode, StepShape

PARTIALS_BYTES = 8 << 20  # room for chunks that several threads share; without room one thread takes them all
_MOST_LAUNCHES = 4096  # kept between eager steps


class CpuAttention:
    """`AttentionBackend` with Numba and LLVM kernels over one `KVCache` in bf16 or fp32.

    Raises ConfigError for a pool whose pages it cannot lay out.
    """

    def __init__(self, kv: KVCache, runtime: Runtime) -> None:
        first = kv.k[0]
        if kv.page_size % PAGE:
            raise ConfigError(f"page size {kv.page_size} is not a multiple of {PAGE}; choose {PAGE} or 32")
        if first.shape[2] * first.element_size() % 4:
            raise ConfigError(
                f"head dimension {first.shape[2]} is odd, which bf16 attention on CPU cannot pair"
            )
        if not all(part.is_contiguous() and part.device.type == "cpu" for part in (*kv.k, *kv.v)):
            raise ConfigError("attention on CPU needs a contiguous KV pool in host memory")
        self._kv = kv
        self._runtime = runtime
        self._kind = kind_for(first.dtype, runtime.isa)
        threads = runtime.pool.num_threads
        self._scratch_bytes = -(-field.scratch_bytes(first.shape[2]) // 64) * 64
        self._scratch = torch.zeros(threads * self._scratch_bytes + 64, dtype=torch.uint8)
        self._partials = torch.zeros(PARTIALS_BYTES + 64, dtype=torch.uint8)
        self._counts = torch.zeros(2, dtype=torch.int64)  # real requests, real rows
        self._kernel = _AttentionKernel(self)
        self.init_graph_state(0, 0)

    @cached_property
    def _library(self) -> NativeLibrary:
        """Made when the first launch is, not while weights have to wait for it."""
        return NativeLibrary("attention", ATTENTION_FUNCTIONS, self._kind, self._runtime.compiler)

    @property
    def name(self) -> str:
        return "cpu"

    @property
    def pad_contract(self) -> PadContract:
        return PadContract("cpu attention", honours_count=True, writes_zeros=True)

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
        self._requests = torch.zeros(4, max_bs, dtype=torch.int64)
        self._wanted = torch.zeros(
            4, max_bs, dtype=torch.int64
        )  # the same from each one's first wanted row on
        self._chunks_done = torch.zeros(max_bs * self._kv.k[0].shape[1], dtype=torch.int64)
        self._host_plan = self._requests.numpy(), self._wanted.numpy(), self._counts.numpy()
        self._one_row_each = np.stack((np.arange(max_bs), np.ones(max_bs, dtype=np.int64)))
        self._kernel.forget()

    def plan(self, view: AttentionView, shape: StepShape) -> None:
        bs = shape.bs
        if bs > self._requests.shape[1]:
            raise ValueError(
                f"attention is planned for {self._requests.shape[1]} requests, the step has {bs}"
            )
        # By numpy, over the same memory: a torch operation on a few integers costs several times as much.
        plan, wanted, counts = self._host_plan
        if view.mode.is_extend:
            assert view.extend_seq_lens is not None
            lens = view.extend_seq_lens.numpy()[:bs]
            plan[0, :bs] = lens.cumsum() - lens
            plan[1, :bs] = lens
        else:
            plan[:2, :bs] = self._one_row_each[:, :bs]
        plan[2, :bs] = view.seq_lens_cpu.numpy()[:bs]
        plan[3, :bs] = view.req_pool_indices.numpy()[:bs]
        counts[:] = bs, shape.raw_num_tokens
        if view.mode.is_extend and view.logit_rows is not None:
            assert view.num_logit_rows is not None, "rows that go on alone come with their count"
            wanted[:, :bs] = plan[:, :bs]
            rows = view.logit_rows.numpy()[: int(view.num_logit_rows)]
            _leave_out(wanted[:, :bs], rows)

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
        wanted = layer.is_last and view.logit_rows is not None
        stream.launch(self._kernel, layer, wanted, q, k, v, view.out_cache_loc, out)

    def launch_of(
        self,
        layer: AttentionLayer,
        tensors: Sequence[torch.Tensor],
        kept: tuple[torch.Tensor, ...],
        *,
        wanted: bool = False,
    ) -> Launch:
        """A launch bound to (q, k, v, slots, out), which it keeps alive only as far as they are in `kept`; `wanted`: it
        leaves out rows of no meaning to the step.
        """
        q, k, v, slots, out = tensors
        kv_heads, dim = self._kv.k[0].shape[1:]
        _check(q, q.shape[1], dim, self._kv.k[0].dtype)
        _check(out, q.shape[1], dim, self._kv.k[0].dtype)
        for part in (k, v):
            _check(part, kv_heads, dim, self._kv.k[0].dtype)
        size = q.element_size()
        values = {
            **self._fixed_fields(),
            field.REQUESTS: (self._wanted if wanted else self._requests).data_ptr(),
            field.Q: q.data_ptr(),
            field.Q_STRIDE: q.stride(0) * size,
            field.OUT: out.data_ptr(),
            field.OUT_STRIDE: out.stride(0) * size,
            field.ROWS: q.shape[0],
            field.Q_HEADS: q.shape[1],
            field.K_PAGES: self._kv.k[layer.layer_id].data_ptr(),
            field.V_PAGES: self._kv.v[layer.layer_id].data_ptr(),
            field.WINDOW: layer.sliding_window or 0,
            field.ATTENTION_CHUNK: layer.attention_chunk_size or 0,
            field.K_NEW: k.data_ptr(),
            field.V_NEW: v.data_ptr(),
            field.K_STRIDE: k.stride(0) * size,
            field.V_STRIDE: v.stride(0) * size,
            field.SLOTS: slots.data_ptr(),
            field.FACTOR: struct.unpack("<I", struct.pack("<f", layer.scale * math.log2(math.e)))[0],
        }
        launch = self._runtime.launch(
            attention_entry, attention_worker, values, field.NUM_FIELDS, (self, *kept)
        )
        launch.streamed = UNKNOWN  # what lies in which pages is known when it runs
        return launch

    def _fixed_fields(self) -> Mapping[int, int]:
        """What does not change between launches."""
        kv_heads, dim = self._kv.k[0].shape[1:]
        functions = self._library.addresses
        return {
            field.COUNTS: self._counts.data_ptr(),
            field.CAPACITY: self._requests.shape[1],
            field.TABLE: self._kv.page_table.data_ptr(),
            field.TABLE_STRIDE: self._kv.page_table.stride(0) * self._kv.page_table.element_size(),
            field.PAGE_BLOCKS: self._kv.page_size // PAGE,
            field.KV_HEADS: kv_heads,
            field.DIM: dim,
            field.VALUE_BYTES: self._kv.k[0].element_size(),
            field.SCRATCH: _aligned(self._scratch),
            field.SCRATCH_STRIDE: self._scratch_bytes,
            field.PARTIALS: _aligned(self._partials),
            field.PARTIALS_BYTES: PARTIALS_BYTES,
            field.CHUNKS_DONE: self._chunks_done.data_ptr(),
            field.SCORE_ROWS: functions["score_rows"],
            field.SOFTMAX_ROWS: functions["softmax_rows"],
            field.MIX_ROWS: functions["mix_rows"],
            field.SCORE_STREAM: functions["score_stream"],
            field.SOFTMAX_STREAM: functions["softmax_stream"],
            field.MIX_STREAM: functions["mix_stream"],
            field.WRITE_KV_ROW: functions["write_kv_row"],
            field.CLEAN_PAGE: functions["clean_page"],
            field.CLEAR_ROWS: functions["clear_rows"],
            field.MERGE_ROWS: functions["merge_rows"],
            field.FINISH_ROWS: functions["finish_rows"],
        }


class _AttentionKernel:
    """What `forward` launches. `bind` fixes the tensors; a plain call finds its launch by their addresses."""

    __slots__ = ("_backend", "_launches")

    def __init__(self, backend: CpuAttention) -> None:
        self._backend = backend
        self._launches: dict[tuple[object, ...], Launch] = {}

    def forget(self) -> None:
        self._launches.clear()

    def __call__(self, layer: AttentionLayer, wanted: bool, *tensors: torch.Tensor) -> None:
        key = (layer, wanted, *((t.data_ptr(), t.shape, t.stride(0)) for t in tensors))
        launch = self._launches.get(key)
        if launch is None:
            if len(self._launches) >= _MOST_LAUNCHES:
                self._launches.clear()
            launch = self._launches[key] = self._backend.launch_of(layer, tensors, kept=(), wanted=wanted)
        launch()

    def bind(self, layer: AttentionLayer, wanted: bool, *tensors: torch.Tensor) -> Launch:
        return self._backend.launch_of(layer, tensors, kept=tensors, wanted=wanted)


def _leave_out(
    requests: np.ndarray[Any, np.dtype[np.int64]], rows: np.ndarray[Any, np.dtype[np.int64]]
) -> None:
    """Let each request (see `init_graph_state`) begin at its first one of `rows` (any order), or have no rows."""
    starts, ends = requests[0].copy(), requests[0] + requests[1]
    owners = np.searchsorted(ends, rows, side="right")
    requests[0] = ends
    np.minimum.at(requests[0], owners, rows)
    requests[1] -= requests[0] - starts


def _aligned(buffer: torch.Tensor) -> int:
    return -(-buffer.data_ptr() // 64) * 64


def _check(x: torch.Tensor, heads: int, dim: int, dtype: torch.dtype) -> None:
    """Rows may be strided, heads and values are not."""
    if tuple(x.shape[1:]) != (heads, dim) or x.dtype != dtype or (x.stride(2), x.stride(1)) != (1, dim):
        raise ValueError(
            f"attention needs contiguous heads [rows, {heads}, {dim}] in {dtype}, got {tuple(x.shape)} {x.dtype}"
            f" with strides {x.stride()}"
        )
