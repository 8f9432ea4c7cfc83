"""ForwardBatch and its constructors."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields

import pytest
import torch

from ostinato.engine.batch import (
    capture_batch,
    capture_shapes,
    decode_batch,
    decode_rows,
    extend_batch,
    idle_batch,
)
from ostinato.padding import Buckets, ShapeRules, StepMode


def test_decode_positions_are_the_last_of_each_sequence() -> None:
    one = decode_batch([5, 6], [11, 4], [1, 2], [26, 35])
    assert one.positions.tolist() == [10, 3]
    assert (one.mode, one.batch_size, one.seq_lens_sum) == (StepMode.DECODE, 2, 15)
    two = decode_batch([5, 6, 7, 8], [11, 4], [1, 2], [25, 26, 34, 35], tokens_per_request=2)
    assert two.positions.tolist() == [9, 10, 2, 3]
    assert two.global_num_token_non_padded_cpu == 4


def test_decode_rows_is_decode_batch_from_lists() -> None:
    lists = ([5, 6], [11, 4], [1, 2], [26, 35])
    made, want = decode_rows(*lists), decode_batch(*lists)
    for field in fields(want):
        ours, theirs = getattr(made, field.name), getattr(want, field.name)
        if isinstance(theirs, torch.Tensor):
            assert torch.equal(ours, theirs)
            assert (ours.dtype, ours.is_contiguous()) == (theirs.dtype, True)
        else:
            assert ours == theirs
    with pytest.raises(ValueError, match="length"):
        decode_rows([1, 2], [3, 3], [1, 2], [16])


def test_extend_rows_follow_their_prefix() -> None:
    batch = extend_batch([1, 2, 3, 4], [3, 1], [16, 7], [2, 1], [48, 49, 50, 23], mode=StepMode.MIXED)
    assert batch.positions.tolist() == [16, 17, 18, 7]
    assert batch.seq_lens.tolist() == [19, 8]
    assert batch.extend_start_loc is not None
    assert batch.extend_start_loc.tolist() == [0, 3]
    assert batch.global_num_token_non_padded.tolist() == [4]
    assert batch.global_num_token_non_padded.dtype is torch.int32


def test_rows_that_come_out() -> None:
    """All, unless some are asked for: these first, in the order asked, zeros behind them."""
    every, some, none = (
        extend_batch([1, 2, 3, 4], [3, 1], [0, 0], [2, 1], [48, 49, 50, 23], logit_rows=rows)
        for rows in (None, [3, 2], [])
    )
    found = []
    for batch in (every, some, none):
        assert batch.logit_rows is not None
        assert batch.num_logit_rows is not None
        found.append((batch.logit_rows.tolist(), batch.num_logit_rows.tolist()))
    assert found == [([0, 1, 2, 3], [4]), ([3, 2, 0, 0], [2]), ([0, 0, 0, 0], [0])]


@pytest.mark.parametrize("rows", [[2], [-1], [0, 1, 0]])
def test_wanted_rows_are_rows_of_the_step(rows: list[int]) -> None:
    with pytest.raises(ValueError, match="of 2 rows"):
        extend_batch([1, 2], [2], [0], [1], [16, 17], logit_rows=rows)


def test_lengths_must_agree() -> None:
    with pytest.raises(ValueError, match="add up to 3"):
        extend_batch([1, 2], [3], [0], [1], [16, 17])
    with pytest.raises(ValueError, match="1 cache locations"):
        decode_batch([1, 2], [3, 3], [1, 2], [16])
    with pytest.raises(ValueError, match="3 page-table rows"):
        decode_batch([1, 2], [3, 3], [1, 2, 3], [16, 17])


def test_the_global_count_is_immutable() -> None:
    batch = decode_batch([1], [3], [1], [16])
    with pytest.raises(FrozenInstanceError):
        batch.global_num_token_non_padded_cpu = 2  # type: ignore[misc]


@pytest.mark.parametrize("mode", [StepMode.IDLE, StepMode.EXTEND])
def test_idle_batches_are_empty(mode: StepMode) -> None:
    batch = idle_batch(mode)
    assert (batch.mode, batch.batch_size, batch.seq_lens_sum) == (mode, 0, 0)
    assert batch.global_num_token_non_padded.tolist() == [0]
    assert batch.input_ids is not None
    assert batch.input_ids.shape == (0,)


def test_capture_batches_fill_their_shapes_and_touch_the_trash_page_only() -> None:
    rules = ShapeRules(Buckets((2, 4)), Buckets((8, 20)), tokens_per_request=2, max_extend_bs=3)
    decode = capture_shapes(StepMode.DECODE, rules, context_len=8)
    extend = capture_shapes(StepMode.EXTEND, rules, context_len=8)
    assert [s.key.size for s in decode] == [2, 4]
    assert [(s.key.size, s.bs) for s in extend] == [(8, 1), (20, 3)]
    for shape in decode + extend:
        batch = capture_batch(shape)
        assert batch.global_num_token_non_padded_cpu == shape.padded_num_tokens == shape.raw_num_tokens
        assert batch.batch_size == shape.bs
        assert batch.out_cache_loc.eq(0).all()
        assert batch.req_pool_indices.eq(0).all()
        assert int(batch.seq_lens.max()) <= 8
        assert int(batch.positions.min()) >= 0
    # Buckets that no legal batch fills (4 requests for 3 slots) are left out.
    assert (
        capture_shapes(
            StepMode.EXTEND, ShapeRules(Buckets(()), Buckets((32,)), max_extend_bs=3), context_len=8
        )
        == []
    )
