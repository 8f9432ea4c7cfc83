"""Buckets and the one decision about a step's shape: P9-P11 of the behaviour reference; F15, F17, F18, F20, F21."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ostinato.errors import ConfigError
from ostinato.graphs import (
    bucket_alignment,
    decode_buckets,
    default_decode_sizes,
    default_prefill_sizes,
    prefill_buckets,
)
from ostinato.padding import (
    Buckets,
    GraphKey,
    ShapeRules,
    StepMode,
    StepShape,
    decide_shape,
    gathered_rows,
)

MODES = (StepMode.DECODE, StepMode.EXTEND, StepMode.MIXED, StepMode.IDLE)


def rules(decode: tuple[int, ...] = (4, 8), extend: tuple[int, ...] = (4, 16), **more: object) -> ShapeRules:
    return ShapeRules(Buckets(decode), Buckets(extend), **more)  # type: ignore[arg-type]


# --- buckets ------------------------------------------------------------------------------------------------


def test_default_decode_list_follows_the_reference() -> None:
    sizes = default_decode_sizes(1024)
    assert sizes[:6] == [1, 2, 4, 8, 12, 16]
    assert {256, 272, 496, 512, 544} <= set(sizes)
    assert {260, 264, 504, 528} & set(sizes) == set()
    assert default_decode_sizes(3, padding=False) == [1, 2, 3]
    speculative = default_decode_sizes(300, tokens_per_request=4)
    assert {7, 8, 10, 32, 36, 64, 72, 256, 272} <= set(speculative)
    assert {9, 33, 68, 260} & set(speculative) == set()


def test_default_prefill_list_follows_the_reference() -> None:
    sizes = default_prefill_sizes(8192)
    assert sizes[:9] == [4, 8, 12, 16, 20, 24, 28, 32, 48]
    assert {256, 288, 512, 576, 1024, 1280, 4096, 4608, 8192} <= set(sizes)
    assert sizes == sorted(set(sizes))


def test_fit_takes_the_smallest_bucket() -> None:
    buckets = Buckets.of([8, 2, 4, 4])
    assert buckets.sizes == (2, 4, 8)
    assert [buckets.fit(n) for n in (0, 1, 2, 3, 8, 9)] == [2, 2, 2, 4, 8, None]
    assert buckets.largest == 8
    assert Buckets(()).fit(1) is None
    assert Buckets(()).largest == 0


def test_bad_sizes_are_named() -> None:
    with pytest.raises(ConfigError, match=r"\[0, -4\]"):
        Buckets.of([4, 0, -4])


def test_f18_buckets_round_up_to_the_alignment() -> None:
    """F18: 4,12,20,28 with attention TP 8 becomes 8,16,24,32, without duplicates."""
    assert Buckets.of([4, 8, 12, 20, 28], alignment=8).sizes == (8, 16, 24, 32)
    assert bucket_alignment(attn_tp_size=4, page_size=6, tokens_per_request=2) == 12
    assert prefill_buckets(64, sizes=[4, 12, 20, 28], attn_tp_size=8).sizes == (8, 16, 24, 32)
    # 3 rows per request and 2 shards: an even number of requests.
    assert decode_buckets(8, sizes=[1, 3, 4], attn_tp_size=2, tokens_per_request=3).sizes == (2, 4)


def test_f20_buckets_stay_within_what_a_legal_batch_can_fill() -> None:
    """F20: context 128, pool of 2 requests, bucket 512: only 256 rows can ever be real."""
    assert prefill_buckets(512, sizes=[64, 128, 512], max_rows=2 * 128).sizes == (64, 128, 256)
    assert decode_buckets(5, sizes=[1, 2, 4, 8]).sizes == (1, 2, 4, 5)
    assert decode_buckets(3).sizes == (1, 2, 3)


def test_f20_an_empty_list_warns_and_runs_eager() -> None:
    with pytest.warns(UserWarning, match="no decode bucket"):
        buckets = decode_buckets(8, sizes=[])
    shape = decide_shape(StepMode.DECODE, [3], 3, ShapeRules(buckets, buckets))
    assert shape.eager_reason == "no buckets"
    assert (shape.padded_num_tokens, shape.padded_bs) == (3, 3)


def test_f21_compilation_without_padding_is_refused() -> None:
    """F21: one compilation per batch size."""
    with pytest.raises(ConfigError, match="256 batch sizes"):
        decode_buckets(256, padding=False, compiled=True)
    assert decode_buckets(4, padding=False).sizes == (1, 2, 3, 4)


# --- the decision -------------------------------------------------------------------------------------------


def test_decode_shape() -> None:
    shape = decide_shape(StepMode.DECODE, [3], 3, rules())
    assert (shape.raw_num_tokens, shape.padded_num_tokens, shape.padded_bs) == (3, 4, 4)
    assert shape.key == GraphKey("decode", 4, 0, "")
    assert shape.eager_reason == ""
    wide = decide_shape(StepMode.DECODE, [10], 5, rules(tokens_per_request=2))
    assert (wide.padded_num_tokens, wide.padded_bs, wide.key.size) == (16, 8, 8)


@pytest.mark.parametrize(("raw", "padded", "reason"), [(5, 5, "too much padding"), (8, 16, "")])
def test_p9_a_bucket_over_twice_the_rows_is_rejected(raw: int, padded: int, reason: str) -> None:
    """P9: buckets [4,16]: raw 5 is rejected (16 > 2*5), raw 8 accepted (16 = 2*8)."""
    shape = decide_shape(StepMode.EXTEND, [raw], 1, rules())
    assert (shape.padded_num_tokens, shape.eager_reason) == (padded, reason)
    assert decide_shape(StepMode.EXTEND, [7], 1, rules(extend=(4, 15))).eager_reason == "too much padding"


def test_p10_mixed_batches_replay_extend_graphs_unless_configured_eager() -> None:
    """P10."""
    accepted = decide_shape(StepMode.MIXED, [4], 2, rules())
    assert accepted.eager_reason == ""
    assert accepted.key == decide_shape(StepMode.EXTEND, [4], 2, rules()).key
    assert decide_shape(StepMode.MIXED, [4], 2, rules(mixed_eager=True)).eager_reason == "mixed batch"
    assert decide_shape(StepMode.EXTEND, [4], 2, rules(mixed_eager=True)).eager_reason == ""


def test_p11_a_rank_without_tokens_makes_the_whole_group_eager() -> None:
    """P11: with a captured gather; the verdict is the same on every rank, idle ones too."""
    gathering = rules(extend_gather=True)
    for rank in (0, 1):
        shape = decide_shape(StepMode.EXTEND, [4, 0], 1 - rank, gathering, dp_rank=rank)
        assert shape.eager_reason == "rank without tokens"
        assert shape.padded_num_tokens == (4, 0)[rank]
    assert decide_shape(StepMode.EXTEND, [4, 0], 1, rules()).eager_reason == ""


def test_ranks_that_gather_share_the_largest_width() -> None:
    """The maximum over ranks, never the sum: 16 ranks of 32 rows fit bucket 32."""
    gathering = rules(decode=(32,), decode_gather=True)
    for rank in range(16):
        shape = decide_shape(StepMode.DECODE, [32] * 16, 32, gathering, dp_rank=rank)
        assert (shape.padded_bs, shape.eager_reason) == (32, "")
    uneven = [
        decide_shape(StepMode.DECODE, [3, 7], (3, 7)[r], rules(decode_gather=True), dp_rank=r) for r in (0, 1)
    ]
    assert [s.key for s in uneven] == [GraphKey("decode", 8, 0, "")] * 2
    assert [s.raw_num_tokens for s in uneven] == [3, 7]


def test_one_rank_with_too_much_padding_makes_the_group_eager() -> None:
    gathering = rules(extend=(4, 16, 64), extend_gather=True)
    reasons = {decide_shape(StepMode.EXTEND, [40, 5], 1, gathering, dp_rank=r).eager_reason for r in (0, 1)}
    assert reasons == {"too much padding"}


def test_request_slots_bound_extend_graphs() -> None:
    slots = rules(max_extend_bs=2)
    fits = decide_shape(StepMode.EXTEND, [4], 1, slots)
    assert (fits.padded_bs, fits.eager_reason) == (2, "")
    crowded = decide_shape(StepMode.EXTEND, [4], 3, slots)
    assert (crowded.padded_bs, crowded.eager_reason) == (3, "too many requests")


def test_above_the_largest_bucket_runs_eager_at_aligned_rows() -> None:
    shape = decide_shape(StepMode.EXTEND, [17], 1, rules(attn_tp_size=4))
    assert (shape.padded_num_tokens, shape.eager_reason) == (20, "above the largest bucket")
    # Whole requests of 3 rows in 4 shards: a multiple of 12.
    wide = decide_shape(StepMode.DECODE, [30], 10, rules(tokens_per_request=3, attn_tp_size=4))
    assert (wide.padded_num_tokens, wide.padded_bs) == (36, 12)


def test_f15_padding_off_replays_exact_sizes_only() -> None:
    """F15: one key builder, so an exactly captured size is found; between sizes there is none."""
    exact = rules(decode=(2, 4), padding=False)
    assert decide_shape(StepMode.DECODE, [4], 4, exact).eager_reason == ""
    between = decide_shape(StepMode.DECODE, [3], 3, exact)
    assert (between.eager_reason, between.padded_bs) == ("no exact bucket", 3)


def test_the_callers_own_reason_comes_first() -> None:
    shape = decide_shape(StepMode.EXTEND, [5], 1, rules(), reject="input embeddings")
    assert (shape.eager_reason, shape.padded_num_tokens) == ("input embeddings", 5)


def test_variant_and_stream_are_part_of_the_key() -> None:
    keys = {
        decide_shape(StepMode.EXTEND, [4], 1, rules(), variant=v, stream_index=s).key
        for v in ("", "lora")
        for s in (0, 1)
    }
    assert len(keys) == 4


def test_a_shape_narrower_than_its_rows_is_impossible() -> None:
    with pytest.raises(AssertionError):
        StepShape(StepMode.DECODE, (5,), 5, 4, 8)


@settings(max_examples=150, deadline=None)
@given(
    mode=st.sampled_from(MODES),
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    attn_tp=st.sampled_from([1, 2, 4]),
    width=st.sampled_from([1, 2, 3]),
    gather=st.booleans(),
    sizes=st.lists(st.integers(1, 48), max_size=6),
)
@example(mode=StepMode.DECODE, counts=[18, 17, 0, 0], attn_tp=4, width=3, gather=True, sizes=[])
def test_every_rank_gets_a_consistent_shape(
    mode: StepMode, counts: list[int], attn_tp: int, width: int, gather: bool, sizes: list[int]
) -> None:
    """F17: width and eligibility come from one path in all modes and layouts; under a gather all ranks agree."""
    counts = counts if mode.is_extend else [n * width for n in counts]
    decided = ShapeRules(
        decode=Buckets.of(sizes, alignment=attn_tp),
        extend=Buckets.of(sizes, alignment=attn_tp),
        tokens_per_request=width,
        attn_tp_size=attn_tp,
        decode_gather=gather,
        extend_gather=gather,
    )
    shapes = [
        decide_shape(mode, counts, n if mode.is_extend else n // width, decided, dp_rank=rank)
        for rank, n in enumerate(counts)
    ]
    for shape, n in zip(shapes, counts, strict=True):
        assert shape.raw_num_tokens == n
        assert shape.padded_num_tokens >= n
        assert shape.padded_num_tokens % attn_tp == 0
        if not mode.is_extend:
            assert shape.padded_num_tokens == shape.padded_bs * width
        if not shape.eager_reason:
            assert shape.key.size in (decided.extend if mode.is_extend else decided.decode).sizes
    if gather:
        laid_out = [gathered_rows(shape, decided) for shape in shapes]
        assert laid_out[1:] == laid_out[:-1]
        assert laid_out[0].padded == tuple(shape.padded_num_tokens for shape in shapes)
        assert len({shape.eager_reason for shape in shapes}) == 1
        if not shapes[0].eager_reason:
            assert len({shape.key for shape in shapes}) == 1
