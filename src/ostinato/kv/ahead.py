"""Memory for the KV cache ahead of use: a thread lets the pool's pages come into being, those handed out first first.

Memory that the system gives when it is first written costs the step that writes it: a virtual machine may take 2 ms for
each 2 MB, and all layers come to the end of theirs in one and the same step. Knows nothing of requests. Invariant: what
the pages hold is not touched, and a pool that is dropped is let go.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import torch

from ostinato.kv.pool import KVPool
from ostinato.ops.cpu.huge_pages import HUGE_PAGE, populate

REST = 3.0  # times as long as it worked does the thread rest: it gets in the way of steps as little as may be
LEAST_FREE = 0.1  # of all memory: what is left to others

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def free_memory() -> float:
    """The share of memory that is free: the machine's, or the container's where that is less. 1.0 if unknown."""
    try:
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) / int(lines["MemTotal"].split()[0])
    except (OSError, KeyError, ValueError):
        free = 1.0
    try:
        limit, used = ((_CGROUP / f"memory.{name}").read_text().strip() for name in ("max", "current"))
        return min(free, 1.0 - int(used) / int(limit))
    except (OSError, ValueError):  # no such group, or one without a limit ("max")
        return free


def give_memory_ahead(pool: KVPool, free: Callable[[], float] = free_memory) -> threading.Thread | None:
    """Start the thread, for a pool in the host's memory; it ends with the pool's last page, or before memory does."""
    if pool.device.type != "cpu":
        return None
    thread = threading.Thread(target=_give, args=(weakref.ref(pool), free), name="kv-memory", daemon=True)
    thread.start()
    return thread


def _give(dropped: weakref.ref[KVPool], free: Callable[[], float]) -> None:
    first: int | None = 0
    while first is not None and free() > LEAST_FREE:
        start = time.perf_counter()
        pool = dropped()
        first = None if pool is None else _next_part(pool, first)
        del pool  # not held while resting
        time.sleep(REST * (time.perf_counter() - start))


def _next_part(pool: KVPool, first: int) -> int | None:
    """The bytes from `first` on of all layers' keys and values; returns where the next part begins, if there is one."""
    for tensor in (*pool.k, *pool.v):
        rows = tensor.view(-1).view(torch.uint8)
        if not populate(rows[first : first + HUGE_PAGE]):
            return None
    first += HUGE_PAGE
    return first if first < rows.numel() else None
