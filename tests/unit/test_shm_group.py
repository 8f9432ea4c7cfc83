"""Shared-memory collectives, ranks as threads of one process: values, long operations, faults."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch

from ostinato.errors import ParallelError
from ostinato.parallel.collectives import (
    Group,
    SingleGroup,
    all_gather_columns,
    all_reduce,
    ordered_sum,
    reduce_scatter,
)
from ostinato.parallel.shm import ShmGroup, create_memory, map_memory, shm_supported
from ostinato.parallel.watchdog import Watchdog

pytestmark = pytest.mark.skipif(not shm_supported(), reason="needs memfd and x86")
T = TypeVar("T")


def _groups(size: int, *, capacity: int = 1 << 16, timeout_s: float | None = 30.0) -> list[ShmGroup]:
    fd = create_memory(size, capacity=capacity)
    ranks = [10 + r for r in range(size)]
    made = [
        ShmGroup(map_memory(fd, size, capacity=capacity), r, ranks, Watchdog(timeout_s), capacity=capacity)
        for r in range(size)
    ]
    os.close(fd)
    return made


def _all(groups: list[ShmGroup], work: Callable[[Group], T]) -> list[T]:
    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(work, groups))


@pytest.fixture(params=[2, 3])
def groups(request: pytest.FixtureRequest) -> Iterator[list[ShmGroup]]:
    # 96 bytes: every operation below goes in several turns, the last one not full.
    made = _groups(request.param, capacity=96)
    yield made
    for group in made:
        group.close()


def _of(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_all_gather_many_times(groups: list[ShmGroup], dtype: torch.dtype) -> None:
    def work(group: Group) -> list[torch.Tensor]:
        found = []
        for rows in (5, 0, 3, 1, 11):
            out = torch.empty(group.size, rows, 7, dtype=dtype)
            group.all_gather((_of(group.rank, rows, 7) * 100).to(dtype), out)
            found.append(out)
        return found

    for found in _all(groups, work):
        for rows, out in zip((5, 0, 3, 1, 11), found, strict=True):
            for r in range(len(groups)):
                assert torch.equal(out[r], (_of(r, rows, 7) * 100).to(dtype))


def test_broadcast_and_barrier(groups: list[ShmGroup]) -> None:
    def work(group: Group) -> torch.Tensor:
        x = _of(group.rank, 40)
        group.barrier()
        group.broadcast(x, 1)
        return x

    assert all(torch.equal(x, _of(1, 40)) for x in _all(groups, work))


def test_all_to_all_uneven(groups: list[ShmGroup]) -> None:
    size = len(groups)
    counts = [[(2 * a + 3 * b) % 4 + 9 * (a == b) for b in range(size)] for a in range(size)]

    def work(group: Group) -> torch.Tensor:
        mine, theirs = counts[group.rank], [counts[a][group.rank] for a in range(size)]
        send = torch.cat([_of(7 * group.rank + b, mine[b], 5) for b in range(size)])
        recv = torch.full((sum(theirs) + 1, 5), 9.0)
        group.all_to_all(send, mine, recv, theirs)
        return recv

    for r, recv in enumerate(_all(groups, work)):
        expected = torch.cat([_of(7 * a + r, counts[a][r], 5) for a in range(size)])
        assert torch.equal(recv[:-1], expected)
        assert torch.equal(recv[-1], torch.full((5,), 9.0)), "a neighbour's row was written"


def test_rows_of_uneven_ranks(groups: list[ShmGroup]) -> None:
    def work(group: Group) -> list[torch.Tensor]:
        found = []
        for counts in ([7, 0, 2], [0, 0, 0], [0, 31, 1]):
            counts = counts[: group.size]
            out = torch.full((sum(counts) + 1, 5), 9.0)
            group.all_gather_rows(_of(group.rank, counts[group.rank] + 2, 5), counts, out)
            found.append(out)
        return found

    for found in _all(groups, work):
        for counts, out in zip(([7, 0, 2], [0, 0, 0], [0, 31, 1]), found, strict=True):
            parts = [_of(r, n + 2, 5)[:n] for r, n in enumerate(counts[: len(groups)])]
            assert torch.equal(out, torch.cat([*parts, torch.full((1, 5), 9.0)]))


def test_sums_have_rank_order(groups: list[ShmGroup]) -> None:
    """1e8 + 1 - 1e8 depends on the order: every rank must find what rank order gives."""
    size = len(groups)
    values = [1e8, 1.0, -1e8][:size]

    def work(group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.full((size, 6), values[group.rank])
        total, part = torch.empty(size, 6), torch.empty(6)
        all_reduce(group, x, total, torch.empty(size, size, 6))
        reduce_scatter(group, x, part, torch.empty(size, 6))
        return total, part

    expected = torch.zeros(()) + values[0]
    for value in values[1:]:
        expected = expected + value
    for total, part in _all(groups, work):
        assert torch.equal(total, expected.expand(size, 6))
        assert torch.equal(part, expected.expand(6))


def test_bf16_sums_are_rounded_once() -> None:
    parts = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    out = torch.empty(1, dtype=torch.bfloat16)
    ordered_sum(parts, out)
    assert out.item() == 258.0, "rounding after each addition would give 256"


def test_columns_side_by_side(groups: list[ShmGroup]) -> None:
    def work(group: Group) -> torch.Tensor:
        out = torch.empty(4, 3 * group.size)
        all_gather_columns(group, _of(group.rank, 4, 3), out, torch.empty(out.numel()))
        return out

    expected = torch.cat([_of(r, 4, 3) for r in range(len(groups))], 1)
    assert all(torch.equal(out, expected) for out in _all(groups, work))


def test_group_of_one_is_the_identity() -> None:
    group, x = SingleGroup(), _of(0, 4, 3)
    for operation in (all_reduce, all_gather_columns):
        out = torch.empty(4, 3)
        operation(group, x, out, torch.empty(12))
        assert torch.equal(out, x)
    out = torch.empty(4, 3)
    reduce_scatter(group, x.unsqueeze(0), out, torch.empty(1, 4, 3))
    assert torch.equal(out, x)
    recv = torch.zeros(4, 3)
    group.all_to_all(x, [2], recv, [2])
    assert torch.equal(recv[:2], x[:2])
    assert not recv[2:].any()


def test_watchdog_names_the_missing_rank() -> None:
    groups = _groups(3, timeout_s=0.2)
    found: list[str] = []

    def wait(group: ShmGroup) -> None:
        with pytest.raises(ParallelError) as error:
            group.barrier()
        found.append(str(error.value))

    threads = [threading.Thread(target=wait, args=(groups[r],)) for r in (0, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    assert all("rank 11 did not come to barrier 1" in text for text in found)


def test_a_failed_rank_is_named_without_waiting() -> None:
    groups = _groups(2, timeout_s=None)
    groups[1].fail()
    with pytest.raises(ParallelError, match="rank 11 failed"):
        groups[0].barrier()


def test_check_is_called_while_waiting() -> None:
    def gone() -> None:
        raise ParallelError("rank 1 was killed")

    fd = create_memory(2, capacity=64)
    group = ShmGroup(map_memory(fd, 2, capacity=64), 0, (0, 1), Watchdog(None, gone), capacity=64)
    os.close(fd)
    with pytest.raises(ParallelError, match="was killed"):
        group.barrier()


def test_other_operations_are_refused() -> None:
    groups = _groups(2)

    def work(group: Group) -> str:
        try:
            if group.rank == 0:
                group.all_gather(torch.zeros(3), torch.zeros(2, 3))
            else:
                group.broadcast(torch.zeros(5), 0)
        except ParallelError as error:
            return str(error)
        return ""

    first, second = _all(groups, work)
    assert "rank 11 entered broadcast of 20 bytes while rank 10 entered all_gather of 12" in first
    assert "rank 10 entered all_gather of 12 bytes" in second


def test_other_counts_are_refused() -> None:
    groups = _groups(2)

    def work(group: Group) -> str:
        try:
            group.all_to_all(torch.zeros(2, 3), [1, 1], torch.zeros(3, 3), [1, 1 + (group.rank == 0)])
        except ParallelError as error:
            return str(error)
        return ""

    assert _all(groups, work) == [
        "shm: rank 11 sent 1 rows to rank 10, which expects 2; the ranks are out of step, restart them",
        "",
    ]


def test_strided_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        _groups(2)[0].all_gather(torch.zeros(4, 4).t(), torch.zeros(2, 4, 4))
