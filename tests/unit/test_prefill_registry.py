"""The prefill registry: P1-P8 of the behaviour reference (P9-P11 are decisions, see test_padding)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ostinato.engine.batch import ForwardBatch, extend_batch, idle_batch
from ostinato.engine.registries import RegistryOptions, build_prefill_registry
from ostinato.errors import ConfigError
from ostinato.graphs import FillContext, GraphBufferRegistry
from ostinato.padding import StepMode

B, T = 4, 16
CTX = FillContext(raw_bs=1, padded_bs=1, raw_num_tokens=3, padded_num_tokens=8)


def batch(**more: Any) -> ForwardBatch:
    return extend_batch([5, 6, 7], [3], [16], [2], [48, 49, 50], **more)


def poisoned(options: RegistryOptions | None = None, value: float = 7) -> GraphBufferRegistry[ForwardBatch]:
    registry = build_prefill_registry(B, T, options)
    for name in registry.slot_names:
        registry.buffer(name).fill_(value)
    return registry


def test_p1_rows_and_tails() -> None:
    registry = poisoned()
    made = batch()
    registry.fill_from(made, CTX)
    for name in ("input_ids", "positions", "out_cache_loc", "logit_rows"):
        assert registry.buffer(name)[:3].tolist() == getattr(made, name).tolist()
        assert registry.buffer(name)[3:8].tolist() == [0] * 5
        assert registry.buffer(name)[8:].tolist() == [7] * 8


def test_p2_embeddings_are_written_inside_the_graph() -> None:
    options = RegistryOptions(multimodal=True, register_input_embeds=True, hidden_size=4)
    registry = poisoned(options, 5)
    made = batch(input_embeds=torch.ones(3, 4), mrope_positions=torch.ones(3, 3, dtype=torch.int64))
    registry.fill_from(made, CTX)
    embeds = registry.buffer("input_embeds")
    assert embeds[:3].eq(5).all()
    assert embeds[3:8].eq(0).all()
    assert embeds[8:].eq(5).all()
    assert registry.buffer("mrope_positions")[:, :9].tolist() == [[1, 1, 1, 0, 0, 0, 0, 0, 5]] * 3
    view = registry.extract_buffer(made, CTX)
    assert view.input_embeds is not None
    assert view.input_embeds.data_ptr() == embeds.data_ptr()
    with pytest.raises(ConfigError, match="hidden_size"):
        RegistryOptions(register_input_embeds=True)


def test_p3_mamba_tracks_copy_requests_only() -> None:
    registry = poisoned(RegistryOptions(mamba=True))
    made = batch(
        mamba_track_indices=torch.tensor([3]),
        mamba_track_mask=torch.tensor([False]),
        mamba_track_seqlens=torch.tensor([9], dtype=torch.int32),
    )
    registry.fill_from(made, replace(CTX, padded_bs=3))
    assert registry.buffer("mamba_track_indices").tolist() == [3, 7, 7, 7]
    assert registry.buffer("mamba_track_mask").tolist() == [False, True, True, True]
    assert registry.buffer("mamba_track_seqlens").tolist() == [9, 7, 7, 7]


def test_stale_mamba_masks_are_cleared_with_request_slots() -> None:
    registry = poisoned(RegistryOptions(mamba=True, request_slots=True))
    registry.fill_from(batch(mamba_track_mask=torch.tensor([True])), replace(CTX, padded_bs=4))
    assert registry.buffer("mamba_track_mask").tolist() == [True, False, False, False]


def test_p4_pipeline_proxies() -> None:
    registry = poisoned(
        RegistryOptions(pp_proxy=(("hidden", 2, torch.float32), ("residual", 2, torch.float32)))
    )
    ctx = replace(CTX, pp_proxy_tensors={"hidden": torch.ones(3, 2), "unknown": torch.ones(9)})
    registry.fill_from(batch(), ctx)
    hidden, residual = (
        registry.buffer("pp_proxy_tensors.hidden"),
        registry.buffer("pp_proxy_tensors.residual"),
    )
    assert hidden[:3].eq(1).all()
    assert hidden[3:8].eq(0).all()
    assert hidden[8:].eq(7).all()
    assert residual[:3].eq(7).all(), "a key that the live proxy lacks is not copied"
    assert residual[3:8].eq(0).all()


def test_p5_unregistered_embeddings_are_carried() -> None:
    embeds = torch.ones(3, 4)
    registry = poisoned()
    assert registry.extract_buffer(batch(input_embeds=embeds), CTX).input_embeds is embeds


def long_batch() -> ForwardBatch:
    rows = [0] * 1018
    local = torch.tensor([509], dtype=torch.int32)
    return extend_batch(rows, [1018], [0], [1], rows, num_token_non_padded=local)


@pytest.mark.parametrize(
    ("gathered", "cp", "rank", "expected"),
    [
        pytest.param(True, False, 0, 512, id="P6-rank0"),
        pytest.param(True, False, 1, 506, id="P6-rank1"),
        pytest.param(False, False, 0, 1018, id="P7-rank0"),
        pytest.param(False, False, 1, 1018, id="P7-rank1"),
        pytest.param(True, True, 0, 509, id="P8-cp"),
    ],
)
def test_p6_p7_p8_counts(gathered: bool, cp: bool, rank: int, expected: int) -> None:
    """The batch's own tensor says 509, local already: localizing or copying it would be wrong without CP."""
    options = RegistryOptions(
        attn_tp_rank=rank, attn_tp_size=2, require_gathered_buffer=gathered, enable_prefill_cp=cp
    )
    registry = build_prefill_registry(B, 1024, options)
    made = long_batch()
    ctx = FillContext(1, 1, 1018, 1024)
    for _ in range(2):
        registry.fill_from(made, ctx)
        view = registry.extract_buffer(made, ctx)
        assert view.num_token_non_padded is not None
        assert view.num_token_non_padded.tolist() == [expected]
        assert view.global_num_token_non_padded.tolist() == [1018]
    assert made.num_token_non_padded is not None
    assert made.num_token_non_padded.tolist() == [509]


def test_f9_the_count_is_filled_in_the_plainest_layout() -> None:
    """F9: one rank, no gather: 5 rows in a bucket of 8, then 2; the count follows."""
    registry = poisoned()
    for rows in (5, 2):
        made = extend_batch([1] * rows, [rows], [0], [1], list(range(16, 16 + rows)))
        registry.fill_from(made, FillContext(1, 1, rows, 8))
        assert registry.buffer("num_token_non_padded").tolist() == [rows]


def test_request_slots() -> None:
    """Unused requests have length 0 and start behind the real rows, whatever stood there."""
    registry = poisoned(RegistryOptions(request_slots=True), 99)
    made = extend_batch([1, 2, 3, 4, 5], [2, 3], [16, 0], [3, 1], [32, 33, 64, 65, 66])
    ctx = FillContext(2, 4, 5, 8)
    registry.fill_from(made, ctx)
    view = registry.extract_buffer(made, ctx)
    assert view.extend_seq_lens is not None
    assert view.extend_prefix_lens is not None
    assert view.extend_start_loc is not None
    assert view.seq_lens.tolist() == view.seq_lens_cpu.tolist() == [18, 3, 0, 0]
    assert view.extend_seq_lens.tolist() == [2, 3, 0, 0]
    assert view.extend_prefix_lens.tolist() == [16, 0, 0, 0]
    assert view.extend_start_loc.tolist() == [0, 2, 5, 5]
    assert view.req_pool_indices.tolist() == [3, 1, 0, 0]
    assert view.orig_seq_lens is None
    assert (view.batch_size, view.num_padding, view.seq_lens_sum) == (4, 2, 21)


def test_idle_ranks_count_nothing() -> None:
    """F25: an idle rank's rows are pads: its count is 0 and its slots are empty requests."""
    registry = poisoned(RegistryOptions(request_slots=True), 99)
    made = idle_batch(StepMode.EXTEND)
    ctx = FillContext(0, 4, 0, 8)
    registry.fill_from(made, ctx)
    view = registry.extract_buffer(made, ctx)
    assert view.num_token_non_padded is not None
    assert view.extend_start_loc is not None
    assert view.input_ids is not None
    assert view.num_token_non_padded.tolist() == [0]
    assert view.seq_lens.tolist() == view.extend_start_loc.tolist() == [0] * 4
    assert view.input_ids.tolist() == [0] * 8
