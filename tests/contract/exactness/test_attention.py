"""A row of CPU attention has the same bits whatever is computed beside it, before it, and by whom.

The truth is a request prefilled whole and alone. Then: other requests in the batch, any chunking, prefix hits,
decoding, one thread or two, chunks of keys shared between threads or not, another order of physical pages, and
stale NaN in every slot that is not the request's own.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.attention.backend import AttentionLayer
from ostinato.attention.cpu import CpuAttention
from ostinato.graphs.stream import EagerStream
from ostinato.kv.pool import KVLayout, KVPool
from ostinato.ops.cpu.isa import AVX512_BF16, PORTABLE, select_isa
from ostinato.ops.cpu.launch import Runtime, open_runtime
from ostinato.padding import StepMode, StepShape

HEADS, KV_HEADS, DIM, PAGE = 6, 2, 40, 16
LENGTHS = (1400, 700, 90)
PAGES = -(-max(LENGTHS) // PAGE)
PATHS = [
    pytest.param(AVX512_BF16, torch.bfloat16, id="bf16-dot"),
    pytest.param(PORTABLE, torch.bfloat16, id="bf16-portable"),
    pytest.param(PORTABLE, torch.float32, id="fp32"),
]
MASKS = [
    pytest.param(AttentionLayer(0, 0.2), id="causal"),
    pytest.param(AttentionLayer(0, 0.2, sliding_window=200), id="window"),
    pytest.param(AttentionLayer(0, 0.2, attention_chunk_size=300), id="chunked"),
]
Part = tuple[int, int, int]  # request, first position, position after the last


@functools.cache
def runtime(isa: str, threads: int) -> Runtime:
    if isa == AVX512_BF16 and select_isa().name != AVX512_BF16:
        pytest.skip("this CPU has no AVX512-BF16")
    before = torch.get_num_threads()
    made = open_runtime(isa=isa, num_threads=threads)
    torch.set_num_threads(before)
    return made


@functools.cache
def sequences(dtype: torch.dtype) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [
        [torch.randn(n, h, DIM, generator=generator).to(dtype) for h in (HEADS, KV_HEADS, KV_HEADS)]
        for n in LENGTHS
    ]


@dataclass
class World:
    """A pool on shuffled pages, all of it NaN, and a backend."""

    isa: str
    dtype: torch.dtype
    layer: AttentionLayer
    threads: int = 1
    seed: int = 1

    def __post_init__(self) -> None:
        layout = KVLayout(1, KV_HEADS, DIM, self.dtype, PAGE)
        self.kv = KVPool(layout, num_pages=PAGES * 3 + 1, max_requests=3, max_pages_per_request=PAGES)
        for cache in (*self.kv.k, *self.kv.v):
            cache.fill_(torch.nan)
        order = torch.randperm(PAGES * 3, generator=torch.Generator().manual_seed(self.seed)) + 1
        for row, length in enumerate(LENGTHS):
            mine = order[row * PAGES : row * PAGES + -(-length // PAGE)]
            self.kv.write_row(row + 1, 0, mine.tolist())
        self.backend = CpuAttention(self.kv, runtime(self.isa, self.threads))
        self.backend.init_graph_state(8, 4096)

    def step(self, parts: list[Part], mode: StepMode = StepMode.EXTEND, pads: int = 0) -> list[torch.Tensor]:
        """Outputs by part."""
        data = sequences(self.dtype)
        pieces = [torch.cat([data[r][i][a:b] for r, a, b in parts]) for i in range(3)]
        q, k, v = (torch.cat([x, x.new_full((pads, *x.shape[1:]), torch.nan)]) for x in pieces)
        slots = [self.kv.slots(r + 1, torch.arange(a, b)) for r, a, b in parts]
        sizes = [b - a for _, a, b in parts]
        view: Any = SimpleNamespace(
            mode=mode,
            out_cache_loc=torch.cat([*slots, torch.zeros(pads, dtype=torch.int64)]),
            req_pool_indices=torch.tensor([r + 1 for r, _, _ in parts]),
            seq_lens_cpu=torch.tensor([b for _, _, b in parts]),
            extend_seq_lens=torch.tensor(sizes),
            logit_rows=None,
        )
        rows = sum(sizes)
        self.backend.plan(view, StepShape(mode, (rows,), len(parts), rows + pads, len(parts) + pads))
        out = torch.full_like(q, torch.nan)
        self.backend.forward(EagerStream(), self.layer, q, k, v, view, out)
        assert not out[rows:].any()
        return list(out[:rows].split(sizes))


@functools.cache
def truth(isa: str, dtype: torch.dtype, layer: AttentionLayer) -> list[torch.Tensor]:
    """Each request prefilled whole, alone, by one thread."""
    world = World(isa, dtype, layer)
    return [world.step([(r, 0, n)])[0] for r, n in enumerate(LENGTHS)]


@pytest.mark.parametrize("layer", MASKS)
@pytest.mark.parametrize(("isa", "dtype"), PATHS)
class TestBits:
    def test_beside_batch_mates_and_pads(self, isa: str, dtype: torch.dtype, layer: AttentionLayer) -> None:
        parts = [(2, 0, LENGTHS[2]), (0, 0, LENGTHS[0]), (1, 0, LENGTHS[1])]
        outs = World(isa, dtype, layer, threads=2).step(parts, pads=13)
        for (request, _, _), out in zip(parts, outs, strict=True):
            assert torch.equal(out, truth(isa, dtype, layer)[request])

    @pytest.mark.parametrize("chunk", [16, 37, 512, 1023])
    def test_in_chunks(self, isa: str, dtype: torch.dtype, layer: AttentionLayer, chunk: int) -> None:
        world, length = World(isa, dtype, layer), LENGTHS[1]
        outs = [
            world.step([(1, at, min(at + chunk, length))], pads=at % 3)[0] for at in range(0, length, chunk)
        ]
        assert torch.equal(torch.cat(outs), truth(isa, dtype, layer)[1])

    @pytest.mark.parametrize("threads", [1, 2])
    def test_decoded(self, isa: str, dtype: torch.dtype, layer: AttentionLayer, threads: int) -> None:
        """Alone (keys shared out between threads) and in a batch; positions at every kind of boundary."""
        world = World(isa, dtype, layer, threads)
        world.step([(0, 0, LENGTHS[0]), (2, 0, LENGTHS[2])])
        expected = truth(isa, dtype, layer)
        for at in (0, 1, 15, 16, 127, 128, 200, 299, 300, 511, 512, 513, 1024, 1399):
            alone = world.step([(0, at, at + 1)], StepMode.DECODE, pads=at % 2)
            assert torch.equal(alone[0], expected[0][at : at + 1])
            mate = min(at, LENGTHS[2] - 1)
            both = world.step([(2, mate, mate + 1), (0, at, at + 1)], StepMode.DECODE, pads=1)
            assert torch.equal(both[0], expected[2][mate : mate + 1])
            assert torch.equal(both[1], expected[0][at : at + 1])

    def test_on_other_physical_pages(self, isa: str, dtype: torch.dtype, layer: AttentionLayer) -> None:
        outs = [World(isa, dtype, layer, seed=seed).step([(0, 0, LENGTHS[0])])[0] for seed in (5, 6)]
        for out in outs:
            assert torch.equal(out, truth(isa, dtype, layer)[0])

    def test_with_pages_before_the_window_given_back(
        self, isa: str, dtype: torch.dtype, layer: AttentionLayer
    ) -> None:
        """Nothing that a row may not see is needed: those pages may be the trash page by then."""
        world = World(isa, dtype, layer)
        world.step([(0, 0, LENGTHS[0])])
        seen = {None: 0, 200: (1300 - 199) // PAGE, 300: 1200 // PAGE}
        keep = seen[layer.sliding_window or layer.attention_chunk_size]
        world.kv.page_table[1, :keep] = 0
        out = world.step([(0, 1300, 1400)])[0]
        assert torch.equal(out, truth(isa, dtype, layer)[0][1300:])


@given(cuts=st.lists(st.integers(1, LENGTHS[1] - 1), max_size=5), mates=st.booleans(), one=st.booleans())
@settings(deadline=None, max_examples=15)
def test_any_chunking_gives_the_bits_of_the_whole(cuts: list[int], mates: bool, one: bool) -> None:
    isa, layer = select_isa().name, AttentionLayer(0, 0.2)
    world = World(isa, torch.bfloat16, layer, threads=1 if one else 2)
    edges = [0, *sorted(set(cuts)), LENGTHS[1]]
    outs = []
    for a, b in itertools.pairwise(edges):
        beside = [(2, 0, LENGTHS[2])] if mates else []
        outs.append(world.step([*beside, (1, a, b)], StepMode.MIXED)[-1])
    assert torch.equal(torch.cat(outs), truth(isa, torch.bfloat16, layer)[1])
