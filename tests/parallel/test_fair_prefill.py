"""Prompts without end on several data-parallel groups hold up no answer, and no prompt waits for more than a step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ostinato.config import EngineConfig
from ostinato.engine.engine import Engine
from ostinato.engine.request import SamplingParams
from ostinato.parallel.shm import shm_supported
from ostinato.parallel.topology import Topology

pytestmark = pytest.mark.skipif(not shm_supported(), reason="needs memfd and x86")

SMALL: dict[str, Any] = {"context_length": 64, "max_running_requests": 4, "num_pages": 64}
ANSWERS = [[5, 6, 7], [8, 9, 10]]
ANSWER_TOKENS, STEPS = 10, 32


def _params(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)


def _under_load(front: Any) -> tuple[dict[str, list[int]], list[dict[str, int]]]:
    """Two answers while each step brings each group a prompt: those that end in time, and statistics of the groups."""
    names = [front.submit(prompt, _params(ANSWER_TOKENS)) for prompt in ANSWERS]
    front.step()
    done: dict[str, list[int]] = {}
    for step in range(STEPS):
        for i in range(2):
            front.submit([(7 * step + 3 * i + j) % 160 for j in range(6)], _params(1))
        for output in front.step():
            if output.finished and output.request_id in names:
                done[output.request_id] = list(output.outputs[0].token_ids)
    return {name: done[name] for name in names if name in done}, front.stats()["parallel"]["groups"]


@pytest.mark.parametrize("delay", [0, 3])
def test_answers_go_on(checkpoint: Callable[[str], Path], ensembles: ModuleType, delay: int) -> None:
    model = str(checkpoint("mixtral"))
    with ensembles.ensemble(Topology(2, 2, 2), model=model, prefill_delay=delay, **SMALL) as ranks:
        done, groups = _under_load(ranks.front)
    config = EngineConfig(model=model, progress=False, threads=1, **SMALL)
    alone = ensembles.generate(Engine(config, lambda *args: None), ANSWERS, _params(ANSWER_TOKENS))
    assert list(done.values()) == [list(output.outputs[0].token_ids) for output in alone]
    turns = [group["fair_decode_turns"] for group in groups]
    assert turns[0] == turns[1], "all ranks take the same turns"
    assert turns[0] >= ANSWER_TOKENS - 2
    assert all(group["fair_prefills_held"] > 0 for group in groups)
    assert sum(group["finished_length"] for group in groups) > STEPS // 2, "prompts go on, too"


def test_without_it_they_do_not(checkpoint: Callable[[str], Path], ensembles: ModuleType) -> None:
    model = str(checkpoint("mixtral"))
    with ensembles.ensemble(Topology(2, 2, 2), model=model, fair_prefill=False, **SMALL) as ranks:
        done, groups = _under_load(ranks.front)
    assert not done
    assert all("fair_decode_turns" not in group for group in groups)
