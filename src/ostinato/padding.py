"""The one home of padding: padded widths, counts of real rows, and masks derived from them.

Two facts are stored, everything else is derived: how many rows are real in each data-parallel group, and the
padded width they run in. Nobody else compares an `arange` with a count (a structure test walks the source).
It knows nothing of models, devices or schedulers and uses torch only through the tensors it is given.
Invariant: shard boundaries come from the PADDED width alone, and the host and device twins agree bit for bit.
"""

from __future__ import annotations

import enum
import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, overload

from ostinato.errors import ConfigError, PadContractError

if TYPE_CHECKING:
    import torch


class StepMode(enum.Enum):
    """What a step runs. `MIXED` (prefill chunks and decode rows together) replays `EXTEND` graphs."""

    DECODE = "decode"
    EXTEND = "extend"
    MIXED = "mixed"
    IDLE = "idle"

    @property
    def is_extend(self) -> bool:
        return self in (StepMode.EXTEND, StepMode.MIXED)


class GraphKey(NamedTuple):
    """Identity of a captured graph. Built by `StepShape` and nowhere else."""

    kind: str  # "decode" or "extend"
    size: int  # rows for extend, batch size for decode
    stream_index: int
    variant: str


@dataclass(frozen=True, slots=True)
class StepShape:
    """The decision about one step: how many rows are real, and how wide it runs.

    `num_tokens` holds the real rows of every data-parallel rank (one entry without data parallelism),
    `padded_num_tokens` and `padded_bs` the widths that this rank executes. `eager_reason` is empty when a
    graph of this key may serve the step, else it says in a few words why none may. `raw_num_tokens` are the real
    rows of this rank, `key` the graph key: the same for capture, admission and replay.
    """

    mode: StepMode
    num_tokens: tuple[int, ...]
    bs: int
    padded_num_tokens: int
    padded_bs: int
    variant: str = ""
    stream_index: int = 0
    dp_rank: int = 0
    eager_reason: str = ""
    raw_num_tokens: int = field(init=False, repr=False, compare=False)
    key: GraphKey = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        extend = self.mode.is_extend
        kind, size = ("extend", self.padded_num_tokens) if extend else ("decode", self.padded_bs)
        object.__setattr__(self, "raw_num_tokens", self.num_tokens[self.dp_rank])
        object.__setattr__(self, "key", GraphKey(kind, size, self.stream_index, self.variant))
        assert self.raw_num_tokens <= self.padded_num_tokens, (self.raw_num_tokens, self.padded_num_tokens)
        assert self.bs <= self.padded_bs, (self.bs, self.padded_bs)


@dataclass(frozen=True, slots=True)
class Buckets:
    """A sorted list of widths for which graphs are captured."""

    sizes: tuple[int, ...]

    @property
    def largest(self) -> int:
        return self.sizes[-1] if self.sizes else 0

    def fit(self, n: int) -> int | None:
        """Smallest bucket that holds `n` rows, or None when `n` is larger than every bucket."""
        i = bisect_left(self.sizes, n)
        return self.sizes[i] if i < len(self.sizes) else None

    @classmethod
    def of(cls, sizes: Iterable[int], *, alignment: int = 1, limit: int | None = None) -> Buckets:
        """Align, filter and sort a list of sizes.

        Sizes are rounded up to a multiple of `alignment` (lcm of attention TP, page and speculative width);
        those over `limit` (what a legal batch can reach) go, and `limit` itself is added when the list
        reached above it, so that the largest legal batch still has a bucket.
        """
        wanted = list(sizes)
        bad = [n for n in wanted if n < 1]
        if bad:
            raise ConfigError(f"bucket sizes must be positive, got {bad}; remove them from the list")
        aligned = {align_up(n, alignment) for n in wanted}
        if limit is not None:
            top = align_up(limit, alignment)
            kept = {n for n in aligned if n <= top}
            if any(n > top for n in aligned):
                kept.add(top)
            aligned = kept
        return cls(tuple(sorted(aligned)))


def align_up(n: int, alignment: int) -> int:
    """`n` rounded up to a multiple of `alignment`."""
    return -(-n // alignment) * alignment


class DpPaddingMode(enum.Enum):
    """How rows of data-parallel ranks share one buffer: equal slots, or exact offsets."""

    MAX_LEN = "max_len"
    SUM_LEN = "sum_len"


class DpCounts(NamedTuple):
    """Rows of each data-parallel rank: real ones (`unpadded`), and as the gathered buffer holds them."""

    mode: DpPaddingMode
    unpadded: tuple[int, ...]
    padded: tuple[int, ...]


def pad_dp_counts(
    counts: Sequence[int],
    *,
    attn_tp_size: int = 1,
    is_extend: bool = False,
    mode: DpPaddingMode | None = None,
) -> DpCounts:
    """Lay out the UNPADDED counts of all ranks (docs/behaviour.md, section 1.8); pure, so equal on each rank.

    Counts are rounded up to the attention-TP size first. Unless `mode` is given, extend steps of several
    ranks take exact offsets, others equal slots as soon as those waste no more than half of the buffer.
    """
    aligned = tuple(align_up(n, attn_tp_size) for n in counts)
    n, top, total = len(aligned), max(aligned), sum(aligned)
    if mode is None:
        exact = (is_extend and n > 1) or 2 * total < top * n
        mode = DpPaddingMode.SUM_LEN if exact else DpPaddingMode.MAX_LEN
    return DpCounts(mode, tuple(counts), (top,) * n if mode is DpPaddingMode.MAX_LEN else aligned)


@dataclass(frozen=True, slots=True)
class ShapeRules:
    """All that decides a step's width besides its counts; fixed at start, equal on every rank.

    `decode_gather`, `extend_gather`: steps of that kind gather rows over data-parallel ranks, so all ranks
    run one width under one verdict. `max_extend_bs`: request slots of the extend graphs. `max_pad_factor`: an
    extend bucket of more than that many times the real rows is refused. `padding` off: exact sizes only.
    `dp_padding`: how ranks that no graph serves share one buffer; None for what wastes less (`pad_dp_counts`).
    """

    decode: Buckets
    extend: Buckets
    tokens_per_request: int = 1
    attn_tp_size: int = 1
    max_extend_bs: int | None = None
    padding: bool = True
    mixed_eager: bool = False
    max_pad_factor: int = 2
    decode_gather: bool = False
    extend_gather: bool = False
    dp_padding: DpPaddingMode | None = None


def decide_shape(
    mode: StepMode,
    num_tokens: Sequence[int],
    bs: int,
    rules: ShapeRules,
    *,
    dp_rank: int = 0,
    variant: str = "",
    stream_index: int = 0,
    reject: str = "",
) -> StepShape:
    """The one decision about a step, made at admission and for the forward: its widths, and graph or eager.

    `mode` is what will run, `num_tokens` the real rows of every data-parallel rank, `bs` the own requests.
    `reject` is the caller's own reason against a graph; under a gather it must be gathered as well. A step
    that no graph serves runs at its own rows (aligned), with the reason in `eager_reason`.
    """
    per_row = 1 if mode.is_extend else rules.tokens_per_request
    gather = rules.extend_gather if mode.is_extend else rules.decode_gather
    seen = tuple(num_tokens) if gather else (num_tokens[dp_rank],)
    size, reason = _bucket(mode, [-(-n // per_row) for n in seen], bs, rules, gather)
    reason = reject or reason
    if not reason:
        tokens = size * per_row
        padded_bs = size if not mode.is_extend else max(rules.max_extend_bs or 0, bs)
    else:
        # Aligned before the layout is chosen, as in `gathered_rows`: else the two could choose another one.
        align = math.lcm(rules.attn_tp_size, per_row)
        counts = pad_dp_counts(seen, attn_tp_size=align, is_extend=mode.is_extend, mode=rules.dp_padding)
        tokens = counts.padded[dp_rank if gather else 0]
        padded_bs = bs if mode.is_extend else tokens // per_row
    return StepShape(
        mode, tuple(num_tokens), bs, tokens, padded_bs, variant, stream_index, dp_rank, eager_reason=reason
    )


def extend_reject(mode: StepMode, num_tokens: int, bs: int, rules: ShapeRules) -> str:
    """Why no extend graph holds these rows of one rank, by the rules of `decide_shape`; empty when one does."""
    return _bucket(mode, [num_tokens], bs, rules, gather=False)[1]


def gathered_rows(shape: StepShape, rules: ShapeRules) -> DpCounts:
    """Rows of every data-parallel rank in a step that gathers them, by what `decide_shape` decided for one of them.

    A graph has one width on all ranks, equal slots; an eager step follows `pad_dp_counts`. Equal on each rank.
    """
    align = math.lcm(rules.attn_tp_size, 1 if shape.mode.is_extend else rules.tokens_per_request)
    if not shape.eager_reason:
        every = (shape.padded_num_tokens,) * len(shape.num_tokens)
        return DpCounts(DpPaddingMode.MAX_LEN, shape.num_tokens, every)
    extend = shape.mode.is_extend
    return pad_dp_counts(shape.num_tokens, attn_tp_size=align, is_extend=extend, mode=rules.dp_padding)


def _bucket(mode: StepMode, sizes: list[int], bs: int, rules: ShapeRules, gather: bool) -> tuple[int, str]:
    """The bucket that holds the largest of `sizes` (one per rank seen), or a reason to run eager."""
    buckets = rules.extend if mode.is_extend else rules.decode
    # The maximum over ranks, never the sum: each rank runs its own rows at this width.
    bucket = buckets.fit(max(sizes))
    if not buckets.sizes:
        return 0, "no buckets"
    if bucket is None:
        return 0, "above the largest bucket"
    if not rules.padding and bucket != max(sizes):
        return 0, "no exact bucket"
    if not mode.is_extend:
        return bucket, ""
    if mode is StepMode.MIXED and rules.mixed_eager:
        return 0, "mixed batch"
    if gather and min(sizes) == 0:
        return 0, "rank without tokens"
    if rules.max_extend_bs is not None and bs > rules.max_extend_bs:
        return 0, "too many requests"
    if any((buckets.fit(n) or 0) > rules.max_pad_factor * n for n in sizes if n):
        return 0, "too much padding"
    return bucket, ""


def attn_tp_shard_bounds(
    padded_num_tokens: int, *, attn_tp_rank: int, attn_tp_size: int, sharded: bool = True
) -> tuple[int, int]:
    """`(offset, chunk)`: the rows that one attention-TP rank owns of a padded width.

    Sharded: rank r owns [r * W / T, (r + 1) * W / T). Not sharded: every rank sees all rows.
    Raises ValueError when a sharded width is not divisible by the attention-TP size.
    """
    if not 0 <= attn_tp_rank < attn_tp_size:
        raise ValueError(f"attn_tp_rank {attn_tp_rank} is outside 0..{attn_tp_size - 1}")
    if not sharded:
        return 0, padded_num_tokens
    if padded_num_tokens % attn_tp_size:
        raise ValueError(
            f"padded width {padded_num_tokens} is not divisible by attn_tp_size {attn_tp_size}; "
            "align the buckets to it"
        )
    chunk = padded_num_tokens // attn_tp_size
    return chunk * attn_tp_rank, chunk


@overload
def local_num_token_non_padded(
    num_token_non_padded: int,
    padded_num_tokens: int,
    *,
    attn_tp_rank: int,
    attn_tp_size: int,
    sharded: bool = True,
) -> int: ...
@overload
def local_num_token_non_padded(
    num_token_non_padded: torch.Tensor,
    padded_num_tokens: int,
    *,
    attn_tp_rank: int,
    attn_tp_size: int,
    sharded: bool = True,
) -> torch.Tensor: ...
def local_num_token_non_padded(
    num_token_non_padded: int | torch.Tensor,
    padded_num_tokens: int,
    *,
    attn_tp_rank: int,
    attn_tp_size: int,
    sharded: bool = True,
) -> int | torch.Tensor:
    """Real rows among those this attention-TP rank feeds to MoE: `clamp(global - offset, 0, chunk)`.

    `num_token_non_padded` is the GLOBAL count of the rank's data-parallel group, as a host int or as an
    integer device tensor; the latter makes a new tensor without a host read, so it may run under capture.
    """
    offset, chunk = attn_tp_shard_bounds(
        padded_num_tokens, attn_tp_rank=attn_tp_rank, attn_tp_size=attn_tp_size, sharded=sharded
    )
    if isinstance(num_token_non_padded, int):
        return min(max(num_token_non_padded - offset, 0), chunk)
    return (num_token_non_padded - offset).clamp(0, chunk)


def real_row_mask(num_token_non_padded: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Bool [num_rows], True for the leading real rows; the count is a one-element device tensor."""
    import torch

    rows = torch.arange(num_rows, device=num_token_non_padded.device)
    return rows < num_token_non_padded


def gathered_row_mask(real_counts: torch.Tensor, rows_per_slot: int) -> torch.Tensor:
    """Bool [dp * rows_per_slot] for a MAX_LEN gathered buffer: row r is real iff (r mod M) < real[r // M].

    `real_counts` holds the UNPADDED count of every data-parallel rank, [dp], on device. A prefix count is
    wrong here: real rows are not a prefix of the gathered buffer.
    """
    import torch

    rows = torch.arange(rows_per_slot, device=real_counts.device)
    return (rows.unsqueeze(0) < real_counts.unsqueeze(1)).reshape(-1)


@dataclass(frozen=True, slots=True)
class PadContract:
    """What a router, kernel or backend promises about padded rows. Undeclared means unsupported.

    accepts_sentinel: takes expert id -1 as "nobody" (consumers).
    accepts_zero_weight: takes only ids that exist; nobody is id 0 with weight 0 (consumers; `moe.hip` translates).
    honours_count:    leaves out rows past the count by itself (consumers).
    writes_zeros:     rows that go nowhere come out as zeros, not as stale memory.
    emits_sentinel:   marks pads with id -1 and weight 0 (producers).
    emits_count:      marks pads only by handing on the count of real rows (producers).
    """

    name: str
    accepts_sentinel: bool = False
    accepts_zero_weight: bool = False
    honours_count: bool = False
    writes_zeros: bool = False
    emits_sentinel: bool = False
    emits_count: bool = False


def check_pad_contracts(producer: PadContract, consumer: PadContract) -> None:
    """Refuse, at load, a pair whose pads would be computed as data.

    Raises PadContractError naming both sides and what is missing.
    """
    by_id = producer.emits_sentinel and (consumer.accepts_sentinel or consumer.accepts_zero_weight)
    by_count = producer.emits_count and consumer.honours_count
    if not (by_id or by_count):
        says = "sentinel ids" if producer.emits_sentinel else "a count" if producer.emits_count else "nothing"
        raise PadContractError(
            f"{producer.name} marks pads by {says}, which {consumer.name} does not honour; choose a pair "
            "of which one side emits what the other accepts"
        )
    if not consumer.writes_zeros:
        raise PadContractError(
            f"{consumer.name} does not promise zeros in rows that go nowhere, so pads would carry stale "
            "values into the next layer; choose a kernel that declares writes_zeros"
        )
