"""The CPU op set against the reference: elementwise kernels, packing through the protocol, and a replayed tape."""

from __future__ import annotations

import functools

import pytest
import torch

from ostinato.errors import ConfigError
from ostinato.ops.cpu.isa import AVX2, AVX512_BF16, PORTABLE
from ostinato.ops.cpu.opset import NumbaOps, open_numba_ops
from ostinato.ops.opset import OpSet
from ostinato.ops.reference import ReferenceOps

ISAS = [AVX512_BF16, AVX2, PORTABLE]
DTYPES = [torch.bfloat16, torch.float32]
# Both sides compute in fp32 and round once: they differ by the polynomial of exp (2 ulp) at most, or by one bf16 step
# where that tips a rounding.
TOLERANCES = {torch.bfloat16: 2.0**-7, torch.float32: 1e-6}


@functools.cache
def opset(isa: str) -> NumbaOps:
    try:
        return open_numba_ops(isa=isa)
    except ConfigError as error:
        pytest.skip(str(error))


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    tolerance = TOLERANCES[theirs.dtype]
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 16), (9, 37), (40, 300)])
def test_elementwise(isa: str, dtype: torch.dtype, rows: int, columns: int) -> None:
    ops: OpSet = opset(isa)
    reference: OpSet = ReferenceOps()
    gate = draw(rows, 1, seed=3) * 4
    x, y = draw(rows, columns, dtype=dtype, seed=1), draw(rows, columns, dtype=dtype, seed=2)
    x[0, 0] = torch.nan
    outs = [torch.empty_like(x) for _ in range(2)]
    for op, out in zip((ops, reference), outs, strict=True):
        op.add(x, y, out)
    assert torch.equal(outs[0].nan_to_num(), outs[1].nan_to_num())
    for op, out in zip((ops, reference), outs, strict=True):
        op.sigmoid_gated_add(x, gate, y, out)
    close(*outs)
    outs = [x.clone(), x.clone()]
    for op, out in zip((ops, reference), outs, strict=True):
        op.clamp(out, 0.5)
    assert torch.equal(outs[0].nan_to_num(9.0), outs[1].nan_to_num(9.0))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int64])
def test_rows_by_index(dtype: torch.dtype) -> None:
    ops = opset(PORTABLE)
    table = (draw(11, 7) * 100).to(dtype)
    ids = torch.tensor([3, 0, 10, 10, -5, 99])
    out = torch.empty(6, 7, dtype=dtype)
    ops.embedding(ids, table, out)
    assert torch.equal(out, table[ids.clamp(0, 10)])
    wide = torch.zeros(2, 20, dtype=dtype)
    ops.gather_rows(table, torch.tensor([4, 1]), wide[:, 3:10])
    assert torch.equal(wide[:, 3:10], table[[4, 1]])
    assert not wide[:, 10:].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 7, 64])
def test_rows_of_packed_weights(dtype: torch.dtype, columns: int) -> None:
    """Of whole panels and of the last, partly filled one; of an even and an odd number of values."""
    ops = opset(PORTABLE)
    table = draw(75, columns).to(dtype)
    ids = torch.tensor([0, 31, 32, 63, 64, 74, 40, -5, 99])
    wide = torch.full((9, columns + 5), 3.0, dtype=dtype)
    ops.embedding(ids, ops.pack_linear(table, out_dtype=torch.float32), wide[:, 2 : columns + 2])
    assert torch.equal(wide[:, 2 : columns + 2], table[ids.clamp(0, 74)])
    assert (wide[:, :2] == 3).all()
    assert (wide[:, columns + 2 :] == 3).all()


def test_rows_of_packed_weights_must_fit() -> None:
    ops = opset(PORTABLE)
    packed = ops.pack_linear(torch.zeros(8, 6))
    with pytest.raises(ValueError, match="do not fit"):
        ops.embedding(torch.tensor([1]), packed, torch.empty(1, 5))
    with pytest.raises(ValueError, match="ids must be"):
        ops.embedding(torch.tensor([1, 2]), packed, torch.empty(1, 6))


def test_elementwise_refuses_what_does_not_fit() -> None:
    ops, x = opset(PORTABLE), torch.zeros(3, 8)
    with pytest.raises(ValueError, match="y must be"):
        ops.add(x, torch.zeros(3, 7), x)
    with pytest.raises(ValueError, match="gate must be"):
        ops.sigmoid_gated_add(x, torch.zeros(3), x, x)
    with pytest.raises(ValueError, match="contiguous rows"):
        ops.clamp(torch.zeros(8, 3).T, 1.0)
    with pytest.raises(ValueError, match="int64"):
        ops.gather_rows(x, torch.zeros(2, dtype=torch.int32), torch.zeros(2, 8))
    with pytest.raises(ValueError, match="do not fit"):
        ops.gather_rows(x, torch.zeros(2, dtype=torch.int64), torch.zeros(2, 7))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_and_experts_like_the_reference(isa: str, dtype: torch.dtype) -> None:
    """The two op sets agree through the protocol alone, outputs of their own dtype included."""
    ours, theirs = opset(isa), ReferenceOps()
    sets: list[OpSet] = [ours, theirs]
    weight, bias, x = (
        draw(50, 40, dtype=dtype),
        draw(50, dtype=dtype, seed=1),
        draw(13, 40, dtype=dtype, seed=2),
    )
    gate_up, down = draw(4, 48, 40, dtype=dtype, seed=3) * 0.2, draw(4, 40, 24, dtype=dtype, seed=4) * 0.2
    ids = torch.rand(13, 4, generator=torch.Generator().manual_seed(5)).topk(2).indices.int()
    ids[3, 1], ids[7] = -1, -1
    weights = torch.rand(13, 2, generator=torch.Generator().manual_seed(6))
    loose = 6e-2 if dtype == torch.bfloat16 else 1e-5
    for out_dtype in (None, torch.float32):
        outs = []
        for ops in sets:
            packed = ops.pack_linear(weight, bias, out_dtype=out_dtype)
            assert (packed.in_features, packed.out_features) == (40, 50)
            outs.append(torch.empty(13, 50, dtype=out_dtype or dtype))
            ops.linear(x, packed, outs[-1])
        torch.testing.assert_close(*outs, rtol=loose, atol=loose)
    outs = []
    for ops in sets:
        experts = ops.pack_experts(gate_up, down)
        assert (experts.num_experts, experts.hidden_size, experts.intermediate_size) == (4, 40, 24)
        outs.append(torch.empty(13, 40, dtype=dtype))
        ops.moe_experts(x, weights, ids, experts, False, outs[-1])
    torch.testing.assert_close(*outs, rtol=loose, atol=loose)
    assert bool((outs[0][7] == 0).all())


def test_gated_linear_is_a_plain_one_and_its_gate() -> None:
    ops, weight, x = opset(PORTABLE), draw(60, 24), draw(7, 24, seed=1)
    plain, fused = torch.empty(7, 60), torch.empty(7, 30)
    ops.linear(x, ops.pack_linear(weight), plain)
    ops.linear(x, ops.pack_gated(weight), fused)
    gate, up = plain.chunk(2, dim=-1)
    close(fused, torch.nn.functional.silu(gate) * up)


def test_plain_calls_follow_their_tensors() -> None:
    """Repeated calls at the same addresses reuse a launch; another shape there makes another."""
    ops, memory, out = opset(PORTABLE), torch.zeros(64), torch.empty(64)
    layers = [ops.pack_linear(torch.full((4, 8), float(i))) for i in (1, 2)]
    for rows in (8, 2):
        for value in (1.0, 3.0):
            memory.fill_(value)
            for i, layer in enumerate(layers, 1):
                ops.linear(memory[: 8 * rows].view(rows, 8), layer, out[: 4 * rows].view(rows, 4))
                assert out[: 4 * rows].tolist() == [8 * i * value] * (4 * rows)


def test_pads_are_declared() -> None:
    contract = opset(PORTABLE).pad_contracts["moe_experts"]
    assert contract.accepts_sentinel
    assert contract.writes_zeros
    assert opset(PORTABLE).name == "numba.portable"
