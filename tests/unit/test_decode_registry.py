"""The decode registry: D1-D8 of the behaviour reference."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ostinato.engine.batch import ForwardBatch, decode_batch
from ostinato.engine.registries import INDEX_SEMANTIC_BUFFERS, RegistryOptions, build_decode_registry
from ostinato.graphs import FillContext, GraphBufferRegistry, GraphSlot, PaddingPolicy

B, T = 8, 16
CTX = FillContext(raw_bs=2, padded_bs=4, raw_num_tokens=2, padded_num_tokens=4)
STANDARD = (
    "input_ids",
    "positions",
    "out_cache_loc",
    "req_pool_indices",
    "seq_lens",
    "seq_lens_cpu",
    "global_num_token_non_padded",
    "num_token_non_padded",
)


def batch(**more: Any) -> ForwardBatch:
    return decode_batch([5, 6], [11, 12], [3, 1], [160, 176], **more)


def counted(count: int, **more: Any) -> ForwardBatch:
    tensor = torch.tensor([count], dtype=torch.int32)
    return replace(batch(**more), global_num_token_non_padded=tensor, global_num_token_non_padded_cpu=count)


def poison(registry: GraphBufferRegistry[ForwardBatch]) -> None:
    for name in registry.slot_names:
        registry.buffer(name).fill_(99)


def source(**more: Any) -> SimpleNamespace:
    rows = {name: torch.zeros(T, dtype=torch.int64) for name in ("input_ids", "positions", "out_cache_loc")}
    requests = {
        n: torch.zeros(B, dtype=torch.int64) for n in ("req_pool_indices", "seq_lens", "seq_lens_cpu")
    }
    counts = {
        n: torch.zeros(1, dtype=torch.int32) for n in ("global_num_token_non_padded", "num_token_non_padded")
    }
    return SimpleNamespace(**rows, **requests, **counts, **more)


def test_d1_tails() -> None:
    registry = build_decode_registry(B, T, RegistryOptions(seq_len_fill_value=5))
    assert registry.slot_names == STANDARD
    poison(registry)
    registry.fill_from(batch(), CTX)
    view = registry.extract_buffer(batch(), CTX)
    assert view.input_ids is not None
    assert view.input_ids.tolist() == [5, 6, 0, 0]
    assert view.positions.tolist() == [10, 11, 0, 0]
    assert view.out_cache_loc.tolist() == [160, 176, 0, 0]
    assert view.req_pool_indices.tolist() == [3, 1, 0, 0]
    assert view.seq_lens.tolist() == view.seq_lens_cpu.tolist() == [11, 12, 5, 5]
    assert (view.batch_size, view.num_padding, view.seq_lens_sum) == (4, 2, 23 + 2 * 5)
    assert registry.buffer("positions")[4:].eq(99).all()


def test_default_fill_value_is_one() -> None:
    """F6: a zero-length row is 0/0 in the softmax of some kernels."""
    registry = build_decode_registry(B, T)
    registry.fill_from(batch(), CTX)
    assert registry.extract_buffer(batch(), CTX).seq_lens.tolist() == [11, 12, 1, 1]


def test_d2_buffers_of_a_source_are_adopted() -> None:
    given = source()
    registry = build_decode_registry(B, T, source=given)
    assert registry.slot_names == STANDARD
    for name in STANDARD:
        assert registry.buffer(name) is getattr(given, name)


@pytest.mark.parametrize("name", STANDARD)
def test_d2_a_missing_buffer_is_an_error(name: str) -> None:
    given = source()
    delattr(given, name)
    with pytest.raises(ValueError, match=name):
        build_decode_registry(B, T, source=given)


@pytest.mark.parametrize(
    ("rank", "count", "expected"), [(0, 100, 4), (1, 100, 4), (0, 5, 4), (1, 5, 1), (1, 3, 0)]
)
def test_d3_gathered_counts_are_localized_by_the_padded_width(rank: int, count: int, expected: int) -> None:
    options = RegistryOptions(attn_tp_rank=rank, attn_tp_size=2, require_gathered_buffer=True)
    registry = build_decode_registry(B, T, options)
    made = counted(count)
    registry.fill_from(made, FillContext(2, 8, 2, 8))
    view = registry.extract_buffer(made, FillContext(2, 8, 2, 8))
    assert view.num_token_non_padded is not None
    assert view.num_token_non_padded.tolist() == [expected]
    assert view.global_num_token_non_padded.tolist() == [count]
    assert made.global_num_token_non_padded.tolist() == [count], "GLOBAL is immutable"
    assert made.num_token_non_padded is None


def test_d4_other_counts_are_copied() -> None:
    registry = build_decode_registry(B, T, RegistryOptions(attn_tp_size=2))
    registry.fill_from(counted(7), CTX)
    assert registry.buffer("num_token_non_padded").tolist() == [7]


def test_context_parallel_counts_are_copied_when_supplied() -> None:
    options = RegistryOptions(attn_tp_size=2, require_gathered_buffer=True, enable_prefill_cp=True)
    registry = build_decode_registry(B, T, options)
    registry.fill_from(counted(7, num_token_non_padded=torch.tensor([3], dtype=torch.int32)), CTX)
    assert registry.buffer("num_token_non_padded").tolist() == [3]
    registry.fill_from(counted(7), CTX)
    assert registry.buffer("num_token_non_padded").tolist() == [7]


def test_counts_are_refreshed_on_every_fill() -> None:
    """F9 and F17: in the plainest layout too, whatever an earlier step left."""
    registry = build_decode_registry(B, T)
    for count in (2, 1, 2):
        poison(registry)
        registry.fill_from(counted(count), CTX)
        assert registry.buffer("num_token_non_padded").tolist() == [count]
        assert registry.buffer("global_num_token_non_padded").tolist() == [count]


@pytest.mark.parametrize(("mlp_gather", "entries"), [(True, 3), (False, 1)])
def test_d5_gathered_row_counts_are_the_padded_width(mlp_gather: bool, entries: int) -> None:
    options = RegistryOptions(
        require_gathered_buffer=True,
        require_mlp_tp_gather=mlp_gather,
        dp_size=3,
        register_global_num_tokens=True,
    )
    registry = build_decode_registry(B, T, options)
    made = batch(global_num_tokens_gpu=torch.full((3,), 999, dtype=torch.int32))
    registry.fill_from(made, CTX)
    view = registry.extract_buffer(made, CTX)
    for counts in (view.global_num_tokens_gpu, view.global_num_tokens_for_logprob_gpu):
        assert counts is not None
        assert counts.tolist() == [4] * entries


def test_d6_unregistered_counts_are_carried() -> None:
    registry = build_decode_registry(B, T)
    tokens, logprob = torch.tensor([37]), torch.tensor([41])
    made = batch(global_num_tokens_gpu=tokens, global_num_tokens_for_logprob_gpu=logprob)
    registry.fill_from(made, CTX)
    view = registry.extract_buffer(made, CTX)
    assert view.global_num_tokens_gpu is tokens
    assert view.global_num_tokens_for_logprob_gpu is logprob


def test_d7_structured_slots_follow_their_source() -> None:
    info = SimpleNamespace(
        column_starts=torch.full((4,), 99, dtype=torch.int32),
        req_lens=torch.full((4,), 99, dtype=torch.int32),
    )
    hidden = torch.full((T, 2), 99.0)
    rids = torch.zeros(B, dtype=torch.int64)
    rooms = torch.full((B,), -1)
    given = source(
        ngram_embedding_info=info,
        pp_proxy_tensors={"hidden": hidden},
        rids_int=rids,
        bootstrap_room_ids_int=rooms,
    )
    registry = build_decode_registry(B, T, source=given)
    assert set(registry.slot_names) - set(STANDARD) == {
        "ngram_embedding_info.column_starts",
        "ngram_embedding_info.req_lens",
        "pp_proxy_tensors.hidden",
        "rids_int",
        "bootstrap_room_ids_int",
    }
    live = SimpleNamespace(column_starts=torch.tensor([1, 2], dtype=torch.int32), req_lens=None)
    made = batch(ngram_embedding_info=live, rids_int=torch.tensor([8, 9]))
    ctx = replace(CTX, pp_proxy_tensors={"hidden": torch.ones(2, 2), "unknown": torch.ones(1)})
    registry.fill_from(made, ctx)
    assert info.column_starts.tolist() == [1, 2, 99, 99]
    assert info.req_lens.tolist() == [99] * 4
    assert hidden[:3].tolist() == [[1, 1], [1, 1], [99, 99]]
    assert rids.tolist() == [8, 9] + [0] * 6
    assert rooms.tolist() == [-1] * B
    view = registry.extract_buffer(made, ctx)
    assert view.ngram_embedding_info is live
    assert view.bootstrap_room_ids_int is None


def test_d7_without_a_source_there_are_none() -> None:
    assert build_decode_registry(B, T).slot_names == STANDARD
    assert build_decode_registry(B, T, source=source()).slot_names == STANDARD


@pytest.mark.parametrize(
    "extra",
    [
        GraphSlot("zeroed", lambda bs, tokens: (bs,), torch.int64, "bs", padding_policy=PaddingPolicy.ZERO),
        GraphSlot("mamba_track_mask", lambda bs, tokens: (bs,), torch.bool, "bs"),
    ],
    ids=["zeroed-but-no-index", "index-but-not-zeroed"],
)
def test_d8_zeroed_slots_are_the_index_like_ones(extra: GraphSlot) -> None:
    with pytest.raises(AssertionError, match=extra.name):
        build_decode_registry(B, T, extra_slots=[extra])


def test_optional_slots() -> None:
    options = RegistryOptions(multimodal=True, mamba=True, encoder_len_fill_value=4)
    registry = build_decode_registry(B, T, options)
    assert set(registry.slot_names) >= INDEX_SEMANTIC_BUFFERS
    poison(registry)
    made = batch(
        mrope_positions=torch.ones(3, 2, dtype=torch.int64),
        mamba_track_indices=torch.tensor([2, 3]),
        mamba_track_mask=torch.tensor([True, False]),
    )
    registry.fill_from(made, CTX)
    view = registry.extract_buffer(made, CTX)
    assert view.mrope_positions is not None
    assert view.mamba_track_mask is not None
    assert view.mrope_positions.tolist() == [[1, 1, 0, 0]] * 3
    assert view.mamba_track_mask.tolist() == [True, False, False, False]
    assert view.encoder_lens is None
    assert build_decode_registry(B, T, options).buffer("encoder_lens").tolist() == [4] * B


def test_the_predicate_is_the_verdict() -> None:
    """One callable decides "sharded" for the count and for the graph; a custom one may look at the width."""
    options = RegistryOptions(attn_tp_size=2, sharded=lambda width: width >= 8)
    registry = build_decode_registry(B, T, options)
    for padded, local in ((4, 3), (8, 3), (6, 3)):
        ctx = FillContext(2, padded, 2, padded)
        assert registry.verdict(ctx) is (padded >= 8)
        registry.fill_from(counted(3), ctx)
        assert registry.buffer("num_token_non_padded").tolist() == [local]
    second = RegistryOptions(attn_tp_rank=1, attn_tp_size=2, sharded=lambda width: width >= 8)
    registry = build_decode_registry(B, T, second)
    registry.fill_from(counted(7), FillContext(2, 8, 2, 8))
    assert registry.buffer("num_token_non_padded").tolist() == [3]
