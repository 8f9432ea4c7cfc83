"""Steps over a launched worker, under poison: runs one batch clean and padded, and names every broken promise.

A `Rig` holds requests whose contexts are in the KV cache. `broken(...)` runs a step as the product would, after a
larger one, with everything that a pad could reach poisoned, and compares it with the same rows run alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ostinato.config import EngineConfig
from ostinato.engine.batch import ForwardBatch, decode_batch, extend_batch
from ostinato.engine.launch import launch
from ostinato.graphs.audit import POISONS, Poison, first_difference, poison_registry, poison_workspace
from ostinato.padding import StepMode, StepShape, decide_shape

PAGE = 16
CONTEXT = 64
DECODE_BUCKETS = (1, 2, 4, 8)
PREFILL_BUCKETS = (4, 8, 16, 24)
MAX_REQUESTS = 10
LENGTHS = (17, 3, 40, 1, 29, 8, 12, 5)
"""Tokens that each request has in the cache; one more request shares the first pages of the longest."""
SHARED_WITH, SHARED_TOKENS = 2, 32
WAYS = ("eager", "replay")


@dataclass(frozen=True)
class Clean:
    """What a batch gives when its rows run alone: outputs of its rows, and all live KV afterwards."""

    outputs: torch.Tensor
    kv: list[torch.Tensor]


class Rig:
    """A worker as `launch` wires it, with requests 0..8 whose contexts are cached."""

    def __init__(self, path: Path, dtype: str = "float32", **options: Any) -> None:
        config = EngineConfig.of(
            model=str(path),
            dtype=dtype,
            **{
                "threads": 1,
                "graph": "tape",
                "capture": "startup",
                "page_size": PAGE,
                "context_length": CONTEXT,
                "max_running_requests": MAX_REQUESTS,
                "chunked_prefill_size": 128,
                "decode_buckets": DECODE_BUCKETS,
                "prefill_buckets": PREFILL_BUCKETS,
                "kernels": "reference",
                **options,
            },
        )
        parts = launch(config, lambda *args: None)
        self.worker = parts.worker
        self.config = parts.model_config
        self.scheduler = parts.scheduler
        self.load_at_start = self.load_counts()
        self.pool = self.worker.pool
        self.model = self.worker.model
        # Every width is tried here, also those that serving would refuse as too much padding.
        self.rules = replace(self.worker.rules, max_pad_factor=10**6)
        self._cache_contexts()

    def _cache_contexts(self) -> None:
        vocab = self.config.vocab_size
        generator = torch.Generator().manual_seed(5)
        # Token 0 is what pads hold, so no real row has it and its embedding may be poisoned.
        self.tokens = torch.randint(1, vocab, (len(LENGTHS) + 1, CONTEXT), generator=generator)
        self.tokens[-1, :SHARED_TOKENS] = self.tokens[SHARED_WITH, :SHARED_TOKENS]
        self.lengths = [*LENGTHS, SHARED_TOKENS]
        self.rows = [self.pool.take_row() for _ in self.lengths]
        allocator = self.scheduler.kv.allocator
        for row in self.rows:
            self.pool.write_row(row, 0, allocator.allocate(CONTEXT // PAGE))
        shared = self.pool.page_table[self.rows[SHARED_WITH], : SHARED_TOKENS // PAGE].tolist()
        self.pool.write_row(self.rows[-1], 0, shared)
        for cache in (*self.pool.k, *self.pool.v):
            cache.fill_(torch.nan)  # what nobody has written must never be read
        for request, length in enumerate(LENGTHS):
            self.alone(self.extend([(request, 0, length)]))
        self._saved = [cache.clone() for cache in (*self.pool.k, *self.pool.v)]

    # ---- batches ----

    def decode(self, requests: Sequence[int]) -> ForwardBatch:
        """The next token of each request."""
        lens = torch.tensor([self.lengths[r] for r in requests], dtype=torch.int64)
        rows = torch.tensor([self.rows[r] for r in requests], dtype=torch.int64)
        return decode_batch(self.tokens[list(requests), lens], lens + 1, rows, self.pool.slots(rows, lens))

    def extend(self, spans: Sequence[tuple[int, int, int]], mode: StepMode = StepMode.EXTEND) -> ForwardBatch:
        """Tokens [start, start + count) of each (request, start, count)."""
        positions = [torch.arange(start, start + count) for _, start, count in spans]
        parts = [self.pool.slots(self.rows[r], p) for (r, _, _), p in zip(spans, positions, strict=True)]
        ids = [self.tokens[r, p] for (r, _, _), p in zip(spans, positions, strict=True)]
        return extend_batch(
            torch.cat(ids),
            [count for _, _, count in spans],
            [start for _, start, _ in spans],
            [self.rows[r] for r, _, _ in spans],
            torch.cat(parts),
            mode=mode,
        )

    # ---- running ----

    def runner(self, batch: ForwardBatch) -> Any:
        return self.worker.prefill if batch.mode.is_extend else self.worker.decode

    def shape(self, batch: ForwardBatch, bucket: int) -> StepShape:
        """The step in a bucket, by the product's own decision with that bucket alone on the list."""
        sizes = (
            replace(self.rules.extend, sizes=(bucket,)),
            replace(self.rules.decode, sizes=(bucket,)),
        )
        rules = replace(self.rules, extend=sizes[0], decode=sizes[1])
        rows = batch.global_num_token_non_padded_cpu
        return decide_shape(batch.mode, (rows,), batch.batch_size, rules)

    def alone(self, batch: ForwardBatch) -> torch.Tensor:
        """The batch's rows without pads, eager: logits of a decode step, hidden states of a prefill."""
        rows = batch.global_num_token_non_padded_cpu
        shape = decide_shape(batch.mode, (rows,), batch.batch_size, self.rules, reject="alone")
        assert (shape.padded_num_tokens, shape.padded_bs) == (rows, batch.batch_size)
        return self.runner(batch).run(shape, batch).clone()

    def padded(self, batch: ForwardBatch, bucket: int, way: str = "replay") -> torch.Tensor:
        """Outputs of all rows of the bucket, eager or replayed."""
        reject = "" if way == "replay" else "contract"
        return self.runner(batch).run(self.shape(batch, bucket), batch, reject=reject)

    def restore(self) -> None:
        """The cache as it was when the contexts had been computed; the trash page holds NaN."""
        for cache, saved in zip((*self.pool.k, *self.pool.v), self._saved, strict=True):
            cache.copy_(saved)
            cache[:PAGE] = torch.nan

    def live_kv(self) -> list[torch.Tensor]:
        """The bits of every page but the trash page."""
        width = torch.int32 if self.pool.k[0].element_size() == 4 else torch.int16
        return [cache[PAGE:].view(width).clone() for cache in (*self.pool.k, *self.pool.v)]

    def load_counts(self) -> torch.Tensor | None:
        return None if self.worker.load is None else self.worker.load.snapshot()

    def clean(self, batch: ForwardBatch) -> Clean:
        """The batch alone on a clean cache. Its rows are finite, and it writes its own KV and no other.

        Reference attention writes single slots; the compiled one lays out whole pages in an order of its own.
        """
        self.restore()
        before = self.live_kv()
        outputs = self.alone(batch)
        assert outputs.isfinite().all()
        after = self.live_kv()
        own = batch.out_cache_loc - PAGE
        if self.model.attention.name != "reference":
            own = (own.div(PAGE, rounding_mode="floor").unique() * PAGE).unsqueeze(1) + torch.arange(PAGE)
        for old, new in zip(before, after, strict=True):
            old[own] = new[own]
            assert torch.equal(old, new)
        return Clean(outputs, after)

    # ---- the contract ----

    def broken(
        self,
        batch: ForwardBatch,
        clean: Clean,
        bucket: int,
        *,
        way: str = "replay",
        poison: Poison | None = POISONS[0],
        before: ForwardBatch | None = None,
    ) -> set[str]:
        """Names of the promises that a padded step breaks; empty when pads change nothing.

        `before`: a step that runs first, so that its rows are what stands in the tails. `poison`: overwrites the
        static buffers, the workspace and the embedding of pads; None leaves them as `before` did.
        """
        if before is not None:
            self.padded(before, bucket, way)
        self.restore()
        runner = self.runner(batch)
        load, replays = self.load_counts(), runner.stats.replays
        with self._poisoned(runner, poison):
            outputs = self.padded(batch, bucket, way).clone()
        rows = batch.global_num_token_non_padded_cpu
        found = set(self._pads_that_show(batch, rows, bucket))
        if first_difference(outputs[:rows], clean.outputs) is not None:
            found.add("real rows differ")
        if not outputs[:rows].isfinite().all():
            found.add("real rows are not finite")
        if not all(map(torch.equal, self.live_kv(), clean.kv)):
            found.add("live KV differs")
        if load is not None and (self.load_counts() - load).sum(1).tolist() != self._load_of(rows):
            found.add("load is not rows * K")
        for name in ("num_token_non_padded", "global_num_token_non_padded"):
            if runner.registry.buffer(name).tolist() != [rows]:
                found.add("count is wrong")
        if runner.stats.replays - replays != (way == "replay"):
            found.add("not replayed")
        return found

    @contextmanager
    def _poisoned(self, runner: Any, poison: Poison | None) -> Iterator[None]:
        if poison is None:
            yield
            return
        poison_registry(runner.registry, poison)
        poison_workspace(self.model.workspace, poison)
        if not isinstance(self.model.embedding, torch.Tensor):
            yield  # held once with the head, whose logits are everybody's
            return
        pad_row = self.model.embedding[0]
        saved = pad_row.clone()
        poison.into(pad_row)
        try:
            yield
        finally:
            pad_row.copy_(saved)

    def _load_of(self, rows: int) -> list[int]:
        """What each layer's counters go up by, in all."""
        return [rows * self.config.moe.top_k if layer.sparse else 0 for layer in self.config.layers]

    def _pads_that_show(self, batch: ForwardBatch, rows: int, bucket: int) -> Iterator[str]:
        """What the last layers left in pad rows: attention and MoE zeros, ids -1 with weight 0."""
        config, workspace = self.config, self.model.workspace
        heads = workspace.take("attention", bucket, config.num_heads * config.head_dim)
        if heads[rows:].count_nonzero():
            yield "attention of pads is not zero"
        if config.moe is None:
            return
        ids = workspace.take("moe.topk_ids", bucket, config.moe.top_k)[rows:]
        weights = workspace.take("moe.topk_weights", bucket, config.moe.top_k)[rows:]
        if (ids != -1).any() or weights.count_nonzero():
            yield "pads are routed"
        delta = workspace.take("delta", bucket, config.hidden_size)[rows:]
        if config.layers[-1].sparse and delta.count_nonzero():
            yield "MoE of pads is not zero"
