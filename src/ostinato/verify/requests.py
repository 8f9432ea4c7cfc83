"""Requests to verify with: random tokens whose contexts lie in the KV cache, and batches made of them.

    request r:  tokens [T]   context cached [0, lengths[r])   the rest of its pages is room for what a step adds
    the last two requests hold the same tokens: one behind the shared first pages of another, one in pages of its own

Every rank of a data-parallel group has the same ones; groups have other tokens, of the same lengths. Knows nothing of
checks or graphs. Invariant: token 0, which pads hold, is in no request; whatever no request wrote is NaN.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ostinato.engine.batch import ForwardBatch, decode_batch, extend_batch, idle_batch
from ostinato.errors import ConfigError
from ostinato.kv.pages import PageAllocator
from ostinato.kv.pool import KVPool
from ostinato.padding import StepMode, align_up

FEWEST_PAGES = 4  # of a request, where the context allows: spans over pages are part of every step

Span = tuple[int, int, int]
"""(request, first position, count)."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the deployment can hold."""

    max_bs: int
    max_num_tokens: int
    context_length: int
    largest_prefill: int
    vocab_size: int


class Requests:
    """As many as a step can have, in pages taken from `allocator`. Raises ConfigError when it has too few."""

    def __init__(self, pool: KVPool, allocator: PageAllocator, sizes: Sizes, seed: int, group: int) -> None:
        self._pool = pool
        count = min(sizes.max_bs, pool.free_rows, allocator.free_pages)
        if count < 1:
            raise ConfigError("the KV cache has no free page to verify with; give more memory")
        page = pool.page_size
        wanted = max(FEWEST_PAGES * page, align_up(-(-sizes.largest_prefill // count), page))
        # Two positions stay free behind a context, for a decode step and the one after it.
        tokens = min(wanted, allocator.free_pages // count * page, sizes.context_length // page * page)
        if tokens < 3:
            raise ConfigError(
                f"verify needs room for at least 3 tokens in each of {count} requests; give a longer context_length or "
                "more KV memory"
            )
        self.capacity = tokens
        rng = torch.Generator().manual_seed(seed * 1000 + group)
        self.tokens = torch.randint(1, sizes.vocab_size, (count, tokens), generator=rng)
        rng.manual_seed(seed)
        self.lengths = torch.randint(1, tokens - 1, (count,), generator=rng).tolist()
        self.lengths[0] = tokens - 2
        self.rows = [pool.take_row() for _ in range(count)]
        self.pages = allocator.allocate(count * tokens // page)
        for request, row in enumerate(self.rows):
            pool.write_row(row, 0, self.pages[request * tokens // page : (request + 1) * tokens // page])
        self._share()

    def _share(self) -> None:
        """The last but one stands behind pages of request 0, the last holds the same tokens for itself."""
        page = self._pool.page_size
        self.shared = (self.lengths[0] // page) * page if len(self.rows) > 3 else 0
        if not self.shared:
            return
        hit, cold = len(self.rows) - 2, len(self.rows) - 1
        self.tokens[hit, : self.shared] = self.tokens[0, : self.shared]
        self.tokens[cold] = self.tokens[hit]
        pages = self._pool.page_table[self.rows[0], : self.shared // page].tolist()
        self._pool.write_row(self.rows[hit], 0, pages)
        self.lengths[hit] = self.lengths[cold] = self.shared

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def free(self) -> range:
        """Those that write nothing which another one reads."""
        return range(len(self.rows) - 2 if self.shared else len(self.rows))

    @property
    def room(self) -> int:
        """Rows that a prefill of all `free` ones can have."""
        return len(self.free) * self.capacity

    # ---- batches ----

    def batch(
        self,
        mode: StepMode,
        spans: Sequence[Span],
        *,
        ids: torch.Tensor | None = None,
        wanted: Sequence[int] | None = None,
    ) -> ForwardBatch:
        """Tokens [first, first + count) of each request, in this order; ids: other tokens in their place.

        wanted: rows of a prefill that come out; all when None.
        """
        if not spans:
            return idle_batch(mode)
        positions = [torch.arange(first, first + count) for _, first, count in spans]
        rows = [self.rows[request] for request, _, _ in spans]
        slots = torch.cat([self._pool.slots(row, p) for row, p in zip(rows, positions, strict=True)])
        ids = self.ids(spans) if ids is None else ids
        if mode is StepMode.DECODE:
            return decode_batch(ids, [first + 1 for _, first, _ in spans], rows, slots)
        counts, firsts = [count for _, _, count in spans], [first for _, first, _ in spans]
        return extend_batch(ids, counts, firsts, rows, slots, mode=mode, logit_rows=wanted)

    def ids(self, spans: Sequence[Span]) -> torch.Tensor:
        """The requests' own tokens there."""
        rows = [self.tokens[request, first : first + count] for request, first, count in spans]
        return torch.cat(rows) if rows else self.tokens.new_zeros(0)

    def swap_rows(self, one: int, other: int) -> None:
        """Two requests change rows of the page table, and keep their pages."""
        a, b = self.rows[one], self.rows[other]
        held = [self._pool.page_table[row].tolist() for row in (a, b)]
        self._pool.write_row(b, 0, held[0])
        self._pool.write_row(a, 0, held[1])
        self.rows[one], self.rows[other] = b, a

    def ends(self, count: int, seed: str) -> list[Span]:
        """So many requests in a random order, each with the one token at its end."""
        return [(r, self.lengths[r], 1) for r in self.pick(count, seed)]

    def pick(self, count: int, seed: str) -> list[int]:
        """So many requests in a random order."""
        rng = torch.Generator().manual_seed(_number(seed))
        return torch.randperm(len(self.rows), generator=rng).tolist()[:count]

    def spans(self, count: int, seed: str) -> list[Span]:
        """`count` rows of several requests: whole prompts, later chunks, rows behind cached prefixes."""
        rng = torch.Generator().manual_seed(_number(seed))
        order = torch.tensor(self.free)[torch.randperm(len(self.free), generator=rng)].tolist()
        most = min(len(order), count)
        fewest = -(-count // self.capacity)
        chosen = order[: int(torch.randint(fewest, most + 1, (1,), generator=rng))] if count else []
        first = [int(torch.randint(0, self.lengths[r] + 1, (1,), generator=rng)) for r in chosen]
        for at in range(len(chosen)):
            if sum(self.capacity - start for start in first) >= count:
                break
            first[at] = 0
        left, spans = count - len(chosen), []
        for at, request in enumerate(chosen):
            room = self.capacity - first[at] - 1
            behind = sum(self.capacity - start - 1 for start in first[at + 1 :])
            low, high = max(left - behind, 0), min(room, left)
            share = -(-2 * left // (len(chosen) - at))
            more = int(torch.randint(low, max(min(high, share), low) + 1, (1,), generator=rng))
            spans.append((request, first[at], more + 1))
            left -= more
        assert sum(n for _, _, n in spans) == count, (count, spans)
        return spans


def _number(seed: str) -> int:
    """A seed of a generator from words, equal on all ranks."""
    return zlib.crc32(seed.encode())
