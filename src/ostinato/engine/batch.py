"""One step's real rows as host arrays: what the scheduler hands to the graph runners.

`ForwardBatch` is a value. Padded views of it have the same type, with fields that are static buffers. Knows
nothing of buckets or buffers. Invariant: the GLOBAL count of real rows is set when the batch is made and never
written again; the LOCAL count (what this rank feeds to MoE) is another field, and computed by the registries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ostinato.padding import ShapeRules, StepMode, StepShape, decide_shape

Ints = Sequence[int] | torch.Tensor


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Real rows of one step. n = rows, bs = requests; int64 on the host unless said otherwise.

    input_ids [n] (None in draft steps), positions [n], out_cache_loc [n]: KV slot of each row, 0 is trash.
    req_pool_indices [bs]: row of the page table, 0 belongs to pads.
    seq_lens, seq_lens_cpu [bs]: KV length including this step's rows; seq_lens_sum: their sum.
    extend_seq_lens, extend_prefix_lens, extend_start_loc [bs]: extend and mixed steps only.
    logit_rows [n]: there, too: rows that leave the last layer, in the order of the output; zeros behind them.
    num_logit_rows: int32 [1], how many.
    global_num_token_non_padded: int32 [1], GLOBAL real rows of this data-parallel group; `_cpu` the same number.
    num_token_non_padded: int32 [1], LOCAL; None in a batch unless a context-parallel strategy supplies it.
    num_padding: pad requests of a view, 0 in a batch.
    """

    mode: StepMode
    batch_size: int
    input_ids: torch.Tensor | None
    positions: torch.Tensor
    out_cache_loc: torch.Tensor
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    seq_lens_cpu: torch.Tensor
    seq_lens_sum: int
    global_num_token_non_padded: torch.Tensor
    global_num_token_non_padded_cpu: int
    num_token_non_padded: torch.Tensor | None = None
    num_padding: int = 0
    extend_seq_lens: torch.Tensor | None = None
    extend_prefix_lens: torch.Tensor | None = None
    extend_start_loc: torch.Tensor | None = None
    logit_rows: torch.Tensor | None = None
    num_logit_rows: torch.Tensor | None = None
    orig_seq_lens: torch.Tensor | None = None
    mrope_positions: torch.Tensor | None = None
    encoder_lens: torch.Tensor | None = None
    input_embeds: torch.Tensor | None = None
    global_num_tokens_gpu: torch.Tensor | None = None
    global_num_tokens_for_logprob_gpu: torch.Tensor | None = None
    global_num_tokens_cpu: tuple[int, ...] | None = None
    mamba_track_indices: torch.Tensor | None = None
    mamba_track_mask: torch.Tensor | None = None
    mamba_track_seqlens: torch.Tensor | None = None
    rids_int: torch.Tensor | None = None
    bootstrap_room_ids_int: torch.Tensor | None = None
    ngram_embedding_info: Any = None


def global_num_tokens(input_ids: torch.Tensor | None, batch_size: int, tokens_per_request: int = 1) -> int:
    """GLOBAL count of a batch: its input ids; for draft steps, which have none, requests * rows of each."""
    return batch_size * tokens_per_request if input_ids is None else input_ids.shape[0]


def decode_batch(
    input_ids: Ints | None,
    seq_lens: Ints,
    req_pool_indices: Ints,
    out_cache_loc: Ints,
    *,
    tokens_per_request: int = 1,
    **optional: Any,
) -> ForwardBatch:
    """A decode step: `tokens_per_request` rows for each request, at the last positions of its sequence.

    `optional` sets further fields of `ForwardBatch`. Raises ValueError when lengths disagree.
    """
    lens = _ints(seq_lens)
    if tokens_per_request == 1:
        positions = lens - 1
    else:
        first = lens.unsqueeze(1) - tokens_per_request
        positions = (first + torch.arange(tokens_per_request)).reshape(-1)
    return _make(
        StepMode.DECODE,
        input_ids,
        positions,
        out_cache_loc,
        req_pool_indices,
        lens,
        tokens_per_request,
        optional,
    )


def decode_rows(
    input_ids: list[int], seq_lens: list[int], req_pool_indices: list[int], out_cache_loc: list[int]
) -> ForwardBatch:
    """`decode_batch` of one row for each request, all from host lists of one length.

    In as few torch operations as there can be: after a step the caches hold weights, and each costs some 20 us.
    """
    count = len(input_ids)
    positions = [n - 1 for n in seq_lens]
    made = torch.tensor((input_ids, positions, out_cache_loc, req_pool_indices, seq_lens))
    ids, where, slots, pool, lens = made.unbind()
    return ForwardBatch(
        mode=StepMode.DECODE,
        batch_size=count,
        input_ids=ids,
        positions=where,
        out_cache_loc=slots,
        req_pool_indices=pool,
        seq_lens=lens,
        seq_lens_cpu=lens,
        seq_lens_sum=sum(seq_lens),
        global_num_token_non_padded=torch.tensor((count,), dtype=torch.int32),
        global_num_token_non_padded_cpu=count,
    )


def extend_batch(
    input_ids: Ints,
    extend_seq_lens: Ints,
    extend_prefix_lens: Ints,
    req_pool_indices: Ints,
    out_cache_loc: Ints,
    *,
    mode: StepMode = StepMode.EXTEND,
    logit_rows: Sequence[int] | None = None,
    **optional: Any,
) -> ForwardBatch:
    """A prefill (or mixed) step: request i adds `extend_seq_lens[i]` rows after `extend_prefix_lens[i]` cached.

    Rows of a request stand together, in the order of the requests. A decode row of a mixed step is an extend of
    one. `logit_rows`: those whose outputs are wanted, in any order; all when None. `optional` sets further fields of
    `ForwardBatch`. Raises ValueError when lengths disagree, and for wanted rows that are not there.
    """
    lens, prefix = _ints(extend_seq_lens), _ints(extend_prefix_lens)
    start = lens.cumsum(0) - lens
    ids = _ints(input_ids)
    if int(lens.sum()) != ids.shape[0]:
        raise ValueError(f"extend_seq_lens add up to {int(lens.sum())}, input_ids has {ids.shape[0]} rows")
    positions = torch.arange(ids.shape[0]) + torch.repeat_interleave(prefix - start, lens)
    extend = {"extend_seq_lens": lens, "extend_prefix_lens": prefix, "extend_start_loc": start}
    extend |= _logit_rows(ids.shape[0], logit_rows)
    return _make(mode, ids, positions, out_cache_loc, req_pool_indices, prefix + lens, 1, optional | extend)


def _logit_rows(count: int, wanted: Sequence[int] | None) -> dict[str, torch.Tensor]:
    if wanted is None:
        rows, number = torch.arange(count), count
    else:
        number = len(wanted)
        if number > count or (number and not 0 <= min(wanted) <= max(wanted) < count):
            raise ValueError(
                f"logit_rows asks for {list(wanted)} of {count} rows; name each of them once at most"
            )
        rows = torch.zeros(count, dtype=torch.int64)
        rows[:number] = torch.tensor(wanted, dtype=torch.int64)
    return {"logit_rows": rows, "num_logit_rows": torch.full((1,), number, dtype=torch.int32)}


def idle_batch(mode: StepMode = StepMode.IDLE) -> ForwardBatch:
    """A step without rows: its GLOBAL count is 0, and whatever the runner pads it to is a pad."""
    if mode.is_extend:
        return extend_batch((), (), (), (), (), mode=mode)
    none = torch.zeros(0, dtype=torch.int64)
    return _make(mode, none, none, none, none, none, 1, {})


def capture_shapes(
    mode: StepMode,
    rules: ShapeRules,
    *,
    context_len: int,
    dp_size: int = 1,
    variants: Sequence[str] = ("",),
) -> list[StepShape]:
    """One full shape for each bucket of `rules` and variant that can be captured ahead of time, all rows real."""
    shapes = []
    for size in (rules.extend if mode.is_extend else rules.decode).sizes:
        tokens = size if mode.is_extend else size * rules.tokens_per_request
        bs = -(-size // context_len) if mode.is_extend else size
        shapes += [decide_shape(mode, [tokens] * dp_size, bs, rules, variant=variant) for variant in variants]
    return [shape for shape in shapes if not shape.eager_reason]


def capture_batch(shape: StepShape, *, seq_len: int = 1) -> ForwardBatch:
    """A dummy batch that fills `shape`: token 0, KV in the trash page. Decode requests have `seq_len` keys."""
    rows, bs = shape.raw_num_tokens, shape.bs
    if not shape.mode.is_extend:
        width = rows // max(bs, 1)
        lens = [max(seq_len, width)] * bs
        return decode_batch([0] * rows, lens, [0] * bs, [0] * rows, tokens_per_request=width)
    lens = [rows // bs + (i < rows % bs) for i in range(bs)]
    return extend_batch([0] * rows, lens, [0] * bs, [0] * bs, [0] * rows, mode=shape.mode)


def _ints(values: Ints) -> torch.Tensor:
    return values if isinstance(values, torch.Tensor) else torch.tensor(values, dtype=torch.int64)


def _make(
    mode: StepMode,
    input_ids: Ints | None,
    positions: torch.Tensor,
    out_cache_loc: Ints,
    req_pool_indices: Ints,
    seq_lens: torch.Tensor,
    tokens_per_request: int,
    optional: dict[str, Any],
) -> ForwardBatch:
    ids = None if input_ids is None else _ints(input_ids)
    batch_size = seq_lens.shape[0]
    count = global_num_tokens(ids, batch_size, tokens_per_request)
    slots, pool = _ints(out_cache_loc), _ints(req_pool_indices)
    if not count == positions.shape[0] == slots.shape[0] or pool.shape[0] != batch_size:
        raise ValueError(
            f"a batch of {count} rows and {batch_size} requests got {positions.shape[0]} positions, "
            f"{slots.shape[0]} cache locations and {pool.shape[0]} page-table rows; give one for each"
        )
    return ForwardBatch(
        mode=mode,
        batch_size=batch_size,
        input_ids=ids,
        positions=positions,
        out_cache_loc=slots,
        req_pool_indices=pool,
        seq_lens=seq_lens,
        seq_lens_cpu=seq_lens,
        seq_lens_sum=int(seq_lens.sum()),
        global_num_token_non_padded=torch.full((1,), count, dtype=torch.int32),
        global_num_token_non_padded_cpu=count,
        **optional,
    )
