"""The radix prefix cache: a tree of token pages whose KV is in the pool.

            root ── [p1 p2] ─┬─ [p3]          a node owns a run of pages; an edge is labelled with their tokens
                             └─ [p4 p5 p6]

Everything is in whole pages. A lock on a node protects it and its ancestors from eviction. Host only: knows nothing of
tensors, requests or steps. Invariant: every page of the tree is evictable or protected, and is held in the allocator.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ostinato.kv.pages import PageAllocator

PageKey = tuple[int, ...]


@dataclass(slots=True, eq=False)
class Node:
    """A run of pages below `parent`. `tokens[i]` are the tokens of `pages[i]`; `queued`: it is in the eviction heap."""

    parent: Node | None
    tokens: list[PageKey]
    pages: list[int]
    children: dict[PageKey, Node] = field(default_factory=dict)
    locks: int = 0
    last_use: int = 0
    queued: bool = False

    @property
    def evictable(self) -> bool:
        """Whether it may go now: a leaf that nobody holds. Roots stay."""
        return self.locks == 0 and not self.children and self.parent is not None


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest cached prefix: its pages in order, and the node where it ends."""

    pages: list[int]
    node: Node


class RadixCache:
    """Prefix cache over the pages of one allocator; LRU eviction by a counter, not by the clock.

    With `enabled=False` nothing is ever kept and every match is empty. `extra_key` separates namespaces: nothing is
    shared between two of them.
    """

    def __init__(self, allocator: PageAllocator, *, enabled: bool = True) -> None:
        self.enabled = enabled
        self.page_size = allocator.page_size
        self.evictable_pages = 0
        self.protected_pages = 0
        self._allocator = allocator
        self._roots: dict[str, Node] = {}
        self._clock = 0
        # Candidates for eviction by last use. Entries may be out of date (used or locked since) and are put right when
        # they come up; each evictable node has exactly one.
        self._heap: list[tuple[int, int, Node]] = []
        self._serial = 0

    @property
    def num_pages(self) -> int:
        """Pages owned by the tree."""
        return self.evictable_pages + self.protected_pages

    def owned_pages(self) -> Iterator[int]:
        """Every page of the tree, for accounting."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            yield from node.pages
            stack.extend(node.children.values())

    def match(self, tokens: Sequence[int], extra_key: str = "") -> PrefixMatch:
        """The longest cached prefix of `tokens` in whole pages; splits a node where the match ends inside it."""
        return self._match(self._page_keys(tokens) if self.enabled else [], extra_key)

    def _match(self, keys: list[PageKey], extra_key: str) -> PrefixMatch:
        # An unknown namespace gets a root that is not kept: asking leaves no trace.
        node = self._roots.get(extra_key) or Node(None, [], [])
        pages: list[int] = []
        at = 0
        while at < len(keys) and (child := node.children.get(keys[at])) is not None:
            same = _common(child.tokens, keys, at)
            if same < len(child.tokens):
                child = self._split(child, same)
            pages += child.pages
            at += same
            node = child
            self._touch(node)
        return PrefixMatch(pages, node)

    def lock(self, node: Node) -> None:
        """Protect `node` and its ancestors."""
        at: Node | None = node
        while at is not None:
            if at.locks == 0:
                self.evictable_pages -= len(at.pages)
                self.protected_pages += len(at.pages)
            at.locks += 1
            at = at.parent

    def unlock(self, node: Node) -> None:
        """Undo one `lock` of `node`."""
        at: Node | None = node
        while at is not None:
            assert at.locks > 0, "unlock without a lock"
            at.locks -= 1
            if at.locks == 0:
                self.evictable_pages += len(at.pages)
                self.protected_pages -= len(at.pages)
                self._queue(at)
            at = at.parent

    def insert(self, tokens: Sequence[int], pages: Sequence[int], extra_key: str = "") -> int:
        """Give the tree `pages`, which hold the KV of the whole pages of `tokens`.

        Returns how many leading pages the tree had already: those it keeps in its own copy, the caller's copies of
        them stay the caller's. The rest now belongs to the tree. With the cache off everything stays the caller's.
        """
        keys = self._page_keys(tokens)
        assert len(pages) == len(keys), (len(pages), len(keys))
        if not self.enabled:
            return len(keys)
        self._roots.setdefault(extra_key, Node(None, [], []))
        match = self._match(keys, extra_key)
        known = len(match.pages)
        if known < len(keys):
            child = Node(match.node, list(keys[known:]), list(pages[known:]))
            match.node.children[keys[known]] = child
            self.evictable_pages += len(child.pages)
            self._touch(child)
            self._queue(child)
        return known

    def evict(self, num_pages: int) -> int:
        """Free `num_pages` evictable pages, or all there are: least recently used leaves first. Returns how many."""
        freed = 0
        while freed < num_pages and self._heap:
            stamp, _, node = heapq.heappop(self._heap)
            node.queued = False
            if stamp != node.last_use:
                self._queue(node)  # used since it was queued: back to its place
            elif node.evictable:
                freed += self._shed(node, num_pages - freed)
        return freed

    def _shed(self, node: Node, num_pages: int) -> int:
        """Free up to `num_pages` of a leaf, from its end, so that a prefix loses no more than was asked for."""
        count = min(len(node.pages), num_pages)
        self._allocator.free(node.pages[-count:])
        self.evictable_pages -= count
        first = node.tokens[0]
        del node.pages[-count:], node.tokens[-count:]
        if node.pages:
            self._queue(node)
            return count
        parent, node.parent = node.parent, None
        assert parent is not None
        del parent.children[first]
        if parent.parent is not None:
            self._queue(parent)
        elif not parent.children:
            self._roots = {key: root for key, root in self._roots.items() if root is not parent}
        return count

    def _queue(self, node: Node) -> None:
        """Make a node a candidate for eviction, if it is one now and not queued yet."""
        if node.evictable and not node.queued:
            node.queued = True
            self._serial += 1
            heapq.heappush(self._heap, (node.last_use, self._serial, node))

    def _page_keys(self, tokens: Sequence[int]) -> list[PageKey]:
        size = self.page_size
        return [tuple(tokens[i : i + size]) for i in range(0, len(tokens) - size + 1, size)]

    def _touch(self, node: Node) -> None:
        self._clock += 1
        node.last_use = self._clock

    def _split(self, node: Node, at: int) -> Node:
        """Cut `node` after `at` pages; returns the new upper half, which inherits the locks."""
        assert node.parent is not None
        upper = Node(node.parent, node.tokens[:at], node.pages[:at], locks=node.locks, last_use=node.last_use)
        node.parent.children[upper.tokens[0]] = upper
        del node.tokens[:at], node.pages[:at]
        node.parent = upper
        upper.children[node.tokens[0]] = node
        return upper


def _common(tokens: list[PageKey], keys: list[PageKey], at: int) -> int:
    """How many pages of `tokens` equal `keys[at:]`."""
    count = 0
    for mine, theirs in zip(tokens, keys[at:], strict=False):
        if mine != theirs:
            break
        count += 1
    return count
