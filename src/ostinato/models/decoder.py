"""The one decoder: embedding, layers of attention and feed-forward around a residual stream, final norm,
head.

Composed from parts by `models/build.py`; what a family is shows only in which parts are there. Knows nothing
of families, files, schedulers or sampling. Invariant: between launches it only takes views of the workspace,
so the same call runs eagerly, is captured, and is replayed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ostinato.attention.backend import AttentionBackend
from ostinato.graphs.stream import Stream
from ostinato.graphs.workspace import Workspace
from ostinato.models.config import ModelConfig
from ostinato.models.parts import Attention, DecoderView, FeedForward, KeptRows, Norm
from ostinato.ops.opset import EmbeddingTable, OpSet, PackedLinear
from ostinato.parallel.columns import ColumnGather


@dataclass(frozen=True, slots=True, eq=False)
class DecoderLayer:
    """Norm, attention, norm, feed-forward."""

    input_norm: Norm
    attention: Attention
    post_norm: Norm
    ffn: FeedForward


@dataclass(frozen=True, slots=True, eq=False)
class CausalLM:
    """A loaded model. Its outputs are workspace views: the next call of the same method overwrites them."""

    config: ModelConfig
    ops: OpSet
    workspace: Workspace
    attention: AttentionBackend
    embedding: EmbeddingTable
    layers: tuple[DecoderLayer, ...]
    final_norm: Norm
    head: PackedLinear
    head_columns: ColumnGather | None = None
    embedding_columns: ColumnGather | None = None

    def forward(self, view: DecoderView, stream: Stream) -> torch.Tensor:
        """Hidden states [T, H] of the T (padded) rows of `view`, the final norm applied; ready for `logits`.

        Where `view` has `logit_rows`, row i is that of `logit_rows[i]`: the last layer's attention caches all rows, and
        only these go on from there. `attention.plan` must have run for this step. Rows past the real ones are
        zero where `view` counts them, else of no meaning; they never influence a real row, whatever the pads of `view`
        hold.
        """
        assert view.input_ids is not None, "a decoder embeds ids; steps without them are not its own"
        rows, size, live = view.input_ids.shape[0], self.config.hidden_size, view.num_token_non_padded
        residual = self.workspace.take("residual", rows, size)
        normed = self.workspace.take("normed", rows, size)
        delta = self.workspace.take("delta", rows, size)
        self.embed(view.input_ids, stream, residual)
        last = len(self.layers) - 1
        for i, layer in enumerate(self.layers):
            if i == 0:
                layer.input_norm.apply(stream, residual, live, normed)
            else:
                layer.input_norm.add_and_apply(stream, delta, residual, live, normed)
            kept = _kept(view) if i == last else None
            layer.attention.forward(stream, normed, view, delta, kept)
            if kept is not None:
                # Into the place of what attention has read.
                stream.launch(self.ops.gather_rows, residual, kept.rows, normed)
                residual, normed, live = normed, residual, kept.count
            layer.post_norm.add_and_apply(stream, delta, residual, live, normed)
            layer.ffn.forward(stream, normed, live, delta)
        self.final_norm.add_and_apply(stream, delta, residual, live, normed)
        return normed

    def embed(self, ids: torch.Tensor, stream: Stream, out: torch.Tensor) -> None:
        """Rows of the embedding for `ids` int64 [T] into `out` [T, H]. Ranks that share its columns come together."""
        columns = self.embedding_columns
        own = out if columns is None else columns.own("delta", *out.shape)
        stream.launch(self.ops.embedding, ids, self.embedding, own)
        if columns is not None:
            columns.gather(stream, own, out)

    def select_rows(self, hidden: torch.Tensor, rows: torch.Tensor, stream: Stream) -> torch.Tensor:
        """hidden[rows] as a workspace view [n, H]; rows int64 [n], n at most the reserved number of logit
        rows.
        """
        out = self.workspace.take("head_rows", rows.shape[0], hidden.shape[1])
        stream.launch(self.ops.gather_rows, hidden, rows, out)
        return out

    def logits(
        self, hidden_rows: torch.Tensor, stream: Stream, live: torch.Tensor | None = None
    ) -> torch.Tensor:
        """fp32 [n, vocab] of normed hidden rows [n, H]; rows past the device count `live` come out zero."""
        out = self.workspace.take("logits", hidden_rows.shape[0], self.config.vocab_size)
        columns = self.head_columns
        own = out if columns is None else columns.own("logits", *out.shape)
        stream.launch(self.ops.linear, hidden_rows, self.head, own, live)
        if columns is not None:
            columns.gather(stream, own, out)
        return out


def _kept(view: DecoderView) -> KeptRows | None:
    """The rows that leave the last layer, where the step names them."""
    if view.logit_rows is None:
        return None
    assert view.num_logit_rows is not None, "rows that go on alone come with their count"
    return KeptRows(view.logit_rows, view.num_logit_rows)
