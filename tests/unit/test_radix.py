"""The prefix cache: matches against a dictionary, locks, eviction order, and pages that are never lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ostinato.kv.pages import PageAllocator
from ostinato.kv.radix import Node, RadixCache

PAGE = 2


@dataclass
class Rig:
    """A cache over its own pages."""

    num_pages: int = 40
    page_size: int = PAGE
    enabled: bool = True
    allocator: PageAllocator = field(init=False)
    cache: RadixCache = field(init=False)

    def __post_init__(self) -> None:
        self.allocator = PageAllocator(self.num_pages, self.page_size)
        self.cache = RadixCache(self.allocator, enabled=self.enabled)

    def add(self, tokens: Sequence[int], key: str = "") -> list[int]:
        """Cache `tokens` as a finished request would; the pages that now hold their whole pages."""
        whole = len(tokens) // self.page_size
        pages = self.allocator.allocate(whole)
        known = self.cache.insert(tokens[: whole * self.page_size], pages, key)
        self.allocator.free(pages[:known])
        self.check()
        return self.cache.match(tokens, key).pages

    def check(self) -> None:
        owned = list(self.cache.owned_pages())
        assert len(owned) == len(set(owned)) == self.cache.num_pages
        assert self.cache.num_pages + self.allocator.free_pages == self.allocator.capacity


def test_longest_whole_page_prefix() -> None:
    rig = Rig()
    pages = rig.add([1, 2, 3, 4, 5, 6])
    assert len(pages) == 3
    match = rig.cache.match
    assert match([1, 2, 3, 4, 5, 6, 7, 8]).pages == pages
    assert match([1, 2, 3, 4, 5, 6]).pages == pages
    assert match([1, 2, 3, 4, 5]).pages == pages[:2]  # a page is matched whole or not at all
    assert match([1, 2, 3, 9, 5, 6]).pages == pages[:1]
    assert match([1]).pages == []
    assert match([2, 1, 3, 4]).pages == []
    assert match([]).pages == []


def test_a_match_inside_a_node_splits_it() -> None:
    rig = Rig()
    pages = rig.add([1, 2, 3, 4, 5, 6])
    inner = rig.cache.match([1, 2, 3, 4, 9, 9])
    assert inner.node.pages == pages[:2]
    assert [child.pages for child in inner.node.children.values()] == [pages[2:]]
    rig.check()
    branch = rig.add([1, 2, 3, 4, 9, 9])
    assert branch[:2] == pages[:2]
    assert branch[2] != pages[2]
    assert len(inner.node.children) == 2


def test_duplicates_are_the_callers() -> None:
    rig = Rig()
    first = rig.add([1, 2, 3, 4])
    pages = rig.allocator.allocate(3)
    assert rig.cache.insert([1, 2, 3, 4, 5, 6], pages) == 2
    assert rig.cache.match([1, 2, 3, 4, 5, 6]).pages == [*first, pages[2]]
    rig.allocator.free(pages[:2])
    rig.check()


def test_namespaces_share_nothing() -> None:
    rig = Rig()
    plain, other = rig.add([1, 2, 3, 4]), rig.add([1, 2, 3, 4], "lora-7")
    assert not set(plain) & set(other)
    assert rig.cache.match([1, 2, 3, 4], "salt").pages == []
    assert rig.cache.match([1, 2, 3, 4], "lora-7").pages == other


def test_empty_namespaces_leave_nothing_behind() -> None:
    """A salt per user must not fill the memory with roots."""
    rig = Rig()
    for i in range(50):
        rig.cache.match([1, 2], f"asked-{i}")
        rig.add([1, 2], f"salt-{i}")
        rig.cache.evict(1)
    assert not rig.cache._roots
    rig.check()


def test_locks_protect_a_path() -> None:
    rig = Rig()
    rig.add([1, 2, 3, 4, 5, 6])
    rig.add([1, 2, 7, 8])
    assert rig.cache.evictable_pages == 4
    node = rig.cache.match([1, 2, 3, 4]).node
    rig.cache.lock(node)
    assert (rig.cache.evictable_pages, rig.cache.protected_pages) == (2, 2)
    assert rig.cache.evict(100) == 2
    assert len(rig.cache.match([1, 2, 3, 4, 5, 6]).pages) == 2
    rig.cache.lock(node)
    rig.cache.unlock(node)
    assert rig.cache.evict(100) == 0
    rig.cache.unlock(node)
    assert rig.cache.evict(100) == 2
    assert rig.cache.num_pages == 0
    rig.check()


def test_a_split_keeps_the_locks() -> None:
    rig = Rig()
    rig.add([1, 2, 3, 4, 5, 6])
    node = rig.cache.match([1, 2, 3, 4, 5, 6]).node
    rig.cache.lock(node)
    rig.cache.match([1, 2, 9, 9])  # splits above the locked node
    assert (rig.cache.evictable_pages, rig.cache.protected_pages) == (0, 3)
    assert rig.cache.evict(3) == 0
    rig.cache.unlock(node)
    assert (rig.cache.evictable_pages, rig.cache.protected_pages) == (3, 0)
    assert rig.cache.evict(3) == 3


def test_unlock_without_a_lock() -> None:
    rig = Rig()
    rig.add([1, 2])
    with pytest.raises(AssertionError, match="unlock without a lock"):
        rig.cache.unlock(rig.cache.match([1, 2]).node)


def test_least_recently_used_goes_first() -> None:
    rig = Rig()
    for token in (1, 2, 3):
        rig.add([token, token])
    rig.cache.match([1, 1])  # now 2 is the oldest
    left = [1, 2, 3]
    for gone in (2, 3, 1):
        assert rig.cache.evict(1) == 1
        left.remove(gone)
        assert [t for t in (1, 2, 3) if _peek(rig, [t, t])] == left
        rig.check()


def _peek(rig: Rig, tokens: list[int]) -> list[int]:
    """Pages cached for `tokens`, without a touch (a match would change the order of eviction)."""
    node: Node | None = rig.cache._roots.get("")
    pages: list[int] = []
    for i in range(0, len(tokens), rig.page_size):
        node = node.children.get(tuple(tokens[i : i + rig.page_size])) if node else None
        pages += node.pages if node else []
    return pages


def test_leaves_before_parents_and_from_the_end() -> None:
    rig = Rig()
    long = rig.add([1, 2, 3, 4, 5, 6, 7, 8])
    rig.add([1, 2, 9, 9])
    # The long branch is older; it loses its last page only, not the whole run.
    assert rig.cache.evict(1) == 1
    assert rig.cache.match([1, 2, 3, 4, 5, 6, 7, 8]).pages == long[:3]
    # That was a use: now the short branch is the oldest leaf; the shared page outlives both.
    assert rig.cache.evict(1) == 1
    assert len(rig.cache.match([1, 2, 9, 9]).pages) == 1
    assert rig.cache.evict(2) == 2
    assert rig.cache.match([1, 2, 3, 4]).pages == long[:1]
    assert rig.cache.evict(5) == 1
    rig.check()


def test_evict_nothing() -> None:
    rig = Rig()
    rig.add([1, 2])
    assert rig.cache.evict(0) == 0
    assert rig.cache.evict(-3) == 0
    assert rig.cache.num_pages == 1


def test_many_requests_leave_one_candidate_each() -> None:
    """Locking and unlocking one prefix for ever must not make the eviction queue grow."""
    rig = Rig()
    rig.add([1, 2, 3, 4])
    for _ in range(100):
        node = rig.cache.match([1, 2, 3, 4]).node
        rig.cache.lock(node)
        rig.cache.unlock(node)
    assert len(rig.cache._heap) == 1
    assert rig.cache.evict(9) == 2


def test_switched_off() -> None:
    rig = Rig(enabled=False)
    pages = rig.allocator.allocate(2)
    assert rig.cache.insert([1, 2, 3, 4], pages) == 2  # all of them stay the caller's
    match = rig.cache.match([1, 2, 3, 4])
    assert match.pages == []
    rig.cache.lock(match.node)
    rig.cache.unlock(match.node)
    assert rig.cache.num_pages == 0
    assert rig.cache.evict(5) == 0


def test_pages_of_one_token() -> None:
    rig = Rig(page_size=1)
    pages = rig.add([5, 6, 7])
    assert rig.cache.match([5, 6, 8]).pages == pages[:2]


TOKENS = st.lists(st.integers(0, 1), max_size=9)
KEYS = st.sampled_from(["", "x"])


class AgainstADictionary(RuleBasedStateMachine):
    """The tree, and a dictionary from (namespace, whole-page prefix) to the page of its last tokens."""

    @initialize(page=st.integers(1, 3))
    def start(self, page: int) -> None:
        self.rig = Rig(num_pages=30, page_size=page)
        self.model: dict[tuple[str, tuple[int, ...]], int] = {}
        self.locked: list[tuple[Node, str, tuple[int, ...]]] = []

    def _prefixes(self, tokens: Sequence[int]) -> list[tuple[int, ...]]:
        size = self.rig.page_size
        return [tuple(tokens[:n]) for n in range(size, len(tokens) + 1, size)]

    def _cached(self, tokens: Sequence[int], key: str) -> list[int]:
        pages: list[int] = []
        for prefix in self._prefixes(tokens):
            if (key, prefix) not in self.model:
                break
            pages.append(self.model[key, prefix])
        return pages

    @rule(tokens=TOKENS, key=KEYS)
    def insert(self, tokens: list[int], key: str) -> None:
        prefixes = self._prefixes(tokens)
        if len(prefixes) > self.rig.allocator.free_pages:
            return
        before = len(self._cached(tokens, key))
        pages = self.rig.allocator.allocate(len(prefixes))
        whole = tokens[: len(prefixes) * self.rig.page_size]
        assert self.rig.cache.insert(whole, pages, key) == before
        self.rig.allocator.free(pages[:before])
        self.model |= {(key, p): page for p, page in zip(prefixes[before:], pages[before:], strict=True)}

    @rule(tokens=TOKENS, key=KEYS, keep=st.booleans())
    def match(self, tokens: list[int], key: str, keep: bool) -> None:
        found = self.rig.cache.match(tokens, key)
        expected = self._cached(tokens, key)
        assert found.pages == expected
        if keep:
            self.rig.cache.lock(found.node)
            self.locked.append((found.node, key, tuple(tokens[: len(expected) * self.rig.page_size])))

    @rule(which=st.integers(0, 99))
    def unlock(self, which: int) -> None:
        if self.locked:
            self.rig.cache.unlock(self.locked.pop(which % len(self.locked))[0])

    def _protected(self) -> set[tuple[str, tuple[int, ...]]]:
        return {(key, p) for _, key, tokens in self.locked for p in self._prefixes(tokens)}

    @rule(count=st.integers(0, 12))
    def evict(self, count: int) -> None:
        evictable = len(self.model) - len(self._protected())
        assert self.rig.cache.evict(count) == min(count, evictable)
        left = set(self.rig.cache.owned_pages())
        self.model = {prefix: page for prefix, page in self.model.items() if page in left}

    @invariant()
    def pages_add_up(self) -> None:
        self.rig.check()
        assert set(self.rig.cache.owned_pages()) == set(self.model.values())
        protected = self._protected()
        assert protected <= set(self.model)
        assert self.rig.cache.protected_pages == len(protected)
        assert self.rig.cache.evictable_pages == len(self.model) - len(protected)
        size = self.rig.page_size
        for key, prefix in self.model:
            assert len(prefix) == size or (key, prefix[:-size]) in self.model, "a page without its prefix"


AgainstADictionary.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestAgainstADictionary = AgainstADictionary.TestCase
