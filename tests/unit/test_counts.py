"""Counts of real rows and their layouts: C1-C6 of the behaviour reference, F2, and the algebra behind them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.engine.batch import capture_batch, decode_batch, global_num_tokens
from ostinato.engine.registries import RegistryOptions, build_decode_registry, build_prefill_registry
from ostinato.graphs import FillContext
from ostinato.padding import (
    Buckets,
    DpPaddingMode,
    ShapeRules,
    StepMode,
    attn_tp_shard_bounds,
    decide_shape,
    gathered_row_mask,
    local_num_token_non_padded,
    pad_dp_counts,
    real_row_mask,
)


def both(g: int, width: int, rank: int, size: int, sharded: bool) -> int:
    """The host twin's value, after the device twin has agreed."""
    host = local_num_token_non_padded(g, width, attn_tp_rank=rank, attn_tp_size=size, sharded=sharded)
    count = torch.tensor([g], dtype=torch.int32)
    device = local_num_token_non_padded(count, width, attn_tp_rank=rank, attn_tp_size=size, sharded=sharded)
    assert (device.dtype, device.tolist()) == (torch.int32, [host])
    assert count.tolist() == [g], "the GLOBAL count must not be written"
    return host


@pytest.mark.parametrize(
    ("attn_tp", "sharded", "width", "counts", "expected"),
    [
        pytest.param(4, False, 16, [10], [[10, 10, 10, 10]], id="TP4"),
        pytest.param(4, True, 16, [10], [[4, 4, 2, 0]], id="TP4-SP"),
        pytest.param(1, False, 16, [10] * 4, [[10]] * 4, id="DP4"),
        pytest.param(2, True, 16, [10, 10], [[8, 2], [8, 2]], id="TP2.DP2.SP2"),
        pytest.param(1, False, 32, [10, 20, 10, 20], [[10], [20], [10], [20]], id="DP4.EP4"),
        pytest.param(2, True, 32, [10, 20], [[10, 0], [16, 4]], id="TP2.DP2.SP2.EP2"),
        pytest.param(2, True, 2, [1], [[1, 0]], id="one-row-two-shards"),
        pytest.param(2, True, 1024, [1018], [[512, 506]], id="F2-1018-of-1024"),
    ],
)
def test_c1_layouts(
    attn_tp: int, sharded: bool, width: int, counts: list[int], expected: list[list[int]]
) -> None:
    """C1 and F2: the layout table, host and device twins alike."""
    assert [[both(g, width, r, attn_tp, sharded) for r in range(attn_tp)] for g in counts] == expected


def test_f2_shard_bounds_come_from_the_padded_width() -> None:
    """F2: rank 0 owns rows 0..511 of the bucket of 1024, not the 509 that raw rows would give."""
    assert attn_tp_shard_bounds(1024, attn_tp_rank=0, attn_tp_size=2) == (0, 512)
    assert attn_tp_shard_bounds(1024, attn_tp_rank=1, attn_tp_size=2) == (512, 512)
    assert attn_tp_shard_bounds(1024, attn_tp_rank=1, attn_tp_size=2, sharded=False) == (0, 1024)


def test_bad_bounds_are_refused() -> None:
    with pytest.raises(ValueError, match="not divisible"):
        attn_tp_shard_bounds(10, attn_tp_rank=0, attn_tp_size=4)
    with pytest.raises(ValueError, match="outside"):
        attn_tp_shard_bounds(8, attn_tp_rank=4, attn_tp_size=4)


@pytest.mark.parametrize(("ids", "expected"), [(None, 4), (torch.zeros(6, dtype=torch.int64), 6)])
def test_c2_count_of_a_draft_batch(ids: torch.Tensor | None, expected: int) -> None:
    """C2: without input ids rows exist all the same; a count of 0 would mask every one of them."""
    assert global_num_tokens(ids, batch_size=4, tokens_per_request=1) == expected
    if ids is None:
        batch = decode_batch(None, [5] * 4, [1, 2, 3, 4], [16, 32, 48, 64])
        assert batch.global_num_token_non_padded.tolist() == [4]
        assert batch.global_num_token_non_padded_cpu == 4
        assert batch.num_token_non_padded is None


def test_c3_equal_slots_keep_the_real_counts() -> None:
    """C3: MAX_LEN, counts [3,0], attention TP 2, prepared twice."""
    first = pad_dp_counts([3, 0], attn_tp_size=2)
    assert first.mode is DpPaddingMode.MAX_LEN
    for counts in (first, pad_dp_counts(first.unpadded, attn_tp_size=2)):
        assert (counts.padded, counts.unpadded) == ((4, 4), (3, 0))


def test_c4_exact_offsets() -> None:
    """C4: SUM_LEN, counts [3,0], attention TP 2: a buffer of 4 rows."""
    counts = pad_dp_counts([3, 0], attn_tp_size=2, mode=DpPaddingMode.SUM_LEN)
    assert (counts.padded, counts.unpadded, sum(counts.padded)) == ((4, 0), (3, 0), 4)


@pytest.mark.parametrize(
    ("counts", "is_extend", "mode"),
    [
        ([8, 0, 0, 0], False, DpPaddingMode.SUM_LEN),
        ([8, 8, 0, 0], False, DpPaddingMode.MAX_LEN),
        ([8, 8], True, DpPaddingMode.SUM_LEN),
        ([8], True, DpPaddingMode.MAX_LEN),
    ],
)
def test_dp_padding_mode(counts: list[int], is_extend: bool, mode: DpPaddingMode) -> None:
    assert pad_dp_counts(counts, is_extend=is_extend).mode is mode


def _filled(kind: str, rows: int, options: RegistryOptions, bucket: int = 8) -> int:
    """LOCAL count after a fill of `rows` real rows in `bucket`."""
    only = Buckets((bucket,))
    rules = ShapeRules(only, only, attn_tp_size=options.attn_tp_size, max_pad_factor=bucket)
    mode = StepMode.DECODE if kind == "decode" else StepMode.EXTEND
    shape = decide_shape(mode, [rows], rows if mode is StepMode.DECODE else 1, rules)
    build = build_decode_registry if kind == "decode" else build_prefill_registry
    registry = build(bucket, bucket, options)
    registry.buffer("num_token_non_padded").fill_(77)
    registry.fill_from(capture_batch(shape), FillContext.of(shape))
    return int(registry.buffer("num_token_non_padded"))


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_c5_capture_localizes_the_full_bucket(kind: str) -> None:
    """C5: localize(W, W) is W / attn_tp on every rank; unsharded it is W."""
    for rank in (0, 1):
        sharded = RegistryOptions(attn_tp_rank=rank, attn_tp_size=2, require_gathered_buffer=True)
        assert _filled(kind, 8, sharded) == 4
        assert _filled(kind, 8, RegistryOptions(attn_tp_rank=rank, attn_tp_size=2)) == 8


@pytest.mark.parametrize("kind", ["decode", "prefill"])
@pytest.mark.parametrize("rank", [0, 1])
def test_c6_capture_and_replay_of_a_full_bucket_agree(kind: str, rank: int) -> None:
    """C6, on one registry: what capture wrote, a replay with raw = bucket writes again, other steps between."""
    only = Buckets((8,))
    rules = ShapeRules(only, only, attn_tp_size=2, max_pad_factor=8)
    options = RegistryOptions(attn_tp_rank=rank, attn_tp_size=2, require_gathered_buffer=True)
    mode = StepMode.DECODE if kind == "decode" else StepMode.EXTEND
    registry = (build_decode_registry if kind == "decode" else build_prefill_registry)(8, 8, options)
    seen = []
    for rows in (8, 3, 8):
        shape = decide_shape(mode, [rows], rows if mode is StepMode.DECODE else 1, rules)
        registry.fill_from(capture_batch(shape), FillContext.of(shape))
        seen.append(int(registry.buffer("num_token_non_padded")))
    assert seen == [4, (3, 0)[rank], 4]


@settings(max_examples=200, deadline=None)
@given(
    data=st.data(), attn_tp=st.sampled_from([1, 2, 3, 4, 8]), chunk=st.integers(0, 40), sharded=st.booleans()
)
def test_local_counts_add_up(data: st.DataObject, attn_tp: int, chunk: int, sharded: bool) -> None:
    """Sharded: locals sum to min(g, W), and mark exactly the rows below g. Replicated: each is min(g, W)."""
    width = attn_tp * chunk
    g = data.draw(st.integers(0, width + 5))
    local = [both(g, width, rank, attn_tp, sharded) for rank in range(attn_tp)]
    if not sharded:
        assert local == [min(g, width)] * attn_tp
        return
    assert sum(local) == min(g, width)
    rows = torch.cat([real_row_mask(torch.tensor([n]), chunk) for n in local])
    assert torch.equal(rows, real_row_mask(torch.tensor([g]), width))


@settings(max_examples=60, deadline=None)
@given(counts=st.lists(st.integers(0, 9), min_size=1, max_size=4), attn_tp=st.sampled_from([1, 2, 4]))
def test_gathered_mask_marks_each_ranks_rows(counts: list[int], attn_tp: int) -> None:
    """In a MAX_LEN buffer real rows are a prefix of every slot, not of the buffer."""
    layout = pad_dp_counts(counts, attn_tp_size=attn_tp, mode=DpPaddingMode.MAX_LEN)
    slot = layout.padded[0]
    mask = gathered_row_mask(torch.tensor(layout.unpadded), slot).view(len(counts), slot)
    assert mask.sum(1).tolist() == counts
    assert all(mask[i, :n].all() for i, n in enumerate(counts))
    assert pad_dp_counts(layout.unpadded, attn_tp_size=attn_tp, mode=DpPaddingMode.MAX_LEN) == layout
