"""Dense products: x [T, K] by weight [N, K], with bias or the gate of a feed-forward behind it.

The exact mode multiplies in tiles of one fixed size, K in sequence, whatever the number of rows is: a row's bits are
the same beside any others. The other mode asks cuBLAS, which may take another algorithm, and so another order of
summation, for another number of rows. Knows nothing of layers. Invariant (exact mode): out[t] is a function of x[t]
and the weight; rows at or past the live count are never read and come out zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ostinato.ops.cuda.elementwise import mask_rows
from ostinato.ops.cuda.launching import cdiv, count_argument, interpreted, run
from ostinato.ops.exact import silu
from ostinato.ops.opset import PackedLinear


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows, columns and depth of the one tile that all products of a kind are made of."""

    m: int
    n: int
    k: int


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tiles of an op set: of dense products, and of those of experts."""

    dense: Tile
    experts: Tile


GPU_TILES = Tiles(Tile(64, 64, 64), Tile(32, 64, 64))
# The interpreter's products are numpy's, whose BLAS treats rows past the eighth of a block in another order.
INTERPRETER_TILES = Tiles(Tile(8, 64, 64), Tile(8, 64, 64))


def default_tiles() -> Tiles:
    """The tiles of this process's kernels."""
    return INTERPRETER_TILES if interpreted() else GPU_TILES


@dataclass(frozen=True, slots=True, eq=False)
class TritonLinear:
    """Weight [N, K] and bias [N] as they are in the checkpoint, on the device; gated: gate rows, then up rows."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    gated: bool = False

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        return self.weight.shape[0] // 2 if self.gated else self.weight.shape[0]


@triton.jit
def product(
    x: tl.tensor,
    real: tl.tensor,
    weight: tl.tensor,
    columns: tl.tensor,
    width: tl.tensor,
    depth: tl.tensor,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
) -> tl.tensor:
    """fp32 [BM, BN]: rows at pointers x [BM, 1] (zero unless `real`) by rows `columns` of weight, K in sequence."""
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, depth, BK):
        k = start + tl.arange(0, BK)
        left = tl.load(x + k[None, :], mask=real & (k[None, :] < depth), other=0.0)
        inside = (columns[:, None] < width) & (k[None, :] < depth)
        right = tl.load(weight + columns[:, None].to(tl.int64) * depth + k[None, :], mask=inside, other=0.0)
        total = tl.dot(left.to(right.dtype), tl.trans(right), total, input_precision=PRECISION)
    return total


@triton.jit
def silu_times(gate: tl.tensor, up: tl.tensor) -> tl.tensor:
    """silu(gate) * up, fp32."""
    return tl.div_rn(gate, 1.0 + tl.exp(-gate)) * up


@triton.jit
def linear_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    live: tl.tensor,
    num_rows: tl.tensor,
    width: tl.tensor,
    depth: tl.tensor,
    x_row: tl.tensor,
    out_row: tl.tensor,
    HAS_LIVE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
) -> None:
    first = tl.program_id(0) * BM
    row = (first + tl.arange(0, BM))[:, None]
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    wanted = num_rows
    if HAS_LIVE:
        wanted = tl.minimum(tl.load(live), num_rows)
    value = tl.zeros((BM, BN), tl.float32)
    if first < wanted:
        rows = x + row.to(tl.int64) * x_row
        value = product(rows, row < wanted, weight, columns, width, depth, PRECISION, BM, BN, BK)
        if HAS_BIAS:
            value += tl.load(bias + columns, mask=columns < width, other=0.0).to(tl.float32)[None, :]
        if GATED:
            upper = weight + width.to(tl.int64) * depth
            up = product(rows, row < wanted, upper, columns, width, depth, PRECISION, BM, BN, BK)
            if HAS_BIAS:
                up += tl.load(bias + width + columns, mask=columns < width, other=0.0).to(tl.float32)[None, :]
            value = silu_times(value, up)
        value = tl.where(row < wanted, value, 0.0)
    target = out + row.to(tl.int64) * out_row + columns[None, :]
    tl.store(target, value.to(out.dtype.element_ty), mask=(row < num_rows) & (columns[None, :] < width))


class Linear:
    """`OpSet.linear`, in tiles of one size."""

    def __init__(self, tile: Tile) -> None:
        self._tile = tile

    def __call__(
        self, x: torch.Tensor, weight: PackedLinear, out: torch.Tensor, live: torch.Tensor | None = None
    ) -> None:
        assert isinstance(weight, TritonLinear)
        rows, width, tile = x.shape[0], weight.out_features, self._tile
        if not rows:
            return
        run(
            linear_kernel,
            (cdiv(rows, tile.m), cdiv(width, tile.n)),
            x,
            weight.weight,
            weight.weight if weight.bias is None else weight.bias,
            out,
            count_argument(live, x),
            rows,
            width,
            weight.in_features,
            x.stride(0),
            out.stride(0),
            HAS_LIVE=live is not None,
            HAS_BIAS=weight.bias is not None,
            GATED=weight.gated,
            PRECISION=precision(weight.weight.dtype),
            BM=tile.m,
            BN=tile.n,
            BK=tile.k,
        )


def library_linear(
    x: torch.Tensor, weight: PackedLinear, out: torch.Tensor, live: torch.Tensor | None = None
) -> None:
    """`OpSet.linear` by torch.matmul: the fastest product of the library, whose order of summation is its own."""
    assert isinstance(weight, TritonLinear)
    dtype = torch.promote_types(weight.weight.dtype, out.dtype)
    if x.is_cuda and dtype != weight.weight.dtype:  # without a copy of the weights in the wider dtype
        product = torch.mm(x.to(weight.weight.dtype), weight.weight.t(), out_dtype=dtype)
    else:
        product = torch.matmul(x.to(dtype), weight.weight.to(dtype).t())
    if weight.bias is not None:
        product = product + weight.bias
    if weight.gated:
        gate, up = product.float().chunk(2, dim=-1)
        product = silu(gate) * up
    out.copy_(product)
    mask_rows(out, live)


def precision(dtype: torch.dtype) -> str:
    """How tiles of a dtype are multiplied: fp32 in full, never in TF32."""
    return "ieee" if dtype == torch.float32 else "tf32"
