"""Property P1 across ranks: whatever pads, tails and buffers of earlier steps hold, no bit of an answer changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ostinato.config import EngineConfig
from ostinato.engine.engine import Engine
from ostinato.engine.request import RequestOutput, SamplingParams
from ostinato.graphs.audit import POISONS, Poison, poison_registry, poison_workspace
from ostinato.moe.layer import MoELayer
from ostinato.parallel.shm import shm_supported
from ostinato.parallel.topology import Topology

pytestmark = pytest.mark.skipif(not shm_supported(), reason="needs memfd and x86")

PROMPTS = [[(5 * i + j * j) % 160 for j in range(n)] for i, n in enumerate((9, 1, 14))]
PARAMS = [SamplingParams(max_tokens=n, temperature=0, logprobs=20, ignore_eos=True) for n in (3, 8, 5)]
SMALL: dict[str, Any] = {
    "context_length": 64,
    "max_running_requests": 8,
    "num_pages": 64,
    "dtype": "bfloat16",
}


class Poisoner:
    """Poisons everything that a step may leave behind, just before each step of one rank."""

    def __init__(self, engine: Engine, poison: Poison) -> None:
        worker, self.steps = engine.worker, 0
        coordinator = worker.coordinator
        layers = [layer.ffn for layer in worker.model.layers if isinstance(layer.ffn, MoELayer)]
        dispatcher: Any = layers[0].dispatcher
        buffers = dispatcher.home.buffers
        poisoner = self

        class Poisoning(type(coordinator)):  # type: ignore[misc]
            def decide(noting, plan: Any) -> Any:
                shape = coordinator.decide(plan)
                if shape is not None:
                    poisoner.steps += 1
                    poison_registry(worker.decode.registry, poison)
                    poison_registry(worker.prefill.registry, poison)
                    poison_workspace(worker.model.workspace, poison)
                    worker._held = ()  # the buffers are no inputs to go on from any more
                    for tensor in (buffers.results, buffers.home, buffers.pairs.x):
                        poison.into(tensor)
                    for parcel in (buffers.send, buffers.gathered, buffers.pairs):
                        parcel.x.fill_(poison.number)
                        parcel.ids.fill_(min(poison.index, 2**31 - 1))
                        parcel.weights.fill_(poison.number)
                    for cache in (*worker.pool.k, *worker.pool.v):
                        cache[: worker.pool.page_size].fill_(poison.number)
                return shape

        worker.coordinator = Poisoning(*[getattr(coordinator, n) for n in coordinator.__dataclass_fields__])


def _values(outputs: list[RequestOutput]) -> Any:
    return [[(o.token_ids, o.logprobs) for o in output.outputs] for output in outputs]


NAN = POISONS[0]
CASES = [(poison, "gathered", "tape") for poison in POISONS[:3]]
CASES += [(NAN, way, "tape") for way in ("sharded", "all_to_all", "all_to_all_fixed")]
CASES.append((NAN, "gathered", "eager"))


@pytest.mark.parametrize(("poison", "dispatch", "graph"), CASES, ids=lambda x: getattr(x, "name", x))
def test_nothing_left_behind_is_read(
    poison: Poison, dispatch: str, graph: str, checkpoint: Callable[[str], Path], ensembles: ModuleType
) -> None:
    """Two data-parallel groups of two ranks each, a shared expert, three requests that end at different times."""
    model = str(checkpoint("qwen2_moe"))
    config = EngineConfig(model=model, progress=False, threads=1, graph=graph, **SMALL)
    expected = _values(ensembles.generate(Engine(config, lambda *args: None), PROMPTS, PARAMS))
    options = {**SMALL, "graph": graph, "dispatch": dispatch}
    with ensembles.ensemble(Topology(4, 2, 4), model=model, **options) as ranks:
        poisoners = [Poisoner(engine, poison) for engine in ranks.engines]
        for _ in range(2):  # the second time graphs of all widths are there
            assert _values(ranks.generate(PROMPTS, PARAMS)) == expected
        assert all(poisoner.steps > 10 for poisoner in poisoners)
