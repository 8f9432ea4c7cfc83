"""The device side of the KV cache: sizes, the page table and its pad row, slots."""

from __future__ import annotations

import pytest
import torch

from ostinato.errors import ConfigError
from ostinato.kv.pages import TRASH_PAGE
from ostinato.kv.pool import KVLayout, KVPool

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=8, dtype=torch.bfloat16, page_size=4)


def _pool() -> KVPool:
    return KVPool(LAYOUT, num_pages=6, max_requests=3, max_pages_per_request=5)


def test_memory_of_a_page() -> None:
    # keys and values * layers * heads * dim * 2 bytes * tokens
    assert LAYOUT.bytes_per_page == 2 * 3 * 2 * 8 * 2 * 4
    assert LAYOUT.pages_in(10 * LAYOUT.bytes_per_page + 5) == 10


def test_memory_too_small_for_anything() -> None:
    with pytest.raises(ConfigError, match=r"of 800 bytes holds 1 pages of 768 bytes.*give more"):
        LAYOUT.pages_in(800)


def test_tensors() -> None:
    pool = _pool()
    assert len(pool.k) == len(pool.v) == 3
    for tensor in [*pool.k, *pool.v]:
        assert tensor.shape == (24, 2, 8)
        assert tensor.dtype == torch.bfloat16
        assert not tensor.any()
    assert pool.page_table.shape == (4, 5)
    assert pool.page_table.dtype == torch.int32
    assert (pool.page_table == TRASH_PAGE).all()


def test_bytes_are_what_the_layout_says() -> None:
    pool = _pool()
    total = sum(t.numel() * t.element_size() for t in [*pool.k, *pool.v])
    assert total == pool.num_pages * LAYOUT.bytes_per_page


def test_row_zero_is_the_pads() -> None:
    pool = _pool()
    assert sorted(pool.take_row() for _ in range(3)) == [1, 2, 3]
    assert pool.free_rows == 0
    for misuse in (lambda: pool.give_row(0), lambda: pool.write_row(0, 0, [3])):
        with pytest.raises(AssertionError, match="row 0 is the pads'"):
            misuse()


def test_a_row_given_back_shows_only_trash() -> None:
    pool = _pool()
    row = pool.take_row()
    pool.write_row(row, 0, [3, 1])
    pool.write_row(row, 2, [5])
    pool.write_row(row, 3, [])
    assert pool.page_table[row].tolist() == [3, 1, 5, 0, 0]
    pool.give_row(row)
    assert (pool.page_table == TRASH_PAGE).all()
    with pytest.raises(AssertionError, match="is free already"):
        pool.give_row(row)


def test_slots_of_positions() -> None:
    pool = _pool()
    a, b = pool.take_row(), pool.take_row()
    pool.write_row(a, 0, [3, 1])
    pool.write_row(b, 0, [2])
    assert pool.slots(a, torch.tensor([0, 3, 4, 7])).tolist() == [12, 15, 4, 7]
    assert pool.slots(torch.tensor([a, b]), torch.tensor([5, 2])).tolist() == [5, 10]
    # Past a request's pages, and for pads, everything is trash.
    assert pool.slots(torch.tensor([b, 0]), torch.tensor([6, 9])).tolist() == [2, 1]


def test_nothing_is_reserved_later() -> None:
    """F19: the buffers that a graph captured stay where they are, however full the pool gets."""
    pool = _pool()
    addresses = [t.data_ptr() for t in [pool.page_table, *pool.k, *pool.v]]
    rows = [pool.take_row() for _ in range(3)]
    for row in rows:
        pool.write_row(row, 0, [1, 2, 3, 4, 5])
    assert (pool.page_table[0] == TRASH_PAGE).all()
    for row in rows:
        pool.give_row(row)
    assert [t.data_ptr() for t in [pool.page_table, *pool.k, *pool.v]] == addresses
