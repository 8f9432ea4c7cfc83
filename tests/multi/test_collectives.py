"""Collectives between processes: shared memory and gloo give the same values, sums in rank order, faults a name."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ostinato.parallel.shm import shm_supported
from ostinato.parallel.topology import Topology


@pytest.fixture(scope="module")
def work() -> ModuleType:
    """The module `work.py`, importable under its plain name by the processes that are started."""
    here = Path(__file__).parent
    sys.path.insert(0, str(here))
    spec = importlib.util.spec_from_file_location("work", here / "work.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["work"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_every_operation(run_ranks: Callable[..., Any], work: ModuleType, transport: str) -> None:
    size = 4
    found = run_ranks(work.operations, Topology(tp=size, dp=2), transport=transport)
    used = "gloo" if transport == "gloo" or not shm_supported() else "shm"
    for rank, (name, (gathered, uneven, received, told, total, near)) in enumerate(found):
        assert name == used
        assert gathered == [float(r) for r in range(size) for _ in range(6)]
        assert uneven == [float(r) for r in range(size) for _ in range(r)]
        assert received == (
            [float(r) for r in range(size) for _ in range(2 * (r + 1))] if rank == size - 1 else []
        )
        assert told == [1.0] * 4
        assert total == [0.25], "1e8 + 1 - 1e8 + 0.25 in rank order, in fp32"
        assert near == [float(rank // 2 * 2), float(rank // 2 * 2 + 1)]


@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_a_killed_rank_is_named(run_ranks: Callable[..., Any], work: ModuleType, transport: str) -> None:
    found = run_ranks(work.kill_one, Topology(tp=3), 1, transport=transport, timeout_s=1.0)
    assert found[1] == "gone"
    for text in (found[0], found[2]):
        # Whoever notices first: those who wait for it, or those who look for its signs of life.
        assert text.startswith(
            ("ParallelError: rank 1 did not come to all_gather", "ParallelError: rank 1 gave no sign")
        )
