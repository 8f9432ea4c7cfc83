"""The mask op's contract: cases M1-M7 of the behaviour reference, and the mask of gathered buffers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.graphs.stream import Stream
from ostinato.graphs.tape import TapeBackend
from ostinato.moe.hip import hip_pad_form
from ostinato.moe.mask import SENTINEL, mask_pad_rows_, pad_rows


def _count(n: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor([n], dtype=dtype)


def _rows(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(1, shape[0] * shape[1] + 1).view(shape).to(dtype)


CASES: tuple[tuple[tuple[int, int], torch.dtype, int], ...] = (
    ((37, 9), torch.float32, 0),
    ((256, 8), torch.float32, 0),
    ((1, 9), torch.float32, 0),
    ((37, 9), torch.int32, SENTINEL),
    ((512, 16), torch.int32, SENTINEL),
)


@pytest.mark.parametrize(("shape", "dtype", "fill"), CASES)
@pytest.mark.parametrize("where", ["0", "1", "5", "n-1", "n", "n+3"])
def test_m1_equals_row_fill(shape: tuple[int, int], dtype: torch.dtype, fill: int, where: str) -> None:
    n = shape[0]
    count = {"0": 0, "1": 1, "5": min(5, n), "n-1": n - 1, "n": n, "n+3": n + 3}[where]
    x = _rows(shape, dtype)
    expected = x.clone()
    expected[count:] = fill
    mask_pad_rows_(x, _count(count), fill)
    assert torch.equal(x, expected)


def test_m2_no_count_changes_nothing() -> None:
    x = _rows((37, 9), torch.int32)
    mask_pad_rows_(x, None, SENTINEL)
    assert torch.equal(x, _rows((37, 9), torch.int32))


def test_m3_strided_rows() -> None:
    whole = _rows((32, 16), torch.float32)
    expected = whole.clone()
    expected[5:, ::2] = 0
    mask_pad_rows_(whole[:, ::2], _count(5), 0)
    assert torch.equal(whole, expected)


@pytest.mark.parametrize("launched", [True, False])
def test_m4_a_captured_mask_follows_the_live_scalar(launched: bool) -> None:
    """As a kernel launched on the stream, and as plain torch between launches."""
    count = _count(256)
    x = torch.empty(256, 9)

    def step(stream: Stream) -> None:
        if launched:
            stream.launch(mask_pad_rows_, x, count, 0.0)
        else:
            mask_pad_rows_(x, count, 0.0)

    graph = TapeBackend().capture(step)
    for live in (256, 5, 0, 100):
        x.copy_(_rows((256, 9), torch.float32))
        count.fill_(live)
        graph.replay()
        assert bool((x[:live] > 0).all())
        assert bool((x[live:] == 0).all())


@pytest.mark.parametrize(
    ("count", "error"),
    [
        (4, TypeError),
        (torch.tensor([4, 4]), ValueError),
        (torch.tensor([4.0]), TypeError),
        (torch.tensor([True]), TypeError),
        (torch.tensor([], dtype=torch.int32), ValueError),
    ],
)
def test_m5_wrong_counts(count: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="num_token_non_padded"):
        mask_pad_rows_(torch.ones(8, 2), count, 0)


@pytest.mark.parametrize(
    "count", [torch.tensor(3), torch.tensor([3], dtype=torch.int64), torch.tensor([[3]])]
)
def test_any_one_element_integer_counts(count: torch.Tensor) -> None:
    x = torch.ones(8, 2)
    mask_pad_rows_(x, count, 0)
    assert x.sum() == 6


def test_count_on_another_device() -> None:
    with pytest.raises(ValueError, match="meta"):
        mask_pad_rows_(torch.ones(8, 2), torch.zeros(1, dtype=torch.int32, device="meta"), 0)


@given(n=st.integers(0, 40), k=st.integers(1, 5), count=st.integers(0, 45))
def test_m6_idempotent(n: int, k: int, count: int) -> None:
    once = _rows((n, k), torch.int32)
    mask_pad_rows_(once, _count(count), SENTINEL)
    twice = once.clone()
    mask_pad_rows_(twice, _count(count), SENTINEL)
    assert torch.equal(once, twice)


def test_m7_weights_and_the_form_for_kernels_without_negative_ids() -> None:
    weights = torch.rand(256, 8) + 0.01
    ids = torch.rand(256, 64).argsort(-1)[:, :8].int()
    mask_pad_rows_(ids, _count(5), SENTINEL)
    masked = weights.clone()
    masked[5:] = float("nan")
    hip_ids, hip_weights = hip_pad_form(ids, masked)
    assert torch.equal(hip_ids[:5], ids[:5])
    assert bool((hip_ids[5:] == 0).all())
    assert torch.equal(hip_weights[:5], weights[:5])
    assert bool((hip_weights[5:] == 0).all())

    hip_ids, hip_weights = hip_pad_form(ids, weights, mask_weights=False)
    assert bool((hip_ids[5:] == 0).all())
    assert torch.equal(hip_weights, weights)


def test_select_not_multiply() -> None:
    x = torch.full((4, 2), float("nan"))
    mask_pad_rows_(x, _count(0), 0.0)
    assert bool((x == 0).all())


def test_gathered_rows_are_no_prefix() -> None:
    """dp 2, 5 rows each, real [3, 5]: pads are 3 and 4; a prefix count of 8 would mask real rows 8 and 9."""
    pads = pad_rows(10, None, torch.tensor([3, 5]), 5)
    assert pads is not None
    assert pads.flatten().nonzero().flatten().tolist() == [3, 4]


def test_gathered_counts_on_another_width_mask_nothing() -> None:
    assert pad_rows(8, None, torch.tensor([3, 5]), 5) is None


def test_gathered_and_prefix_count_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="both"):
        pad_rows(10, _count(8), torch.tensor([3, 5]), 5)
    with pytest.raises(ValueError, match="rows_per_slot"):
        pad_rows(10, None, torch.tensor([3, 5]))
    with pytest.raises(TypeError, match="gathered_counts"):
        pad_rows(10, None, torch.tensor([3.0, 5.0]), 5)
