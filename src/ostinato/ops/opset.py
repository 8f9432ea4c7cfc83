"""The op set of the decoder: the protocol that every kernel library implements.

An `OpSet` is a namespace of kernels (launched through a `Stream`, writing into tensors they are given) and of
pack functions that turn plain weights into opaque values of its own layout. It knows nothing of models or
schedulers. Invariant: every kernel is row local (row i of the output depends on row i of the inputs alone,
whatever the other rows hold, NaN included), so pad rows can be computed as data and never change a real row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ostinato.ops.pairs import PairKernel, PairRule, PairTensors
from ostinato.padding import PadContract


class WeightPieces(Protocol):
    """A weight [N, K] or [E, N, K] handed over piece by piece, so that it need not be in memory whole."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    def pieces(self) -> Iterator[tuple[int, int, torch.Tensor]]:
        """(matrix, first row, rows [n, K]) until every row was there once.

        The rows are read-only, and good until the next piece is asked for.
        """
        ...


Weight = torch.Tensor | WeightPieces


def pieces_of(weight: Weight) -> Iterator[tuple[int, int, torch.Tensor]]:
    """The pieces of a weight; those of a tensor [N, K] or [E, N, K] are its matrices."""
    if not isinstance(weight, torch.Tensor):
        yield from weight.pieces()
        return
    for i, matrix in enumerate(weight if weight.dim() == 3 else weight.unsqueeze(0)):
        yield i, 0, matrix


def whole_weight(weight: Weight) -> torch.Tensor:
    """The weight as one tensor: itself, or its pieces put together."""
    if isinstance(weight, torch.Tensor):
        return weight
    whole = torch.empty(weight.shape, dtype=weight.dtype)
    matrices = whole if whole.dim() == 3 else whole.unsqueeze(0)
    for matrix, first, rows in weight.pieces():
        matrices[matrix, first : first + rows.shape[0]] = rows
    return whole


@dataclass(frozen=True, slots=True)
class PackedSize:
    """Bytes of all weights that an op set packed: as they are stored, and as they would be uncoded."""

    stored: int = 0
    uncoded: int = 0


class PackedLinear(Protocol):
    """Weights of one linear layer in the op set's own layout; only that op set reads them."""

    @property
    def in_features(self) -> int: ...
    @property
    def out_features(self) -> int: ...


EmbeddingTable = torch.Tensor | PackedLinear


class PackedExperts(Protocol):
    """Weights of all experts of one layer (gate and up fused, and down) in the op set's own layout."""

    @property
    def num_experts(self) -> int: ...
    @property
    def by_expert(self) -> tuple[torch.Tensor, ...]:
        """All memory of the weights: contiguous tensors whose first dimension is the expert."""
        ...

    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...


@dataclass(frozen=True, slots=True, eq=False)
class RoutingRule:
    """How experts are chosen from router logits: `moe.TopKConfig` in the terms of a kernel.

    num_shared: columns behind the chosen ones, of experts that every row uses (ids from num_experts on).
    shared_weight: theirs; without `renormalize` it is multiplied by the sum of the row's weights.
    scale: what the chosen experts' weights are multiplied with, last.
    """

    num_experts: int
    num_routed: int
    scoring_func: str
    renormalize: bool
    correction_bias: torch.Tensor | None = None
    num_groups: int = 1
    num_kept_groups: int = 1
    scale: float = 1.0
    num_shared: int = 0
    shared_weight: float = 1.0


class RoutingKernel(Protocol):
    """Routing in one launch."""

    def __call__(
        self,
        logits: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        live: torch.Tensor | None,
        load: torch.Tensor | None,
        load_live: torch.Tensor | None,
        /,
    ) -> None:
        """logits fp32 [T, E] -> weights fp32 [T, K], ids int32 [T, K]; rows at or past `live` weigh 0, with id -1.

        Adds the int64 `load_live` to load[e], int64 [>= E], for each choice of expert e.
        """
        ...


class OpSet(Protocol):
    """Kernels of a decoder. T = rows, H = hidden size, D = head dim, E = experts, K = experts per row.

    Activations are contiguous in their last dimension; rows may be strided (views of a fused buffer).

    `live` is an int32 tensor of one element that counts the leading rows wanted, None for all: rows at or past it cost
    nothing, are never read, and come out zero; where a kernel works in place they stay as they are.
    """

    @property
    def name(self) -> str: ...

    @property
    def embeds_packed(self) -> bool: ...

    @property
    def packed_size(self) -> PackedSize | None:
        """What packed weights take; None where they are kept as they come."""
        ...

    @property
    def pad_contracts(self) -> Mapping[str, PadContract]:
        """Contracts of the kernels that consume routing, by kernel name; the others are row local."""
        ...

    def pack_linear(
        self, weight: Weight, bias: torch.Tensor | None = None, *, out_dtype: torch.dtype | None = None
    ) -> PackedLinear:
        """Pack `weight` [N, K] and `bias` [N]; products are summed in fp32 and written in `out_dtype`.

        `out_dtype` defaults to the weight's. Routers and the head ask for fp32: precision must not be lost
        there.
        """
        ...

    def pack_gated(self, weight: Weight, bias: torch.Tensor | None = None) -> PackedLinear:
        """Pack gate and up `weight` [2I, K], gate rows first: `linear` by it writes silu(gate) * up, [T, I]."""
        ...

    def pack_experts(self, gate_up: Weight, down: Weight) -> PackedExperts:
        """Pack `gate_up` [E, 2I, H] (gate rows first) and `down` [E, H, I]."""
        ...

    def routing_kernel(self, rule: RoutingRule) -> RoutingKernel | None:
        """A kernel that has the bits of `moe.routing` for this rule, or None: route by torch ops."""
        ...

    def pair_kernel(self, memory: PairTensors, rule: PairRule, ranks: int) -> PairKernel | None:
        """A kernel with the bits of `moe.pairs.ReferencePairs`, for rows of so many ranks, or None: use that."""
        ...

    def embedding(self, ids: torch.Tensor, table: EmbeddingTable, out: torch.Tensor) -> None:
        """out[t] = table[ids[t]]; ids int64 [T], clamped into the table [V, H]; out [T, H].

        Where `embeds_packed`, the table may be a packed linear layer: the weights of a tied head are held once.
        """
        ...

    def rms_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        out: torch.Tensor,
        live: torch.Tensor | None = None,
    ) -> None:
        """RMS norm of the last dimension in fp32, cast, then scaled by `weight` (None: not scaled).

        [T, H] for the norm of a row, [T, heads, D] for a norm of each head; out may be x.
        """
        ...

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        out: torch.Tensor,
        live: torch.Tensor | None = None,
    ) -> None:
        """residual += x, then out = rms_norm(residual); all [T, H]."""
        ...

    def layer_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        eps: float,
        out: torch.Tensor,
        live: torch.Tensor | None = None,
    ) -> None:
        """Layer norm with bias over the last dimension, computed in fp32."""
        ...

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
        """residual += x, then out = layer_norm(residual); all [T, H]."""
        ...

    def linear(
        self, x: torch.Tensor, weight: PackedLinear, out: torch.Tensor, live: torch.Tensor | None = None
    ) -> None:
        """out [T, N] = x [T, K] @ weight.T + bias; by a gated weight silu(gate) * up of them, in fp32."""
        ...

    def rope(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        positions: torch.Tensor,
        table: torch.Tensor,
        interleaved: bool,
        live: torch.Tensor | None = None,
    ) -> None:
        """Rotate q [T, Hq, D] and k [T, Hkv, D] in place, in fp32.

        `table` is fp32 [max_positions, R]: R/2 cosines, then R/2 sines; dimensions past R pass through. Pairs
        are (i, i + R/2), or (2i, 2i + 1) when `interleaved`. Positions int64 [T]; those of pad rows are
        clamped.
        """
        ...

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
        """`rms_norm` of every head of q and k, then `rope`, in place; weights [D]."""
        ...

    def argmax(self, x: torch.Tensor, out: torch.Tensor, live: torch.Tensor | None = None) -> None:
        """out[t] (int64 [T]) = index of the largest value of x [T, V]: the lowest among equals, NaN never."""
        ...

    def sample(
        self,
        x: torch.Tensor,
        rules: torch.Tensor,
        seeds: torch.Tensor,
        positions: torch.Tensor,
        out: torch.Tensor,
        live: torch.Tensor | None = None,
    ) -> None:
        """out[t] = the token that follows row t, by `ops.choice.choose` of fp32 logits x [T, V].

        rules fp64 [T, 4]: temperature, top-k (0: all), top-p, min-p; seeds, positions and out int64 [T]. The noise is
        that of (seeds[t], positions[t] + 1). Rows past `live` come out 0.
        """
        ...

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
        """The inputs of a decode step (int64 [T], one row a request) become those of the next, in place.

        input_ids = choice; positions and every int64 [T] of `lengths` (at most 4) + 1; out_cache_loc = slot of the new
        position, by the int32 page table [requests, pages] at req_pool_indices. Rows past `live` stay.
        """
        ...

    def moe_experts(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        experts: PackedExperts,
        weights_on_input: bool,
        out: torch.Tensor,
    ) -> None:
        """out[t] = sum over k of weight[t, k] * expert[id[t, k]](x[t]).

        x and out [T, H]; weights fp32 and ids int32 [T, K], -1 for nobody. Slots are added in slot order, in
        fp32; a row without experts is zero. With `weights_on_input` the weight scales x instead of the
        result.
        """
        ...

    def combine_slots(
        self, results: torch.Tensor, places: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
    ) -> None:
        """out[t] = sum over k, in slot order, in fp32, of weights[t, k] * results[places[t, k]].

        results fp32 [P, H]; places int64 [T, K], negative for nobody; weights fp32 [T, K]; out [T, H]. The bits of
        `moe_experts`, whose results of one slot each, with weight 1 and an fp32 `out`, are what is added here.
        """
        ...

    def add(self, x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> None:
        """out = x + y, of one shape; out may be x or y."""
        ...

    def sigmoid_gated_add(
        self, x: torch.Tensor, gate: torch.Tensor, y: torch.Tensor, out: torch.Tensor
    ) -> None:
        """out [T, H] = x + sigmoid(gate) * y with gate fp32 [T, 1]; out may be x."""
        ...

    def clamp(self, x: torch.Tensor, limit: float) -> None:
        """Clamp x into [-limit, limit], in place."""
        ...

    def scale_by_position(
        self, q: torch.Tensor, positions: torch.Tensor, floor_scale: float, attn_scale: float
    ) -> None:
        """q[t] *= 1 + attn_scale * log1p(floor((positions[t] + 1) / floor_scale)), in place (arXiv
        2501.19399).
        """
        ...

    def gather_rows(self, x: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> None:
        """out[i] = x[rows[i]]; rows int64 [n]."""
        ...
