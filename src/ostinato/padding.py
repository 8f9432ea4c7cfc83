"""The one home of padding: padded widths, counts of real rows, and masks derived from them.

Two facts are stored, everything else is derived: how many rows are real in each data-parallel group, and the
padded width they run in. Nobody else compares an `arange` with a count (a structure test walks the source).
This module knows nothing of models, devices or schedulers; it uses torch only through the tensors it is given.
Invariant: shard boundaries come from the PADDED width alone, and the host and device twins agree bit for bit.
"""

from __future__ import annotations

import enum
import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
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
    """Identity of a captured graph. Built by `StepShape.key` and nowhere else."""

    kind: str  # "decode" or "extend"
    size: int  # rows for extend, batch size for decode
    stream_index: int
    variant: str


@dataclass(frozen=True, slots=True)
class StepShape:
    """The decision about one step: how many rows are real, and how wide it runs.

    `num_tokens` holds the real rows of every data-parallel rank (one entry without data parallelism),
    `padded_num_tokens` and `padded_bs` the widths that this rank executes.
    """

    mode: StepMode
    num_tokens: tuple[int, ...]
    bs: int
    padded_num_tokens: int
    padded_bs: int
    variant: str = ""
    stream_index: int = 0
    dp_rank: int = 0

    def __post_init__(self) -> None:
        assert self.raw_num_tokens <= self.padded_num_tokens, (self.raw_num_tokens, self.padded_num_tokens)
        assert self.bs <= self.padded_bs, (self.bs, self.padded_bs)

    @property
    def raw_num_tokens(self) -> int:
        """Real rows of this rank."""
        return self.num_tokens[self.dp_rank]

    @property
    def key(self) -> GraphKey:
        """The graph key: the same for capture, admission and replay."""
        if self.mode.is_extend:
            return GraphKey("extend", self.padded_num_tokens, self.stream_index, self.variant)
        return GraphKey("decode", self.padded_bs, self.stream_index, self.variant)


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


def bucket_alignment(*, attn_tp_size: int = 1, page_size: int = 1, tokens_per_request: int = 1) -> int:
    """The alignment every bucket needs: lcm of what will split or page its rows."""
    return math.lcm(attn_tp_size, page_size, tokens_per_request)


def default_decode_sizes(max_bs: int, *, tokens_per_request: int = 1, padding: bool = True) -> list[int]:
    """Default decode buckets up to `max_bs` (behaviour reference, section 3.1)."""
    if not padding:
        return list(range(1, max_bs + 1))
    if tokens_per_request > 1:
        sizes = [*range(1, 9), *range(10, 33, 2), *range(36, 65, 4), *range(72, 257, 8)]
        sizes += range(272, max(max_bs, 272) + 16, 16)
    else:
        sizes = [1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16)]
        sizes += range(512, max(max_bs, 512) + 32, 32)
    return sizes


def default_prefill_sizes(max_num_tokens: int) -> list[int]:
    """Default prefill token buckets up to `max_num_tokens` (behaviour reference, section 3.1)."""
    sizes = [*range(4, 33, 4), *range(48, 257, 16), *range(288, 513, 32), *range(576, 1025, 64)]
    sizes += range(1280, 4097, 256)
    sizes += range(4608, max(max_num_tokens, 4608) + 512, 512)
    return sizes


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

    `num_token_non_padded` is the GLOBAL count of the rank's data-parallel group, as a host int or as an integer
    device tensor; the tensor form makes a new tensor without a host read, so it may run under capture.
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

    `real_counts` holds the UNPADDED count of every data-parallel rank, [dp], on device. A prefix count is wrong
    here: real rows are not a prefix of the gathered buffer.
    """
    import torch

    rows = torch.arange(rows_per_slot, device=real_counts.device)
    return (rows.unsqueeze(0) < real_counts.unsqueeze(1)).reshape(-1)


@dataclass(frozen=True, slots=True)
class PadContract:
    """What a router, kernel or backend promises about padded rows. Undeclared means unsupported.

    accepts_sentinel: takes expert id -1 as "nobody" (consumers).
    honours_count:    leaves out rows past the count by itself (consumers).
    writes_zeros:     rows that go nowhere come out as zeros, not as stale memory.
    emits_sentinel:   marks pads with id -1 and weight 0 (producers).
    emits_count:      marks pads only by handing on the count of real rows (producers).
    """

    name: str
    accepts_sentinel: bool = False
    honours_count: bool = False
    writes_zeros: bool = False
    emits_sentinel: bool = False
    emits_count: bool = False


def check_pad_contracts(producer: PadContract, consumer: PadContract) -> None:
    """Refuse, at load, a pair whose pads would be computed as data.

    Raises PadContractError naming both sides and what is missing.
    """
    by_id = producer.emits_sentinel and consumer.accepts_sentinel
    by_count = producer.emits_count and consumer.honours_count
    if not (by_id or by_count):
        says = "sentinel ids" if producer.emits_sentinel else "a count" if producer.emits_count else "nothing"
        raise PadContractError(
            f"{producer.name} marks pads by {says}, which {consumer.name} does not honour; choose a pair of which "
            "one side emits what the other accepts"
        )
    if not consumer.writes_zeros:
        raise PadContractError(
            f"{consumer.name} does not promise zeros in rows that go nowhere, so pads would carry stale values "
            "into the next layer; choose a kernel that declares writes_zeros"
        )
