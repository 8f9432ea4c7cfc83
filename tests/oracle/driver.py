"""Runs a `CausalLM` without the engine: ragged batches over a small paged KV cache, in steps of any kind."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from ostinato.attention import ReferenceAttention
from ostinato.graphs.stream import EagerStream, Stream
from ostinato.models import CausalLM, ModelConfig, load_model, read_config
from ostinato.ops import ReferenceOps
from ostinato.padding import StepMode, StepShape

PAGE = 16


@dataclass(frozen=True)
class View:
    """The fields of `ForwardBatch` that a decoder reads."""

    mode: StepMode
    input_ids: torch.Tensor
    positions: torch.Tensor
    out_cache_loc: torch.Tensor
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    seq_lens_cpu: torch.Tensor
    extend_seq_lens: torch.Tensor | None
    extend_start_loc: torch.Tensor | None
    num_token_non_padded: torch.Tensor | None
    logit_rows: torch.Tensor | None = None
    num_logit_rows: torch.Tensor | None = None


@dataclass
class Cache:
    """A KV cache with page_table row r + 1 for request r; its pages are shuffled, page 0 is trash."""

    k: list[torch.Tensor]
    v: list[torch.Tensor]
    page_table: torch.Tensor
    page_size: int = PAGE

    @classmethod
    def of(cls, layers: int, heads: int, dim: int, requests: int, length: int, dtype: torch.dtype) -> Cache:
        per_request = -(-length // PAGE)
        pages = torch.randperm(requests * per_request, generator=torch.Generator().manual_seed(0)) + 1
        table = torch.zeros(requests + 1, per_request, dtype=torch.int32)
        table[1:] = pages.view(requests, per_request)
        shape = ((requests * per_request + 1) * PAGE, heads, dim)
        # Stale memory of other requests must never matter.
        return cls(
            [torch.full(shape, torch.nan, dtype=dtype) for _ in range(layers)],
            [torch.full(shape, torch.nan, dtype=dtype) for _ in range(layers)],
            table,
        )

    def slots(self, request: int, start: int, stop: int) -> torch.Tensor:
        positions = torch.arange(start, stop)
        return self.page_table[request + 1, positions // PAGE].long() * PAGE + positions % PAGE


@dataclass
class Driver:
    """Feeds tokens of several requests to a model; `padding` adds poisoned pad rows to every step."""

    model: CausalLM
    cache: Cache
    padding: int = 0
    lengths: list[int] = field(default_factory=list)

    @classmethod
    def load(
        cls,
        path: Path,
        requests: int,
        length: int,
        *,
        padding: int = 0,
        dtype: torch.dtype | None = None,
        config: ModelConfig | None = None,
    ) -> Driver:
        config = config or read_config(path, dtype=dtype)
        cache = Cache.of(
            config.num_layers, config.num_kv_heads, config.head_dim, requests, length, config.dtype
        )
        attention = ReferenceAttention(cache)
        attention.init_graph_state(requests + padding, requests * length + padding)
        model = load_model(
            path,
            ops=ReferenceOps(),
            attention=attention,
            max_num_tokens=requests * length + padding,
            max_bs=requests * length + padding,
            config=config,
        )
        return cls(model, cache, padding, [0] * requests)

    def view(self, tokens: list[list[int]], mode: StepMode) -> tuple[View, StepShape]:
        """The padded step that appends `tokens[r]` to request r (none: left out)."""
        active = [r for r, new in enumerate(tokens) if new]
        counts = [len(tokens[r]) for r in active]
        total, pads = sum(counts), self.padding
        spans = [(r, self.lengths[r], self.lengths[r] + n) for r, n in zip(active, counts, strict=True)]
        far = 10**9  # what a pad row may hold

        def padded(values: list[int], fill: int) -> torch.Tensor:
            return torch.tensor([*values, *[fill] * pads], dtype=torch.int64)

        lens = padded([stop for _, _, stop in spans], 1)
        starts = [sum(counts[:i]) for i in range(len(counts))]
        view = View(
            mode=mode,
            input_ids=padded([t for r in active for t in tokens[r]], far),
            positions=padded([p for _, start, stop in spans for p in range(start, stop)], far),
            out_cache_loc=padded([s for span in spans for s in self.cache.slots(*span).tolist()], far),
            req_pool_indices=padded([r + 1 for r in active], 0),
            seq_lens=lens,
            seq_lens_cpu=lens.clone(),
            extend_seq_lens=padded(counts, 0) if mode.is_extend else None,
            extend_start_loc=padded(starts, 0) if mode.is_extend else None,
            num_token_non_padded=torch.tensor([total], dtype=torch.int32),
        )
        return view, StepShape(mode, (total,), len(active), total + pads, len(active) + pads)

    def run(self, view: View, stream: Stream) -> torch.Tensor:
        """fp32 logits of all rows, pads included."""
        hidden = self.model.forward(view, stream)
        return self.model.logits(hidden, stream)

    def step(self, tokens: list[list[int]], *, mode: StepMode = StepMode.EXTEND) -> list[torch.Tensor]:
        """Append `tokens[r]` to request r; fp32 logits [len(tokens[r]), vocab] of each."""
        view, shape = self.view(tokens, mode)
        self.model.attention.plan(view, shape)
        logits = self.run(view, EagerStream()).clone()
        counts = [len(new) for new in tokens]
        self.lengths = [length + n for length, n in zip(self.lengths, counts, strict=True)]
        return list(logits[: sum(counts)].split(counts))
