"""Ranks that are processes: they verify in step with rank 0, and one that does not join a step is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ostinato.config import EngineConfig
from ostinato.engine.front import open_engine
from ostinato.parallel.shm import shm_supported
from ostinato.verify.faults import Injection, fault_named
from ostinato.verify.program import program
from ostinato.verify.run import Plan, Run

pytestmark = pytest.mark.skipif(not shm_supported(), reason="needs memfd and x86")


def test_processes_verify_and_one_that_returns_early_is_named(
    tiny: Callable[[str], str], small: dict[str, Any]
) -> None:
    config = EngineConfig(
        model=tiny("olmoe"),
        tp_size=2,
        dp_size=2,
        ep_size=2,
        rank_timeout=60,
        **small | {"prefill_buckets": (8,)},
    )
    engine = open_engine(config, lambda *args: None, program())
    try:
        right = Run(engine, Plan(only=("idle",), cell="decode:8:3"))
        right.cells(lambda title, failed, share: None)
        (result,) = right.results()
        assert result.cells
        assert result.passed
        group: Any = engine.world.world
        group.watchdog = replace(group.watchdog, timeout_s=2.0)
        # Rank 0 has that cell's rows, so rank 1 is the idle one.
        wrong = Run(
            engine, Plan(only=("idle",), cell="decode:8:3", inject=Injection(fault_named("early-return"), 1))
        )
        wrong.cells(lambda title, failed, share: None)
        assert wrong.broken
        (result,) = wrong.results()
        (finding,) = result.findings
        assert "rank 1 did not come" in finding.what
        assert finding.place.rank == 1
    finally:
        engine.close()
