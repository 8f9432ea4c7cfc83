"""Paged attention in Triton against its torch twin; in Triton's interpreter where there is no GPU.

Tolerances, relative to the largest value: fp32 3e-6 (another order of summation); fp16 2e-3 (probabilities and the
output are rounded, a few steps of 2**-11).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ostinato.attention.backend import AttentionLayer
from ostinato.attention.reference import ReferenceAttention
from ostinato.graphs.stream import EagerStream
from ostinato.kv.pool import KVLayout, KVPool
from ostinato.padding import StepMode, StepShape

pytest.importorskip("triton")
from ostinato.attention.triton import TritonAttention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS = (1, 9, 139)
CHUNK = 128  # so that the longest request has two
CASES: list[tuple[tuple[int, int, int], dict[str, int]]] = [
    ((2, 2, 64), {}),
    ((2, 1, 80), {}),
    ((4, 2, 96), {"sliding_window": 50}),
    ((3, 1, 128), {}),
    ((2, 1, 256), {"attention_chunk_size": 100}),
]
Parts = list[tuple[int, int, int]]
"""(request, first position, length after the step) of the requests of a step."""


def pool(kv_heads: int, dim: int, dtype: torch.dtype, device: str = DEVICE, page_size: int = 16) -> KVPool:
    """Room for all requests on shuffled pages; what nobody wrote is NaN."""
    pages = -(-max(LENGTHS) // page_size)
    made = KVPool(
        KVLayout(1, kv_heads, dim, dtype, page_size),
        num_pages=pages * len(LENGTHS) + 1,
        max_requests=len(LENGTHS),
        max_pages_per_request=pages,
        device=device,
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


def run(
    backend: Any,
    kv: KVPool,
    data: list[list[torch.Tensor]],
    layer: AttentionLayer,
    mode: StepMode,
    parts: Parts,
    pads: int = 0,
) -> torch.Tensor:
    """One step; its output on the host, pads included. Pad rows are NaN and go to slot 0."""
    device = kv.k[0].device
    rows = [torch.cat([data[r - 1][i][start:stop] for r, start, stop in parts]) for i in range(3)]
    q, k, v = (torch.cat([x, x.new_full((pads, *x.shape[1:]), torch.nan)]).to(device) for x in rows)
    slots = [kv.slots(r, torch.arange(start, stop, device=device)) for r, start, stop in parts]
    lens = torch.tensor([stop for _, _, stop in parts])
    view: Any = SimpleNamespace(
        mode=mode,
        out_cache_loc=torch.cat([*slots, torch.zeros(pads, dtype=torch.int64, device=device)]),
        req_pool_indices=torch.tensor([r for r, _, _ in parts] + [0] * pads, device=device),
        seq_lens=torch.cat([lens, torch.ones(pads, dtype=torch.int64)]).to(device),
        seq_lens_cpu=lens,
        extend_seq_lens=torch.tensor([stop - start for _, start, stop in parts] + [0] * pads, device=device),
    )
    count = len(q) - pads
    shape = StepShape(mode, (count,), len(parts), len(q), len(parts) + pads)
    backend.init_graph_state(len(LENGTHS) + 2, len(q))
    backend.plan(view, shape)
    out = torch.full_like(q, torch.nan)
    backend.forward(EagerStream(), layer, q, k, v, view, out)
    return out.cpu()


WHOLE: Parts = [(r + 1, 0, n) for r, n in enumerate(LENGTHS)]
LAST: Parts = [(r + 1, n - 1, n) for r, n in enumerate(LENGTHS)]


@pytest.mark.parametrize(("shape", "mask"), CASES)
def test_prefill_and_decode_match_the_reference(shape: tuple[int, int, int], mask: dict[str, int]) -> None:
    """Pads come out zero and write no page; a decoded row has the bits of the same row prefilled."""
    _, kv_heads, dim = shape
    layer = AttentionLayer(0, dim**-0.5, **mask)
    data, kv = sequences(*shape, torch.float32), pool(kv_heads, dim, torch.float32)
    plain = pool(kv_heads, dim, torch.float32, "cpu")
    want = run(ReferenceAttention(plain), plain, data, layer, StepMode.EXTEND, WHOLE)
    backend = TritonAttention(kv, chunk=CHUNK)
    got = run(backend, kv, data, layer, StepMode.EXTEND, WHOLE, pads=2)
    assert not got[sum(LENGTHS) :].any()
    got = got[: sum(LENGTHS)]
    assert float((got - want).abs().max()) <= 3e-6 * float(want.abs().max())
    assert torch.equal(kv.k[0].cpu().nan_to_num(7.0), plain.k[0].nan_to_num(7.0))
    assert torch.equal(kv.v[0].cpu().nan_to_num(7.0), plain.v[0].nan_to_num(7.0))
    decoded = run(backend, kv, data, layer, StepMode.DECODE, LAST, pads=2)
    assert not decoded[len(LENGTHS) :].any()
    assert torch.equal(decoded[: len(LENGTHS)], got[torch.tensor(LENGTHS).cumsum(0) - 1])


def test_half_precision() -> None:
    shape, layer = (2, 1, 64), AttentionLayer(0, 0.125)
    data = sequences(*shape, torch.float16)
    kv, plain = pool(1, 64, torch.float16), pool(1, 64, torch.float32, "cpu")
    wide = [[x.float() for x in row] for row in data]
    want = run(ReferenceAttention(plain), plain, wide, layer, StepMode.EXTEND, WHOLE)
    got = run(TritonAttention(kv), kv, data, layer, StepMode.EXTEND, WHOLE)
    assert float((got.float() - want).abs().max()) <= 2e-3 * float(want.abs().max())


def test_a_row_has_the_same_bits_in_chunks_beside_others_and_on_other_pages() -> None:
    """Prefilled whole or in chunks after a cached prefix, in a mixed step, with pages of another size."""
    shape, layer = (1, 1, 16), AttentionLayer(0, 0.25, sliding_window=70)
    data = sequences(*shape, torch.float32)
    kv = pool(1, 16, torch.float32)
    whole = run(TritonAttention(kv, chunk=CHUNK), kv, data, layer, StepMode.EXTEND, WHOLE)[10:]
    other = pool(1, 16, torch.float32, page_size=32)
    backend = TritonAttention(other, chunk=CHUNK)
    pieces = []
    for parts in ([(3, 0, 37)], [(1, 0, 1), (3, 37, 130)], [(3, 130, 131), (2, 0, 9)], [(3, 131, 139)]):
        out = run(backend, other, data, layer, StepMode.EXTEND, parts, pads=1)
        start = 0
        for request, first, last in parts:
            if request == 3:
                pieces.append(out[start : start + last - first])
            start += last - first
    assert torch.equal(torch.cat(pieces), whole)


def test_far_apart_scores_neither_overflow_nor_vanish() -> None:
    data = sequences(2, 1, 32, torch.float32)
    for q, _, _ in data:
        q *= 1000
    kv, plain = pool(1, 32, torch.float32), pool(1, 32, torch.float32, "cpu")
    layer = AttentionLayer(0, 1.0)
    want = run(ReferenceAttention(plain), plain, data, layer, StepMode.EXTEND, WHOLE)
    got = run(TritonAttention(kv, chunk=CHUNK), kv, data, layer, StepMode.EXTEND, WHOLE)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=2e-3)


def test_the_plan_of_a_step_is_the_next_ones_when_a_key_is_added_to_each() -> None:
    data, layer = sequences(11, 1, 32, torch.float32), AttentionLayer(0, 0.125)
    outs = []
    for advanced in (False, True):
        kv = pool(1, 32, torch.float32)
        backend = TritonAttention(kv, chunk=CHUNK)
        for cache, part in ((kv.k[0], data[2][1]), (kv.v[0], data[2][2])):
            cache[kv.slots(3, torch.arange(127, device=DEVICE))] = part[:127].to(DEVICE)
        run(backend, kv, data, layer, StepMode.DECODE, [(3, 127, 128)])
        if not advanced:
            outs.append(run(backend, kv, data, layer, StepMode.DECODE, [(3, 128, 129)]))
            continue
        backend.planned_lens[:1] += 1
        q, k, v = (x[128:129].to(DEVICE) for x in data[2])
        view: Any = SimpleNamespace(
            mode=StepMode.DECODE, out_cache_loc=kv.slots(3, torch.tensor([128], device=DEVICE))
        )
        out = torch.empty_like(q)
        backend.forward(EagerStream(), layer, q, k, v, view, out)
        outs.append(out.cpu())
    assert torch.equal(*outs)


def test_steps_and_tensors_that_do_not_fit_are_refused() -> None:
    kv = pool(1, 16, torch.float32)
    backend = TritonAttention(kv)
    with pytest.raises(ValueError, match="contiguous values"):
        run(backend, kv, sequences(2, 1, 16, torch.float16), AttentionLayer(0, 1.0), StepMode.EXTEND, WHOLE)
    backend.init_graph_state(0, 0)
    view: Any = SimpleNamespace(mode=StepMode.DECODE)
    with pytest.raises(ValueError, match="planned for 0"):
        backend.plan(view, StepShape(StepMode.DECODE, (1,), 1, 1, 1))
