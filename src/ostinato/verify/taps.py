"""A model that remembers what every layer gave: the same layers, each followed by a launch that copies its result.

Put in the place of a worker's model and captured anew, it shows where two runs of a step part. Knows nothing of checks.
Invariant: the layers compute what they always do; only copies are launched beside them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from ostinato.graphs.stream import Stream
from ostinato.models.decoder import CausalLM
from ostinato.models.parts import DecoderView, KeptRows

PARTS = ("attention", "feed-forward")


@dataclass(frozen=True, slots=True, eq=False)
class Tapped:
    """Copies of one run's leading rows. parts [2 * layers, rows, H]: attention and feed-forward of each layer in turn.

    ids int32 [layers, rows, K]: routed experts, -2 in dense layers; None for a dense model.
    """

    parts: torch.Tensor
    ids: torch.Tensor | None

    def first_difference(self, other: Tapped, rows: int) -> tuple[int, str, int, float] | None:
        """(layer, part, row, largest difference there) of the first part that has other bits; None when none has."""
        for at, (a, b) in enumerate(zip(self.parts, other.parts, strict=True)):
            x, y = a[:rows], b[:rows]
            same = (x == y) | ((x != x) & (y != y))
            if not bool(same.all()):
                row = int((~same).any(1).nonzero()[0])
                gap = (x.double() - y.double()).abs().max()
                return at // 2, PARTS[at % 2], row, float(gap)
        return None


class Taps:
    """Buffers for up to `rows` rows of every layer of `model`, and the model that fills them."""

    def __init__(self, model: CausalLM, rows: int) -> None:
        self._model, self._rows = model, rows
        config = model.config
        shape = (2 * config.num_layers, rows, config.hidden_size)
        self._parts = torch.zeros(shape, dtype=config.dtype, device=model.workspace.device)
        moe = config.moe
        self._ids = None
        if moe is not None:
            self._ids = torch.full((config.num_layers, rows, moe.top_k), -2, dtype=torch.int32)
            self._ids = self._ids.to(model.workspace.device)

    def model(self) -> CausalLM:
        """The tapped model."""
        config = self._model.config
        layers = [
            replace(
                layer,
                attention=cast("Any", _TappedAttention(layer.attention, self, index)),
                ffn=_TappedFeedForward(layer.ffn, self, index, config.layers[index].sparse),
            )
            for index, layer in enumerate(self._model.layers)
        ]
        return replace(self._model, layers=tuple(layers))

    def read(self, rows: int) -> Tapped:
        """What the last run left of its leading rows."""
        n = min(rows, self._rows)
        ids = None if self._ids is None else self._ids[:, :n].clone()
        return Tapped(self._parts[:, :n].clone(), ids)

    def keep(self, stream: Stream, at: int, values: torch.Tensor) -> None:
        n = min(len(values), self._rows)
        stream.launch(_copy, values[:n], self._parts[at, :n])

    def keep_ids(self, stream: Stream, layer: int, rows: int) -> None:
        moe = self._model.config.moe
        if self._ids is not None and moe is not None:
            n = min(rows, self._rows)
            ids = self._model.workspace.take("moe.topk_ids", rows, moe.top_k)
            stream.launch(_copy, ids[:n], self._ids[layer, :n])


def _copy(values: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(values)


@dataclass(frozen=True, slots=True, eq=False)
class _TappedAttention:
    inner: Any
    taps: Taps
    index: int

    def forward(
        self,
        stream: Stream,
        x: torch.Tensor,
        view: DecoderView,
        out: torch.Tensor,
        kept: KeptRows | None = None,
    ) -> None:
        self.inner.forward(stream, x, view, out, kept)
        self.taps.keep(stream, 2 * self.index, out)


@dataclass(frozen=True, slots=True, eq=False)
class _TappedFeedForward:
    inner: Any
    taps: Taps
    index: int
    sparse: bool

    def forward(
        self, stream: Stream, x: torch.Tensor, num_token_non_padded: torch.Tensor | None, out: torch.Tensor
    ) -> None:
        self.inner.forward(stream, x, num_token_non_padded, out)
        self.taps.keep(stream, 2 * self.index + 1, out)
        if self.sparse:
            self.taps.keep_ids(stream, self.index, len(out))
