"""The reference op set: what each kernel computes, and that rows are independent of their neighbours to the
bit.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.ops import OpSet, ReferenceOps
from ostinato.padding import PadContract, check_pad_contracts

OPS: OpSet = ReferenceOps()
H = 48


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def made(out: torch.Tensor, kernel: Callable[..., None], *args: object) -> torch.Tensor:
    kernel(*args, out)
    return out


def test_embedding_clamps_what_pads_hold() -> None:
    table = draw(10, H)
    ids = torch.tensor([3, 9, 10**12, -5])
    out = made(torch.empty(4, H), OPS.embedding, ids, table)
    assert torch.equal(out, table[[3, 9, 9, 0]])


def test_rms_norm_matches_its_definition() -> None:
    x, weight = draw(5, H), draw(H, seed=1)
    expected = x * weight / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(made(torch.empty(5, H), OPS.rms_norm, x, weight, 1e-5), expected)
    heads = draw(5, 3, 16)
    expected = heads / (heads.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    OPS.rms_norm(heads, None, 1e-5, heads)
    torch.testing.assert_close(heads, expected)


def test_rms_norm_of_a_strided_view_leaves_the_rest_alone() -> None:
    fused = draw(4, 3 * 16)
    before = fused.clone()
    part = fused[:, 16:32]
    OPS.rms_norm(part, torch.ones(16), 1e-6, part)
    assert torch.equal(fused[:, :16], before[:, :16])
    assert torch.equal(fused[:, 32:], before[:, 32:])
    torch.testing.assert_close(part.square().mean(-1), torch.ones(4))


def test_rms_norm_is_computed_in_fp32_and_scaled_after_the_cast() -> None:
    x, weight = draw(3, H, dtype=torch.bfloat16), draw(H, seed=1, dtype=torch.bfloat16)
    wide = x.float()
    normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(torch.bfloat16)
    out = made(torch.empty(3, H, dtype=torch.bfloat16), OPS.rms_norm, x, weight, 1e-6)
    assert torch.equal(out, weight * normed)


@pytest.mark.parametrize("layer_norm", [False, True])
def test_fused_adds_update_the_residual(layer_norm: bool) -> None:
    x, residual, weight, bias = draw(5, H), draw(5, H, seed=1), draw(H, seed=2), draw(H, seed=3)
    total = x + residual
    fused, plain = torch.empty(5, H), torch.empty(5, H)
    if layer_norm:
        OPS.layer_norm(total, weight, bias, 1e-5, plain)
        OPS.add_layer_norm(x, residual, weight, bias, 1e-5, fused)
        torch.testing.assert_close(plain, torch.nn.functional.layer_norm(total, (H,), weight, bias, 1e-5))
    else:
        OPS.rms_norm(total, weight, 1e-5, plain)
        OPS.add_rms_norm(x, residual, weight, 1e-5, fused)
    assert torch.equal(residual, total)
    assert torch.equal(fused, plain)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 8, 13])
def test_linear(rows: int, bias: bool) -> None:
    x, weight, offset = draw(rows, H), draw(20, H, seed=1), draw(20, seed=2) if bias else None
    packed = OPS.pack_linear(weight, offset)
    assert (packed.in_features, packed.out_features) == (H, 20)
    out = made(torch.full((rows, 20), torch.nan), OPS.linear, x, packed)
    torch.testing.assert_close(out, torch.nn.functional.linear(x, weight, offset))


def test_a_linear_with_fp32_output_loses_nothing_at_its_output() -> None:
    """Near-tied router logits at magnitude 8, 1e-3 apart, are one value in bf16 (F39)."""
    weight = torch.zeros(2, 8, dtype=torch.bfloat16)
    weight[:, 0] = 8.0
    weight[1, 1] = 1e-3
    x = torch.ones(1, 8, dtype=torch.bfloat16)
    exact = made(torch.empty(1, 2), OPS.linear, x, OPS.pack_linear(weight, out_dtype=torch.float32))
    assert exact[0, 1] - exact[0, 0] == pytest.approx(1e-3, rel=1e-2)
    rounded = made(torch.empty(1, 2, dtype=torch.bfloat16), OPS.linear, x, OPS.pack_linear(weight))
    assert rounded[0, 0] == rounded[0, 1]


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_rotates_pairs_and_passes_the_rest(interleaved: bool) -> None:
    dim, rotary = 16, 8
    angles = draw(6, rotary // 2).abs()
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    q, k = draw(3, 2, dim), draw(3, 1, dim, seed=1)
    before = {"q": q.clone(), "k": k.clone()}
    positions = torch.tensor([5, 0, 10**9])
    OPS.rope(q, k, positions, table, interleaved)
    for name, after in (("q", q), ("k", k)):
        old = before[name]
        assert torch.equal(after[..., rotary:], old[..., rotary:])
        for i in range(rotary // 2):
            a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + rotary // 2)
            theta = angles[[5, 0, 5], i].unsqueeze(1)
            old_pair, new_pair = (
                torch.complex(old[..., a], old[..., b]),
                torch.complex(after[..., a], after[..., b]),
            )
            torch.testing.assert_close(new_pair, old_pair * torch.polar(torch.ones_like(theta), theta))


def test_gated_linear() -> None:
    x, weight, bias = draw(5, H), draw(2 * 11, H, seed=1), draw(2 * 11, seed=2)
    gate, up = (x @ weight.T + bias).chunk(2, dim=-1)
    packed = OPS.pack_gated(weight, bias)
    assert (packed.in_features, packed.out_features) == (H, 11)
    expected = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(made(torch.empty(5, 11), OPS.linear, x, packed), expected)


def experts(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return 0.3 * draw(4, 24, H, seed=5).to(dtype), 0.3 * draw(4, H, 12, seed=6).to(dtype)


def expert(x: torch.Tensor, index: int) -> torch.Tensor:
    gate_up, down = experts()
    gate, up = (x @ gate_up[index].T).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up) @ down[index].T


@pytest.mark.parametrize("on_input", [False, True])
def test_moe_experts(on_input: bool) -> None:
    x = draw(3, H)
    x[2] = torch.nan
    ids = torch.tensor([[2, 0], [-1, 3], [-1, -1]], dtype=torch.int32)
    scale = torch.tensor([[0.7, 0.2], [torch.nan, 1.5], [torch.nan, torch.inf]])
    out = torch.full((3, H), torch.nan)
    OPS.moe_experts(x, scale, ids, OPS.pack_experts(*experts()), on_input, out)

    def term(row: int, index: int, weight: float) -> torch.Tensor:
        return expert(x[row] * weight, index) if on_input else expert(x[row], index) * weight

    torch.testing.assert_close(out[0], term(0, 2, 0.7) + term(0, 0, 0.2))
    torch.testing.assert_close(out[1], term(1, 3, 1.5))
    assert torch.equal(out[2], torch.zeros(H))


def test_moe_experts_with_nobody_at_all() -> None:
    out = torch.full((2, H), torch.nan)
    ids = torch.full((2, 2), -1, dtype=torch.int32)
    OPS.moe_experts(draw(2, H), torch.ones(2, 2), ids, OPS.pack_experts(*experts()), False, out)
    assert torch.equal(out, torch.zeros(2, H))


def test_the_experts_take_sentinels() -> None:
    contract = OPS.pad_contracts["moe_experts"]
    check_pad_contracts(PadContract("router", emits_sentinel=True), contract)


def test_small_kernels() -> None:
    x, y = draw(3, H), draw(3, H, seed=1)
    assert torch.equal(made(torch.empty(3, H), OPS.add, x, y), x + y)
    gate = draw(3, 1, seed=2)
    torch.testing.assert_close(
        made(torch.empty(3, H), OPS.sigmoid_gated_add, x, gate, y), x + torch.sigmoid(gate) * y
    )
    clipped = x.clone()
    OPS.clamp(clipped, 0.5)
    assert torch.equal(clipped, x.clamp(-0.5, 0.5))
    rows = torch.tensor([2, 0])
    assert torch.equal(made(torch.empty(2, H), OPS.gather_rows, x, rows), x[rows])


def test_scale_by_position() -> None:
    q = torch.ones(4, 2, 8)
    OPS.scale_by_position(q, torch.tensor([0, 6, 7, 23]), 8.0, 0.1)
    expected = torch.tensor(
        [1.0, 1.0, 1 + 0.1 * torch.log(torch.tensor(2.0)), 1 + 0.1 * torch.log(torch.tensor(4.0))]
    )
    torch.testing.assert_close(q[:, 0, 0], expected)


def every_kernel(x: torch.Tensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The outputs of all kernels that compute, for rows x [T, 48]."""
    rows = x.shape[0]

    def new(width: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(rows, width, dtype=kind)

    weight = draw(H, seed=1, dtype=dtype)
    # Routing belongs to the row: it must not depend on where the row stands.
    ids = torch.stack((torch.zeros(rows), torch.full((rows,), 3.0)), dim=1).to(torch.int32)
    scale = torch.tensor([[0.3, 0.9]]).repeat(rows, 1)
    heads, table = x.clone().view(rows, 3, 16), draw(8, 16, seed=2)
    OPS.rope(heads[:, :2], heads[:, 2:], torch.full((rows,), 5), table, False)
    moe = new(H)
    OPS.moe_experts(x, scale, ids, OPS.pack_experts(*experts(dtype)), False, moe)
    linear = OPS.pack_linear(draw(37, H, seed=3, dtype=dtype))
    router = OPS.pack_linear(draw(37, H, seed=3, dtype=dtype), out_dtype=torch.float32)
    return {
        "rms_norm": made(new(H), OPS.rms_norm, x, weight, 1e-6),
        "layer_norm": made(new(H), OPS.layer_norm, x, weight, weight, 1e-6),
        "linear": made(new(37), OPS.linear, x, linear),
        "linear fp32": made(new(37, torch.float32), OPS.linear, x, router),
        "gated linear": made(new(18), OPS.linear, x, OPS.pack_gated(draw(36, H, seed=3, dtype=dtype))),
        "sigmoid_gated_add": made(new(H), OPS.sigmoid_gated_add, x, x[:, :1].float(), x),
        "rope": heads.view(rows, H),
        "moe_experts": moe,
    }


@settings(deadline=None, max_examples=25)
@given(
    rows=st.integers(1, 40),
    start=st.integers(0, 39),
    length=st.integers(1, 40),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_a_row_has_the_same_bits_whatever_stands_beside_it(
    rows: int, start: int, length: int, dtype: torch.dtype
) -> None:
    start = min(start, rows - 1)
    stop = min(start + length, rows)
    x = draw(rows, H, seed=9, dtype=dtype)
    part = every_kernel(x[start:stop].clone(), dtype)
    poisoned = x.clone()
    poisoned[:start] = torch.nan
    poisoned[stop:] = torch.inf
    for whole in (every_kernel(x, dtype), every_kernel(poisoned, dtype)):
        for name, out in part.items():
            assert torch.equal(whole[name][start:stop], out), name
