"""Page bookkeeping: the trash page, conservation, and double frees."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.errors import ConfigError
from ostinato.kv.pages import TRASH_PAGE, PageAllocator


def test_trash_page_is_never_handed_out() -> None:
    """F19: also a pool that is full to the last page still has the page that pads write to."""
    allocator = PageAllocator(9, 16)
    pages = allocator.allocate(allocator.free_pages)
    assert sorted(pages) == list(range(1, 9))
    assert TRASH_PAGE not in pages
    assert allocator.free_pages == 0


def test_capacity_leaves_the_trash_page_out() -> None:
    allocator = PageAllocator(9, 16)
    assert (allocator.num_pages, allocator.capacity, allocator.free_pages) == (9, 8, 8)


def test_low_pages_go_first() -> None:
    assert PageAllocator(100, 1).allocate(3) == [1, 2, 3]


def test_nothing_asked_nothing_taken() -> None:
    allocator = PageAllocator(3, 1)
    assert allocator.allocate(0) == []
    assert allocator.free_pages == 2


@pytest.mark.parametrize("page", [TRASH_PAGE, 2])
def test_freeing_a_page_that_is_not_held(page: int) -> None:
    allocator = PageAllocator(5, 1)
    allocator.allocate(1)
    with pytest.raises(AssertionError, match=f"page {page} is not held"):
        allocator.free([page])


def test_freeing_twice() -> None:
    allocator = PageAllocator(5, 1)
    pages = allocator.allocate(2)
    allocator.free(pages)
    with pytest.raises(AssertionError, match="is not held"):
        allocator.free(pages)


def test_more_than_there_is() -> None:
    allocator = PageAllocator(5, 1)
    with pytest.raises(AssertionError, match="5 pages wanted, 4 free"):
        allocator.allocate(5)


@pytest.mark.parametrize(
    ("pages", "size", "message"), [(1, 16, "num_pages .* got 1"), (8, 0, "page_size .* got 0")]
)
def test_sizes_that_cannot_work(pages: int, size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PageAllocator(pages, size)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=40))
def test_pages_are_conserved(script: list[tuple[bool, int]]) -> None:
    """Whatever is taken and given back, each page is free or held by exactly one taker."""
    allocator = PageAllocator(13, 4)
    held: list[list[int]] = []
    for take, count in script:
        if take and count <= allocator.free_pages:
            held.append(allocator.allocate(count))
        elif not take and held:
            allocator.free(held.pop(count % len(held)))
        out = [page for pages in held for page in pages]
        assert len(set(out)) == len(out)
        assert TRASH_PAGE not in out
        assert allocator.free_pages + len(out) == allocator.capacity
