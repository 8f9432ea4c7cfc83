"""Live checks over several ranks: all check the same steps, and what one finds takes the graph from all of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ostinato.engine.request import SamplingParams
from ostinato.parallel.shm import shm_supported
from ostinato.parallel.topology import Topology

pytestmark = pytest.mark.skipif(not shm_supported(), reason="needs memfd and x86")

SIZES: dict[str, Any] = {"context_length": 64, "max_running_requests": 4, "num_pages": 20}
PROMPTS = [[(11 * i + 3 * j) % 160 for j in range(9)] for i in range(3)]


@pytest.mark.parametrize("layout", [Topology(2, 2, 2), Topology(2, 1, 2)], ids=["dp", "attn tp"])
def test_a_fault_on_one_rank_quarantines_on_all(
    checkpoint: Callable[[str], Path], ensembles: ModuleType, tmp_path: Path, layout: Topology
) -> None:
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    options = SIZES | {"model": str(checkpoint("mixtral")), "trace_dir": str(tmp_path)}
    with ensembles.ensemble(layout, shadow_rate=0.5, **options) as ranks:

        def play() -> list[Any]:
            return [o.outputs[0].token_ids for o in ranks.generate(PROMPTS, params)]

        want = play()
        play()
        workers = [engine.worker for engine in ranks.engines]
        assert len({worker.checks.steps for worker in workers}) == 1
        checks = [(worker.decode.stats.checked, worker.prefill.stats.checked) for worker in workers]
        assert checks[0] == checks[1]
        assert checks[0][0] > 2
        faulty = workers[1]
        for key in faulty.decode.captured:
            tape = faulty.decode.graph(key)
            spoil = tape.outputs.neg_
            tape._calls, tape._whole = (*tape._calls, spoil), None
        again = play()
        if layout.dp > 1:
            assert again == play() == want
        for worker in workers:
            assert worker.decode.stats.mismatches >= 1
            assert worker.decode.stats.quarantined == faulty.decode.stats.quarantined
        assert all("rank1" in path.name for path in tmp_path.glob("*.trace"))
        assert list(tmp_path.glob("*.trace"))
        assert ranks.front.stats()["graph"]["decode"]["quarantined"]
