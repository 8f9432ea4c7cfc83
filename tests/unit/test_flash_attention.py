"""The FlashAttention-3 adapter against a module of the same signatures: the schedule's life, and what it is passed to.

The fake computes what FlashAttention-3 would, and refuses what would be a fault there: a schedule of another step, of
another number of splits, or with a semaphore that was not reset.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ostinato.attention.backend import AttentionLayer
from ostinato.attention.capabilities import AttentionNeeds
from ostinato.attention.flash import CAPABILITIES, FlashKernels, FlashPlugin
from ostinato.attention.reference import ReferenceAttention
from ostinato.errors import ConfigError
from ostinato.graphs import EagerStream, TapeBackend
from ostinato.kv.pool import KVLayout, KVPool
from ostinato.padding import StepMode, StepShape

HEADS, KV_HEADS, DIM, PAGE, LENGTHS = 4, 2, 16, 16, (5, 33, 20)
NEEDS = AttentionNeeds(torch.device("cpu"), torch.float32, DIM, PAGE, 48, HEADS)


class FakeFlash:
    """`get_scheduler_metadata` and `flash_attn_with_kvcache`; calls are counted."""

    def __init__(self) -> None:
        self.schedules = 0
        self.with_schedule: list[bool] = []

    def get_scheduler_metadata(
        self,
        batch_size: int,
        max_seqlen_q: int,
        max_seqlen_k: int,
        num_heads_q: int,
        num_heads_kv: int,
        headdim: int,
        cache_seqlens: torch.Tensor,
        qkv_dtype: torch.dtype = torch.bfloat16,
        headdim_v: int | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_k_new: torch.Tensor | None = None,
        cache_leftpad: torch.Tensor | None = None,
        page_size: int | None = None,
        max_seqlen_k_new: int = 0,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        attention_chunk: int = 0,
        has_softcap: bool = False,
        num_splits: int = 0,
        pack_gqa: bool | None = None,
        sm_margin: int = 0,
    ) -> torch.Tensor:
        """int32: a semaphore, the splits, the lengths."""
        assert (num_heads_q, num_heads_kv, headdim, page_size) == (HEADS, KV_HEADS, DIM, PAGE)
        assert (batch_size, max_seqlen_q, causal, window_size) == (len(cache_seqlens), 1, True, (-1, -1))
        assert max_seqlen_k >= int(cache_seqlens.max())
        assert qkv_dtype == torch.float32
        self.schedules += 1
        head = torch.tensor((0, num_splits), dtype=torch.int32)
        return torch.cat((head, cache_seqlens))

    def flash_attn_with_kvcache(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *,
        cache_seqlens: torch.Tensor,
        page_table: torch.Tensor,
        cu_seqlens_q: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        softmax_scale: float,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        scheduler_metadata: torch.Tensor | None = None,
        num_splits: int = 0,
    ) -> torch.Tensor:
        assert causal
        assert num_splits > 0
        assert cache_seqlens.dtype == page_table.dtype == torch.int32
        self.with_schedule.append(scheduler_metadata is not None)
        if scheduler_metadata is not None:
            assert window_size == (-1, -1)
            assert scheduler_metadata[1] == num_splits, "the schedule is for other splits"
            assert torch.equal(scheduler_metadata[2:], cache_seqlens), "the schedule is another step's"
            assert scheduler_metadata[0] == 0, "the semaphore was not reset"
        first = torch.arange(len(q) + 1) if cu_seqlens_q is None else cu_seqlens_q
        assert max_seqlen_q is None or max_seqlen_q >= int(first.diff().max())
        rows = q.reshape(-1, HEADS, DIM)
        out = torch.full_like(rows, torch.nan)
        for i in range(len(cache_seqlens)):
            start, stop, length = int(first[i]), int(first[i + 1]), int(cache_seqlens[i])
            k, v = (
                cache[page_table[i].long()].flatten(0, 1)[:length].repeat_interleave(HEADS // KV_HEADS, 1)
                for cache in (k_cache, v_cache)
            )
            position = torch.arange(length - (stop - start), length).unsqueeze(1)
            key = torch.arange(length)
            seen = key <= position
            if window_size[0] >= 0:
                seen &= key >= position - window_size[0]
            scores = torch.einsum("qhd,khd->hqk", rows[start:stop], k) * softmax_scale
            shares = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            out[start:stop] = torch.einsum("hqk,khd->qhd", shares, v)
        return out.view_as(q)


def pool() -> KVPool:
    made = KVPool(
        KVLayout(2, KV_HEADS, DIM, torch.float32, PAGE), num_pages=10, max_requests=3, max_pages_per_request=3
    )
    for row in range(3):
        made.write_row(row + 1, 0, [3 * row + 1, 3 * row + 2, 3 * row + 3])
    return made


def view_of(kv: KVPool, mode: StepMode, parts: list[tuple[int, int, int]], pads: int) -> Any:
    """(request, first position, length) of each; pads are requests of length 1 in decode steps, of 0 rows else."""
    lens = torch.tensor([n for _, _, n in parts] + [1] * pads)
    slots = [kv.slots(r, torch.arange(first, n)) for r, first, n in parts]
    return SimpleNamespace(
        mode=mode,
        out_cache_loc=torch.cat([*slots, torch.zeros(pads, dtype=torch.int64)]),
        req_pool_indices=torch.tensor([r for r, _, _ in parts] + [0] * pads),
        seq_lens=lens,
        seq_lens_cpu=lens,
        extend_seq_lens=torch.tensor([n - first for _, first, n in parts] + [0] * pads),
    )


def tensors(rows: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, heads, DIM, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS)]


def step(
    backend: Any, kv: KVPool, mode: StepMode, parts: list[tuple[int, int, int]], seed: int, pads: int = 0
) -> list[torch.Tensor]:
    """Two layers of one step, the second with a window; their outputs."""
    view = view_of(kv, mode, parts, pads)
    rows = len(view.out_cache_loc)
    shape = StepShape(mode, (rows - pads,), len(parts), rows, len(parts) + pads)
    backend.plan(view, shape)
    outs = []
    for layer in (AttentionLayer(0, 0.25), AttentionLayer(1, 0.25, sliding_window=9)):
        q, k, v = tensors(rows, seed + layer.layer_id)
        out = torch.full_like(q, 7.0)
        backend.forward(EagerStream(), layer, q, k, v, view, out)
        outs.append(out)
    return outs


@pytest.mark.parametrize("num_splits", [1, 3])
def test_prefill_and_decode_are_those_of_the_reference(num_splits: int) -> None:
    """Pads come out zero; one schedule a decode step, for the layers without a window only."""
    flash, kv, plain = FakeFlash(), pool(), pool()
    backends: list[Any] = [ReferenceAttention(plain), FlashKernels(kv, NEEDS, flash, num_splits)]
    for backend in backends:
        backend.init_graph_state(5, 64)
    whole = [(r + 1, 0, n) for r, n in enumerate(LENGTHS)]
    for mode, parts in (
        (StepMode.EXTEND, whole),
        (StepMode.DECODE, [(r, n, n + 1) for r, _, n in whole]),
        (StepMode.EXTEND, [(2, 34, 40), (1, 6, 7)]),
        (StepMode.DECODE, [(2, 40, 41)]),
    ):
        want = step(backends[0], plain, mode, parts, 3, pads=2)
        got = step(backends[1], kv, mode, parts, 3, pads=2)
        for ours, theirs in zip(got, want, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
            assert not ours[-2:].any()
    assert flash.schedules == 2
    assert flash.with_schedule == [False, False, True, False, False, False, True, False]


def test_a_captured_call_reads_the_schedule_of_the_step_it_is_replayed_for() -> None:
    """The buffer stays where it was, is written by each plan, and its semaphore is back at 0."""
    flash, kv = FakeFlash(), pool()
    backend = FlashKernels(kv, NEEDS, flash)
    backend.init_graph_state(4, 16)
    layer = AttentionLayer(0, 0.25)
    q, k, v = tensors(3, 1)
    out = torch.empty_like(q)
    view = view_of(kv, StepMode.DECODE, [(1, 4, 5), (2, 8, 9)], 1)
    shape = StepShape(StepMode.DECODE, (2,), 2, 3, 3)
    backend.plan(view, shape)
    graph = TapeBackend().capture(lambda stream: backend.forward(stream, layer, q, k, v, view, out))
    address = backend._schedules[3].data_ptr()
    for parts in ([(1, 5, 6), (2, 9, 10)], [(3, 3, 4), (1, 6, 7)]):
        now = view_of(kv, StepMode.DECODE, parts, 1)
        for name in ("out_cache_loc", "req_pool_indices", "seq_lens"):
            getattr(view, name).copy_(getattr(now, name))
        backend._schedules[3][0] = 99  # as kernels leave it
        backend.plan(view, shape)
        graph.replay()
        seen = out.clone()
        backend.forward(EagerStream(), layer, q, k, v, view, out)
        assert torch.equal(seen, out)
    assert backend._schedules[3].data_ptr() == address
    assert all(flash.with_schedule)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_splits must be fixed"):
        FlashKernels(pool(), NEEDS, FakeFlash(), 0)
    with pytest.raises(ConfigError, match="needs FlashAttention-3"):
        FlashPlugin().build(pool(), NEEDS)
    backend = FlashKernels(pool(), NEEDS, FakeFlash())
    with pytest.raises(ValueError, match="planned for 0"):
        step(backend, pool(), StepMode.DECODE, [(1, 0, 1)], 0)


def test_only_decode_steps_are_captured_and_none_follows_without_a_plan() -> None:
    assert CAPABILITIES.captures == {StepMode.DECODE}
    assert not CAPABILITIES.can_advance(torch.device("cuda"))
