"""Row-wise Triton kernels and dense products against their torch twins; in Triton's interpreter where there is no GPU.

Tolerances: fp32 within 2e-6 of the largest value (sums run in another order), fp16 within a rounding step or two.
"""

from __future__ import annotations

import pytest
import torch

from ostinato.ops.opset import OpSet
from ostinato.ops.reference import ReferenceOps

pytest.importorskip("triton")
from ostinato.ops.cuda import gemm
from ostinato.ops.cuda.opset import TritonOps

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF, FULL = torch.float16, torch.float32


@pytest.fixture(scope="module")
def ops() -> TritonOps:
    return TritonOps(DEVICE)


def draw(*shape: int, dtype: torch.dtype = FULL, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def live(rows: int) -> torch.Tensor:
    return torch.tensor([rows], dtype=torch.int32, device=DEVICE)


def near(got: torch.Tensor, want: torch.Tensor) -> None:
    rtol, atol = (2e-6, 2e-6 * float(want.abs().max() + 1)) if got.dtype == FULL else (2**-9, 2**-9)
    torch.testing.assert_close(got, want, rtol=rtol, atol=atol)


@pytest.mark.parametrize(("width", "dtype"), [(37, FULL), (64, HALF), (300, FULL)])
def test_norms(ops: TritonOps, width: int, dtype: torch.dtype) -> None:
    """Rows past the live count are never read: they hold NaN, and come out zero."""
    wide = draw(5, width + 3, dtype=dtype)
    x, residual = wide[:, :width], draw(5, width, dtype=dtype, seed=1)
    weight, bias = draw(width, dtype=dtype, seed=2), draw(width, dtype=dtype, seed=3)
    x[4] = torch.nan
    for name, args in (
        ("rms_norm", (x, weight, 1e-6)),
        ("rms_norm", (x, None, 1e-5)),
        ("layer_norm", (x, weight, bias, 1e-5)),
        ("add_rms_norm", (x, residual, weight, 1e-6)),
        ("add_layer_norm", (x, residual, weight, bias, 1e-5)),
    ):
        results = []
        for library in (ReferenceOps(), ops):
            mine = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
            mine[0] = x  # strided
            out = torch.full((5, width), 7.0, dtype=dtype, device=DEVICE)
            getattr(library, name)(*mine, out, live(4))
            assert not out[4].any()
            results.append((out, mine[1]))
        near(results[1][0], results[0][0])
        if name.startswith("add"):
            assert torch.equal(results[1][1], results[0][1])


def test_head_norms_in_place(ops: TritonOps) -> None:
    fused = draw(3, 200)
    outs = []
    for library in (ReferenceOps(), ops):
        mine = fused.clone()
        heads = mine[:, :160].view(3, 2, 80)
        library.rms_norm(heads, draw(80, seed=1), 1e-6, heads)
        outs.append(mine)
    near(outs[1], outs[0])
    assert torch.equal(outs[1][:, 160:], fused[:, 160:])


@pytest.mark.parametrize(
    ("dim", "rotary", "interleaved", "dtype"),
    [
        (64, 64, False, FULL),
        (80, 32, True, FULL),
        (96, 96, False, HALF),
        (128, 128, True, FULL),
        (256, 64, False, FULL),
    ],
)
def test_rope_with_and_without_norm(
    ops: TritonOps, dim: int, rotary: int, interleaved: bool, dtype: torch.dtype
) -> None:
    """In place, on strided rows of a fused buffer; positions outside the table are clamped."""
    table, fused = draw(40, rotary, seed=5), draw(4, 5 * dim, dtype=dtype, seed=6)
    positions = torch.tensor([0, 39, -7, 1 << 40], device=DEVICE)
    weights = draw(dim, dtype=dtype, seed=7), draw(dim, dtype=dtype, seed=8)
    for norm in (False, True):
        outs = []
        for library in (ReferenceOps(), ops):
            mine = fused.clone()
            q, k = mine[:, : 3 * dim].view(4, 3, dim), mine[:, 3 * dim : 4 * dim].view(4, 1, dim)
            if norm:
                library.norm_rope(q, k, *weights, 1e-6, positions, table, interleaved, live(3))
            else:
                library.rope(q, k, positions, table, interleaved, live(3))
            outs.append(mine)
        near(outs[1], outs[0])
        assert torch.equal(outs[1][3], fused[3])
        assert torch.equal(outs[1][:, 4 * dim :], fused[:, 4 * dim :])


@pytest.mark.parametrize(("width", "depth", "dtype"), [(50, 40, FULL), (130, 70, FULL), (66, 48, HALF)])
def test_dense_products(ops: TritonOps, width: int, depth: int, dtype: torch.dtype) -> None:
    reference: OpSet = ReferenceOps()
    x, weight, bias = (
        draw(9, depth, dtype=dtype),
        draw(width, depth, dtype=dtype, seed=1) * 0.2,
        draw(width, dtype=dtype, seed=2),
    )
    x[7:] = torch.nan
    for library in (ops, TritonOps(DEVICE, tiles=gemm.GPU_TILES), TritonOps(DEVICE, exact=False)):
        for gated in (False, True):
            for out_dtype in (dtype, FULL):
                outs = []
                for some in (reference, library):
                    pack = some.pack_gated if gated else some.pack_linear
                    packed = pack(weight, bias) if gated else pack(weight, bias, out_dtype=out_dtype)
                    assert (packed.in_features, packed.out_features) == (depth, width // (1 + gated))
                    outs.append(torch.full((9, packed.out_features), 5.0, dtype=out_dtype, device=DEVICE))
                    some.linear(x, packed, outs[-1], live(7))
                assert not outs[1][7:].any()
                tolerance = 4e-6 if dtype == FULL else 8e-3
                torch.testing.assert_close(outs[1], outs[0], rtol=tolerance, atol=tolerance)


def test_a_row_of_a_product_has_the_same_bits_in_any_place_beside_any_others(ops: TritonOps) -> None:
    """The tile has one size, whatever the number of rows is, and K is summed in sequence."""
    packed = ops.pack_linear(draw(40, 150, seed=1))
    row = draw(1, 150)
    alone = torch.empty(1, 40, device=DEVICE)
    ops.linear(row, packed, alone)
    m = gemm.default_tiles().dense.m
    for rows, place in ((2, 1), (m, m - 1), (m + 5, m + 2)):
        x, out = draw(rows, 150, seed=rows), torch.empty(rows, 40, device=DEVICE)
        x[place] = row
        ops.linear(x, packed, out)
        assert torch.equal(out[place], alone[0])


def test_elementwise_and_rows_by_index(ops: TritonOps) -> None:
    x, y, gate = draw(3, 37), draw(3, 37, seed=1), draw(3, 1, seed=2) * 4
    for name, args in (("add", (x, y)), ("sigmoid_gated_add", (x, gate, y))):
        outs = [torch.empty_like(x) for _ in range(2)]
        for library, out in zip((ReferenceOps(), ops), outs, strict=True):
            getattr(library, name)(*args, out)
        near(outs[1], outs[0])
    table, ids = draw(11, 7), torch.tensor([3, 0, 10, -5, 99], device=DEVICE)
    out = torch.empty(5, 7, device=DEVICE)
    ops.embedding(ids, table, out)
    assert torch.equal(out, table[ids.clamp(0, 10)])
    ops.embedding(ids, ops.pack_linear(table), out.zero_())
    assert torch.equal(out, table[ids.clamp(0, 10)])
    wide = torch.zeros(2, 20, device=DEVICE)
    ops.gather_rows(table, torch.tensor([4, 1], device=DEVICE), wide[:, 3:10])
    assert torch.equal(wide[:, 3:10], table[[4, 1]])
    assert not wide[:, 10:].any()


def test_advance_makes_the_next_inputs_of_the_live_rows(ops: TritonOps) -> None:
    table = torch.arange(21, dtype=torch.int32, device=DEVICE).view(3, 7)
    start = {
        "input_ids": torch.tensor([1, 2, 3, 4]),
        "positions": torch.tensor([0, 15, 31, 9]),
        "out_cache_loc": torch.tensor([7, 7, 7, 7]),
    }
    requests = torch.tensor([1, 2, 1, 0], device=DEVICE)
    found = []
    for library in (ReferenceOps(), ops):
        mine = [t.clone().to(DEVICE) for t in start.values()]
        lengths = [torch.arange(4, device=DEVICE), torch.arange(4, 8, device=DEVICE)]
        choice = torch.tensor([9, 8, 7, 6], device=DEVICE)
        library.advance(choice, *mine, requests, table, 16, lengths, live(3))
        found.append([t.tolist() for t in (*mine, *lengths)])
    assert found[0] == found[1]
    assert found[1][0] == [9, 8, 7, 4]
