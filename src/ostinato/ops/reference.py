"""The op set in plain torch: the oracle of the fast kernels, and what runs where there are none.

Knows nothing of models. Its matrix products always run on blocks of `ROW_BLOCK` rows, the last one filled
with zeros: a BLAS picks another order of summation for another number of rows, so a fixed number is what
makes a row's bits the same in every bucket, beside every batch-mate, prefilled or decoded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch.nn.functional import layer_norm

from ostinato.ops.choice import choose, uniform
from ostinato.ops.exact import sigmoid, silu
from ostinato.ops.opset import (
    EmbeddingTable,
    PackedExperts,
    PackedLinear,
    PackedSize,
    RoutingKernel,
    RoutingRule,
    Weight,
    whole_weight,
)
from ostinato.ops.pairs import PairKernel, PairRule, PairTensors
from ostinato.padding import PadContract, align_up

ROW_BLOCK = 8


@dataclass(frozen=True, slots=True)
class ReferenceLinear:
    """Plain [N, K] weight and [N] bias, in the dtype the product is computed in; gated: gate rows, then up rows."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    gated: bool = False

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        return self.weight.shape[0] // 2 if self.gated else self.weight.shape[0]


@dataclass(frozen=True, slots=True)
class ReferenceExperts:
    """Plain gate_up [E, 2I, H] and down [E, H, I]."""

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


def blocked_matmul(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [T, K] @ weight[N, K].T + bias in blocks of `ROW_BLOCK` rows; [T, N] in the weight's dtype."""
    rows = x.shape[0]
    padded = align_up(rows, ROW_BLOCK)
    blocks = x.new_zeros(padded, x.shape[1], dtype=weight.dtype)
    blocks[:rows] = x
    out = torch.empty(padded, weight.shape[0], dtype=weight.dtype, device=x.device)
    weight_t = weight.t()
    for start in range(0, padded, ROW_BLOCK):
        torch.mm(blocks[start : start + ROW_BLOCK], weight_t, out=out[start : start + ROW_BLOCK])
    if bias is not None:
        out += bias
    return out[:rows]


def _rms_normalise(x: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float().contiguous()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> None:
    rotary = 2 * cos.shape[-1]
    part = x[..., :rotary].float()
    first, second = (part[..., 0::2], part[..., 1::2]) if interleaved else part.chunk(2, dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    if interleaved:
        x[..., :rotary] = torch.stack(turned, dim=-1).flatten(-2)
    else:
        x[..., :rotary] = torch.cat(turned, dim=-1)


def _silu_and_mul(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """out [T, I] = silu(gate_up[:, :I]) * gate_up[:, I:], in fp32."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    out.copy_(silu(gate) * up)


def live_rows(x: torch.Tensor, live: torch.Tensor | None) -> int:
    """Rows of x to compute. Reads the count on the host: it is called inside kernels alone."""
    return x.shape[0] if live is None else min(max(int(live), 0), x.shape[0])


class ReferenceOps:
    """`OpSet` in plain torch; see the protocol for what each kernel computes."""

    __slots__ = ()

    @property
    def name(self) -> str:
        return "reference"

    @property
    def embeds_packed(self) -> bool:
        return False  # its heads are fp32 whatever the table is

    @property
    def packed_size(self) -> PackedSize | None:
        return None

    @property
    def pad_contracts(self) -> Mapping[str, PadContract]:
        contract = PadContract("reference.moe_experts", accepts_sentinel=True, writes_zeros=True)
        return MappingProxyType({"moe_experts": contract})

    def pack_linear(
        self, weight: Weight, bias: torch.Tensor | None = None, *, out_dtype: torch.dtype | None = None
    ) -> ReferenceLinear:
        # torch cannot sum bf16 products into an fp32 result here, so an fp32 output asks for fp32 weights.
        dtype = torch.promote_types(weight.dtype, out_dtype or weight.dtype)
        whole = whole_weight(weight).to(dtype).contiguous()
        return ReferenceLinear(whole, None if bias is None else bias.to(dtype))

    def pack_gated(self, weight: Weight, bias: torch.Tensor | None = None) -> ReferenceLinear:
        return ReferenceLinear(whole_weight(weight).contiguous(), bias, gated=True)

    def pack_experts(self, gate_up: Weight, down: Weight) -> ReferenceExperts:
        return ReferenceExperts(whole_weight(gate_up).contiguous(), whole_weight(down).contiguous())

    def routing_kernel(self, rule: RoutingRule) -> RoutingKernel | None:
        return None  # `moe.routing` itself is the reference

    def pair_kernel(self, memory: PairTensors, rule: PairRule, ranks: int) -> PairKernel | None:
        return None  # as is `moe.pairs`

    def embedding(self, ids: torch.Tensor, table: EmbeddingTable, out: torch.Tensor) -> None:
        assert isinstance(table, torch.Tensor), "a table packed by another op set"
        torch.index_select(table, 0, ids.clamp(0, table.shape[0] - 1), out=out)

    def rms_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        out: torch.Tensor,
        live: torch.Tensor | None = None,
    ) -> None:
        n = live_rows(x, live)
        normed = _rms_normalise(x[:n], eps)
        out[:n] = normed if weight is None else weight * normed
        out[n:] = 0

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        out: torch.Tensor,
        live: torch.Tensor | None = None,
    ) -> None:
        n = live_rows(x, live)
        residual[:n] += x[:n]
        self.rms_norm(residual, weight, eps, out, live)

    def layer_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        eps: float,
        out: torch.Tensor,
        live: torch.Tensor | None = None,
    ) -> None:
        n = live_rows(x, live)
        out[:n] = layer_norm(x[:n].float(), (x.shape[-1],), weight.float(), bias.float(), eps)
        out[n:] = 0

    def add_layer_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        eps: float,
        out: torch.Tensor,
        live: torch.Tensor | None = None,
    ) -> None:
        n = live_rows(x, live)
        residual[:n] += x[:n]
        self.layer_norm(residual, weight, bias, eps, out, live)

    def linear(
        self, x: torch.Tensor, weight: PackedLinear, out: torch.Tensor, live: torch.Tensor | None = None
    ) -> None:
        assert isinstance(weight, ReferenceLinear)
        n = live_rows(x, live)
        product = blocked_matmul(x[:n], weight.weight, weight.bias)
        if weight.gated:
            _silu_and_mul(product, out[:n])
        else:
            out[:n] = product
        out[n:] = 0

    def rope(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        positions: torch.Tensor,
        table: torch.Tensor,
        interleaved: bool,
        live: torch.Tensor | None = None,
    ) -> None:
        n = live_rows(q, live)
        rows = table[positions[:n].clamp(0, table.shape[0] - 1)].unsqueeze(1)
        cos, sin = rows.chunk(2, dim=-1)
        _rotate(q[:n], cos, sin, interleaved)
        _rotate(k[:n], cos, sin, interleaved)

    def norm_rope(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        q_weight: torch.Tensor,
        k_weight: torch.Tensor,
        eps: float,
        positions: torch.Tensor,
        table: torch.Tensor,
        interleaved: bool,
        live: torch.Tensor | None = None,
    ) -> None:
        n = live_rows(q, live)
        for x, weight in ((q[:n], q_weight), (k[:n], k_weight)):
            self.rms_norm(x, weight, eps, x)
        self.rope(q, k, positions, table, interleaved, live)

    def argmax(self, x: torch.Tensor, out: torch.Tensor, live: torch.Tensor | None = None) -> None:
        n = live_rows(x, live)
        largest = x[:n].masked_fill(x[:n].isnan(), float("-inf")).amax(-1, keepdim=True)
        out[:n] = (x[:n] == largest).int().argmax(-1)  # the first; of a row of NaN, 0
        out[n:] = 0

    def sample(
        self,
        x: torch.Tensor,
        rules: torch.Tensor,
        seeds: torch.Tensor,
        positions: torch.Tensor,
        out: torch.Tensor,
        live: torch.Tensor | None = None,
    ) -> None:
        n = live_rows(x, live)
        out[n:] = 0
        for i, (rule, seed, position) in enumerate(
            zip(rules[:n].tolist(), seeds[:n].tolist(), positions[:n].tolist(), strict=True)
        ):
            temperature, top_k, top_p, min_p = rule
            noise = uniform(seed, position + 1)
            out[i] = choose(x[i], temperature, int(top_k), top_p, min_p, noise)

    def advance(
        self,
        choice: torch.Tensor,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        out_cache_loc: torch.Tensor,
        req_pool_indices: torch.Tensor,
        page_table: torch.Tensor,
        page_size: int,
        lengths: Sequence[torch.Tensor],
        live: torch.Tensor | None = None,
    ) -> None:
        n = live_rows(input_ids, live)
        input_ids[:n] = choice[:n]
        for x in (positions, *lengths):
            x[:n] += 1
        where = positions[:n]
        pages = (where // page_size).clamp(max=page_table.shape[1] - 1)
        out_cache_loc[:n] = page_table[req_pool_indices[:n], pages].long() * page_size + where % page_size

    def moe_experts(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        experts: PackedExperts,
        weights_on_input: bool,
        out: torch.Tensor,
    ) -> None:
        assert isinstance(experts, ReferenceExperts)
        slots = torch.zeros(*topk_ids.shape, x.shape[1], dtype=torch.float32, device=x.device)
        for expert in sorted(set(topk_ids.flatten().tolist())):
            if expert < 0:
                continue
            rows, cols = torch.where(topk_ids == expert)
            scale = topk_weights[rows, cols].unsqueeze(1)
            source = x[rows]
            if weights_on_input:
                source = source * scale.to(x.dtype)
            gate_up = blocked_matmul(source, experts.gate_up[expert], None)
            act = torch.empty(len(rows), experts.intermediate_size, dtype=gate_up.dtype, device=x.device)
            _silu_and_mul(gate_up, act)
            result = blocked_matmul(act, experts.down[expert], None).float()
            slots[rows, cols] = result if weights_on_input else result * scale
        total = slots[:, 0]
        for slot in slots.unbind(1)[1:]:
            total = total + slot
        out.copy_(total)

    def combine_slots(
        self, results: torch.Tensor, places: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
    ) -> None:
        nobody = places < 0
        if not len(results):
            out.zero_()
            return
        slots = results[places.clamp_min(0)] * weights.unsqueeze(2)
        slots.masked_fill_(nobody.unsqueeze(2), 0.0)
        total = slots[:, 0]
        for slot in slots.unbind(1)[1:]:
            total = total + slot
        out.copy_(total)

    def add(self, x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> None:
        torch.add(x, y, out=out)

    def sigmoid_gated_add(
        self, x: torch.Tensor, gate: torch.Tensor, y: torch.Tensor, out: torch.Tensor
    ) -> None:
        out.copy_(x.float() + sigmoid(gate) * y.float())

    def clamp(self, x: torch.Tensor, limit: float) -> None:
        x.clamp_(-limit, limit)

    def scale_by_position(
        self, q: torch.Tensor, positions: torch.Tensor, floor_scale: float, attn_scale: float
    ) -> None:
        scale = torch.log1p(torch.floor((positions.float() + 1.0) / floor_scale)) * attn_scale + 1.0
        q.copy_(q * scale.view(-1, 1, 1))

    def gather_rows(self, x: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> None:
        torch.index_select(x, 0, rows, out=out)
