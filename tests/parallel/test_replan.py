"""`--buckets auto` over two groups: both change their lists at the same step, and no answer moves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ostinato.config import EngineConfig
from ostinato.engine.engine import Engine
from ostinato.engine.request import SamplingParams
from ostinato.graphs.planner import Costs
from ostinato.parallel.shm import shm_supported
from ostinato.parallel.topology import Topology

pytestmark = pytest.mark.skipif(not shm_supported(), reason="needs memfd and x86")


def play(engine: Engine) -> list[Any]:
    """Requests that come one after the other and end at different times, so that groups are idle, too."""
    told: dict[str, Any] = {}
    names = []
    for i in range(9):
        params = SamplingParams(max_tokens=6 + 3 * (i % 4), temperature=0, logprobs=5, ignore_eos=True)
        names.append(engine.submit([(7 * i + j) % 160 for j in range(4 + 5 * (i % 3))], params))
        for _ in range(3):
            told |= {o.request_id: o.outputs[0] for o in engine.step() if o.finished}
    while engine.has_work:
        told |= {o.request_id: o.outputs[0] for o in engine.step() if o.finished}
    return [(told[name].token_ids, told[name].logprobs) for name in names]


def test_groups_change_together(checkpoint: Callable[[str], Path], ensembles: ModuleType) -> None:
    options: dict[str, Any] = {"context_length": 64, "max_running_requests": 6, "num_pages": 40}
    options["model"] = str(checkpoint("mixtral"))
    want = play(Engine(EngineConfig(progress=False, threads=1, **options), lambda *args: None))
    with ensembles.ensemble(Topology(2, 2, 2), buckets="auto", **options) as ranks:
        workers = [engine.worker for engine in ranks.engines]
        for worker in workers:
            worker.options.replanner.costs = Costs(pad_row=1e-3, eager=1e-2, graph=1e-3)
            worker.options.replanner.every = 6
        assert play(ranks.front) == want
        assert workers[0].rules == workers[1].rules == workers[0].coordinator.rules
        found = [worker.stats()["buckets"] for worker in workers]
        assert found[0] == found[1]
        assert found[0]["changes"] >= 2
