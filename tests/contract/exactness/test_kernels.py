"""The exactness contract of matrix products and experts: a row's bits do not depend on what is played around it.

Rows of a product with many rows are compared, bit for bit, with the same rows alone, in every smaller product,
elsewhere in a batch, beside other rows, and on one or two threads; on every instruction path of this machine.
"""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

from ostinato.errors import ConfigError
from ostinato.ops.cpu.experts import ExpertWeights, MoeExperts
from ostinato.ops.cpu.isa import AVX2, AVX512_BF16, PORTABLE
from ostinato.ops.cpu.launch import Runtime, open_runtime
from ostinato.ops.cpu.linear import Linear, LinearWeights
from ostinato.ops.cpu.packing import Packer, pack_bias
from ostinato.ops.cpu.scratch import Scratch

ISAS = [AVX512_BF16, AVX2, PORTABLE]
DTYPES = [torch.bfloat16, torch.float32]
ROWS = 37
EXPERTS, HIDDEN, INNER, SLOTS = 5, 66, 49, 3


@functools.cache
def runtime(isa: str, threads: int = 2) -> Runtime:
    """A runtime whose teams have so many threads, whatever torch uses."""
    try:
        made = open_runtime(isa=isa)
    except ConfigError as error:
        pytest.skip(str(error))
    return dataclasses.replace(made, pool=dataclasses.replace(made.pool, num_threads=threads))


@functools.cache
def product(isa: str, dtype: torch.dtype, gated: bool) -> tuple[torch.Tensor, LinearWeights, torch.Tensor]:
    """Rows, a layer with tails in every direction, and all outputs at once on two threads."""
    draw = torch.Generator().manual_seed(5)
    weight = torch.randn(150, 533, generator=draw).to(dtype)
    x = torch.randn(ROWS, 533, generator=draw).to(dtype)
    panels = Packer(runtime(isa)).pack(weight, gated=gated)
    layer = LinearWeights(panels, pack_bias(torch.randn(150, generator=draw), panels), dtype)
    return x, layer, multiply(isa, x, layer)


def multiply(isa: str, x: torch.Tensor, layer: LinearWeights, threads: int = 2) -> torch.Tensor:
    out = torch.empty(len(x), layer.out_features)
    Linear(runtime(isa, threads), Scratch()).bind(x, layer, out)()
    return out


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [False, True])
def test_rows_in_every_smaller_product(isa: str, dtype: torch.dtype, gated: bool) -> None:
    x, layer, whole = product(isa, dtype, gated)
    for rows in range(1, ROWS + 1):
        assert torch.equal(multiply(isa, x[:rows], layer), whole[:rows]), rows


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_at_other_places_and_beside_others(isa: str, dtype: torch.dtype) -> None:
    x, layer, whole = product(isa, dtype, False)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))
    assert torch.equal(multiply(isa, x[order], layer), whole[order])
    beside = torch.full_like(x, torch.nan)
    beside[11] = x[11]
    assert torch.equal(multiply(isa, beside, layer)[11], whole[11])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_and_strides(isa: str, dtype: torch.dtype) -> None:
    """One thread or two; rows packed tightly or 4096 bytes apart, where they are copied before the product."""
    x, layer, whole = product(isa, dtype, False)
    assert torch.equal(multiply(isa, x, layer, threads=1), whole)
    apart = torch.zeros(ROWS, 4096 // dtype.itemsize, dtype=dtype)[:, : x.shape[1]]
    apart.copy_(x)
    assert torch.equal(multiply(isa, apart, layer), whole)


@functools.cache
def experts(isa: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, ExpertWeights]:
    draw = torch.Generator().manual_seed(7)
    packer = Packer(runtime(isa))
    gate_up = torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=draw) * HIDDEN**-0.5
    down = torch.randn(EXPERTS, HIDDEN, INNER, generator=draw)
    layer = ExpertWeights(packer.pack(gate_up.to(dtype), gated=True), packer.pack(down.to(dtype)))
    ids = torch.rand(ROWS, EXPERTS, generator=draw).topk(SLOTS).indices.int()
    ids[torch.rand(ROWS, SLOTS, generator=draw) < 0.2] = -1
    x = torch.randn(ROWS, HIDDEN, generator=draw).to(dtype)
    return x, torch.rand(ROWS, SLOTS, generator=draw), ids, layer


def run(isa: str, dtype: torch.dtype, rows: torch.Tensor, on_input: bool, threads: int = 2) -> torch.Tensor:
    """Outputs of the rows with these numbers, in this order."""
    x, weights, ids, layer = experts(isa, dtype)
    out = torch.empty(len(rows), HIDDEN)
    kernel = MoeExperts(runtime(isa, threads), Scratch())
    kernel.bind(x[rows], weights[rows], ids[rows], layer, on_input, out)()
    return out


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("on_input", [False, True])
def test_experts_in_every_batch(isa: str, dtype: torch.dtype, on_input: bool) -> None:
    everyone = torch.arange(ROWS)
    whole = run(isa, dtype, everyone, on_input)
    assert torch.equal(run(isa, dtype, everyone, on_input, threads=1), whole)
    for n in (1, 2, 3, 5, 8, 13, 21, 34):
        assert torch.equal(run(isa, dtype, everyone[:n], on_input), whole[:n]), n
    for row in range(0, ROWS, 5):
        assert torch.equal(run(isa, dtype, everyone[row : row + 1], on_input)[0], whole[row]), row
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(2))
    assert torch.equal(run(isa, dtype, order, on_input), whole[order])
    crowd = torch.cat([torch.full((60,), 3), torch.tensor([8])])  # one expert far over a tile
    assert torch.equal(run(isa, dtype, crowd, on_input)[[0, -1]], whole[[3, 8]])


def test_paths_differ_only_by_rounding() -> None:
    """The two bf16 paths sum in the same order, so they agree far within a bf16 step."""
    x, _, whole = product(PORTABLE, torch.bfloat16, False)
    other = product(AVX512_BF16, torch.bfloat16, False)[2]
    assert float((whole - other).abs().max()) < 2e-6 * x.shape[1] ** 0.5 * float(whole.abs().max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [False, True])
def test_narrow_registers_change_no_bit(dtype: torch.dtype, gated: bool) -> None:
    """Tiles for registers of 256 bits give the bits of the portable ones."""
    assert torch.equal(product(AVX2, dtype, gated)[2], product(PORTABLE, dtype, gated)[2])
