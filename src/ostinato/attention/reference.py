"""Paged attention in plain torch, one kernel for decode, extend and mixed steps.

The plan copies the step's real requests into fixed buffers; pads are simply not in it, so they write nothing
and come out as zeros. Knows nothing of graphs or weights. Invariant: every product has a fixed shape
(`ROW_BLOCK` query rows by `KV_BLOCK` keys at fixed absolute positions) and blocks are added in order of
position, so a query's bits depend on its own keys alone: not on chunking, batch-mates, bucket or whether it
was decoded or prefilled.
"""

from __future__ import annotations

import math

import torch

from ostinato.attention.backend import AttentionLayer, AttentionView, CaptureLimits, KVCache
from ostinato.graphs.stream import Stream
from ostinato.padding import PadContract, StepMode, StepShape, align_up

ROW_BLOCK = 8
KV_BLOCK = 64


class ReferenceAttention:
    """`AttentionBackend` in plain torch over one `KVCache`."""

    def __init__(self, kv: KVCache) -> None:
        self._kv = kv
        # Rows of the plan: first query row, query rows, KV length, row of the page table; one column per
        # request.
        self._requests = torch.zeros(4, 0, dtype=torch.int64)
        self._counts = torch.zeros(2, dtype=torch.int64)  # real requests, real rows

    @property
    def name(self) -> str:
        return "reference"

    @property
    def pad_contract(self) -> PadContract:
        return PadContract("reference attention", honours_count=True, writes_zeros=True)

    @property
    def seq_len_fill_value(self) -> int:
        return 1

    def can_capture(self, mode: StepMode) -> bool:
        return True

    @property
    def capture_limits(self) -> CaptureLimits:
        return CaptureLimits()

    def init_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self._requests = torch.zeros(4, max_bs, dtype=torch.int64)

    def plan(self, view: AttentionView, shape: StepShape) -> None:
        bs, rows = shape.bs, shape.raw_num_tokens
        if bs > self._requests.shape[1]:
            raise ValueError(
                f"attention is planned for {self._requests.shape[1]} requests, the step has {bs}"
            )
        plan = self._requests[:, :bs]
        if view.mode.is_extend:
            assert view.extend_seq_lens is not None
            lens = view.extend_seq_lens[:bs]
            plan[0] = lens.cumsum(0) - lens
            plan[1] = lens
        else:
            plan[0] = torch.arange(bs)
            plan[1] = 1
        plan[2] = view.seq_lens_cpu[:bs]
        plan[3] = view.req_pool_indices[:bs]
        self._counts[0] = bs
        self._counts[1] = rows

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
        out_cache_loc: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        num_requests, num_rows = self._counts.tolist()
        slots = out_cache_loc[:num_rows]
        self._kv.k[layer.layer_id][slots] = k[:num_rows]
        self._kv.v[layer.layer_id][slots] = v[:num_rows]
        out[num_rows:] = 0
        for start, rows, kv_len, page_row in self._requests[:, :num_requests].t().tolist():
            if rows == 0:
                continue
            first_key = _first_key(layer, kv_len - rows) // KV_BLOCK * KV_BLOCK
            keys, values = self._gather(layer.layer_id, page_row, first_key, kv_len)
            part = slice(start, start + rows)
            out[part] = _attend(layer, q[part], keys, values, kv_len - rows, first_key)

    def _gather(
        self, layer_id: int, page_row: int, start: int, stop: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [blocks, Hkv, D, KV_BLOCK] and values [blocks, Hkv, KV_BLOCK, D] of positions [start, stop),
        fp32.

        What lies past `stop` in the last block is zero: a masked score times stale NaN would still be NaN.
        """
        positions = torch.arange(start, stop)
        page_size = self._kv.page_size
        pages = self._kv.page_table[page_row, positions // page_size].long()
        slots = pages * page_size + positions % page_size
        blocks = []
        for cache in (self._kv.k[layer_id], self._kv.v[layer_id]):
            block = cache.new_zeros(align_up(stop - start, KV_BLOCK), *cache.shape[1:], dtype=torch.float32)
            block[: stop - start] = cache[slots]
            blocks.append(block.view(-1, KV_BLOCK, *cache.shape[1:]))
        return blocks[0].permute(0, 2, 3, 1).contiguous(), blocks[1].transpose(1, 2).contiguous()


def _first_key(layer: AttentionLayer, position: int) -> int:
    """The first key that a query at `position`, or any later one, can see."""
    first = 0
    if layer.sliding_window is not None:
        first = max(first, position - layer.sliding_window + 1)
    if layer.attention_chunk_size is not None:
        first = max(first, position // layer.attention_chunk_size * layer.attention_chunk_size)
    return first


def _visible(layer: AttentionLayer, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Bool mask of absolute positions: may the query see the key?"""
    mask = keys <= queries
    if layer.sliding_window is not None:
        mask &= keys > queries - layer.sliding_window
    if layer.attention_chunk_size is not None:
        mask &= keys // layer.attention_chunk_size == queries // layer.attention_chunk_size
    return mask


def _attend(
    layer: AttentionLayer,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    first_position: int,
    first_key: int,
) -> torch.Tensor:
    """q [n, Hq, D] at positions first_position + i over blocked keys and values; fp32 [n, Hq, D]."""
    n, q_heads, dim = q.shape
    kv_heads = keys.shape[1]
    group = q_heads // kv_heads
    # Queries of one KV head stand together as rows (token, head of the group), in whole blocks.
    total = align_up(n * group, ROW_BLOCK)
    rows = q.new_zeros(kv_heads, total, dim, dtype=torch.float32)
    rows[:, : n * group] = (
        q.reshape(n, kv_heads, group, dim).transpose(0, 1).reshape(kv_heads, n * group, dim)
    )
    positions = first_position + torch.arange(total) // group
    key_positions = (first_key + torch.arange(keys.shape[0] * KV_BLOCK)).view(-1, 1, 1, KV_BLOCK)
    out = torch.empty_like(rows)
    finite = bool(values.isfinite().all())
    for start in range(0, total, ROW_BLOCK):
        part = slice(start, start + ROW_BLOCK)
        mask = _visible(layer, positions[part].view(1, 1, -1, 1), key_positions)
        out[:, part] = _attend_block(rows[:, part], keys, values, mask, layer.scale, finite)
    out = out[:, : n * group].reshape(kv_heads, n, group, dim)
    return out.transpose(0, 1).reshape(n, q_heads, dim)


def _attend_block(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    finite: bool,
) -> torch.Tensor:
    """q [Hkv, ROW_BLOCK, D], keys [B, Hkv, D, KV_BLOCK], mask [B, 1, ROW_BLOCK, KV_BLOCK]; [Hkv, ROW_BLOCK,
    D]. `finite`: all values are.
    """
    scores = torch.matmul(q.expand(keys.shape[0], *q.shape), keys) * scale
    scores = scores.masked_fill(~mask, -math.inf)
    # Filler rows of the last block may see nothing: give them a finite maximum, they are cut off by the
    # caller.
    peak = scores.amax(dim=(0, 3), keepdim=True).clamp_min(torch.finfo(torch.float32).min)
    weights = torch.exp(scores - peak)
    mixed = torch.matmul(weights, values) if finite else _mix_one_by_one(weights, values, mask)
    sums = weights.sum(-1, keepdim=True)
    total, norm = mixed[0], sums[0]
    for i in range(1, mixed.shape[0]):
        total = total + mixed[i]
        norm = norm + sums[i]
    return total / norm


def _mix_one_by_one(weights: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """weights @ values, [B, Hkv, ROW_BLOCK, D], where a value may be infinite or NaN: it is left out of the product for
    each row that may not see it, as zero times it would be NaN there. Products keep their shape, and rows their bits.
    """
    mixed = torch.empty(*weights.shape[:-1], values.shape[-1])
    broken = ~values.isfinite()
    for row in range(ROW_BLOCK):
        unseen = ~mask[:, :, row].unsqueeze(-1)
        mixed[:, :, row] = torch.matmul(weights, values.masked_fill(broken & unseen, 0.0))[:, :, row]
    return mixed
