"""The KV cache gets its memory ahead of use, without a byte of it changed, and never the last of the machine's."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import cast

import pytest
import torch

from ostinato.kv import ahead
from ostinato.kv.pool import KVLayout, KVPool

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16, page_size=16)
PAGES = 1300  # 5.3 MB of keys for each layer: two whole huge pages, and a part of one


def a_pool() -> KVPool:
    return KVPool(LAYOUT, num_pages=PAGES, max_requests=1, max_pages_per_request=4)


def own_thread() -> Callable[[], bool]:
    """Tells in a thread whether it has begun since: those of engines that other tests opened may be at work, too."""
    others = set(threading.enumerate())
    return lambda: threading.current_thread() not in others


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for pages")
def test_all_of_it_is_there_and_as_it_was(load_module: Callable[[str], ModuleType]) -> None:
    resident = load_module("unit/test_weight_streaming.py").resident
    pool = a_pool()
    pool.k[0][7] = 1.0
    before = resident(pool.v[1])
    thread = ahead.give_memory_ahead(pool, lambda: False, lambda: 1.0)
    assert thread is not None
    thread.join(timeout=60)
    assert not thread.is_alive()
    size = pool.v[1].numel() * pool.v[1].element_size()
    assert before < size <= min(resident(tensor) for tensor in (*pool.k, *pool.v))
    assert [int(tensor.sum()) for tensor in (*pool.k, *pool.v)] == [2 * 64, 0, 0, 0]


def test_it_stops_where_memory_is_short() -> None:
    asked: list[float] = []

    def free() -> float:
        asked.append(0.5 if not asked else ahead.LEAST_FREE)
        return asked[-1]

    thread = ahead.give_memory_ahead(a_pool(), lambda: False, free)
    assert thread is not None
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert 1 <= len(asked) <= 2


def test_a_dropped_pool_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread holds nothing between two pages, and goes no further than the page that it was at."""
    pools = [a_pool()]
    own = own_thread()
    parts: list[int] = []

    def populate(address: int, size: int) -> bool:
        if own():
            pools.clear()  # the last one who holds it, but for the thread
            parts.append(size)
        return True

    monkeypatch.setattr(ahead, "populate", populate)
    begun = threading.Event()
    thread = ahead.give_memory_ahead(pools[0], lambda: not begun.is_set(), lambda: 1.0)
    assert thread is not None
    begun.set()  # now that the call has let go of the pool
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert len(parts) == 1


def test_it_waits_while_steps_run_and_only_then(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = iter([True, True, False, True])
    seen: list[str] = []
    own = own_thread()

    def populate(address: int, size: int) -> bool:
        if own():
            seen.append("page")
        return True

    def wait(seconds: float) -> None:
        if own():
            seen.append("wait")
        else:
            time.sleep(seconds)

    monkeypatch.setattr(ahead, "populate", populate)
    monkeypatch.setattr(ahead, "time", SimpleNamespace(sleep=wait))
    pool = a_pool()
    thread = ahead.give_memory_ahead(pool, lambda: next(turns, False), lambda: 1.0)
    assert thread is not None
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert seen[:5] == ["wait", "wait", "page", "wait", "page"]
    assert seen.count("wait") == 3


def test_a_program_may_end_meanwhile() -> None:
    """A thread that is in C++ when the interpreter ends aborts the process."""
    program = """
import torch
from ostinato.kv import ahead
from ostinato.kv.pool import KVLayout, KVPool

ahead.populate = lambda address, size: True
pool = KVPool(KVLayout(32, 8, 64, torch.bfloat16, 16), num_pages=9000, max_requests=1, max_pages_per_request=4)
ahead.give_memory_ahead(pool, lambda: False, lambda: 1.0)
"""
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")


def test_a_device_has_its_memory_from_the_start() -> None:
    pool = cast(KVPool, SimpleNamespace(device=torch.device("meta")))
    assert ahead.give_memory_ahead(pool, lambda: False) is None


@pytest.mark.parametrize(
    ("meminfo", "limit", "used", "free"),
    [
        ("MemTotal: 100 kB\nMemAvailable: 40 kB\n", None, None, 0.4),
        ("MemTotal: 100 kB\nMemAvailable: 40 kB\n", "max", "7", 0.4),
        ("MemTotal: 100 kB\nMemAvailable: 40 kB\n", "1000", "900", 0.1),
        ("nonsense", "1000", "250", 0.75),
        (None, None, None, 1.0),
    ],
)
def test_free_memory_is_that_of_the_machine_or_of_the_container(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    meminfo: str | None,
    limit: str | None,
    used: str | None,
    free: float,
) -> None:
    for name, text in (("meminfo", meminfo), ("memory.max", limit), ("memory.current", used)):
        if text is not None:
            (tmp_path / name).write_text(text)
    monkeypatch.setattr(ahead, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(ahead, "_CGROUP", tmp_path)
    assert ahead.free_memory() == pytest.approx(free)
