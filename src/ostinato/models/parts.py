"""The parts a decoder layer is composed from: norms, attention, dense feed-forward.

Each part holds packed weights and launches kernels into workspace buffers; nothing here allocates or reads
device data, so everything may be captured. `live`, the device count of leading real rows among those given, goes
to every kernel that takes one. Knows nothing of families, files or schedulers. Invariant: a part treats rows one by
one, except attention, whose backend leaves pad rows out; pads cost nothing, and what a part writes of them is zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from ostinato.attention.backend import AttentionBackend, AttentionLayer, AttentionView
from ostinato.graphs.stream import Stream
from ostinato.graphs.workspace import Workspace
from ostinato.ops.opset import OpSet, PackedLinear
from ostinato.parallel.columns import ColumnGather


class DecoderView(AttentionView, Protocol):
    """The fields of a (padded) batch that a decoder reads; see `ForwardBatch` for their meaning."""

    @property
    def input_ids(self) -> torch.Tensor | None: ...
    @property
    def positions(self) -> torch.Tensor: ...
    @property
    def num_token_non_padded(self) -> torch.Tensor | None: ...


class FeedForward(Protocol):
    """Dense or sparse: x [T, H] -> out [T, H], two different buffers."""

    def forward(
        self, stream: Stream, x: torch.Tensor, num_token_non_padded: torch.Tensor | None, out: torch.Tensor
    ) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """RMS norm, or layer norm where there is a bias."""

    ops: OpSet
    weight: torch.Tensor
    bias: torch.Tensor | None
    eps: float

    def apply(self, stream: Stream, x: torch.Tensor, live: torch.Tensor | None, out: torch.Tensor) -> None:
        """out = norm(x)."""
        if self.bias is None:
            stream.launch(self.ops.rms_norm, x, self.weight, self.eps, out, live)
        else:
            stream.launch(self.ops.layer_norm, x, self.weight, self.bias, self.eps, out, live)

    def add_and_apply(
        self,
        stream: Stream,
        x: torch.Tensor,
        residual: torch.Tensor,
        live: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """residual += x, then out = norm(residual)."""
        if self.bias is None:
            stream.launch(self.ops.add_rms_norm, x, residual, self.weight, self.eps, out, live)
        else:
            stream.launch(self.ops.add_layer_norm, x, residual, self.weight, self.bias, self.eps, out, live)


WHOLE_QK = ("q_whole", "k_whole")
"""Workspace buffers of the queries and keys of all ranks, where a norm goes over all of them."""


@dataclass(frozen=True, slots=True, eq=False)
class Rope:
    """A rotation of queries and keys; `table` as `rope_table` makes it."""

    table: torch.Tensor
    interleaved: bool


@dataclass(frozen=True, slots=True, eq=False)
class QKNorm:
    """RMS norm of queries and keys. `weights`: theirs; None for a norm without (L2 norm times sqrt(D)).

    per_head: over each head's D, else over all heads together. before_rope: where it stands.
    """

    weights: tuple[torch.Tensor, torch.Tensor] | None
    eps: float
    per_head: bool
    before_rope: bool


@dataclass(frozen=True, slots=True, eq=False)
class KeptRows:
    """Rows of a step that go on alone: `rows` int64 [T], where the first `count` (int32 [1], on the device) are from.

    What `rows` holds behind them is any row's index.
    """

    rows: torch.Tensor
    count: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Attention:
    """qkv projection, norms and rotation of queries and keys, paged attention, output projection.

    clip: bound of |q|, |k|, |v| before rope. temperature: (floor_scale, attn_scale) of queries by position.
    columns: with attention TP, `qkv` holds the heads of this rank and `out` its columns of the result. own_heads: these
    heads among all (query, key) ones, where a norm goes over all and so needs those of the other ranks.
    """

    ops: OpSet
    workspace: Workspace
    backend: AttentionBackend
    layer: AttentionLayer
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv: PackedLinear
    out: PackedLinear
    qk_norm: QKNorm | None
    rope: Rope | None
    clip: float | None
    temperature: tuple[float, float] | None
    columns: ColumnGather | None = None
    own_heads: tuple[slice, slice] | None = None

    def forward(
        self,
        stream: Stream,
        x: torch.Tensor,
        view: DecoderView,
        out: torch.Tensor,
        kept: KeptRows | None = None,
    ) -> None:
        """x [T, H] -> out [T, H]; with `kept`, the rows of out are those rows of x."""
        rows, dim, live = x.shape[0], self.head_dim, view.num_token_non_padded
        fused = self._fused(rows)
        stream.launch(self.ops.linear, x, self.qkv, fused, live)
        # Views of the fused projection: rows are strided, heads are not.
        k_start = self.num_heads * dim
        v_start = k_start + self.num_kv_heads * dim
        q = fused[:, :k_start].view(rows, self.num_heads, dim)
        k = fused[:, k_start:v_start].view(rows, self.num_kv_heads, dim)
        v = fused[:, v_start:].view(rows, self.num_kv_heads, dim)
        if self.columns is not None and self.own_heads is not None:
            q, k = self._norm_over_all(stream, self.columns, self.own_heads, fused, live)
        self._norm_and_rotate(stream, fused, q, k, view)
        if self.columns is None:
            mixed = self.workspace.take("attention", rows, q.shape[1], dim)
            stream.eager(self._attend, view, (q, k, v), (mixed,))
            heads, live = self._kept(stream, mixed.view(rows, k_start), live, kept)
            stream.launch(self.ops.linear, heads, self.out, out, live)
            return
        whole = self.workspace.take("attention", rows, self.out.in_features)
        own = self.columns.own("attention", rows, self.out.in_features)
        stream.eager(self._attend, view, (q, k, v), (own.view(rows, q.shape[1], dim),))
        self.columns.gather(stream, own, whole)
        heads, live = self._kept(stream, whole, live, kept)
        column_linear(stream, self.ops, self.columns, heads, self.out, out, live)

    def _kept(
        self, stream: Stream, heads: torch.Tensor, live: torch.Tensor | None, kept: KeptRows | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rows of `heads` [T, heads * D] that go on, and their count."""
        if kept is None:
            return heads, live
        picked = self.workspace.take("qkv", *heads.shape)  # what lay there has been read
        stream.launch(self.ops.gather_rows, heads, kept.rows, picked)
        return picked, kept.count

    def _fused(self, rows: int) -> torch.Tensor:
        """Where the projection goes."""
        width = self.qkv.out_features
        if self.columns is None or self.own_heads is None:
            return self.workspace.take("qkv", rows, width)
        return self.columns.own("qkv", rows, width * self.columns.group.size)

    def _norm_over_all(
        self,
        stream: Stream,
        columns: ColumnGather,
        own: tuple[slice, slice],
        fused: torch.Tensor,
        live: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Own queries and keys, normed over those of all ranks: every rank norms all, and keeps its own."""
        assert self.qk_norm is not None
        assert self.qk_norm.weights is not None
        widths = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        whole = [
            self.workspace.take(name, len(fused), len(weight))
            for name, weight in zip(WHOLE_QK, self.qk_norm.weights, strict=True)
        ]
        columns.gather_parts(stream, fused, widths, whole)
        heads = [x.view(len(x), x.shape[1] // self.head_dim, self.head_dim) for x in whole]  # also of no rows
        self._normalise(stream, self.qk_norm, heads[0], heads[1], live)
        if self.clip is not None:
            for x in whole:
                stream.launch(self.ops.clamp, x, self.clip)
        return heads[0][:, own[0]], heads[1][:, own[1]]

    def _attend(
        self,
        stream: Stream,
        view: AttentionView,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        self.backend.forward(stream, self.layer, q, k, v, view, out)

    def _norm_and_rotate(
        self, stream: Stream, fused: torch.Tensor, q: torch.Tensor, k: torch.Tensor, view: DecoderView
    ) -> None:
        """What happens to queries and keys before they meet, in place; `fused` is their memory, values included."""
        ops, rope, live = self.ops, self.rope, view.num_token_non_padded
        norm = self.qk_norm if self.own_heads is None else None
        weights = None if norm is None or not (norm.per_head and norm.before_rope) else norm.weights
        if norm is not None and weights is not None and rope is not None and self.clip is None:
            rotation = (view.positions, rope.table, rope.interleaved)
            stream.launch(ops.norm_rope, q, k, *weights, norm.eps, *rotation, live)
        else:
            if norm is not None and norm.before_rope:
                self._normalise(stream, norm, q, k, live)
            if self.clip is not None:
                stream.launch(ops.clamp, fused, self.clip)
            if rope is not None:
                stream.launch(ops.rope, q, k, view.positions, rope.table, rope.interleaved, live)
            if norm is not None and not norm.before_rope:
                self._normalise(stream, norm, q, k, live)
        if self.temperature is not None:
            stream.launch(ops.scale_by_position, q, view.positions, *self.temperature)

    def _normalise(
        self, stream: Stream, norm: QKNorm, q: torch.Tensor, k: torch.Tensor, live: torch.Tensor | None
    ) -> None:
        for x, weight in zip((q, k), norm.weights or (None, None), strict=True):
            over = x if norm.per_head else x.view(x.shape[0], x.shape[1] * x.shape[2])
            stream.launch(self.ops.rms_norm, over, weight, norm.eps, over, live)


@dataclass(frozen=True, slots=True, eq=False)
class DenseFFN:
    """Gated SiLU feed-forward: gate_up H -> I, packed as gated; down I -> H. With `columns`, both hold columns."""

    ops: OpSet
    workspace: Workspace
    gate_up: PackedLinear
    down: PackedLinear
    columns: ColumnGather | None = None

    def forward(
        self, stream: Stream, x: torch.Tensor, num_token_non_padded: torch.Tensor | None, out: torch.Tensor
    ) -> None:
        """x [T, H] -> out [T, H]."""
        act, live = self.workspace.take("ffn_act", x.shape[0], self.down.in_features), num_token_non_padded
        if self.columns is None:
            stream.launch(self.ops.linear, x, self.gate_up, act, live)
            stream.launch(self.ops.linear, act, self.down, out, live)
        else:
            own = self.columns.own("ffn_act", *act.shape)
            stream.launch(self.ops.linear, x, self.gate_up, own, live)
            self.columns.gather(stream, own, act)
            column_linear(stream, self.ops, self.columns, act, self.down, out, live)


def column_linear(
    stream: Stream,
    ops: OpSet,
    columns: ColumnGather,
    x: torch.Tensor,
    weight: PackedLinear,
    out: torch.Tensor,
    live: torch.Tensor | None,
) -> None:
    """out [T, H] = x [T, K] by a weight of which each rank has some columns."""
    own = columns.own("delta", *out.shape)
    stream.launch(ops.linear, x, weight, own, live)
    columns.gather(stream, own, out)
