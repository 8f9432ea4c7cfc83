"""Which KV pages a sequence lives in, from its start to its end: pages, prefix tree and page table together.

The only place that moves pages between free, tree and sequence. Knows nothing of policy: who may start, grow or must go
is decided by the scheduler. Invariant: each page is free, in the tree, or held by exactly one live sequence.
"""

from __future__ import annotations

from collections.abc import Iterable

from ostinato.engine.sequence import Sequence
from ostinato.kv.pages import PageAllocator
from ostinato.kv.pool import KVPool
from ostinato.kv.radix import PrefixMatch, RadixCache


class Residency:
    """Page bookkeeping of all sequences over one allocator, tree and pool."""

    def __init__(self, allocator: PageAllocator, radix: RadixCache, pool: KVPool) -> None:
        self.allocator = allocator
        self.radix = radix
        self.pool = pool
        self.page_size = allocator.page_size

    @property
    def total_tokens(self) -> int:
        """Tokens that the pool holds, the trash page left out."""
        return self.allocator.capacity * self.page_size

    @property
    def available_tokens(self) -> int:
        """Tokens in pages that are free or evictable."""
        return (self.allocator.free_pages + self.radix.evictable_pages) * self.page_size

    def start(self, sequence: Sequence, match: PrefixMatch) -> None:
        """Give a sequence its row and the cached prefix `match`, whose node is locked for it already."""
        sequence.node, sequence.num_tree_pages = match.node, len(match.pages)
        sequence.pages = list(match.pages)
        sequence.num_computed = len(match.pages) * self.page_size
        sequence.row = self.pool.take_row()
        self.pool.write_row(sequence.row, 0, sequence.pages)

    def grow(self, sequence: Sequence, num_tokens: int) -> None:
        """Give a sequence pages for its first `num_tokens` tokens, evicting from the tree if need be."""
        count = -(-num_tokens // self.page_size) - len(sequence.pages)
        if count <= 0:
            return
        self.evict_for(count * self.page_size)
        pages = self.allocator.allocate(count)
        self.pool.write_row(sequence.row, len(sequence.pages), pages)
        sequence.pages += pages

    def evict_for(self, num_tokens: int) -> None:
        """Evict from the tree until pages for `num_tokens` are free, or nothing evictable is left."""
        self.radix.evict(-(-num_tokens // self.page_size) - self.allocator.free_pages)

    def cache(self, sequence: Sequence) -> None:
        """Hand the sequence's computed whole pages to the tree, and use the tree's copies from here on."""
        whole = sequence.num_computed // self.page_size
        if not self.radix.enabled or whole <= sequence.num_tree_pages:
            return
        tokens = sequence.tokens(0, whole * self.page_size)
        key = sequence.request.extra_key
        known = self.radix.insert(tokens, sequence.pages[:whole], key)
        match = self.radix.match(tokens, key)
        assert len(match.pages) == whole
        # What the tree had from another sequence we hold twice, except what we took from the tree.
        duplicates = sequence.pages[sequence.num_tree_pages : known]
        self.allocator.free(duplicates)
        if duplicates:
            self.pool.write_row(sequence.row, 0, match.pages)
        sequence.pages[:whole] = match.pages
        self.radix.lock(match.node)
        assert sequence.node is not None
        self.radix.unlock(sequence.node)
        sequence.node, sequence.num_tree_pages = match.node, whole

    def release(self, sequence: Sequence) -> None:
        """Take back a sequence's row, its own pages and its hold on the tree."""
        self.allocator.free(sequence.pages[sequence.num_tree_pages :])
        assert sequence.node is not None
        self.radix.unlock(sequence.node)
        self.pool.give_row(sequence.row)
        sequence.pages, sequence.num_tree_pages, sequence.node, sequence.row = [], 0, None, 0

    def check_leaks(self, live: Iterable[Sequence]) -> None:
        """Raise AssertionError unless every page has exactly one owner."""
        sequences = list(live)
        own = [page for s in sequences for page in s.pages[s.num_tree_pages :]]
        assert len(own) == len(set(own)), "a page is held by two sequences"
        total = self.allocator.free_pages + self.radix.num_pages + len(own)
        assert total == self.allocator.capacity, (
            f"{self.allocator.free_pages} free + {self.radix.num_pages} in the tree + {len(own)} held is not "
            f"{self.allocator.capacity}"
        )
        if not sequences:
            assert self.radix.protected_pages == 0, "pages are locked without a live sequence"

    def as_dict(self) -> dict[str, int]:
        """Pages in use, cached (evictable) and in all."""
        used = self.allocator.capacity - self.allocator.free_pages - self.radix.evictable_pages
        return {
            "kv_pages_used": used,
            "kv_pages_cached": self.radix.evictable_pages,
            "kv_pages_total": self.allocator.capacity,
        }
