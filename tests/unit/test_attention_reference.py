"""Paged reference attention against a plain softmax, its pads, and bits that depend on a query's own keys
alone.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.attention import AttentionBackend, AttentionLayer, ReferenceAttention
from ostinato.graphs.stream import EagerStream
from ostinato.padding import StepMode, StepShape

HQ, HKV, D, PAGE = 6, 2, 16, 8
PAGES = 24  # per request
PLAIN = AttentionLayer(0, 0.25)
LAYERS = (
    PLAIN,
    AttentionLayer(0, 0.25, sliding_window=1),
    AttentionLayer(0, 0.25, sliding_window=70),
    AttentionLayer(0, 0.25, attention_chunk_size=11),
    AttentionLayer(0, 0.25, attention_chunk_size=64),
)


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@dataclass
class Cache:
    """Two requests over shuffled pages; memory that was never written is NaN."""

    page_size: int = PAGE
    k: list[torch.Tensor] = field(
        default_factory=lambda: [torch.full(((2 * PAGES + 1) * PAGE, HKV, D), torch.nan)]
    )
    v: list[torch.Tensor] = field(
        default_factory=lambda: [torch.full(((2 * PAGES + 1) * PAGE, HKV, D), torch.nan)]
    )
    page_table: torch.Tensor = field(default_factory=lambda: torch.zeros(3, PAGES, dtype=torch.int32))

    def __post_init__(self) -> None:
        pages = torch.randperm(2 * PAGES, generator=torch.Generator().manual_seed(3)) + 1
        self.page_table[1:] = pages.view(2, PAGES)

    def slots(self, request: int, start: int, stop: int) -> torch.Tensor:
        positions = torch.arange(start, stop)
        return self.page_table[request, positions // PAGE].long() * PAGE + positions % PAGE


@dataclass(frozen=True)
class View:
    mode: StepMode
    out_cache_loc: torch.Tensor
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    seq_lens_cpu: torch.Tensor
    extend_seq_lens: torch.Tensor | None
    extend_start_loc: torch.Tensor | None


@dataclass(frozen=True)
class Chunk:
    """Rows [start, stop) of a request (1 or 2)."""

    request: int
    start: int
    stop: int


def tokens(request: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values of all positions of a request."""
    length = PAGES * PAGE
    return tuple(draw(length, h, D, seed=10 * request + i) for i, h in enumerate((HQ, HKV, HKV)))  # type: ignore[return-value]


def run(
    cache: Cache, layer: AttentionLayer, chunks: list[Chunk], *, pads: int = 0, decode: bool = False
) -> list[torch.Tensor]:
    """One step; the rows of each chunk. Pad rows hold NaN and point nowhere, pad requests at live pages."""
    rows = [tuple(t[c.start : c.stop] for t in tokens(c.request)) for c in chunks]
    counts = [c.stop - c.start for c in chunks]
    total = sum(counts)
    q, k, v = (
        torch.cat([*parts, torch.full((pads, h, D), torch.nan)])
        for parts, h in zip(zip(*rows, strict=True), (HQ, HKV, HKV), strict=True)
    )
    slots = torch.cat([cache.slots(c.request, c.start, c.stop) for c in chunks])

    def padded(values: list[int], fill: int) -> torch.Tensor:
        return torch.tensor([*values, *[fill] * pads])

    lens = padded([c.stop for c in chunks], 1)
    view = View(
        mode=StepMode.DECODE if decode else StepMode.EXTEND,
        out_cache_loc=torch.cat([slots, torch.full((pads,), 10**9)]),
        req_pool_indices=padded([c.request for c in chunks], 1),
        seq_lens=lens,
        seq_lens_cpu=lens,
        extend_seq_lens=None if decode else padded(counts, 5),
        extend_start_loc=None if decode else padded([sum(counts[:i]) for i in range(len(counts))], 0),
    )
    backend: AttentionBackend = ReferenceAttention(cache)
    backend.init_graph_state(len(chunks) + pads, total + pads)
    backend.plan(view, StepShape(view.mode, (total,), len(chunks), total + pads, len(chunks) + pads))
    out = torch.full((total + pads, HQ, D), torch.nan)
    backend.forward(EagerStream(), layer, q, k, v, view, out)
    assert torch.equal(out[total:], torch.zeros(pads, HQ, D))
    return list(out[:total].split(counts))


def plain(layer: AttentionLayer, request: int, length: int) -> torch.Tensor:
    """Textbook attention of positions [0, length)."""
    q, k, v = (t[:length].transpose(0, 1) for t in tokens(request))
    k, v = k.repeat_interleave(HQ // HKV, 0), v.repeat_interleave(HQ // HKV, 0)
    rows, cols = torch.arange(length).view(-1, 1), torch.arange(length).view(1, -1)
    hidden = cols > rows
    if layer.sliding_window is not None:
        hidden |= cols <= rows - layer.sliding_window
    if layer.attention_chunk_size is not None:
        hidden |= cols // layer.attention_chunk_size != rows // layer.attention_chunk_size
    scores = (q @ k.transpose(1, 2) * layer.scale).masked_fill(hidden, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1)


@pytest.mark.parametrize("layer", LAYERS)
def test_whole_sequences(layer: AttentionLayer) -> None:
    got = run(Cache(), layer, [Chunk(2, 0, 137), Chunk(1, 0, 9)], pads=3)
    torch.testing.assert_close(got[0], plain(layer, 2, 137))
    torch.testing.assert_close(got[1], plain(layer, 1, 9))


@settings(deadline=None, max_examples=20)
@given(
    layer=st.sampled_from(LAYERS),
    cuts=st.lists(st.integers(1, 149), max_size=4),
    decoded=st.integers(0, 3),
    pads=st.integers(0, 3),
)
def test_chunks_decoding_and_neighbours_do_not_change_a_bit(
    layer: AttentionLayer, cuts: list[int], decoded: int, pads: int
) -> None:
    length = 150
    (whole,) = run(Cache(), layer, [Chunk(1, 0, length)])
    ends = sorted({*cuts, length - decoded})
    ends = [end for end in ends if end <= length - decoded]
    cache, rows, start = Cache(), [], 0
    for i, end in enumerate(ends):
        beside = [Chunk(2, i, i + 1)]
        rows.append(run(cache, layer, [*beside, Chunk(1, start, end)], pads=pads)[1])
        start = end
    for position in range(start, length):
        rows.append(run(cache, layer, [Chunk(1, position, position + 1)], pads=pads, decode=True)[0])
    assert torch.equal(torch.cat(rows), whole)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("part", [1, 2], ids=["key", "value"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_out_of_rows_that_may_not_see_it(
    monkeypatch: pytest.MonkeyPatch, layer: AttentionLayer, part: int, bad: float
) -> None:
    """Whole, in chunks and decoded: zero times infinity must not reach other rows of the same product."""
    length, place = 100, 37
    (clean,) = run(Cache(), layer, [Chunk(1, 0, length)])
    dirty = [x.clone() for x in tokens(1)]
    dirty[part][place] = bad
    monkeypatch.setattr(sys.modules[__name__], "tokens", lambda request: tuple(dirty))
    (whole,) = run(Cache(), layer, [Chunk(1, 0, length)])
    rows = torch.arange(length)
    sees = rows >= place
    if layer.sliding_window is not None:
        sees &= rows < place + layer.sliding_window
    if layer.attention_chunk_size is not None:
        sees &= rows // layer.attention_chunk_size == place // layer.attention_chunk_size
    assert torch.equal(whole[~sees], clean[~sees])
    assert not whole[place].isfinite().all()
    cache = Cache()
    pieces = [run(cache, layer, [Chunk(1, a, b)])[0] for a, b in ((0, 30), (30, 41), (41, 99))]
    pieces += run(cache, layer, [Chunk(1, 99, 100)], decode=True)
    torch.testing.assert_close(torch.cat(pieces), whole, rtol=0, atol=0, equal_nan=True)


def test_pads_write_nothing() -> None:
    cache = Cache()
    run(cache, PLAIN, [Chunk(1, 0, 5)], pads=4)
    written = cache.slots(1, 0, 5)
    _, keys, values = tokens(1)
    assert torch.equal(cache.k[0][written], keys[:5])
    assert torch.equal(cache.v[0][written], values[:5])
    for stored in (cache.k[0], cache.v[0]):
        others = torch.ones(len(stored), dtype=torch.bool)
        others[written] = False
        assert stored[others].isnan().all()


def test_requests_without_new_rows_are_skipped() -> None:
    cache = Cache()
    first, none, second = run(cache, PLAIN, [Chunk(1, 0, 4), Chunk(2, 0, 0), Chunk(2, 0, 3)])
    assert len(none) == 0
    torch.testing.assert_close(first, plain(PLAIN, 1, 4))
    torch.testing.assert_close(second, plain(PLAIN, 2, 3))


def test_reused_pages_carry_nothing_over() -> None:
    cache = Cache()
    run(cache, PLAIN, [Chunk(1, 0, 100)])
    cache.page_table[2] = cache.page_table[1]  # request 1 is gone, request 2 gets its pages
    (got,) = run(cache, PLAIN, [Chunk(2, 0, 6)])
    torch.testing.assert_close(got, plain(PLAIN, 2, 6))


def test_a_new_plan_over_a_smaller_step_forgets_the_larger_one() -> None:
    cache = Cache()
    backend = ReferenceAttention(cache)
    backend.init_graph_state(2, 64)
    q, k, v = (t[:4] for t in tokens(1))
    lens = torch.tensor([3, 1])
    view = View(
        StepMode.EXTEND, cache.slots(1, 0, 4), torch.tensor([1, 2]), lens, lens, lens, torch.tensor([0, 3])
    )
    out = torch.full((4, HQ, D), torch.nan)
    for shape, real in (
        (StepShape(StepMode.EXTEND, (4,), 2, 4, 2), 4),
        (StepShape(StepMode.EXTEND, (3,), 1, 4, 2), 3),
    ):
        backend.plan(replace(view, out_cache_loc=cache.slots(1, 0, 4)), shape)
        backend.forward(EagerStream(), PLAIN, q, k, v, view, out)
        assert torch.equal(out[real:], torch.zeros(4 - real, HQ, D))
    torch.testing.assert_close(out[:3], plain(PLAIN, 1, 3))


def test_more_requests_than_planned_for() -> None:
    backend = ReferenceAttention(Cache())
    backend.init_graph_state(1, 8)
    lens = torch.ones(2, dtype=torch.int64)
    view = View(StepMode.DECODE, lens, lens, lens, lens, None, None)
    with pytest.raises(ValueError, match="planned for 1 requests, the step has 2"):
        backend.plan(view, StepShape(StepMode.DECODE, (2,), 2, 2, 2))


def test_what_the_backend_declares() -> None:
    backend: AttentionBackend = ReferenceAttention(Cache())
    assert backend.seq_len_fill_value == 1
    assert all(backend.can_capture(mode) for mode in StepMode)
    assert backend.pad_contract.honours_count
    assert backend.pad_contract.writes_zeros
