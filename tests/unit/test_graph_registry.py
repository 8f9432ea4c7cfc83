"""Static buffers and their one writer: R1-R18 of the behaviour reference; F10, F11, F12."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from ostinato.graphs import BufferPool, FillContext, GraphBufferRegistry, GraphSlot, PaddingPolicy
from ostinato.graphs.registry import MAX_PLANS

BS, TOKENS = 8, 16
CTX = FillContext(raw_bs=2, padded_bs=4, raw_num_tokens=4, padded_num_tokens=8)


@dataclass(frozen=True, slots=True)
class Batch:
    batch_size: int = 2
    input_ids: torch.Tensor | None = None
    out_cache_loc: torch.Tensor | None = None
    req_pool_indices: torch.Tensor | None = None
    seq_lens: torch.Tensor | None = None
    seq_lens_cpu: torch.Tensor | None = None
    mrope_positions: torch.Tensor | None = None
    encoder_lens: torch.Tensor | None = None
    count: Any = None
    input_embeds: torch.Tensor | None = None


def slot(
    name: str, axis: Any = "tokens", policy: PaddingPolicy = PaddingPolicy.FOREACH_COPY, **more: Any
) -> GraphSlot:
    def shape(bs: int, tokens: int) -> tuple[int, ...]:
        return {"tokens": (tokens,), "bs": (bs,), "none": (1,)}[axis]

    more.setdefault("shape_fn", shape)
    return GraphSlot(
        name=name, dtype=more.pop("dtype", torch.int64), axis=axis, padding_policy=policy, **more
    )


def registry(
    *slots: GraphSlot, pool: BufferPool | None = None, bs: int = BS, tokens: int = TOKENS
) -> GraphBufferRegistry[Batch]:
    made: GraphBufferRegistry[Batch] = GraphBufferRegistry(bs, tokens, pool=pool)
    for each in slots:
        made.register_slot(each)
    return made


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def test_r1_unknown_axis() -> None:
    with pytest.raises(ValueError, match="garbage"):
        GraphSlot("x", lambda bs, tokens: (tokens,), torch.int64, "garbage")  # type: ignore[arg-type]


def test_r2_buffers_start_as_zeros() -> None:
    made = registry(slot("input_ids"))
    assert made.buffer("input_ids").tolist() == [0] * 16


def test_r3_duplicate_names() -> None:
    made = registry(slot("input_ids"), slot("seq_lens", enabled=False))
    for name in ("input_ids", "seq_lens"):
        with pytest.raises(ValueError, match=name):
            made.register_slot(slot(name))


def test_r4_disabled_slots_do_not_exist() -> None:
    made = registry(slot("input_ids"), slot("seq_lens", "bs", enabled=False))
    assert not made.has_slot("seq_lens")
    assert made.slot_names == ("input_ids",)
    with pytest.raises(KeyError):
        made.buffer("seq_lens")
    batch = Batch(input_ids=ints(1, 2, 3, 4), seq_lens=ints(7, 8))
    made.fill_from(batch, CTX)
    assert made.extract_buffer(batch, CTX).seq_lens is batch.seq_lens


def test_r5_bound_buffers_must_match() -> None:
    made = registry()
    with pytest.raises(ValueError, match=r"\(16,\)"):
        made.register_slot(slot("input_ids"), bind=torch.zeros(15, dtype=torch.int64))
    with pytest.raises(ValueError, match="int64"):
        made.register_slot(slot("input_ids"), bind=torch.zeros(16, dtype=torch.int32))
    mine = torch.full((16,), 3)
    made.register_slot(slot("input_ids", policy=PaddingPolicy.FILL_ONCE, pad_value=9), bind=mine)
    assert made.buffer("input_ids") is mine
    assert mine.tolist() == [3] * 16, "an adopted buffer is left as it is"


def test_r6_tails_of_all_axes() -> None:
    made = registry(
        slot("req_pool_indices", "bs", PaddingPolicy.ZERO),
        slot("out_cache_loc", "tokens", PaddingPolicy.ZERO),
        slot("seq_lens", "bs", PaddingPolicy.FILL_SENTINEL, pad_value=5),
        slot("seq_lens_cpu", "bs", PaddingPolicy.FILL_SENTINEL, pad_value=5, device="cpu"),
    )
    for name in made.slot_names:
        made.buffer(name).fill_(99)
    lens = ints(11, 12)
    made.fill_from(
        Batch(req_pool_indices=ints(3, 1), out_cache_loc=ints(1, 2, 3, 4), seq_lens=lens, seq_lens_cpu=lens),
        CTX,
    )
    assert made.buffer("req_pool_indices").tolist() == [3, 1, 0, 0, 99, 99, 99, 99]
    assert made.buffer("out_cache_loc").tolist() == [1, 2, 3, 4, 0, 0, 0, 0] + [99] * 8
    assert made.buffer("seq_lens").tolist() == [11, 12, 5, 5, 99, 99, 99, 99]
    assert made.buffer("seq_lens_cpu").tolist() == [11, 12, 5, 5, 99, 99, 99, 99]


@pytest.mark.parametrize("policy", [PaddingPolicy.KEEP_PAD, PaddingPolicy.FOREACH_COPY])
def test_r7_kept_tails(policy: PaddingPolicy) -> None:
    made = registry(slot("input_ids", policy=policy))
    made.buffer("input_ids").fill_(77)
    made.fill_from(Batch(input_ids=ints(1, 2, 3, 4)), CTX)
    assert made.buffer("input_ids").tolist() == [1, 2, 3, 4] + [77] * 12


def test_r8_views_alias_the_buffers() -> None:
    made = registry(slot("input_ids"), slot("req_pool_indices", "bs"))
    template = Batch(input_ids=ints(1, 2, 3, 4), req_pool_indices=ints(3, 1))
    before = replace(template)
    view = made.extract_buffer(template, CTX)
    assert view.batch_size == 4
    assert view.input_ids is not None
    assert view.req_pool_indices is not None
    assert view.input_ids.data_ptr() == made.buffer("input_ids").data_ptr()
    assert (view.input_ids.shape, view.req_pool_indices.shape) == ((8,), (4,))
    assert template.batch_size == 2
    assert template.input_ids is before.input_ids


def test_r9_none_stays_none() -> None:
    made = registry(slot("mrope_positions", "tokens", PaddingPolicy.ZERO))
    assert made.extract_buffer(Batch(), CTX).mrope_positions is None


def test_r10_a_missing_field_leaves_the_fill_once_value() -> None:
    made = registry(slot("encoder_lens", "bs", PaddingPolicy.FILL_ONCE, pad_value=6))
    made.fill_from(Batch(), CTX)
    assert made.buffer("encoder_lens").tolist() == [6] * 8
    assert made.extract_buffer(Batch(), CTX).encoder_lens is None


def test_r11_computed_slots_are_always_exposed() -> None:
    made = registry(slot("input_embeds", copy_from_fb=False))
    view = made.extract_buffer(Batch(), CTX)
    assert view.input_embeds is not None
    assert view.input_embeds.shape == (8,)


def test_r12_hooks_run_after_the_copies() -> None:
    seen: list[FillContext] = []

    def times_ten(buffer: torch.Tensor, batch: Batch, ctx: FillContext) -> None:
        seen.append(ctx)
        buffer *= 10

    made = registry(slot("input_ids", post_fill=times_ten))
    made.fill_from(Batch(input_ids=ints(1, 2, 3, 4)), CTX)
    assert made.buffer("input_ids")[:4].tolist() == [10, 20, 30, 40]
    assert [(c.raw_num_tokens, c.padded_num_tokens) for c in seen] == [(4, 8)]


def test_r13_slices_on_the_second_dimension() -> None:
    made = registry(
        slot(
            "mrope_positions",
            "tokens",
            PaddingPolicy.ZERO,
            shape_fn=lambda bs, tokens: (3, tokens),
            slice_fn=lambda buffer, n: buffer[:, :n],
        )
    )
    made.buffer("mrope_positions").fill_(99)
    batch = Batch(mrope_positions=torch.arange(24).view(3, 8))
    ctx = FillContext(1, 1, 8, 12)
    made.fill_from(batch, ctx)
    view = made.extract_buffer(batch, ctx).mrope_positions
    narrow = made.extract_buffer(batch, ctx.real()).mrope_positions
    assert view is not None
    assert narrow is not None
    assert (view.shape, narrow.shape) == ((3, 12), (3, 8))
    assert torch.equal(narrow, torch.arange(24).view(3, 8))
    assert view[:, 8:].eq(0).all()
    assert made.buffer("mrope_positions")[:, 12:].eq(99).all()


@pytest.mark.parametrize(("rows", "expected"), [(ints(5, 6), [5, 6, 99, 99]), (None, [99] * 4)])
def test_r14_sourced_slots(rows: torch.Tensor | None, expected: list[int]) -> None:
    """Head copied and the rest kept; nothing copied for None; a dotted name is no field of the view."""
    made = registry(slot("info.starts", "bs", PaddingPolicy.KEEP_PAD, source_fn=lambda batch, ctx: rows))
    made.buffer("info.starts").fill_(99)
    made.fill_from(Batch(), CTX)
    assert made.buffer("info.starts")[:4].tolist() == expected
    assert not hasattr(made.extract_buffer(Batch(), CTX), "info.starts")


def test_a_dotted_name_needs_a_source() -> None:
    with pytest.raises(ValueError, match="source_fn"):
        slot("info.starts")


@pytest.mark.parametrize("first", [0, 1])
def test_r15_equal_buffers_are_shared(first: int) -> None:
    """In either order of building, also between shapes of equal size."""
    pool = BufferPool()
    shapes: list[Callable[[int, int], tuple[int, ...]]] = [
        lambda bs, tokens: (16,),
        lambda bs, tokens: (2, 8),
    ]
    if first:
        shapes.reverse()
    a, b = (registry(slot("input_ids", shape_fn=shape), pool=pool) for shape in shapes)
    assert a.buffer("input_ids").data_ptr() == b.buffer("input_ids").data_ptr()
    assert a.buffer("input_ids").shape != b.buffer("input_ids").shape
    alone = registry(slot("input_ids"))
    assert alone.buffer("input_ids").data_ptr() != a.buffer("input_ids").data_ptr()


@pytest.mark.parametrize("sizes", [(16, 8), (8, 16)])
def test_r16_other_sizes_never_alias(sizes: tuple[int, int]) -> None:
    pool = BufferPool()
    a, b = (registry(slot("input_ids"), pool=pool, tokens=n) for n in sizes)
    assert a.buffer("input_ids").data_ptr() != b.buffer("input_ids").data_ptr()


def test_sharers_must_agree_on_the_pad_value() -> None:
    pool = BufferPool()
    first = registry(slot("seq_lens", "bs", PaddingPolicy.FILL_SENTINEL, pad_value=1), pool=pool)
    with pytest.raises(ValueError, match="pad_value 1"):
        registry(slot("seq_lens", "bs", PaddingPolicy.FILL_SENTINEL, pad_value=0), pool=pool)
    first.buffer("seq_lens").fill_(42)
    registry(slot("seq_lens", "bs", PaddingPolicy.FILL_SENTINEL, pad_value=1), pool=pool)
    assert first.buffer("seq_lens").tolist() == [42] * 8, "a later sharer must not refill it"


def test_r17_a_sentinel_without_value() -> None:
    made = registry(slot("seq_lens", "bs", PaddingPolicy.FILL_SENTINEL))
    with pytest.raises(RuntimeError, match="pad_value"):
        made.fill_from(Batch(seq_lens=ints(1, 2)), CTX)
    made.fill_from(Batch(seq_lens=ints(1, 2)), CTX.real())
    assert made.buffer("seq_lens").tolist() == [1, 2, 0, 0, 0, 0, 0, 0]


def test_r18_fill_once_is_never_reset() -> None:
    made = registry(slot("encoder_lens", "bs", PaddingPolicy.FILL_ONCE, pad_value=9))
    assert made.buffer("encoder_lens").tolist() == [9] * 8
    made.buffer("encoder_lens").fill_(99)
    made.fill_from(Batch(encoder_lens=ints(1, 2)), CTX)
    assert made.buffer("encoder_lens").tolist() == [1, 2] + [99] * 6


def test_f10_no_tail_survives_a_larger_step() -> None:
    """F10: a step of eight rows, then one of three in the same bucket."""
    made = registry(
        slot("out_cache_loc", "tokens", PaddingPolicy.ZERO),
        slot("seq_lens", "bs", PaddingPolicy.FILL_SENTINEL, pad_value=1),
    )
    made.fill_from(
        Batch(out_cache_loc=torch.full((8,), 4000), seq_lens=torch.full((8,), 4000)), FillContext(8, 8, 8, 8)
    )
    ctx = FillContext(3, 8, 3, 8)
    batch = Batch(out_cache_loc=ints(1, 2, 3), seq_lens=ints(4, 5, 6))
    made.fill_from(batch, ctx)
    view = made.extract_buffer(batch, ctx)
    assert view.out_cache_loc is not None
    assert view.seq_lens is not None
    assert view.out_cache_loc.tolist() == [1, 2, 3, 0, 0, 0, 0, 0]
    assert view.seq_lens.tolist() == [4, 5, 6, 1, 1, 1, 1, 1]


def test_f11_row_fields_narrow_together() -> None:
    """F11: an eager segment sees every field at the real rows, and the padded view is untouched by that."""
    made = registry(
        slot("input_ids"), slot("out_cache_loc", "tokens", PaddingPolicy.ZERO), slot("seq_lens", "bs")
    )
    batch = Batch(input_ids=ints(1, 2, 3, 4), out_cache_loc=ints(5, 6, 7, 8), seq_lens=ints(2, 2))
    made.fill_from(batch, CTX)
    padded, real = made.extract_buffer(batch, CTX), made.extract_buffer(batch, CTX.real())
    for name, rows in (("input_ids", 4), ("out_cache_loc", 4), ("seq_lens", 2)):
        narrow, wide = getattr(real, name), getattr(padded, name)
        assert narrow.shape == (rows,)
        assert torch.equal(narrow, getattr(batch, name))
        assert wide.shape == (2 * rows,)
        assert narrow.data_ptr() == wide.data_ptr()


def test_f12_the_last_row_of_a_view_is_of_this_step() -> None:
    """F12: with room for 8 requests, 8 run, then 2: nothing that leaves the registry reaches row 7."""
    made = registry(slot("req_pool_indices", "bs", PaddingPolicy.ZERO))
    made.fill_from(Batch(req_pool_indices=torch.arange(1, 9)), FillContext(8, 8, 8, 8))
    batch, ctx = Batch(req_pool_indices=ints(3, 4)), FillContext(2, 2, 2, 2)
    made.fill_from(batch, ctx)
    view = made.extract_buffer(batch, ctx).req_pool_indices
    assert view is not None
    assert view[-2:].tolist() == [3, 4]


def test_rows_that_do_not_match_are_refused() -> None:
    """One row would be broadcast over four in silence."""
    made = registry(slot("input_ids"))
    for bad in (ints(1), ints(1, 2, 3)):
        with pytest.raises(ValueError, match="input_ids"):
            made.fill_from(Batch(input_ids=bad), CTX)
    with pytest.raises(ValueError, match="does not fit"):
        made.fill_from(Batch(input_ids=torch.zeros(17, dtype=torch.int64)), FillContext(1, 1, 17, 17))
    with pytest.raises(ValueError, match="does not fit"):
        made.extract_buffer(Batch(), FillContext(9, 9, 9, 9))


def test_dtypes_convert_and_other_fields_are_skipped() -> None:
    made = registry(
        slot("input_ids", dtype=torch.int32), slot("out_cache_loc"), slot("count", "none", dtype=torch.int32)
    )
    made.buffer("count").fill_(5)
    made.fill_from(Batch(input_ids=ints(1, 2, 3, 4), count="no tensor"), CTX)
    assert made.buffer("input_ids")[:4].tolist() == [1, 2, 3, 4]
    assert made.buffer("count").tolist() == [5]
    made.fill_from(Batch(count=torch.tensor(7)), CTX)
    assert made.buffer("count").tolist() == [7], "a scalar fits a buffer of one"


def test_reset_for_capture() -> None:
    """What is written at each step becomes benign, whole; FILL_ONCE and kept slots stay."""
    made = registry(
        slot("out_cache_loc", "tokens", PaddingPolicy.ZERO),
        slot("seq_lens", "bs", PaddingPolicy.FILL_SENTINEL, pad_value=1),
        slot("encoder_lens", "bs", PaddingPolicy.FILL_ONCE, pad_value=9),
        slot("input_ids"),
    )
    for name in made.slot_names:
        made.buffer(name).fill_(4000)
    made.reset_for_capture()
    found = {name: made.buffer(name).unique().tolist() for name in made.slot_names}
    assert found == {"out_cache_loc": [0], "seq_lens": [1], "encoder_lens": [4000], "input_ids": [4000]}


def test_a_computed_slot_needs_a_field_to_show_in() -> None:
    made = registry(slot("nowhere", copy_from_fb=False))
    with pytest.raises(ValueError, match="nowhere"):
        made.extract_buffer(Batch(), CTX)


def test_host_fields_that_padding_changes() -> None:
    made: GraphBufferRegistry[Batch] = GraphBufferRegistry(
        BS,
        TOKENS,
        view_fields=lambda batch, ctx: {"count": ctx.padded_bs - ctx.raw_bs},
        verdict=lambda ctx: ctx.padded_bs,
    )
    assert made.extract_buffer(Batch(), CTX).count == 2
    assert made.verdict(CTX) == 4
    assert registry().verdict(CTX) is None


def test_many_widths_keep_the_plans_bounded() -> None:
    made = registry(slot("input_ids", policy=PaddingPolicy.ZERO), bs=64, tokens=64)
    for raw in range(1, 33):
        for padded in range(raw, raw + 33):
            ctx = FillContext(raw, padded, raw, padded)
            made.fill_from(Batch(input_ids=torch.full((raw,), raw)), ctx)
            assert made.buffer("input_ids")[:padded].tolist() == [raw] * raw + [0] * (padded - raw)
    assert len(made._plans) <= MAX_PLANS
