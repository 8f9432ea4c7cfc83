"""The static inputs of decode and prefill graphs: which buffers exist, what their tails hold, how counts get in.

Tables of slots over `ForwardBatch` (docs/behaviour.md, sections 2.6 and 2.7). Knows nothing of models or
backends. Invariant: counts are written at every fill, in every parallel layout, and one predicate decides
whether rows are attention-TP sharded: for capture, replay and eager alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ostinato.engine.batch import ForwardBatch
from ostinato.errors import ConfigError
from ostinato.graphs.registry import BufferPool, GraphBufferRegistry
from ostinato.graphs.slots import Axis, FillContext, GraphSlot, PaddingPolicy
from ostinato.graphs.stream import Stream
from ostinato.padding import local_num_token_non_padded

INDEX_SEMANTIC_BUFFERS = frozenset(
    {
        "positions",
        "mrope_positions",
        "out_cache_loc",
        "req_pool_indices",
        "mamba_track_indices",
        "mamba_track_mask",
    }
)
"""Buffers whose values are used as indices: a stale tail there is an illegal access, so theirs are zeroed."""

_ZERO, _SENTINEL, _ONCE, _KEEP = (
    PaddingPolicy.ZERO,
    PaddingPolicy.FILL_SENTINEL,
    PaddingPolicy.FILL_ONCE,
    PaddingPolicy.KEEP_PAD,
)


@dataclass(frozen=True, slots=True)
class RegistryOptions:
    """What the registries depend on; explicit, so that no layer asks the process for its rank.

    require_gathered_buffer: MoE or MLP inputs are gathered, over data-parallel ranks or attention-TP shards;
        require_mlp_tp_gather: over data-parallel ranks, so the global counts have one entry per rank.
    sharded: (padded rows) -> whether rows are split over attention TP; None for the default rule, gathered and
        without prefill context parallelism.
    seq_len_fill_value: the attention backend's, for decode pads; prefill pads have length 0.
    request_slots: the prefill graph holds attention too, so the prefill registry owns the per-request fields.
    pp_proxy: (key, width, dtype) of what an earlier pipeline stage hands over, [rows, width] each.
    """

    attn_tp_rank: int = 0
    attn_tp_size: int = 1
    require_gathered_buffer: bool = False
    require_mlp_tp_gather: bool = False
    enable_prefill_cp: bool = False
    dp_size: int = 1
    sharded: Callable[[int], bool] | None = None
    seq_len_fill_value: int = 1
    cache_loc_dtype: torch.dtype = torch.int64
    register_global_num_tokens: bool = False
    multimodal: bool = False
    mamba: bool = False
    encoder_len_fill_value: int | None = None
    register_input_embeds: bool = False
    hidden_size: int = 0
    embeds_dtype: torch.dtype = torch.float32
    request_slots: bool = False
    pp_proxy: tuple[tuple[str, int, torch.dtype], ...] = ()

    def __post_init__(self) -> None:
        if self.register_input_embeds and self.hidden_size < 1:
            raise ConfigError(f"register_input_embeds needs hidden_size > 0, got {self.hidden_size}")

    def is_sharded(self, padded_num_tokens: int) -> bool:
        """The one predicate: does each attention-TP rank own a slice of the `padded_num_tokens` rows?"""
        if self.sharded is not None:
            return self.sharded(padded_num_tokens)
        return self.require_gathered_buffer and not self.enable_prefill_cp

    def localize(self, global_count: int, padded_num_tokens: int) -> int:
        """The LOCAL count of this rank for a host GLOBAL count."""
        return local_num_token_non_padded(
            global_count,
            padded_num_tokens,
            attn_tp_rank=self.attn_tp_rank,
            attn_tp_size=self.attn_tp_size,
            sharded=self.is_sharded(padded_num_tokens),
        )


def build_decode_registry(
    max_bs: int,
    max_tokens: int,
    options: RegistryOptions | None = None,
    *,
    device: torch.device | str = "cpu",
    pool: BufferPool | None = None,
    source: Any = None,
    extra_slots: Iterable[GraphSlot] = (),
    advance: Callable[[ForwardBatch, Stream], None] | None = None,
) -> GraphBufferRegistry[ForwardBatch]:
    """Static inputs of decode steps of up to `max_bs` requests and `max_tokens` rows.

    `advance`: launches what makes the next step's inputs of those in a view (see `GraphBufferRegistry`).
    `source`: an object whose attributes are adopted as the buffers; structured ones (n-gram info, pipeline
    proxies, request canaries) are registered only where it has them. Raises ValueError when it lacks a required
    buffer, AssertionError when the zeroed slots are not exactly the index-like ones.
    """
    options = RegistryOptions() if options is None else options
    registry = _registry(max_bs, max_tokens, options, device, pool, options.seq_len_fill_value, advance)
    for slot in [*_decode_slots(options), *extra_slots]:
        registry.register_slot(slot, bind=_adopted(source, slot))
    for slot, buffer in _structured_slots(source):
        registry.register_slot(slot, bind=buffer)
    zeroed = {slot.name for slot in registry.slots() if slot.padding_policy is PaddingPolicy.ZERO}
    expected = INDEX_SEMANTIC_BUFFERS & set(registry.slot_names)
    assert zeroed == expected, f"zeroed slots {sorted(zeroed)} must be the index-like ones {sorted(expected)}"
    return registry


def build_prefill_registry(
    max_bs: int,
    max_tokens: int,
    options: RegistryOptions | None = None,
    *,
    device: torch.device | str = "cpu",
    pool: BufferPool | None = None,
    extra_slots: Iterable[GraphSlot] = (),
) -> GraphBufferRegistry[ForwardBatch]:
    """Static inputs of prefill steps: pad rows are really executed, so every tail is benign.

    With `options.request_slots` it owns the request fields too: unused requests have length 0 and start behind
    the real rows.
    """
    options = RegistryOptions() if options is None else options
    registry = _registry(max_bs, max_tokens, options, device, pool, 0)
    for slot in [*_prefill_slots(options), *extra_slots]:
        registry.register_slot(slot)
    return registry


def _registry(
    max_bs: int,
    max_tokens: int,
    options: RegistryOptions,
    device: torch.device | str,
    pool: BufferPool | None,
    pad_seq_len: int,
    advance: Callable[[ForwardBatch, Stream], None] | None = None,
) -> GraphBufferRegistry[ForwardBatch]:
    def view_fields(batch: ForwardBatch, ctx: FillContext) -> Mapping[str, Any]:
        pads = ctx.padded_bs - ctx.raw_bs
        return {"num_padding": pads, "seq_lens_sum": batch.seq_lens_sum + pads * pad_seq_len}

    def verdict(ctx: FillContext) -> bool:
        return options.is_sharded(ctx.padded_num_tokens)

    return GraphBufferRegistry(
        max_bs,
        max_tokens,
        device=device,
        pool=pool,
        view_fields=view_fields,
        verdict=verdict,
        advance=advance,
    )


def _row(name: str, dtype: torch.dtype, policy: PaddingPolicy, **more: Any) -> GraphSlot:
    return GraphSlot(name, lambda bs, tokens: (tokens,), dtype, "tokens", padding_policy=policy, **more)


def _request(name: str, dtype: torch.dtype, policy: PaddingPolicy, **more: Any) -> GraphSlot:
    return GraphSlot(name, lambda bs, tokens: (bs,), dtype, "bs", padding_policy=policy, **more)


def _counter(name: str, size: int = 1, **more: Any) -> GraphSlot:
    return GraphSlot(name, lambda bs, tokens: (size,), torch.int32, "none", padding_policy=_KEEP, **more)


def _mrope() -> GraphSlot:
    return GraphSlot(
        "mrope_positions",
        lambda bs, tokens: (3, tokens),
        torch.int64,
        "tokens",
        padding_policy=_ZERO,
        slice_fn=lambda buffer, n: buffer[:, :n],
    )


def _decode_slots(options: RegistryOptions) -> list[GraphSlot]:
    fill = options.seq_len_fill_value
    entries = options.dp_size if options.require_mlp_tp_gather else 1
    slots = [
        _row("input_ids", torch.int64, _SENTINEL, pad_value=0),
        _row("positions", torch.int64, _ZERO),
        _row("out_cache_loc", options.cache_loc_dtype, _ZERO),
        _request("req_pool_indices", torch.int64, _ZERO),
        _request("seq_lens", torch.int64, _SENTINEL, pad_value=fill),
        _request("seq_lens_cpu", torch.int64, _SENTINEL, pad_value=fill, device="cpu"),
        _counter("global_num_token_non_padded"),
        _counter("num_token_non_padded", copy_from_fb=False, post_fill=_decode_count(options)),
    ]
    if options.register_global_num_tokens:
        for name in ("global_num_tokens_gpu", "global_num_tokens_for_logprob_gpu"):
            slots.append(_counter(name, entries, copy_from_fb=False, post_fill=_fill_padded_rows))
    if options.multimodal:
        slots.append(_mrope())
    if options.mamba:
        slots.append(_request("mamba_track_indices", torch.int64, _ZERO))
        slots.append(_request("mamba_track_mask", torch.bool, _ZERO))
    if options.encoder_len_fill_value is not None:
        slots.append(_request("encoder_lens", torch.int64, _ONCE, pad_value=options.encoder_len_fill_value))
    return slots


def _prefill_slots(options: RegistryOptions) -> list[GraphSlot]:
    slots = [
        _row("input_ids", torch.int64, _ZERO),
        _row("positions", torch.int64, _ZERO),
        _row("out_cache_loc", options.cache_loc_dtype, _ZERO),
        _counter("global_num_token_non_padded"),
        _counter("num_token_non_padded", copy_from_fb=False, post_fill=_prefill_count(options)),
        _row("logit_rows", torch.int64, _ZERO),
        _counter("num_logit_rows"),
    ]
    if options.multimodal:
        slots.append(_mrope())
    if options.register_input_embeds:
        shape = options.hidden_size
        embeds = GraphSlot(
            "input_embeds",
            lambda bs, tokens: (tokens, shape),
            options.embeds_dtype,
            "tokens",
            padding_policy=_ZERO,
            copy_from_fb=False,
        )
        slots.append(embeds)
    if options.mamba:
        mask_tail = _ZERO if options.request_slots else PaddingPolicy.FOREACH_COPY
        slots.append(_request("mamba_track_indices", torch.int64, PaddingPolicy.FOREACH_COPY))
        slots.append(_request("mamba_track_mask", torch.bool, mask_tail))
        slots.append(_request("mamba_track_seqlens", torch.int32, PaddingPolicy.FOREACH_COPY))
    for key, width, dtype in options.pp_proxy:
        slots.append(_proxy_slot(key, width, dtype))
    if options.request_slots:
        slots += [
            _request("seq_lens", torch.int64, _ZERO),
            _request("seq_lens_cpu", torch.int64, _ZERO, device="cpu"),
            _request("extend_seq_lens", torch.int64, _ZERO),
            _request("extend_prefix_lens", torch.int64, _ZERO),
            _request("extend_start_loc", torch.int64, _KEEP, post_fill=_start_behind_real_rows),
            _request("req_pool_indices", torch.int64, _ZERO),
            _request("orig_seq_lens", torch.int64, _ZERO),
        ]
    return slots


def _proxy_slot(key: str, width: int, dtype: torch.dtype) -> GraphSlot:
    return GraphSlot(
        f"pp_proxy_tensors.{key}",
        lambda bs, tokens: (tokens, width),
        dtype,
        "tokens",
        padding_policy=_ZERO,
        source_fn=_proxy(key),
    )


# --- computed values ----------------------------------------------------------------------------------------

Hook = Callable[[torch.Tensor, ForwardBatch, FillContext], None]


def _decode_count(options: RegistryOptions) -> Hook:
    """LOCAL count of a decode step, from the device's GLOBAL count; a context-parallel one is copied."""

    def fill(buffer: torch.Tensor, batch: ForwardBatch, ctx: FillContext) -> None:
        width = ctx.padded_num_tokens
        if options.is_sharded(width):
            local = local_num_token_non_padded(
                batch.global_num_token_non_padded,
                width,
                attn_tp_rank=options.attn_tp_rank,
                attn_tp_size=options.attn_tp_size,
            )
            buffer.copy_(local)
        elif options.enable_prefill_cp and batch.num_token_non_padded is not None:
            buffer.copy_(batch.num_token_non_padded)
        else:
            buffer.copy_(batch.global_num_token_non_padded)

    return fill


def _prefill_count(options: RegistryOptions) -> Hook:
    """LOCAL count of a prefill step, from the host: the batch's own tensor might be localized already."""

    def fill(buffer: torch.Tensor, batch: ForwardBatch, ctx: FillContext) -> None:
        width = ctx.padded_num_tokens
        if options.is_sharded(width):
            buffer.fill_(options.localize(batch.global_num_token_non_padded_cpu, width))
        elif options.enable_prefill_cp and batch.num_token_non_padded is not None:
            buffer.copy_(batch.num_token_non_padded)
        else:
            buffer.fill_(ctx.raw_num_tokens)

    return fill


def _fill_padded_rows(buffer: torch.Tensor, batch: ForwardBatch, ctx: FillContext) -> None:
    """A captured gather moves padded rows of every rank, whatever the batch counted."""
    buffer.fill_(ctx.padded_num_tokens)


def _start_behind_real_rows(buffer: torch.Tensor, batch: ForwardBatch, ctx: FillContext) -> None:
    buffer[ctx.raw_bs : ctx.padded_bs].fill_(ctx.raw_num_tokens)


def _proxy(key: str) -> Callable[[Any, FillContext], torch.Tensor | None]:
    def rows(batch: Any, ctx: FillContext) -> torch.Tensor | None:
        return None if ctx.pp_proxy_tensors is None else ctx.pp_proxy_tensors.get(key)

    return rows


# --- adopted buffers ----------------------------------------------------------------------------------------


def _adopted(source: Any, slot: GraphSlot) -> torch.Tensor | None:
    if source is None or not slot.enabled:
        return None
    buffer = getattr(source, slot.name, None)
    if not isinstance(buffer, torch.Tensor):
        raise ValueError(
            f"the source of the decode registry has no buffer {slot.name!r}; add it, or drop the slot"
        )
    return buffer


def _structured_slots(source: Any) -> list[tuple[GraphSlot, torch.Tensor]]:
    """Slots that exist only where `source` has the buffer; nobody reads their tails."""
    found: list[tuple[GraphSlot, torch.Tensor]] = []
    info = getattr(source, "ngram_embedding_info", None)
    for key in ("column_starts", "req_lens"):
        buffer = getattr(info, key, None)
        if isinstance(buffer, torch.Tensor):
            found.append((_like(f"ngram_embedding_info.{key}", buffer, "none", _KEEP, _ngram(key)), buffer))
    for key, buffer in (getattr(source, "pp_proxy_tensors", None) or {}).items():
        found.append((_like(f"pp_proxy_tensors.{key}", buffer, "none", _KEEP, _proxy(key)), buffer))
    for name, pad in (("rids_int", 0), ("bootstrap_room_ids_int", -1)):
        buffer = getattr(source, name, None)
        if isinstance(buffer, torch.Tensor):
            found.append((_like(name, buffer, "bs", _ONCE, None, pad), buffer))
    return found


def _ngram(key: str) -> Callable[[Any, FillContext], torch.Tensor | None]:
    def rows(batch: Any, ctx: FillContext) -> torch.Tensor | None:
        return getattr(batch.ngram_embedding_info, key, None)

    return rows


def _like(
    name: str,
    buffer: torch.Tensor,
    axis: Axis,
    policy: PaddingPolicy,
    source_fn: Callable[[Any, FillContext], torch.Tensor | None] | None,
    pad_value: float | None = None,
) -> GraphSlot:
    shape = tuple(buffer.shape)
    return GraphSlot(
        name,
        lambda bs, tokens: shape,
        buffer.dtype,
        axis,
        padding_policy=policy,
        pad_value=pad_value,
        source_fn=source_fn,
    )
