"""Packed matrix products against the same product in float64, over shapes with every kind of tail."""

from __future__ import annotations

import functools

import pytest
import torch

from ostinato.errors import ConfigError
from ostinato.ops.cpu.isa import AVX2, AVX512_BF16, PORTABLE, select_isa
from ostinato.ops.cpu.launch import Runtime, open_runtime
from ostinato.ops.cpu.linear import Linear, LinearWeights
from ostinato.ops.cpu.packing import Packer, Panels, empty_panels, pack_bias
from ostinato.ops.cpu.scratch import Scratch
from ostinato.ops.cpu.threads import open_pool, torch_openmp_library

ISAS = [AVX512_BF16, AVX2, PORTABLE]
# Sums of K products in fp32 differ from the exact ones by a few units in the last place of the largest partial sum;
# an output in bf16 is rounded once more, by at most 2**-8 of itself.
FP32_TOLERANCE = 2e-6
BF16_TOLERANCE = 2.0**-8 + FP32_TOLERANCE
SHAPES = [
    (1, 1, 1),
    (2, 31, 3),
    (3, 32, 64),
    (5, 33, 7),
    (12, 70, 129),
    (13, 64, 100),
    (37, 96, 257),
    (50, 256, 2048),
    (61, 200, 512),
    (96, 64, 140),
    (205, 40, 70),
]


@functools.cache
def runtime(isa: str) -> Runtime:
    try:
        return open_runtime(isa=isa)
    except ConfigError as error:
        pytest.skip(str(error))


def layer(
    isa: str, weight: torch.Tensor, bias: torch.Tensor | None = None, gated: bool = False
) -> LinearWeights:
    panels = Packer(runtime(isa)).pack(weight, gated=gated)
    return LinearWeights(panels, pack_bias(bias, panels), weight.dtype)


def draw(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def worst(out: torch.Tensor, exact: torch.Tensor, scale: torch.Tensor) -> float:
    """Largest error in units of `scale`, the size of the products that were summed."""
    return float(((out.double() - exact).abs() / scale).max())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "outputs", "columns"), SHAPES)
def test_products(isa: str, dtype: torch.dtype, rows: int, outputs: int, columns: int) -> None:
    weight, x = draw(outputs, columns, dtype=dtype, seed=1), draw(rows, columns, dtype=dtype, seed=2)
    bias = draw(outputs, dtype=dtype, seed=3)
    packed = layer(isa, weight, bias)
    exact = x.double() @ weight.double().T + bias.double()
    scale = x.double().abs() @ weight.double().abs().T + bias.double().abs()
    for out_dtype, tolerance in ((torch.float32, FP32_TOLERANCE), (torch.bfloat16, BF16_TOLERANCE)):
        wide = torch.full((rows, outputs + 3), 7.0, dtype=out_dtype)
        Linear(runtime(isa), Scratch())(x, packed, wide[:, :outputs])
        assert worst(wide[:, :outputs], exact, scale) < tolerance
        assert bool((wide[:, outputs:] == 7.0).all())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_strided_rows(isa: str, dtype: torch.dtype) -> None:
    weight, x = draw(45, 66, dtype=dtype, seed=1), draw(14, 80, dtype=dtype, seed=2)[:, 5:71]
    out = torch.empty(14, 45, dtype=dtype)
    Linear(runtime(isa), Scratch())(x, layer(isa, weight), out)
    exact = x.double() @ weight.double().T
    scale = x.double().abs() @ weight.double().abs().T
    assert worst(out, exact, scale) < BF16_TOLERANCE


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "half", "columns"), [(1, 1, 2), (4, 15, 9), (13, 48, 64), (7, 53, 130)])
def test_gated(isa: str, dtype: torch.dtype, rows: int, half: int, columns: int) -> None:
    weight, x = draw(2 * half, columns, dtype=dtype, seed=1), draw(rows, columns, dtype=dtype, seed=2)
    bias = draw(2 * half, dtype=dtype, seed=3)
    out = torch.empty(rows, half)
    Linear(runtime(isa), Scratch())(x, layer(isa, weight, bias, gated=True), out)
    gate, up = (x.double() @ weight.double().T + bias.double()).chunk(2, dim=1)
    exact = torch.nn.functional.silu(gate) * up
    # silu(g) * u moves by at most 1.1 |u| per unit of g and |g| per unit of u
    sizes = (x.double().abs() @ weight.double().abs().T + bias.double().abs()).chunk(2, dim=1)
    assert worst(out, exact, 1.1 * sizes[0] * up.abs() + sizes[1] * gate.abs() + exact.abs()) < FP32_TOLERANCE


def test_silu_at_the_ends() -> None:
    """Far gates neither overflow nor lose their sign; NaN stays NaN."""
    gates = torch.tensor([-1e30, -200.0, -90.0, -1.0, 0.0, 1.0, 90.0, 1e30, float("nan")]).unsqueeze(1)
    out = torch.empty(9, 1)
    weight = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    x = torch.cat([gates, torch.ones(9, 1)], dim=1)
    Linear(runtime(PORTABLE), Scratch())(x, layer(PORTABLE, weight, gated=True), out)
    assert out[:2, 0].tolist() == pytest.approx([0.0, 0.0], abs=1e-6)
    assert out[2:8, 0].tolist() == pytest.approx(
        [0.0, -0.26894143, 0.0, 0.7310586, 90.0, 1e30], rel=1e-6, abs=1e-30
    )
    assert out[8, 0].isnan()


@pytest.mark.parametrize("live", [-1, 0, 1, 5, 12, 29, 40])
def test_live_count(live: int) -> None:
    """Rows past the count come out zero and are not read; the others are as without a count."""
    weight, x = draw(70, 40, dtype=torch.float32, seed=1), draw(29, 40, dtype=torch.float32, seed=2)
    packed, kernel = layer(PORTABLE, weight), Linear(runtime(PORTABLE), Scratch())
    whole, out = torch.empty(29, 70), torch.full((29, 70), 7.0)
    kernel(x, packed, whole)
    n = min(max(live, 0), 29)
    x[n:] = torch.nan
    kernel(x, packed, out, torch.tensor([live], dtype=torch.int32))
    assert torch.equal(out[:n], whole[:n])
    assert bool((out[n:] == 0).all())


def test_replay_reads_the_tensors_again() -> None:
    weight, x, out = draw(40, 24, dtype=torch.float32, seed=1), torch.zeros(3, 24), torch.empty(3, 40)
    count = torch.tensor([3], dtype=torch.int32)
    launch = Linear(runtime(PORTABLE), Scratch()).bind(x, layer(PORTABLE, weight), out, count)
    launch()
    assert bool((out == 0).all())
    x.copy_(draw(3, 24, dtype=torch.float32, seed=2))
    count.fill_(2)
    launch()
    assert torch.allclose(out[:2], x[:2] @ weight.T, atol=1e-5)
    assert bool((out[2] == 0).all())


def test_no_rows() -> None:
    out = torch.empty(0, 40)
    Linear(runtime(PORTABLE), Scratch())(torch.empty(0, 24), layer(PORTABLE, torch.ones(40, 24)), out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("gated", [False, True])
def test_packing_by_shards(dtype: torch.dtype, gated: bool) -> None:
    """Rows written piecewise, at any boundary, give the panels of the whole; the layout is as documented."""
    packer = Packer(runtime(PORTABLE))
    weight = draw(106, 75, dtype=dtype, seed=1)
    whole = packer.pack(weight, gated=gated)
    pieces = empty_panels(1, 106, 75, dtype, gated=gated)
    for start, stop in ((0, 5), (5, 50), (50, 90), (90, 106)):
        packer.write_rows(pieces, 0, weight[start:stop], start)
    assert torch.equal(whole.words, pieces.words)
    assert torch.equal(unpacked(whole), weight)


def unpacked(panels: Panels) -> torch.Tensor:
    """[rows, columns] of the first matrix, read back from the documented layout; padding must be zero."""
    values = (
        panels.words[0].view(panels.dtype).unflatten(-1, (32, -1))
    )  # [panels, words, 32, values per word]
    flat = values.permute(0, 2, 1, 3).flatten(2)  # [panels, 32, padded columns]
    assert not flat[:, :, panels.columns :].any()
    if panels.gated:
        parts = [flat[:, half : half + 16].flatten(0, 1) for half in (0, 16)]
    else:
        parts = [flat.flatten(0, 1)]
    each = panels.rows // len(parts)
    assert not any(part[each:].any() for part in parts)
    return torch.cat([part[:each, : panels.columns] for part in parts])


def test_what_does_not_fit_is_refused() -> None:
    packer, kernel = Packer(runtime(PORTABLE)), Linear(runtime(PORTABLE), Scratch())
    with pytest.raises(ValueError, match="float16"):
        empty_panels(1, 8, 8, torch.float16)
    with pytest.raises(ValueError, match="even number of rows"):
        empty_panels(1, 7, 8, torch.float32, gated=True)
    with pytest.raises(ValueError, match="do not fit"):
        packer.write_rows(empty_panels(1, 8, 8, torch.float32), 0, torch.ones(4, 8), 5)
    packed = layer(PORTABLE, torch.ones(8, 4))
    for x, out in (
        (torch.ones(2, 5), torch.ones(2, 8)),
        (torch.ones(2, 4).bfloat16(), torch.ones(2, 8)),
        (torch.ones(4, 2).T, torch.ones(2, 8)),
        (torch.ones(2, 4), torch.ones(3, 8)),
        (torch.ones(2, 4), torch.ones(2, 8, dtype=torch.float16)),
    ):
        with pytest.raises(ValueError, match=r"must be|does not fit"):
            kernel(x, packed, out)
    with pytest.raises(ValueError, match="int32"):
        kernel(torch.ones(2, 4), packed, torch.ones(2, 8), torch.tensor([1]))
    with pytest.raises(ValueError, match="bias"):
        pack_bias(torch.ones(3), packed.panels)


def test_instruction_sets() -> None:
    full = dict.fromkeys(("avx512f", "avx512bw", "avx512vl", "avx512bf16", "avx512vnni"), True)
    assert select_isa(features=full).name == AVX512_BF16
    assert select_isa(features={**full, "avx512bf16": False}).name == PORTABLE
    assert select_isa(features={}).tile_rows < select_isa(features=full).tile_rows
    assert select_isa(features={"avx2": True, "fma": True}).name == AVX2
    assert select_isa(features={"avx2": True}).name == PORTABLE
    assert select_isa(features={**full, "avx2": True, "fma": True, "avx512bf16": False}).name == PORTABLE
    with pytest.raises(ConfigError, match="needs fma, which this CPU lacks; use 'portable'"):
        select_isa(AVX2, {"avx2": True})
    with pytest.raises(ConfigError, match="avx512bf16"):
        select_isa(AVX512_BF16, {**full, "avx512bf16": False})
    with pytest.raises(ConfigError, match="unknown"):
        select_isa("sse")


def test_the_pool_is_torchs() -> None:
    """Parallel regions enter the OpenMP runtime that torch uses; the size must be positive."""
    pool = open_pool()
    assert pool.num_threads == torch.get_num_threads()
    assert pool.library == (torch_openmp_library() or "none")
    with pytest.raises(ConfigError, match="at least 1"):
        open_pool(0)
