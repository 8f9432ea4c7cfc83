"""Row-wise CPU kernels against their torch twins, on every instruction path.

Tolerances: fp32 within 2e-6 of the largest value (sums are added in another order); bf16 within one bf16 rounding
step of the twin (2**-7 relative), since the fp32 value before the rounding may fall on its other side.
"""

from __future__ import annotations

import functools

import pytest
import torch

from ostinato.ops.cpu.isa import AVX512_BF16, PORTABLE, select_isa
from ostinato.ops.cpu.launch import Runtime, open_runtime
from ostinato.ops.cpu.row_ops import RowOps
from ostinato.ops.reference import ReferenceOps

PATHS = [name for name in (AVX512_BF16, PORTABLE) if name == select_isa().name or name == PORTABLE]
DTYPES = (torch.bfloat16, torch.float32)
WIDTHS = (2, 16, 30, 64, 100, 256, 770)


@functools.cache
def runtime(isa: str) -> Runtime:
    return open_runtime(isa=isa)


@functools.cache
def ops(isa: str) -> RowOps:
    return RowOps(runtime(isa))


def values(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def assert_near(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype == want.dtype
    if got.dtype == torch.float32:
        torch.testing.assert_close(got, want, rtol=2e-6, atol=2e-6 * float(want.abs().max()))
    else:
        torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("isa", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_norms_match_the_reference(isa: str, dtype: torch.dtype, width: int) -> None:
    reference, fast = ReferenceOps(), ops(isa)
    x, residual = values(5, width, dtype=dtype), values(5, width, dtype=dtype, seed=1)
    weight, bias = values(width, dtype=dtype, seed=2), values(width, dtype=dtype, seed=3)
    for name, args in (
        ("rms_norm", (x, weight, 1e-6)),
        ("rms_norm", (x, None, 1e-5)),
        ("layer_norm", (x, weight, bias, 1e-5)),
        ("add_rms_norm", (x, residual, weight, 1e-6)),
        ("add_layer_norm", (x, residual, weight, bias, 1e-5)),
    ):
        results = []
        for library in (reference, fast):
            mine = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
            out = torch.full_like(x, 7)
            getattr(library, name)(*mine, out)
            results.append((out, mine[1]))
        assert_near(results[1][0], results[0][0])
        if name.startswith("add"):
            assert torch.equal(results[1][1], results[0][1])


@pytest.mark.parametrize("isa", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "rotary"), [(64, 64), (80, 32), (96, 96), (128, 128), (256, 64), (36, 36)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_matches_the_reference(
    isa: str, dtype: torch.dtype, dim: int, rotary: int, interleaved: bool
) -> None:
    """In place, on strided rows of a fused buffer, positions outside the table clamped; the same bits in fp32."""
    table = values(40, rotary, dtype=torch.float32, seed=5)
    positions = torch.tensor([0, 39, 7, -3, 1000, 21])
    results = []
    for library in (ReferenceOps(), ops(isa)):
        fused = values(6, 5 * dim, dtype=dtype)
        q, k = fused[:, : 3 * dim].view(6, 3, dim), fused[:, 3 * dim : 4 * dim].view(6, 1, dim)
        library.rope(q, k, positions, table, interleaved)
        results.append(fused)
    assert torch.equal(results[0], results[1])


@pytest.mark.parametrize("isa", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
def test_fused_norm_and_rope_give_the_bits_of_the_single_kernels(
    isa: str, dtype: torch.dtype, interleaved: bool
) -> None:
    fast, dim = ops(isa), 48
    table, positions = values(10, 32, dtype=torch.float32, seed=5), torch.tensor([3, 9, 0])
    weights = [values(dim, dtype=dtype, seed=s) for s in (6, 7)]
    q, k = values(3, 4, dim, dtype=dtype), values(3, 2, dim, dtype=dtype, seed=1)
    fused = (q.clone(), k.clone())
    for x, weight in zip((q, k), weights, strict=True):
        fast.rms_norm(x, weight, 1e-6, x)
    fast.rope(q, k, positions, table, interleaved)
    fast.norm_rope(*fused, *weights, 1e-6, positions, table, interleaved)
    assert torch.equal(fused[0], q)
    assert torch.equal(fused[1], k)


@pytest.mark.parametrize("isa", PATHS)
def test_a_row_has_the_same_bits_in_any_batch_and_with_any_threads(isa: str) -> None:
    x, weight = values(300, 200, dtype=torch.bfloat16), values(200, dtype=torch.bfloat16, seed=1)
    x[7] = float("nan")
    whole = torch.empty_like(x)
    ops(isa).rms_norm(x, weight, 1e-6, whole)
    for rows in (1, 2, 5, 31):
        part = torch.empty_like(x[:rows])
        ops(isa).rms_norm(x[20 : 20 + rows], weight, 1e-6, part)
        assert torch.equal(part, whole[20 : 20 + rows])
    assert whole[7].isnan().all()
    assert not whole[8].isnan().any()


def test_bound_launch_follows_its_tensors() -> None:
    fast = ops(PORTABLE)
    x, weight, out = values(2, 32, dtype=torch.float32), torch.ones(32), torch.empty(2, 32)
    launch = fast.rms_norm.bind(x, weight, 0.0, out)
    x.fill_(3.0)
    launch()
    assert torch.equal(out, torch.ones(2, 32))


@pytest.mark.parametrize("isa", PATHS)
@pytest.mark.parametrize("vocab", [1, 5, 16, 17, 1000])
def test_greedy_choice(isa: str, vocab: int) -> None:
    logits = values(9, vocab, dtype=torch.float32)
    out = torch.full((9,), -1)
    ops(isa).argmax(logits, out)
    assert torch.equal(out, logits.argmax(-1))


def test_greedy_choice_takes_the_lowest_of_equals_and_never_nan() -> None:
    nan, inf = float("nan"), float("inf")
    rows = torch.full((6, 40), -1.0)
    rows[0, [3, 19, 35]] = 2.0
    rows[1, [18, 35]] = 2.0
    rows[2, 0], rows[2, 30] = nan, 1.0
    rows[3] = nan
    rows[4] = -inf
    rows[5] = nan
    rows[5, 39] = -5.0
    out = torch.full((6,), -1)
    ops(PORTABLE).argmax(rows, out)
    assert out.tolist() == [3, 18, 30, 0, 0, 39]


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("rms_norm", (torch.zeros(2, 8).t(), torch.zeros(2), 1e-6, torch.zeros(8, 2))),
        ("rms_norm", (torch.zeros(2, 8), torch.zeros(8).bfloat16(), 1e-6, torch.zeros(2, 8))),
        ("rms_norm", (torch.zeros(2, 8), torch.zeros(8), 1e-6, torch.zeros(3, 8))),
        ("rms_norm", (torch.zeros(2, 8).half(), torch.zeros(8).half(), 1e-6, torch.zeros(2, 8).half())),
        ("add_rms_norm", (torch.zeros(2, 8), torch.zeros(3, 8), torch.zeros(8), 1e-6, torch.zeros(2, 8))),
        ("argmax", (torch.zeros(2, 8), torch.zeros(3, dtype=torch.int64))),
    ],
)
def test_tensors_that_do_not_fit_are_refused(name: str, args: tuple[object, ...]) -> None:
    with pytest.raises(ValueError, match=r"got|compute in"):
        getattr(ops(PORTABLE), name)(*args)
