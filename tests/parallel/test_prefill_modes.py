"""Prefill graph modes over ranks: the same answers in each, one width and one verdict for all ranks of a step."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ostinato.config import EngineConfig
from ostinato.engine import coordinator, worker
from ostinato.engine.engine import Engine
from ostinato.engine.prefill_graph import ExtendFacts, can_replay_locally
from ostinato.engine.request import RequestOutput, SamplingParams
from ostinato.padding import StepShape
from ostinato.parallel.shm import shm_supported
from ostinato.parallel.topology import Topology

from .table import PARAMS, PROMPTS, SMALL, same

pytestmark = pytest.mark.skipif(not shm_supported(), reason="needs memfd and x86")

Checkpoint = Callable[[str], Path]


@pytest.fixture(scope="module")
def alone(checkpoint: Checkpoint, ensembles: ModuleType) -> list[RequestOutput]:
    """The answers of one rank that captures nothing."""
    options = {**SMALL, "graph": "eager"}
    config = EngineConfig(model=str(checkpoint("qwen2_moe")), progress=False, threads=1, **options)
    return list(ensembles.generate(Engine(config, lambda *args: None), PROMPTS, PARAMS))


@pytest.mark.parametrize(
    ("layout", "asked", "runs"),
    [
        ((2, 1, 2), "auto", "full"),
        ((2, 1, 2), "breakable", "breakable"),
        ((2, 2, 2), "auto", "breakable"),
        ((2, 2, 2), "full", "full"),
        ((2, 2, 2), "eager", "eager"),
    ],
    ids=str,
)
def test_every_mode_answers_alike(
    layout: tuple[int, int, int],
    asked: str,
    runs: str,
    alone: list[RequestOutput],
    checkpoint: Checkpoint,
    ensembles: ModuleType,
) -> None:
    """Under data-parallel attention breakable is what one gets without asking."""
    options: dict[str, Any] = {**SMALL, "prefill_graph": asked, "enable_prefix_caching": False}
    with ensembles.ensemble(Topology(*layout), model=str(checkpoint("qwen2_moe")), **options) as ranks:
        for _ in range(2):  # the second time on graphs
            same(ranks.generate(PROMPTS, PARAMS), alone)
        for engine in ranks.engines:
            found = engine.worker.stats()
            replays = found["graph"]["prefill"]["replays"]
            assert found["prefill_graph"] == runs
            assert (replays > 0) == (runs != "eager")


def test_ranks_of_very_different_prompts_share_one_bucket(
    checkpoint: Checkpoint, ensembles: ModuleType
) -> None:
    """Lengths 6 and 200 beside each other: each rank would choose another bucket, and wait for the other for ever."""
    prompts = [[(7 * j + 3 * i) % 160 for j in range(n)] for i, n in enumerate((6, 200))]
    params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    options: dict[str, Any] = {
        "context_length": 256,
        "max_running_requests": 4,
        "enable_prefix_caching": False,
        "prefill_buckets": (8, 64, 208, 256),
    }
    shapes: dict[int, list[StepShape]] = {}

    def watch(engine: Engine) -> None:
        run, seen = engine.worker.prefill.run, shapes.setdefault(engine.world.topology.rank, [])

        def noted(shape: StepShape, *args: Any, **named: Any) -> Any:
            seen.append(shape)
            return run(shape, *args, **named)

        engine.worker.prefill.run = noted

    model = str(checkpoint("mixtral"))
    config = EngineConfig(model=model, progress=False, threads=1, **options)
    expected = ensembles.generate(Engine(config, lambda *args: None), prompts, params)
    with ensembles.ensemble(Topology(2, 2, 2), model=model, prepare=watch, **options) as ranks:
        for _ in range(2):
            same(ranks.generate(prompts, params), expected)
        assert all(engine.worker.prefill.stats.replays == 1 for engine in ranks.engines)
    assert [shape.num_tokens for shape in shapes[0]] == [(6, 200)] * 2
    for rank in (0, 1):
        assert [(shape.padded_num_tokens, shape.eager_reason) for shape in shapes[rank]] == [(208, "")] * 2


def test_the_vote_and_the_forward_never_disagree(
    alone: list[RequestOutput], checkpoint: Checkpoint, ensembles: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every forward of a prefill asks again, and gets the answer of the vote before it; decode rows that join too."""
    votes: dict[int, tuple[ExtendFacts, str]] = {}
    asked: list[str] = []

    def vote(facts: ExtendFacts, *args: Any) -> str:
        reason = can_replay_locally(facts, *args)
        votes[threading.get_ident()] = facts, reason
        return reason

    def forward(facts: ExtendFacts, *args: Any) -> str:
        reason = can_replay_locally(facts, *args)
        assert votes[threading.get_ident()] == (facts, reason)
        asked.append(reason)
        return reason

    monkeypatch.setattr(coordinator, "can_replay_locally", vote)
    monkeypatch.setattr(worker, "can_replay_locally", forward)
    options: dict[str, Any] = {**SMALL, "prefill_buckets": (2, 8), "fair_prefill": False}
    with ensembles.ensemble(Topology(2, 2, 2), model=str(checkpoint("qwen2_moe")), **options) as ranks:
        same(ranks.generate(PROMPTS, PARAMS), alone)
    assert len(asked) > 4
    assert {"", "above the largest bucket"} <= set(asked)
