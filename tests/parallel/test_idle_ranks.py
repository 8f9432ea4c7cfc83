"""Fault cases of docs/fault-cases.md, part B, over a whole engine: ranks without work, or with work that cannot run."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ostinato.config import EngineConfig
from ostinato.engine.engine import Engine
from ostinato.engine.request import RequestOutput, SamplingParams
from ostinato.errors import ParallelError
from ostinato.padding import StepMode, StepShape
from ostinato.parallel.shm import shm_supported
from ostinato.parallel.topology import Topology

pytestmark = pytest.mark.skipif(not shm_supported(), reason="needs memfd and x86")

SMALL: dict[str, Any] = {"context_length": 64, "max_running_requests": 4, "num_pages": 6}


def _params(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0, logprobs=20, ignore_eos=True)


def _values(outputs: list[RequestOutput]) -> Any:
    return [[(o.token_ids, o.logprobs, o.finish_reason) for o in output.outputs] for output in outputs]


@pytest.fixture
def alone(checkpoint: Callable[[str], Path], ensembles: ModuleType) -> Callable[..., Any]:
    def get(prompt: list[int], tokens: int, **options: Any) -> Any:
        settings = {**SMALL, "num_pages": 64, **options}
        config = EngineConfig(model=str(checkpoint("mixtral")), progress=False, threads=1, **settings)
        return _values(ensembles.generate(Engine(config, lambda *args: None), [prompt], _params(tokens)))[0]

    return get


class Watched:
    """Notes the shapes that a rank runs, by wrapping its coordinator's decision."""

    def __init__(self, engine: Engine) -> None:
        self.shapes: list[StepShape] = []
        coordinator = engine.worker.coordinator

        class Noting(type(coordinator)):  # type: ignore[misc]
            def decide(noting, plan: Any) -> StepShape | None:
                shape = coordinator.decide(plan)
                if shape is not None:
                    self.shapes.append(shape)
                return shape

        fields = [getattr(coordinator, name) for name in coordinator.__dataclass_fields__]
        engine.worker.coordinator = Noting(*fields)


def test_f26_a_rank_whose_request_waits_for_pages(
    alone: Callable[..., Any], checkpoint: Callable[[str], Path], ensembles: ModuleType
) -> None:
    """Five pages of 16 tokens on each rank; requests of 3 pages each: the second of a rank waits for the first."""
    prompts = [[(11 * i + j) % 160 for j in range(20)] for i in range(4)]
    with ensembles.ensemble(Topology(2, 2, 2), model=str(checkpoint("mixtral")), **SMALL) as ranks:
        found = _values(ranks.generate(prompts, _params(24)))
        assert found == [alone(prompt, 24) for prompt in prompts]
        groups = ranks.front.stats()["parallel"]["groups"]
        assert all(group.get("admission_no_token", 0) > 0 for group in groups), "nobody had to wait"


def test_f25_f29_an_idle_rank_beside_prefill_and_decode(
    alone: Callable[..., Any], checkpoint: Callable[[str], Path], ensembles: ModuleType
) -> None:
    """Rank 1 takes part in every step with a count of 0, in the mode that runs, and moves no bit."""
    prompt = [(3 * j) % 160 for j in range(9)]
    with ensembles.ensemble(Topology(2, 2, 2), model=str(checkpoint("mixtral")), **SMALL) as ranks:
        busy, idle = Watched(ranks.engines[0]), Watched(ranks.engines[1])
        assert _values(ranks.generate([prompt], _params(6)))[0] == alone(prompt, 6)
    assert [s.mode for s in idle.shapes] == [StepMode.EXTEND] + [StepMode.DECODE] * 5
    assert [s.mode for s in busy.shapes] == [s.mode for s in idle.shapes]
    assert all(s.raw_num_tokens == 0 and s.bs == 0 for s in idle.shapes)
    assert [s.num_tokens for s in idle.shapes] == [s.num_tokens for s in busy.shapes]
    prefill, decode = idle.shapes[0], idle.shapes[1]
    assert prefill.eager_reason == "rank without tokens"
    assert prefill.padded_num_tokens == 0, "exact offsets: an idle rank has no rows at all"
    assert (decode.padded_num_tokens, decode.eager_reason) == (1, ""), "equal slots, replayed"


def test_decode_rows_join_a_prefill(
    alone: Callable[..., Any], checkpoint: Callable[[str], Path], ensembles: ModuleType
) -> None:
    """While rank 1 prefills, rank 0's decode rows run as prefills of one token, with the same bits."""
    first, second = [5, 6, 7], [(7 * j) % 160 for j in range(4)]
    options = {**SMALL, "prefill_buckets": (4, 8)}
    with ensembles.ensemble(Topology(2, 2, 2), model=str(checkpoint("mixtral")), **options) as ranks:
        front, watched = ranks.front, Watched(ranks.engines[0])
        name = front.submit(first, _params(8))
        done: dict[str, RequestOutput] = {}
        for step in range(40):
            if step == 3:
                other = front.submit(second, _params(3))
            for output in front.step():
                if output.finished:
                    done[output.request_id] = output
            if len(done) == 2:
                break
        assert _values([done[name], done[other]]) == [alone(first, 8), alone(second, 3)]
    joined = [s for s in watched.shapes if s.mode is StepMode.EXTEND and s.num_tokens == (1, 4)]
    assert len(joined) == 1
    assert joined[0].bs == 1


def test_ctrl_c_waits_for_the_end_of_a_step(
    alone: Callable[..., Any], checkpoint: Callable[[str], Path], ensembles: ModuleType
) -> None:
    """The ranks stay in step: what was asked before the interrupt is aborted, what comes after is answered."""
    prompt = [(3 * j) % 160 for j in range(9)]
    with ensembles.ensemble(Topology(2, 2, 2), model=str(checkpoint("mixtral")), **SMALL) as ranks:
        name = ranks.front.submit(prompt, _params(6))
        ranks.front.step()
        advance = ranks.front._advance

        def interrupted() -> None:
            signal.raise_signal(signal.SIGINT)
            advance()

        ranks.front._advance = interrupted
        with pytest.raises(KeyboardInterrupt):
            ranks.front.step()
        ranks.front._advance = advance
        last = ranks.front.abort(name)
        assert last is not None
        assert len(last.outputs[0].token_ids) == 2, "the step that was interrupted came to its end"
        assert _values(ranks.generate([prompt], _params(6)))[0] == alone(prompt, 6)


def test_ranks_that_drift_apart_are_named(checkpoint: Callable[[str], Path], ensembles: ModuleType) -> None:
    """Ranks 2 and 3 share requests; as soon as one chooses another token, the step ends with its name."""
    with ensembles.ensemble(Topology(4, 2, 4), model=str(checkpoint("mixtral")), **SMALL) as ranks:
        for i in range(2):
            ranks.front.submit([1 + i, 2, 3], _params(6))
        ranks.front.step()
        (drifting,) = [engine for engine in ranks.engines if engine.world.topology.rank == 3]
        drifting.digest += 1
        with pytest.raises(ParallelError, match="rank 3 has chosen other tokens than rank 2"):
            ranks.front.step()
        ranks.expects_errors = True
