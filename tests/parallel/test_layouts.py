"""What must hold in every layout besides the table's answers: whatever is said of a step or counted, and bf16."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ostinato.config import EngineConfig
from ostinato.engine.engine import Engine
from ostinato.engine.request import RequestOutput
from ostinato.parallel.shm import shm_supported
from ostinato.parallel.topology import Topology

from .table import LENGTHS, PARAMS, PROMPTS, SMALL, Way, difference, play, same

CHOSEN = sum(params.max_tokens or 0 for params in PARAMS)
"""Tokens, each of a row that passes the last layer."""

pytestmark = pytest.mark.skipif(not shm_supported(), reason="needs memfd and x86")


@pytest.fixture(scope="module")
def alone(checkpoint: Callable[[str], Path], ensembles: ModuleType) -> Callable[..., list[RequestOutput]]:
    """alone(family, **options) -> the outputs of one rank."""
    made: dict[Any, list[RequestOutput]] = {}

    def get(family: str, **options: Any) -> list[RequestOutput]:
        key = family, tuple(sorted(options.items()))
        if key not in made:
            config = EngineConfig(
                model=str(checkpoint(family)), progress=False, threads=1, **SMALL, **options
            )
            made[key] = ensembles.generate(Engine(config, lambda *args: None), PROMPTS, PARAMS)
        return made[key]

    return get


@pytest.mark.parametrize("dispatch", ["gathered", "sharded", "all_to_all"])
@pytest.mark.parametrize(
    ("layout", "graph"), [((4, 1, 4), "tape"), ((4, 2, 4), "tape"), ((4, 4, 4), "eager")], ids=str
)
def test_every_way_to_the_experts(
    layout: tuple[int, int, int],
    graph: str,
    dispatch: str,
    alone: Callable[..., list[RequestOutput]],
    checkpoint: Callable[[str], Path],
    ensembles: ModuleType,
) -> None:
    """bf16, with a shared expert (qwen2_moe): counted exactly once in every layout."""
    options = {**SMALL, "graph": graph, "dtype": "bfloat16"}
    model = str(checkpoint("qwen2_moe"))
    with ensembles.ensemble(Topology(*layout), model=model, dispatch=dispatch, **options) as ranks:
        same(ranks.generate(PROMPTS, PARAMS), alone("qwen2_moe", dtype="bfloat16"))


def test_dense_groups_exchange_no_votes(
    alone: Callable[..., list[RequestOutput]], checkpoint: Callable[[str], Path], ensembles: ModuleType
) -> None:
    with ensembles.ensemble(Topology(4, 2, 1), model=str(checkpoint("llama")), **SMALL) as ranks:
        same(ranks.generate(PROMPTS, PARAMS), alone("llama"))
        assert all(engine.worker.coordinator.sync.rounds == 0 for engine in ranks.engines)


def test_one_request_beside_idle_ranks(
    alone: Callable[..., list[RequestOutput]], checkpoint: Callable[[str], Path], ensembles: ModuleType
) -> None:
    """dp 4 and one request at a time: three ranks take part with pads alone, which count as no load and cost no expert
    work: each rank computes what the busy one's rows send to its experts, and the others' rows send nothing.
    """
    with ensembles.ensemble(Topology(4, 4, 4), model=str(checkpoint("mixtral")), **SMALL) as ranks:
        for i, expected in enumerate(alone("mixtral")):
            same(ranks.generate([PROMPTS[i]], [PARAMS[i]]), [expected])
        stats = ranks.front.stats()
        rows = sum(len(p) + q.max_tokens - 1 for p, q in zip(PROMPTS, PARAMS, strict=True) if q.max_tokens)
        layers = [sum(layer) for layer in stats["expert_load"]]
        want = [*[rows * 2] * (len(layers) - 1), CHOSEN * 2]
        assert layers == want, (
            "real rows * experts of each, on all ranks together; in the last layer those that choose"
        )
        assert stats["tokens"]["prompt"] == sum(LENGTHS)
        busy = [engine.stats()["expert_load"] for engine in ranks.engines if engine is not ranks.front]
        assert all(not any(map(any, load)) for load in busy), "ranks without requests counted load"
        assert stats["graph"]["decode"]["replays"] > 0, "equal slots for all ranks"
        computed = [rank["computed"] for rank in stats["parallel"]["expert_rows"]]
        assert computed == [
            sum(sum(layer[2 * r : 2 * r + 2]) for layer in stats["expert_load"]) for r in range(4)
        ]
        assert [rank["fetched"] for rank in stats["parallel"]["expert_rows"]] == [sum(layers), 0, 0, 0]


@pytest.mark.parametrize("dispatch", ["sharded", "all_to_all"])
def test_rows_of_experts_are_counted_where_they_run(
    dispatch: str, checkpoint: Callable[[str], Path], ensembles: ModuleType
) -> None:
    """Experts sliced over pairs of ranks: both of a pair compute its rows, a slice of each."""
    model = str(checkpoint("mixtral"))
    with ensembles.ensemble(Topology(4, 2, 2), model=model, dispatch=dispatch, **SMALL) as ranks:
        ranks.generate(PROMPTS, PARAMS)
        stats = ranks.front.stats()
        shares = [sum(sum(layer[first : first + 4]) for layer in stats["expert_load"]) for first in (0, 4)]
        rows = stats["parallel"]["expert_rows"]
        assert [rank["computed"] for rank in rows] == [shares[0], shares[0], shares[1], shares[1]]
        assert sum(rank["fetched"] for rank in rows) == sum(shares)


@pytest.mark.parametrize("family", ["qwen2_moe", "llama4"])
def test_a_shared_expert_counts_once(family: str, checkpoint: Callable[[str], Path]) -> None:
    """Behind a gate and without one, with experts that have replicas: tp = dp = ep = 4 has the bits of one rank."""
    alone = play(checkpoint(family), Topology(), Way(graph="eager"))
    found = play(checkpoint(family), Topology(4, 4, 4), Way(redundant=4))
    assert difference(found, alone) == 0.0


def test_load_is_counted_once_where_rows_are_shared(
    checkpoint: Callable[[str], Path], ensembles: ModuleType
) -> None:
    with ensembles.ensemble(Topology(4, 2, 4), model=str(checkpoint("mixtral")), **SMALL) as ranks:
        ranks.generate(PROMPTS, PARAMS)
        rows = sum(len(p) + (q.max_tokens or 0) - 1 for p, q in zip(PROMPTS, PARAMS, strict=True))
        *layers, last = (sum(layer) for layer in ranks.front.stats()["expert_load"])
        assert (set(layers), last) == ({rows * 2}, CHOSEN * 2)


def test_captured_ahead_of_time(
    alone: Callable[..., list[RequestOutput]], checkpoint: Callable[[str], Path], ensembles: ModuleType
) -> None:
    options = {**SMALL, "capture": "startup", "prefill_buckets": (4, 16), "decode_buckets": (1, 4, 8)}
    with ensembles.ensemble(Topology(2, 2, 2), model=str(checkpoint("qwen3_moe")), **options) as ranks:
        assert not any(map(any, ranks.front.stats()["expert_load"])), "captures counted load"
        same(ranks.generate(PROMPTS, PARAMS), alone("qwen3_moe"))
        assert ranks.front.stats()["graph"]["decode"]["replays"] > 0


def test_prefills_wait_for_each_other(
    alone: Callable[..., list[RequestOutput]], checkpoint: Callable[[str], Path], ensembles: ModuleType
) -> None:
    """Answers stay; every rank came to the same verdicts, and no wait was longer than allowed."""
    model = str(checkpoint("qwen3_moe"))
    with ensembles.ensemble(Topology(2, 2, 2), model=model, prefill_delay=3, **SMALL) as ranks:
        same(ranks.generate(PROMPTS, PARAMS), alone("qwen3_moe"))
        same(ranks.generate(PROMPTS[:1], PARAMS[:1]), alone("qwen3_moe")[:1])
        first, second = (engine.stats()["prefill_delay"] for engine in ranks.engines[1:] * 2)
        counts = Engine.stats(ranks.front)["prefill_delay"]
        assert counts == first == second
        assert counts["delay"] >= 2, "the lone prompt waited, in vain"
        assert counts["wait_timeout"] >= 1
