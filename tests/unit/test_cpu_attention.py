"""Paged attention on CPU against its torch twin in fp32, over a grid of shapes, masks and instruction paths.

Tolerances, relative to the largest value: fp32 2e-6; bf16 1e-2 (the rounding of probabilities and of the output, two
steps of 2**-8 each at most).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ostinato.attention.backend import AttentionLayer
from ostinato.attention.cpu import CpuAttention
from ostinato.attention.reference import ReferenceAttention
from ostinato.errors import ConfigError
from ostinato.graphs.stream import EagerStream
from ostinato.kv.pool import KVLayout, KVPool
from ostinato.ops.cpu.isa import AVX512_BF16, PORTABLE, select_isa
from ostinato.ops.cpu.launch import Runtime, open_runtime
from ostinato.padding import StepMode, StepShape

LENGTHS = (1, 17, 150, 530)
PATHS = [
    pytest.param(AVX512_BF16, torch.bfloat16, id="bf16-dot"),
    pytest.param(PORTABLE, torch.bfloat16, id="bf16-portable"),
    pytest.param(PORTABLE, torch.float32, id="fp32"),
]
SHAPES = [(4, 4, 64), (6, 2, 80), (8, 2, 96), (7, 1, 128), (2, 1, 256), (2, 2, 6), (50, 1, 26)]
TOLERANCE = {torch.bfloat16: 1e-2, torch.float32: 2e-6}


@functools.cache
def runtime(isa: str) -> Runtime:
    if isa == AVX512_BF16 and select_isa().name != AVX512_BF16:
        pytest.skip("this CPU has no AVX512-BF16")
    return open_runtime(isa=isa)


@dataclass(frozen=True)
class Step:
    """Rows of requests 1.. at their ends: (request, first position, length after the step)."""

    parts: tuple[tuple[int, int, int], ...]
    mode: StepMode
    pads: int = 0
    wanted: tuple[int, ...] | None = None

    @property
    def rows(self) -> int:
        return sum(stop - start for _, start, stop in self.parts)


def pool(kv_heads: int, dim: int, dtype: torch.dtype, page_size: int = 16) -> KVPool:
    """Room for all requests on shuffled pages; what nobody wrote is NaN."""
    pages = -(-max(LENGTHS) // page_size)
    layout = KVLayout(1, kv_heads, dim, dtype, page_size)
    made = KVPool(
        layout,
        num_pages=pages * len(LENGTHS) + 1,
        max_requests=len(LENGTHS),
        max_pages_per_request=pages,
    )
    order = torch.randperm(pages * len(LENGTHS), generator=torch.Generator().manual_seed(1)) + 1
    for row in range(len(LENGTHS)):
        made.write_row(row + 1, 0, order[row * pages : (row + 1) * pages].tolist())
    for cache in (*made.k, *made.v):
        cache.fill_(torch.nan)
    return made


def sequences(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> list[list[torch.Tensor]]:
    """q, k and v of every request."""
    generator = torch.Generator().manual_seed(2)
    return [
        [torch.randn(n, h, dim, generator=generator).to(dtype) for h in (heads, kv_heads, kv_heads)]
        for n in LENGTHS
    ]


def run(backend: Any, kv: KVPool, data: list[list[torch.Tensor]], layer: AttentionLayer, step: Step) -> Any:
    """One step; its output, pads included. Pad rows are NaN and go to slot 0."""
    parts = [torch.cat([data[r - 1][i][start:stop] for r, start, stop in step.parts]) for i in range(3)]
    q, k, v = (torch.cat([x, x.new_full((step.pads, *x.shape[1:]), torch.nan)]) for x in parts)
    slots = [kv.slots(r, torch.arange(start, stop)) for r, start, stop in step.parts]
    requests = torch.tensor([r for r, _, _ in step.parts])
    wanted: dict[str, Any] = {"logit_rows": None, "num_logit_rows": None}
    if step.wanted is not None:
        wanted["logit_rows"] = torch.tensor([*step.wanted, *[0] * (len(q) - len(step.wanted))])
        wanted["num_logit_rows"] = torch.tensor([len(step.wanted)], dtype=torch.int32)
    view: Any = SimpleNamespace(
        mode=step.mode,
        out_cache_loc=torch.cat([*slots, torch.zeros(step.pads, dtype=torch.int64)]),
        req_pool_indices=requests,
        seq_lens_cpu=torch.tensor([stop for _, _, stop in step.parts]),
        extend_seq_lens=torch.tensor([stop - start for _, start, stop in step.parts]),
        **wanted,
    )
    shape = StepShape(
        step.mode, (step.rows,), len(step.parts), step.rows + step.pads, len(step.parts) + step.pads
    )
    backend.init_graph_state(len(LENGTHS), q.shape[0])
    backend.plan(view, shape)
    out = torch.full_like(q, torch.nan)
    backend.forward(EagerStream(), layer, q, k, v, view, out)
    return out


def whole(pads: int = 0) -> Step:
    return Step(tuple((r + 1, 0, n) for r, n in enumerate(LENGTHS)), StepMode.EXTEND, pads)


@functools.cache
def truth(shape: tuple[int, int, int], dtype: torch.dtype, layer: AttentionLayer) -> torch.Tensor:
    """The reference's output in fp32, for q, k and v of `dtype`."""
    kv = pool(shape[1], shape[2], torch.float32)
    wide = [[x.float() for x in row] for row in sequences(*shape, dtype)]
    want: torch.Tensor = run(ReferenceAttention(kv), kv, wide, layer, whole())
    return want


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("isa", "dtype"), PATHS)
@pytest.mark.parametrize(
    "mask", [{}, {"sliding_window": 50}, {"attention_chunk_size": 64}], ids=["causal", "window", "chunked"]
)
def test_prefill_and_decode_match_the_reference(
    isa: str, dtype: torch.dtype, shape: tuple[int, int, int], mask: dict[str, int]
) -> None:
    heads, kv_heads, dim = shape
    layer = AttentionLayer(0, dim**-0.5, **mask)
    data, want = sequences(heads, kv_heads, dim, dtype), truth(shape, dtype, layer)
    packed = pool(kv_heads, dim, dtype)
    backend = CpuAttention(packed, runtime(isa))
    got = run(backend, packed, data, layer, whole(pads=3))
    assert not got[sum(LENGTHS) :].any()
    got = got[: sum(LENGTHS)]
    assert float((got.float() - want).abs().max()) <= TOLERANCE[dtype] * float(want.abs().max())
    last = Step(tuple((r + 1, n - 1, n) for r, n in enumerate(LENGTHS)), StepMode.DECODE, pads=2)
    decoded = run(backend, packed, data, layer, last)
    assert not decoded[len(LENGTHS) :].any()
    assert torch.equal(decoded[: len(LENGTHS)], got[torch.tensor(LENGTHS).cumsum(0) - 1])


@pytest.mark.parametrize(
    ("last", "wanted"), [(1, None), (12, None), (30, None), (12, ()), (30, (1, 40))], ids=str
)
@pytest.mark.parametrize("shape", [(8, 2, 32), (2, 2, 64), (6, 6, 16)])
@pytest.mark.parametrize(("isa", "dtype"), PATHS)
def test_new_rows_are_written_once_and_before_they_are_read(
    isa: str, dtype: torch.dtype, shape: tuple[int, int, int], last: int, wanted: tuple[int, ...] | None
) -> None:
    """Few rows at a time, over the border of a chunk too: pages and rows are those of one whole step. Rows that the
    last layer leaves out are written too.
    """
    data, layer = sequences(*shape, dtype), AttentionLayer(0, shape[2] ** -0.5)
    kv, other = pool(*shape[1:], dtype), pool(*shape[1:], dtype)
    want = run(CpuAttention(kv, runtime(isa)), kv, data, layer, whole())
    starts = [max(0, n - last) for n in LENGTHS]
    before = tuple((r + 1, 0, start) for r, start in enumerate(starts) if start)
    after = tuple((r + 1, start, n) for r, (start, n) in enumerate(zip(starts, LENGTHS, strict=True)))
    backend = CpuAttention(other, runtime(isa))
    run(backend, other, data, layer, Step(before, StepMode.EXTEND))
    mode = StepMode.DECODE if last == 1 else StepMode.EXTEND
    got = run(backend, other, data, replace(layer, is_last=True), Step(after, mode, pads=2, wanted=wanted))[
        :-2
    ]
    ends = torch.tensor(LENGTHS).cumsum(0).tolist()
    rows = [range(end - n + start, end) for end, n, start in zip(ends, LENGTHS, starts, strict=True)]
    order = [row for part in rows for row in part]
    named = list(range(len(order)) if wanted is None else wanted)
    assert torch.equal(got[named], want[order][named])
    for one, same in zip((*kv.k, *kv.v), (*other.k, *other.v), strict=True):
        assert torch.equal(one[1:].isnan(), same[1:].isnan())
        assert torch.equal(one[1:].nan_to_num(), same[1:].nan_to_num())


@pytest.mark.parametrize(
    "wanted", [(), (0, 17, 167, 697), (697,), (100, 18, 99), (1, 0), range(698)], ids=len
)
@pytest.mark.parametrize("start", [0, 9])
@pytest.mark.parametrize(("isa", "dtype"), PATHS)
def test_the_last_layer_attends_from_each_first_wanted_row_on(
    isa: str, dtype: torch.dtype, start: int, wanted: Sequence[int]
) -> None:
    """The same bits and the same pages as for all rows, and nothing is done for rows that nobody wants."""
    data, kinds = sequences(4, 2, 32, dtype), (AttentionLayer(0, 0.2), AttentionLayer(0, 0.2, is_last=True))
    starts = [min(start, n - 1) for n in LENGTHS]
    rows = [n - s for n, s in zip(LENGTHS, starts, strict=True)]
    ends = torch.tensor(rows).cumsum(0)
    named = tuple(row for row in wanted if row < sum(rows))
    parts = tuple((r + 1, s, n) for r, (s, n) in enumerate(zip(starts, LENGTHS, strict=True)))
    step = Step(parts, StepMode.EXTEND, pads=3, wanted=named)
    results = []
    for layer in kinds:
        kv = pool(2, 32, dtype)
        backend = CpuAttention(kv, runtime(isa))
        run(backend, kv, data, AttentionLayer(0, 0.2), whole())  # what lies before `start`
        results.append((run(backend, kv, data, layer, step), kv.k[0].clone(), kv.v[0].clone()))
    (every, *pages), (some, *same_pages) = results
    for one, other in zip(pages, same_pages, strict=True):
        assert torch.equal(one.nan_to_num(), other.nan_to_num())
    goes_on = torch.zeros(len(some), dtype=torch.bool)
    for first, end in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True):
        mine = [row for row in named if first <= row < end]
        goes_on[min(mine, default=end) : end] = True
    goes_on[sum(rows) :] = True  # pads are zeros in both
    assert torch.equal(some[goes_on], every[goes_on])
    assert some[~goes_on].isnan().all()


@pytest.mark.parametrize(("isa", "dtype"), PATHS)
def test_pages_of_several_blocks_give_the_bits_of_small_pages(isa: str, dtype: torch.dtype) -> None:
    data, layer = sequences(4, 2, 32, dtype), AttentionLayer(0, 0.2)
    results = []
    for page_size in (16, 48):
        kv = pool(2, 32, dtype, page_size)
        results.append(run(CpuAttention(kv, runtime(isa)), kv, data, layer, whole()))
    assert torch.equal(*results)


@pytest.mark.parametrize(("isa", "dtype"), PATHS)
def test_a_later_value_that_is_not_finite_stays_out_of_earlier_rows(isa: str, dtype: torch.dtype) -> None:
    """Rows of one tile: a zero probability times infinity must not reach rows that may not see it."""
    layer = AttentionLayer(0, 0.2, sliding_window=40)
    data = sequences(4, 2, 32, dtype)
    kv = pool(2, 32, dtype)
    clean = run(CpuAttention(kv, runtime(isa)), kv, data, layer, whole())
    data[3][2][300, 1, 5] = torch.inf
    dirty = run(CpuAttention(kv, runtime(isa)), kv, data, layer, whole())
    first = sum(LENGTHS[:3])
    hit = torch.zeros(len(dirty), 4, 32, dtype=torch.bool)
    hit[first + 300 : first + 340, 2:, 5] = True
    assert torch.equal(dirty[~hit], clean[~hit])
    assert not dirty[hit].isfinite().any()


def test_far_apart_scores_neither_overflow_nor_vanish() -> None:
    data = sequences(4, 2, 32, torch.float32)
    for q, _, _ in data:
        q *= 1000
    layer = AttentionLayer(0, 1.0)
    results = []
    for make in (ReferenceAttention, functools.partial(CpuAttention, runtime=runtime(PORTABLE))):
        kv = pool(2, 32, torch.float32)
        results.append(run(make(kv), kv, data, layer, whole()))
    torch.testing.assert_close(results[1], results[0], rtol=1e-3, atol=2e-3)


def test_pools_and_tensors_that_do_not_fit_are_refused() -> None:
    small = KVPool(KVLayout(1, 1, 16, torch.float32, 8), num_pages=2, max_requests=1, max_pages_per_request=1)
    with pytest.raises(ConfigError, match="page size 8"):
        CpuAttention(small, runtime(PORTABLE))
    with pytest.raises(ConfigError, match="head dimension 7"):
        CpuAttention(pool(1, 7, torch.bfloat16), runtime(PORTABLE))
    with pytest.raises(ConfigError, match="float16"):
        CpuAttention(pool(1, 8, torch.float16), runtime(PORTABLE))
    kv = pool(1, 8, torch.float32)
    backend = CpuAttention(kv, runtime(PORTABLE))
    wrong = sequences(2, 1, 8, torch.bfloat16)
    with pytest.raises(ValueError, match="contiguous heads"):
        run(backend, kv, wrong, AttentionLayer(0, 1.0), whole())
    step = replace(whole(), parts=((1, 0, 1),))
    backend.init_graph_state(0, 0)
    with pytest.raises(ValueError, match="planned for 0"):
        backend.plan(
            SimpleNamespace(mode=StepMode.DECODE),  # type: ignore[arg-type]
            StepShape(step.mode, (1,), 1, 1, 1),
        )
