"""Memory for the KV cache ahead of use: a thread lets the pool's pages come into being, those handed out first first.

Memory that the system gives when it is first written costs the step that writes it: a virtual machine may take 2 ms for
each 2 MB, and all layers come to the end of theirs in one and the same step. Knows nothing of requests. Invariant: what
the pages hold is not touched, and a pool that is dropped is let go.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

from ostinato.kv.pool import KVPool
from ostinato.ops.cpu.huge_pages import HUGE_PAGE, populate

LOOK = 0.05  # seconds between two looks whether steps still run: it works when none does, and takes no core from any
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


def give_memory_ahead(
    pool: KVPool, busy: Callable[[], bool], free: Callable[[], float] = free_memory
) -> threading.Thread | None:
    """Start the thread, for a pool in the host's memory; it ends with the pool's last page, or before memory does.

    `busy` tells whether steps run; it must not keep the pool alive.
    """
    if pool.device.type != "cpu":
        return None
    # Addresses, for the thread must not call torch: one that is in C++ when the interpreter ends aborts the process.
    places = [(x.data_ptr(), x.numel() * x.element_size()) for x in (*pool.k, *pool.v)]
    args = weakref.ref(pool), places, busy, free
    thread = threading.Thread(target=_give, args=args, name="kv-memory", daemon=True)
    thread.start()
    return thread


def _give(
    dropped: weakref.ref[KVPool],
    places: Sequence[tuple[int, int]],
    busy: Callable[[], bool],
    free: Callable[[], float],
) -> None:
    """One huge page of one layer's keys or values at a time, of all layers before the next of each."""
    for first in range(0, places[0][1], HUGE_PAGE):
        for address, size in places:
            while busy():
                time.sleep(LOOK)
            pool = dropped()  # held while its memory is spoken of
            if pool is None or free() <= LEAST_FREE:
                return
            if not populate(address + first, min(HUGE_PAGE, size - first)):
                return
            del pool
