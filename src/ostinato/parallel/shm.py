"""Collectives of ranks on one machine, through memory they share.

    memory    one line per rank: sequence number, failed          then per rank two halves: header | table | payload
    operation write own payload to half seq % 2, publish seq, wait until everybody has, read theirs

The memory has no name (a memfd, found through its creator's process), so nothing is left behind however ranks die.
Loads and stores are plain ones, which is enough where stores are seen in order (x86). Knows nothing of what it carries.
Invariant: a half is written again only after every rank has published the operation in between: nobody reads it still.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import time
from collections.abc import Sequence

import torch

from ostinato.errors import ParallelError
from ostinato.parallel.watchdog import Watchdog

LINE = 64
DEFAULT_CAPACITY = 8 << 20
"""Payload bytes of one rank and half; longer operations go in turns."""

_SPINS = 200  # looks at a sequence number before the core is offered to others
_OPS = ("barrier", "all_gather", "all_to_all", "broadcast")
_BARRIER, _GATHER, _TO_ALL, _BROADCAST = range(4)
_SEQ, _FAILED = range(2)  # words of a rank's line
_OP, _BYTES = range(2)  # words of a half's header


def shm_supported() -> bool:
    """Whether this machine has what the transport needs: unnamed shared memory, and stores seen in order."""
    return hasattr(os, "memfd_create") and platform.machine() in ("x86_64", "AMD64")


class ShmGroup:
    """A `Group` over one block of shared memory; `ranks` are the members' names in messages."""

    def __init__(
        self,
        memory: mmap.mmap,
        rank: int,
        ranks: Sequence[int],
        watchdog: Watchdog,
        *,
        capacity: int = DEFAULT_CAPACITY,
        name: str = "shm",
    ) -> None:
        self.rank = rank
        self.size = len(ranks)
        self.name = name
        self._ranks = tuple(ranks)
        self.watchdog = watchdog
        self._capacity = capacity
        self._half = _half_bytes(self.size, capacity)
        self._memory: mmap.mmap | None = memory
        self._words = memoryview(memory).cast("q")
        # ctypes would pin the mapping for ever; torch lets it go with its tensor.
        self._keep: torch.Tensor | None = torch.frombuffer(memory, dtype=torch.uint8)
        self._base = self._keep.data_ptr()
        self._seq = 0
        self._others = tuple(r for r in range(self.size) if r != rank)

    # ---- operations ----

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        n = x.numel() * x.element_size()
        _check("out", out, self.size * n)
        _check("x", x, n)
        source, target = x.data_ptr(), out.data_ptr()
        for start in range(0, max(n, 1), self._capacity):
            k = min(self._capacity, n - start)
            ctypes.memmove(self._open(self.rank, _GATHER, n), source + start, k)
            self._sync(_GATHER)
            for r in range(self.size):
                ctypes.memmove(target + r * n + start, self._read(r, _GATHER, n), k)

    def all_gather_rows(self, x: torch.Tensor, counts: Sequence[int], out: torch.Tensor) -> None:
        row = _row_bytes(x)
        sizes = [row * count for count in counts]
        _check_room("out", out, sum(sizes))
        _check_room("x", x, sizes[self.rank])
        source, target = x.data_ptr(), out.data_ptr()
        for start in range(0, max(*sizes, 1), self._capacity):
            payload = self._open(self.rank, _GATHER, sum(sizes))
            if sizes[self.rank] > start:
                ctypes.memmove(payload, source + start, min(self._capacity, sizes[self.rank] - start))
            self._sync(_GATHER)
            at = target + start
            for r, size in enumerate(sizes):
                if size > start:
                    there = self._read(r, _GATHER, sum(sizes))
                    ctypes.memmove(at, there, min(self._capacity, size - start))
                at += size

    def broadcast(self, x: torch.Tensor, root: int) -> None:
        n = x.numel() * x.element_size()
        _check("x", x, n)
        for start in range(0, max(n, 1), self._capacity):
            k = min(self._capacity, n - start)
            payload = self._open(self.rank, _BROADCAST, n)
            if self.rank == root:
                ctypes.memmove(payload, x.data_ptr() + start, k)
            self._sync(_BROADCAST)
            if self.rank != root:
                ctypes.memmove(x.data_ptr() + start, self._read(root, _BROADCAST, n), k)

    def barrier(self) -> None:
        self._open(self.rank, _BARRIER, 0)
        self._sync(_BARRIER)

    def all_to_all(
        self, send: torch.Tensor, send_counts: Sequence[int], recv: torch.Tensor, recv_counts: Sequence[int]
    ) -> None:
        row = _row_bytes(send)
        total = row * sum(send_counts)
        _check_room("send", send, total)
        _check_room("recv", recv, row * sum(recv_counts))
        turn, turns = 0, 1
        while turn < turns:
            first = turn * self._capacity
            payload = self._open(self.rank, _TO_ALL, row)
            self._write_table(send_counts)
            if total > first:
                ctypes.memmove(payload, send.data_ptr() + first, min(self._capacity, total - first))
            self._sync(_TO_ALL)
            at = 0
            for r in range(self.size):
                counts = self._read_table(r)
                turns = max(turns, -(-sum(counts) * row // self._capacity))
                self._expect(r, counts[self.rank], recv_counts[r])
                begin = sum(counts[: self.rank]) * row
                self._take(r, row, (begin, begin + counts[self.rank] * row), first, recv.data_ptr() + at)
                at += counts[self.rank] * row
            turn += 1

    def _take(self, r: int, row: int, segment: tuple[int, int], first: int, target: int) -> None:
        """Copy what rank r's window [first, first + capacity) holds of `segment` of its stream to `target`."""
        low, high = max(segment[0], first), min(segment[1], first + self._capacity)
        if low < high:
            source = self._read(r, _TO_ALL, row) + low - first
            ctypes.memmove(target + low - segment[0], source, high - low)

    def close(self) -> None:
        """Unmap the memory; the last rank to do so frees it."""
        if self._memory is not None:
            self._words.release()
            self._keep = None
            self._memory = None

    def fail(self) -> None:
        """Tell the others that this rank gives up, so that they need not wait for the watchdog."""
        if self._memory is not None:
            self._words[self.rank * LINE // 8 + _FAILED] = 1

    # ---- the protocol ----

    def _at(self, rank: int) -> int:
        """Offset of the half of `rank` that the operation in hand uses."""
        return self.size * LINE + (2 * rank + (self._seq + 1) % 2) * self._half

    def _open(self, rank: int, op: int, size: int) -> int:
        """Write the header of the next operation; the address of its payload."""
        at = self._at(rank)
        self._words[at // 8 + _OP] = op
        self._words[at // 8 + _BYTES] = size
        return self._base + at + LINE + _table_bytes(self.size)

    def _read(self, rank: int, op: int, size: int) -> int:
        """The address of a rank's payload of the operation that was just published, checked to be the same one."""
        at = self.size * LINE + (2 * rank + self._seq % 2) * self._half
        found_op, found_size = self._words[at // 8 + _OP], self._words[at // 8 + _BYTES]
        if (found_op, found_size) != (op, size):
            raise ParallelError(
                f"{self.name}: rank {self._ranks[rank]} entered {_OPS[found_op]} of {found_size} bytes while rank "
                f"{self._ranks[self.rank]} entered {_OPS[op]} of {size}; the ranks are out of step, restart them"
            )
        return self._base + at + LINE + _table_bytes(self.size)

    def _write_table(self, counts: Sequence[int]) -> None:
        table = (self._at(self.rank) + LINE) // 8
        for r, count in enumerate(counts):
            self._words[table + r] = count

    def _read_table(self, rank: int) -> list[int]:
        table = (self.size * LINE + (2 * rank + self._seq % 2) * self._half + LINE) // 8
        return self._words[table : table + self.size].tolist()

    def _expect(self, rank: int, sent: int, expected: int) -> None:
        if sent != expected:
            raise ParallelError(
                f"{self.name}: rank {self._ranks[rank]} sent {sent} rows to rank {self._ranks[self.rank]}, which "
                f"expects {expected}; the ranks are out of step, restart them"
            )

    def _sync(self, op: int) -> None:
        """Publish the operation and wait until every rank has."""
        words, seq = self._words, self._seq + 1
        self._seq = seq
        words[self.rank * LINE // 8] = seq
        for r in self._others:
            flag = r * LINE // 8
            spins = 0
            while words[flag] < seq:
                spins += 1
                if spins > _SPINS:
                    self._wait(flag, seq, op)

    def _wait(self, flag: int, seq: int, op: int) -> None:
        """The slow part: give the core away, sleep longer and longer, look for failures."""
        words, began, looked = self._words, time.monotonic(), 0.0
        while words[flag] < seq:
            waited = time.monotonic() - began
            if waited < 0.002:
                os.sched_yield()
                continue
            time.sleep(50e-6 if waited < 0.1 else 1e-3 if waited < 2.0 else 5e-3)
            if waited - looked > 0.05:
                looked = waited
                self._look(seq, op, waited)

    def _look(self, seq: int, op: int, waited: float) -> None:
        lines = [(self._ranks[r], self._words[r * LINE // 8 : r * LINE // 8 + 2]) for r in self._others]
        failed = [rank for rank, line in lines if line[_FAILED]]
        if failed:
            raise ParallelError(f"{_ranks(failed)} failed; see what it wrote. {self.name} cannot go on")
        self.watchdog.check()
        timeout = self.watchdog.timeout_s
        if timeout is not None and waited > timeout:
            missing = [rank for rank, line in lines if line[_SEQ] < seq]
            raise ParallelError(
                f"{_ranks(missing)} did not come to {_OPS[op]} {seq} of {self.name} within {timeout:g} s; it hangs or "
                "is gone: look at its output, or allow more time"
            )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def create_memory(size: int, *, capacity: int = DEFAULT_CAPACITY) -> int:
    """A file descriptor of fresh, zeroed memory for a group of `size` ranks."""
    fd = os.memfd_create("ostinato")
    os.ftruncate(fd, memory_bytes(size, capacity))
    return fd


def map_memory(fd: int, size: int, *, capacity: int = DEFAULT_CAPACITY) -> mmap.mmap:
    """Map the memory behind a descriptor, which may be closed afterwards."""
    return mmap.mmap(fd, memory_bytes(size, capacity))


def memory_bytes(size: int, capacity: int) -> int:
    return size * LINE + 2 * size * _half_bytes(size, capacity)


def _table_bytes(size: int) -> int:
    return -(-8 * size // LINE) * LINE


def _half_bytes(size: int, capacity: int) -> int:
    return LINE + _table_bytes(size) + -(-capacity // LINE) * LINE


def _row_bytes(x: torch.Tensor) -> int:
    elements = 1
    for extent in x.shape[1:]:
        elements *= extent
    return elements * x.element_size()


def _check_room(name: str, x: torch.Tensor, nbytes: int) -> None:
    if not x.is_contiguous() or x.numel() * x.element_size() < nbytes:
        raise ValueError(
            f"{name} must be contiguous with {nbytes} bytes or more, got {tuple(x.shape)} {x.dtype}, "
            f"strides {x.stride()}"
        )


def _check(name: str, x: torch.Tensor, nbytes: int) -> None:
    if not x.is_contiguous() or x.numel() * x.element_size() != nbytes:
        raise ValueError(
            f"{name} must be contiguous with {nbytes} bytes, got {tuple(x.shape)} {x.dtype}, strides {x.stride()}"
        )
