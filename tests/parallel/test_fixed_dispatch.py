"""Dispatch all-to-all with a fixed number of slots between ranks, over a whole engine: bits, counts, overflow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ostinato.config import EngineConfig
from ostinato.engine.engine import Engine
from ostinato.engine.request import RequestOutput, SamplingParams
from ostinato.errors import ConfigError, ParallelError
from ostinato.parallel.shm import shm_supported
from ostinato.parallel.topology import Topology

pytestmark = pytest.mark.skipif(not shm_supported(), reason="needs memfd and x86")

SMALL: dict[str, Any] = {"context_length": 64, "max_running_requests": 4, "num_pages": 64}
FIXED: dict[str, Any] = {**SMALL, "dispatch": "all_to_all_fixed"}
PROMPTS = [[(11 * i + j) % 160 for j in range(3 + 5 * i)] for i in range(3)]
GREEDY = SamplingParams(max_tokens=5, temperature=0, logprobs=20, ignore_eos=True)


def _values(outputs: list[RequestOutput]) -> Any:
    return [[(o.token_ids, o.logprobs) for o in output.outputs] for output in outputs]


@pytest.mark.parametrize("graph", ["tape", "eager"])
@pytest.mark.parametrize("layout", [(2, 2, 2), (4, 2, 4), (2, 2, 1)], ids=str)
def test_bits_of_one_rank(
    checkpoint: Callable[[str], Path], ensembles: ModuleType, layout: tuple[int, int, int], graph: str
) -> None:
    model = str(checkpoint("mixtral"))
    config = EngineConfig(model=model, progress=False, threads=1, **SMALL)
    alone = ensembles.generate(Engine(config, lambda *args: None), PROMPTS, GREEDY)
    with ensembles.ensemble(Topology(*layout), model=model, graph=graph, **FIXED) as ranks:
        found = ranks.generate(PROMPTS, GREEDY)
        stats = ranks.front.stats()
    tokens = [[o.token_ids for o in output.outputs] for output in found]
    assert tokens == [[o.token_ids for o in output.outputs] for output in alone]
    if layout[2] == layout[0]:
        assert _values(found) == _values(alone), "experts are whole: every bit"
    replays = stats["graph"]["decode"]["replays"]
    assert (replays > 0) == (graph == "tape"), "its shapes are fixed, so steps replay"
    assert 0 < stats["dispatch"]["most_slots"] <= stats["dispatch"]["capacity"]
    assert stats["dispatch"]["overflows"] == 0


def test_overflow_is_counted_and_names_the_remedy(
    checkpoint: Callable[[str], Path], ensembles: ModuleType
) -> None:
    options = {**FIXED, "dispatch_capacity": 1}
    with ensembles.ensemble(Topology(2, 2, 2), model=str(checkpoint("mixtral")), **options) as ranks:
        ranks.expects_errors = True
        with pytest.raises(
            ParallelError, match=r"do not fit.* raise dispatch_capacity to \d+ or more, or leave"
        ):
            ranks.generate(PROMPTS, GREEDY)
        assert ranks.front.stats()["dispatch"]["overflows"] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dispatch_capacity": 8}, "dispatch_capacity 8 is for dispatch 'all_to_all_fixed'"),
        ({"cp_size": 2}, "cp_size 2: context parallelism is not there yet"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**options)
