"""The lists of widths for which graphs are captured: defaults, alignment, and what a legal batch can reach.

Lists are configuration; these are the defaults and the filters every list passes, once. What a bucket means
stays in padding.py. Invariant: every bucket is a multiple of what will split its rows, and some legal batch
fits it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable

from ostinato.errors import ConfigError
from ostinato.padding import Buckets


def bucket_alignment(*, attn_tp_size: int = 1, page_size: int = 1, tokens_per_request: int = 1) -> int:
    """The alignment every bucket needs: lcm of what will split or page its rows."""
    return math.lcm(attn_tp_size, page_size, tokens_per_request)


def default_decode_sizes(max_bs: int, *, tokens_per_request: int = 1, padding: bool = True) -> list[int]:
    """Default decode buckets up to `max_bs` (docs/behaviour.md, section 3.1)."""
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
    """Default prefill token buckets up to `max_num_tokens` (docs/behaviour.md, section 3.1)."""
    sizes = [*range(4, 33, 4), *range(48, 257, 16), *range(288, 513, 32), *range(576, 1025, 64)]
    sizes += range(1280, 4097, 256)
    sizes += range(4608, max(max_num_tokens, 4608) + 512, 512)
    return sizes


def decode_buckets(
    max_bs: int,
    *,
    sizes: Iterable[int] | None = None,
    attn_tp_size: int = 1,
    tokens_per_request: int = 1,
    padding: bool = True,
    compiled: bool = False,
) -> Buckets:
    """Decode buckets (batch sizes) that a legal batch of at most `max_bs` requests can use.

    `sizes` replaces the default list. Raises ConfigError for `compiled` without `padding`: one compilation
    per batch size would stall the start for many minutes.
    """
    if compiled and not padding:
        raise ConfigError(
            f"padding is off and compilation on: {max_bs} batch sizes would each be compiled; "
            "turn padding on or compilation off"
        )
    wanted = default_decode_sizes(max_bs, tokens_per_request=tokens_per_request, padding=padding)
    # Buckets count requests, alignment is about rows.
    alignment = math.lcm(attn_tp_size, tokens_per_request) // tokens_per_request
    return _usable(
        Buckets.of(wanted if sizes is None else sizes, alignment=alignment, limit=max_bs), "decode"
    )


def prefill_buckets(
    max_num_tokens: int,
    *,
    sizes: Iterable[int] | None = None,
    attn_tp_size: int = 1,
    page_size: int = 1,
    max_rows: int | None = None,
) -> Buckets:
    """Prefill buckets (rows) up to `max_num_tokens` and up to `max_rows`.

    `max_rows` is what the request pool and the context length allow together (max requests * context length):
    larger buckets could never be filled. `sizes` replaces the default list.
    """
    limit = max_num_tokens if max_rows is None else min(max_num_tokens, max_rows)
    wanted = default_prefill_sizes(limit) if sizes is None else sizes
    alignment = bucket_alignment(attn_tp_size=attn_tp_size, page_size=page_size)
    return _usable(Buckets.of(wanted, alignment=alignment, limit=limit), "prefill")


def _usable(buckets: Buckets, kind: str) -> Buckets:
    if not buckets.sizes:
        warnings.warn(f"no {kind} bucket is left, so every {kind} step runs eager; give sizes", stacklevel=3)
    return buckets
