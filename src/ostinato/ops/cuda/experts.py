"""The experts of a MoE layer: slots grouped by expert in whole tiles, two grouped products, combined in slot order.

    topk_ids [T, K] -> tiles of slots of one expert -> act [T * K, I] -> results fp32 [T * K, H] -> out [T, H]

How many tiles there are is known on the device alone; programs past them do nothing. Knows nothing of routers.
Invariant: a slot's result depends on its row and expert alone; slots of nobody (id < 0) are in no tile, their results
are never read, and a row of nothing but those comes out zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from ostinato.ops.cuda.gemm import Tile, precision, product, silu_times
from ostinato.ops.cuda.launching import cdiv, power_of_two, run
from ostinato.ops.cuda.scratch import Scratch
from ostinato.ops.opset import PackedExperts

_SCAN = 1024
_COLUMNS = 1024
NO_SLOT = tl.constexpr(-1)


@dataclass(frozen=True, slots=True, eq=False)
class TritonExperts:
    """gate_up [E, 2I, H], gate rows first, and down [E, H, I], on the device."""

    gate_up: torch.Tensor
    down: torch.Tensor

    @property
    def num_experts(self) -> int:
        return self.gate_up.shape[0]

    @property
    def by_expert(self) -> tuple[torch.Tensor, ...]:
        return self.gate_up, self.down

    @property
    def hidden_size(self) -> int:
        return self.down.shape[1]

    @property
    def intermediate_size(self) -> int:
        return self.down.shape[2]


@triton.jit
def count_kernel(chosen: tl.tensor, counts: tl.tensor, num_slots: tl.tensor, SCAN: tl.constexpr) -> None:
    """counts[e] = slots of expert e; one program an expert."""
    expert = tl.program_id(0)
    found = tl.zeros((SCAN,), tl.int32)
    for start in range(0, num_slots, SCAN):
        slot = start + tl.arange(0, SCAN)
        found += (tl.load(chosen + slot, mask=slot < num_slots, other=-1) == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(found, axis=0))


@triton.jit
def place_kernel(
    chosen: tl.tensor,
    counts: tl.tensor,
    order: tl.tensor,
    tile_expert: tl.tensor,
    num_tiles: tl.tensor,
    num_slots: tl.tensor,
    num_experts: tl.tensor,
    BM: tl.constexpr,
    SCAN: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
) -> None:
    """order[tile * BM ..]: slots of one expert, in order, the last tile filled up with NO_SLOT."""
    expert = tl.program_id(0)
    every = tl.arange(0, EXPERTS_BLOCK)
    tiles = (tl.load(counts + every, mask=every < num_experts, other=0) + BM - 1) // BM
    first = tl.sum(tl.where(every < expert, tiles, 0), axis=0)
    own = tl.sum(tl.where(every == expert, tiles, 0), axis=0)
    seen = 0
    for start in range(0, num_slots, SCAN):
        slot = start + tl.arange(0, SCAN)
        mine = tl.load(chosen + slot, mask=slot < num_slots, other=-1) == expert
        rank = seen + tl.cumsum(mine.to(tl.int32), axis=0) - 1
        tl.store(order + first * BM + rank, slot, mask=mine)
        seen += tl.sum(mine.to(tl.int32), axis=0)
    fill = seen + tl.arange(0, BM)
    tl.store(order + first * BM + fill, tl.zeros((BM,), tl.int32) + NO_SLOT, mask=fill < own * BM)
    for tile in range(0, own):
        tl.store(tile_expert + first + tile, expert)
    if expert == num_experts - 1:
        tl.store(num_tiles, first + own)


@triton.jit
def gate_up_kernel(
    x: tl.tensor,
    weights: tl.tensor,
    gate_up: tl.tensor,
    act: tl.tensor,
    order: tl.tensor,
    tile_expert: tl.tensor,
    num_tiles: tl.tensor,
    top_k: tl.tensor,
    width: tl.tensor,
    depth: tl.tensor,
    x_row: tl.tensor,
    WEIGHTED: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
) -> None:
    """act[slot] = silu(gate) * up of the slot's row."""
    tile = tl.program_id(0)
    if tile < tl.load(num_tiles):
        slot = tl.load(order + tile * BM + tl.arange(0, BM))[:, None]
        real = slot >= 0
        columns = tl.program_id(1) * BN + tl.arange(0, BN)
        rows = x + (slot // top_k).to(tl.int64) * x_row
        matrix = gate_up + tl.load(tile_expert + tile).to(tl.int64) * 2 * width * depth
        upper = matrix + width.to(tl.int64) * depth
        if WEIGHTED:
            share = tl.load(weights + slot, mask=real, other=0.0)
            gate = weighted_product(rows, real, share, matrix, columns, width, depth, PRECISION, BM, BN, BK)
            up = weighted_product(rows, real, share, upper, columns, width, depth, PRECISION, BM, BN, BK)
        else:
            gate = product(rows, real, matrix, columns, width, depth, PRECISION, BM, BN, BK)
            up = product(rows, real, upper, columns, width, depth, PRECISION, BM, BN, BK)
        target = act + slot.to(tl.int64) * width + columns[None, :]
        value = silu_times(gate, up).to(act.dtype.element_ty)
        tl.store(target, value, mask=real & (columns[None, :] < width))


@triton.jit
def weighted_product(
    x: tl.tensor,
    real: tl.tensor,
    share: tl.tensor,
    weight: tl.tensor,
    columns: tl.tensor,
    width: tl.tensor,
    depth: tl.tensor,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
) -> tl.tensor:
    """`product` of rows that are multiplied by their weight first, in their own dtype."""
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, depth, BK):
        k = start + tl.arange(0, BK)
        left = tl.load(x + k[None, :], mask=real & (k[None, :] < depth), other=0.0)
        scaled = left.to(tl.float32) * share.to(left.dtype).to(tl.float32)
        inside = (columns[:, None] < width) & (k[None, :] < depth)
        right = tl.load(weight + columns[:, None].to(tl.int64) * depth + k[None, :], mask=inside, other=0.0)
        left = scaled.to(left.dtype).to(right.dtype)
        total = tl.dot(left, tl.trans(right), total, input_precision=PRECISION)
    return total


@triton.jit
def down_kernel(
    act: tl.tensor,
    down: tl.tensor,
    results: tl.tensor,
    order: tl.tensor,
    tile_expert: tl.tensor,
    num_tiles: tl.tensor,
    width: tl.tensor,
    depth: tl.tensor,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
) -> None:
    """results[slot] = down(act[slot]), fp32."""
    tile = tl.program_id(0)
    if tile < tl.load(num_tiles):
        slot = tl.load(order + tile * BM + tl.arange(0, BM))[:, None]
        real = slot >= 0
        columns = tl.program_id(1) * BN + tl.arange(0, BN)
        rows = act + slot.to(tl.int64) * depth
        matrix = down + tl.load(tile_expert + tile).to(tl.int64) * width * depth
        value = product(rows, real, matrix, columns, width, depth, PRECISION, BM, BN, BK)
        target = results + slot.to(tl.int64) * width + columns[None, :]
        tl.store(target, value, mask=real & (columns[None, :] < width))


@triton.jit
def combine_kernel(
    results: tl.tensor,
    places: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    width: tl.tensor,
    out_row: tl.tensor,
    TOP_K: tl.constexpr,
    BY_SLOT: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """out[t] = sum over k, in order, of weights[t, k] * results[place]. BY_SLOT: results lie by slot."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = columns < width
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(TOP_K):
        place = tl.load(places + row * TOP_K + k).to(tl.int64)
        somebody = place >= 0
        if BY_SLOT:
            place = row * TOP_K + k
        value = tl.load(results + place * width + columns, mask=there & somebody, other=0.0)
        if WEIGHTED:
            value *= tl.load(weights + row * TOP_K + k)
        # Selected, not multiplied: the weight of nobody may be anything.
        value = tl.where(somebody, value, 0.0)
        if k == 0:
            total = value
        else:
            total += value
    tl.store(out + row * out_row + columns, total.to(out.dtype.element_ty), mask=there)


def combine(
    results: torch.Tensor,
    places: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
    *,
    by_slot: bool,
    weighted: bool,
) -> None:
    """out [T, H] of results fp32 [P, H]; see `combine_kernel`."""
    rows, top_k = places.shape
    if not rows:
        return
    grid = rows, cdiv(out.shape[1], _COLUMNS)
    arguments = results, places, weights, out, out.shape[1], out.stride(0)
    options = {"TOP_K": top_k, "BY_SLOT": by_slot, "WEIGHTED": weighted, "BLOCK": _COLUMNS}
    run(combine_kernel, grid, *arguments, **options)


def combine_slots(
    results: torch.Tensor, places: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
) -> None:
    """`OpSet.combine_slots`."""
    combine(results, places.contiguous(), weights.contiguous(), out, by_slot=False, weighted=True)


class MoeExperts:
    """`OpSet.moe_experts`, in scratch memory that all layers share."""

    def __init__(self, scratch: Scratch, tile: Tile) -> None:
        self._scratch = scratch
        self._tile = tile

    def __call__(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        experts: PackedExperts,
        weights_on_input: bool,
        out: torch.Tensor,
    ) -> None:
        assert isinstance(experts, TritonExperts)
        rows, top_k = topk_ids.shape
        if not rows:
            return
        # Contiguous already wherever they come out of the workspace; copies would be made on the device.
        ids, weights = topk_ids.contiguous(), topk_weights.contiguous()
        slots, inner, hidden = rows * top_k, experts.intermediate_size, experts.hidden_size
        tile = self._tile
        most_tiles = slots // tile.m + min(experts.num_experts, slots)
        groups = self._group(ids, experts.num_experts, most_tiles)
        act = self._scratch.take("experts.act", slots * inner, experts.down.dtype)
        results = self._scratch.take("experts.results", slots * hidden, torch.float32)
        sizes: dict[str, Any] = {
            "BM": tile.m,
            "BN": tile.n,
            "BK": tile.k,
            "PRECISION": precision(experts.down.dtype),
        }
        run(
            gate_up_kernel,
            (most_tiles, cdiv(inner, tile.n)),
            x,
            weights,
            experts.gate_up,
            act,
            *groups,
            top_k,
            inner,
            hidden,
            x.stride(0),
            WEIGHTED=weights_on_input,
            **sizes,
        )
        grid = most_tiles, cdiv(hidden, tile.n)
        run(down_kernel, grid, act, experts.down, results, *groups, hidden, inner, **sizes)
        combine(results, ids, weights, out, by_slot=True, weighted=not weights_on_input)

    def _group(
        self, ids: torch.Tensor, num_experts: int, most_tiles: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Slots by tile, the expert of each tile, and how many tiles there are."""
        take, slots = self._scratch.take, ids.numel()
        counts = take("experts.counts", num_experts, torch.int32)
        order = take("experts.order", most_tiles * self._tile.m, torch.int32)
        tile_expert = take("experts.tile_expert", most_tiles, torch.int32)
        num_tiles = take("experts.num_tiles", 1, torch.int32)
        run(count_kernel, (num_experts,), ids, counts, slots, SCAN=_SCAN)
        run(
            place_kernel,
            (num_experts,),
            ids,
            counts,
            order,
            tile_expert,
            num_tiles,
            slots,
            num_experts,
            BM=self._tile.m,
            SCAN=_SCAN,
            EXPERTS_BLOCK=power_of_two(num_experts),
        )
        return order, tile_expert, num_tiles
