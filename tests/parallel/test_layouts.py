"""The layout table: whatever the ranks share, the answers are those of one rank, bit for bit where that is promised."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ostinato.config import EngineConfig
from ostinato.engine.engine import Engine
from ostinato.engine.request import RequestOutput, SamplingParams
from ostinato.parallel.shm import shm_supported
from ostinato.parallel.topology import Topology

pytestmark = pytest.mark.skipif(not shm_supported(), reason="needs memfd and x86")

SPARSE = ("qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "phimoe", "llama4")
DENSE = ("llama", "llama_tied", "mistral", "qwen2", "qwen3")
LENGTHS = (9, 1, 21, 4, 2)
PROMPTS = [[(7 * i + 3 * j + j * j) % 160 for j in range(n)] for i, n in enumerate(LENGTHS)]
# Ends at different times: ranks run dry beside busy ones.
PARAMS = [
    SamplingParams(
        max_tokens=n, temperature=0, logprobs=20, ignore_eos=True, prompt_logprobs=5 if n == 3 else None
    )
    for n in (6, 3, 5, 2, 7)
]
SMALL: dict[str, Any] = {
    "context_length": 64,
    "max_running_requests": 8,
    "chunked_prefill_size": 16,
    "num_pages": 64,
    "graph": "tape",
}


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


def _values(output: RequestOutput) -> Any:
    """Everything that must not change, names aside."""
    return [
        (o.token_ids, o.logprobs, o.text, o.finish_reason) for o in output.outputs
    ], output.prompt_logprobs


def _same(found: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert _values(one) == _values(other)


def _close(found: list[RequestOutput], expected: list[RequestOutput], tolerance: float) -> None:
    for one, other in zip(found, expected, strict=True):
        for a, b in zip(one.outputs, other.outputs, strict=True):
            assert a.token_ids == b.token_ids
            assert a.logprobs is not None
            assert b.logprobs is not None
            for x, y in zip(a.logprobs, b.logprobs, strict=True):
                for token in x.keys() & y.keys():
                    assert x[token].logprob == pytest.approx(y[token].logprob, abs=tolerance)


@pytest.mark.parametrize("layout", [(2, 2, 2), (2, 1, 2), (4, 2, 4)], ids=str)
@pytest.mark.parametrize("family", SPARSE)
def test_sparse_families(
    family: str,
    layout: tuple[int, int, int],
    alone: Callable[..., list[RequestOutput]],
    checkpoint: Callable[[str], Path],
    ensembles: ModuleType,
) -> None:
    """Experts whole on their ranks: the bits of one rank, with data, attention-TP and expert parallelism alike."""
    with ensembles.ensemble(Topology(*layout), model=str(checkpoint(family)), **SMALL) as ranks:
        _same(ranks.generate(PROMPTS, PARAMS), alone(family))


@pytest.mark.parametrize("dispatch", ["gathered", "sharded", "all_to_all"])
@pytest.mark.parametrize("graph", ["eager", "tape"])
@pytest.mark.parametrize("layout", [(4, 4, 4), (4, 1, 4), (4, 2, 4)], ids=str)
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
        _same(ranks.generate(PROMPTS, PARAMS), alone("qwen2_moe", dtype="bfloat16"))


SLICED = [(tp, dp, ep) for tp in (2, 4) for dp in (1, 2, 4) for ep in (1, 2) if dp <= tp and ep < tp]


@pytest.mark.parametrize(
    ("family", "layout"), [("qwen2_moe", layout) for layout in SLICED] + [("llama4", (4, 2, 2))], ids=str
)
def test_sliced_experts_are_close(
    family: str,
    layout: tuple[int, int, int],
    alone: Callable[..., list[RequestOutput]],
    checkpoint: Callable[[str], Path],
    ensembles: ModuleType,
) -> None:
    """Each expert sliced over ranks: sums of slices are added in rank order, in another order than in one rank."""
    with ensembles.ensemble(Topology(*layout), model=str(checkpoint(family)), **SMALL) as ranks:
        _close(ranks.generate(PROMPTS, PARAMS), alone(family), 1e-4)


@pytest.mark.parametrize("layout", [(2, 1, 1), (4, 1, 1), (4, 2, 1)], ids=str)
@pytest.mark.parametrize("family", DENSE)
def test_dense_families(
    family: str,
    layout: tuple[int, int, int],
    alone: Callable[..., list[RequestOutput]],
    checkpoint: Callable[[str], Path],
    ensembles: ModuleType,
) -> None:
    """Columns put side by side, nothing summed: exact across tp; data-parallel groups exchange no votes."""
    with ensembles.ensemble(Topology(*layout), model=str(checkpoint(family)), **SMALL) as ranks:
        _same(ranks.generate(PROMPTS, PARAMS), alone(family))
        assert all(engine.worker.coordinator.sync.rounds == 0 for engine in ranks.engines)


def test_one_request_beside_idle_ranks(
    alone: Callable[..., list[RequestOutput]], checkpoint: Callable[[str], Path], ensembles: ModuleType
) -> None:
    """dp 4 and one request at a time: three ranks take part with nothing, and count no load."""
    with ensembles.ensemble(Topology(4, 4, 4), model=str(checkpoint("mixtral")), **SMALL) as ranks:
        for i, expected in enumerate(alone("mixtral")):
            _same(ranks.generate([PROMPTS[i]], [PARAMS[i]]), [expected])
        stats = ranks.front.stats()
        rows = sum(len(p) + q.max_tokens - 1 for p, q in zip(PROMPTS, PARAMS, strict=True) if q.max_tokens)
        layers = [sum(layer) for layer in stats["expert_load"]]
        assert layers == [rows * 2] * len(layers), "real rows * experts of each, on all ranks together"
        assert stats["tokens"]["prompt"] == sum(LENGTHS)
        busy = [engine.stats()["expert_load"] for engine in ranks.engines if engine is not ranks.front]
        assert all(not any(map(any, load)) for load in busy), "ranks without requests counted load"


def test_load_is_counted_once_where_rows_are_shared(
    checkpoint: Callable[[str], Path], ensembles: ModuleType
) -> None:
    with ensembles.ensemble(Topology(4, 2, 4), model=str(checkpoint("mixtral")), **SMALL) as ranks:
        ranks.generate(PROMPTS, PARAMS)
        rows = sum(len(p) + (q.max_tokens or 0) - 1 for p, q in zip(PROMPTS, PARAMS, strict=True))
        assert {sum(layer) for layer in ranks.front.stats()["expert_load"]} == {rows * 2}


def test_captured_ahead_of_time(
    alone: Callable[..., list[RequestOutput]], checkpoint: Callable[[str], Path], ensembles: ModuleType
) -> None:
    options = {**SMALL, "capture": "startup", "prefill_buckets": (4, 16), "decode_buckets": (1, 4, 8)}
    with ensembles.ensemble(Topology(2, 2, 2), model=str(checkpoint("qwen3_moe")), **options) as ranks:
        assert not any(map(any, ranks.front.stats()["expert_load"])), "captures counted load"
        _same(ranks.generate(PROMPTS, PARAMS), alone("qwen3_moe"))
        assert ranks.front.stats()["graph"]["decode"]["replays"] > 0


def test_prefills_wait_for_each_other(
    alone: Callable[..., list[RequestOutput]], checkpoint: Callable[[str], Path], ensembles: ModuleType
) -> None:
    """Answers stay; every rank came to the same verdicts, and no wait was longer than allowed."""
    model = str(checkpoint("qwen3_moe"))
    with ensembles.ensemble(Topology(2, 2, 2), model=model, prefill_delay=3, **SMALL) as ranks:
        _same(ranks.generate(PROMPTS, PARAMS), alone("qwen3_moe"))
        _same(ranks.generate(PROMPTS[:1], PARAMS[:1]), alone("qwen3_moe")[:1])
        first, second = (engine.stats()["prefill_delay"] for engine in ranks.engines[1:] * 2)
        counts = Engine.stats(ranks.front)["prefill_delay"]
        assert counts == first == second
        assert counts["delay"] >= 2, "the lone prompt waited, in vain"
        assert counts["wait_timeout"] >= 1
