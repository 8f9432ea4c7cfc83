"""Experts with replicas, moved while they serve: answers stay, bit for bit, and load is counted by the law."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ostinato.config import EngineConfig
from ostinato.engine.engine import Engine
from ostinato.engine.request import RequestOutput, SamplingParams
from ostinato.errors import ConfigError
from ostinato.moe.rebalance import Transfer, transfers
from ostinato.parallel.shm import shm_supported
from ostinato.parallel.topology import Topology

pytestmark = pytest.mark.skipif(not shm_supported(), reason="needs memfd and x86")

PROMPTS = [[(5 * i + j * j) % 160 for j in range(n)] for i, n in enumerate((9, 1, 14, 4))]
PARAMS = SamplingParams(max_tokens=9, temperature=0, logprobs=20, ignore_eos=True)
SMALL: dict[str, Any] = {"context_length": 64, "max_running_requests": 8, "num_pages": 64}


@pytest.fixture(scope="module")
def alone(checkpoint: Callable[[str], Path], ensembles: ModuleType) -> Callable[..., list[RequestOutput]]:
    made: dict[tuple[str, str], list[RequestOutput]] = {}

    def get(family: str, dtype: str = "float32") -> list[RequestOutput]:
        if (family, dtype) not in made:
            model = str(checkpoint(family))
            config = EngineConfig(model=model, dtype=dtype, progress=False, threads=1, **SMALL)
            made[family, dtype] = ensembles.generate(Engine(config, lambda *args: None), PROMPTS, PARAMS)
        return made[family, dtype]

    return get


def _values(outputs: list[RequestOutput]) -> Any:
    return [[(o.token_ids, o.logprobs) for o in output.outputs] for output in outputs]


@pytest.mark.parametrize("dispatch", ["gathered", "all_to_all"])
@pytest.mark.parametrize(
    ("layout", "redundant"), [((2, 2, 2), 2), ((4, 2, 4), 4), ((4, 2, 2), 0), ((1, 1, 1), 3)], ids=str
)
def test_rebalanced_while_serving(
    layout: tuple[int, int, int],
    redundant: int,
    dispatch: str,
    alone: Callable[..., list[RequestOutput]],
    checkpoint: Callable[[str], Path],
    ensembles: ModuleType,
) -> None:
    options = {**SMALL, "redundant_experts": redundant, "rebalance_steps": 3, "dispatch": dispatch}
    model = str(checkpoint("mixtral"))
    with ensembles.ensemble(Topology(*layout), model=model, **options) as ranks:
        found = _values(ranks.generate(PROMPTS, PARAMS))
        if layout[0] == layout[2]:  # experts are whole
            assert found == _values(alone("mixtral"))
        else:
            assert [[o[0] for o in one] for one in found] == [
                [o[0] for o in one] for one in _values(alone("mixtral"))
            ]
        stats = ranks.front.stats()
        rows, chosen = sum(map(len, PROMPTS)) + 8 * len(PROMPTS), 9 * len(PROMPTS)
        *layers, last = (sum(layer) for layer in stats["expert_load"])
        assert set(layers) == {rows * 2}, "real rows * experts of each"
        assert last == chosen * 2, "the last layer computes rows that choose a token"
        placement = stats["placement"]
        assert placement["rebalanced"] >= 2
        assert all(
            set(slots) == set(range(8)) and len(slots) == 8 + redundant for slots in placement["slots"]
        )
        if layout[2] > 1:
            assert placement["moved"] > 0
        same = [engine.worker.rebalancer.layers[0].slots for engine in ranks.engines]
        assert len(set(same)) == 1


def test_int8_and_bf16_weights_move(
    alone: Callable[..., list[RequestOutput]], checkpoint: Callable[[str], Path], ensembles: ModuleType
) -> None:
    model = str(checkpoint("qwen2_moe"))
    options = {**SMALL, "dtype": "bfloat16", "redundant_experts": 2, "rebalance_steps": 2}
    with ensembles.ensemble(Topology(2, 2, 2), model=model, **options) as ranks:
        assert _values(ranks.generate(PROMPTS, PARAMS)) == _values(alone("qwen2_moe", "bfloat16"))
    config = EngineConfig(model=model, quantization="int8", progress=False, threads=1, **SMALL)
    expected = _values(ensembles.generate(Engine(config, lambda *args: None), PROMPTS, PARAMS))
    options = {**SMALL, "quantization": "int8", "redundant_experts": 2, "rebalance_steps": 2}
    with ensembles.ensemble(Topology(2, 2, 2), model=model, **options) as ranks:
        assert _values(ranks.generate(PROMPTS, PARAMS)) == expected
        assert ranks.front.stats()["placement"]["moved"] > 0


def test_placement_from_a_file(
    tmp_path: Path,
    alone: Callable[..., list[RequestOutput]],
    checkpoint: Callable[[str], Path],
    ensembles: ModuleType,
) -> None:
    """A map that is nothing like the identity, another one in each layer."""
    slots = [[7, 6, 5, 4, 3, 2, 1, 0, 3, 3], [1, 1, 0, 2, 4, 3, 5, 7, 6, 0], [0, 1, 2, 3, 4, 5, 6, 7, 6, 5]]
    path = tmp_path / "placement.json"
    path.write_text(json.dumps({"slots": slots}))
    model = str(checkpoint("mixtral"))
    with ensembles.ensemble(Topology(2, 2, 2), model=model, expert_placement=str(path), **SMALL) as ranks:
        assert _values(ranks.generate(PROMPTS, PARAMS)) == _values(alone("mixtral"))
        assert ranks.front.stats()["placement"]["slots"] == slots


def test_refusals(checkpoint: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match="give one"):
        EngineConfig(expert_placement="x", redundant_experts=2)
    config = EngineConfig(model=str(checkpoint("llama")), redundant_experts=2, progress=False, **SMALL)
    with pytest.raises(ConfigError, match="no experts to place"):
        Engine(config, lambda *args: None)


def test_transfers_prefer_the_own_rank_and_spread_the_sends() -> None:
    before, after = (0, 1, 2, 0, 1, 3), (0, 3, 2, 0, 2, 1)
    assert transfers(before, after, 2) == [Transfer(1, 2, 0, 1), Transfer(0, 2, 1, 1), Transfer(1, 1, 1, 2)]
    assert transfers(before, before, 2) == []
