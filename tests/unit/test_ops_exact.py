"""Elementwise functions give an element the same bits wherever it stands, and the right value."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from ostinato.ops.exact import sigmoid, silu, softmax, softplus

PAIRS: tuple[tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]], ...] = (
    (sigmoid, torch.sigmoid),
    (silu, functional.silu),
    (softplus, functional.softplus),
)


@pytest.mark.parametrize(("ours", "torchs"), PAIRS)
def test_place_does_not_matter(
    ours: Callable[[torch.Tensor], torch.Tensor], torchs: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    x = torch.randn(4001, generator=torch.Generator().manual_seed(0)) * 8
    whole = ours(x)
    alone = torch.cat([ours(x[i : i + 1]) for i in range(len(x))])
    assert torch.equal(whole, alone)
    for width in (2, 7, 16, 33):
        assert torch.equal(ours(x[:width].clone()), whole[:width])
    torch.testing.assert_close(whole, torchs(x), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("ours", "torchs"), PAIRS)
def test_extremes(
    ours: Callable[[torch.Tensor], torch.Tensor], torchs: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    x = torch.tensor([-1e4, -200.0, -90.0, 0.0, 90.0, 200.0, 1e4])
    torch.testing.assert_close(ours(x), torchs(x), rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("width", [1, 7, 16, 40, 300])
def test_softmax_rows_stand_alone(width: int) -> None:
    x = torch.randn(9, width, generator=torch.Generator().manual_seed(1)) * 6
    x[3] = float("nan")
    whole = softmax(x)
    for i in range(9):
        torch.testing.assert_close(softmax(x[i : i + 1])[0], whole[i], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(whole, torch.softmax(x, -1), rtol=4e-6, atol=1e-30, equal_nan=True)
