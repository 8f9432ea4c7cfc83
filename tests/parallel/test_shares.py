"""Ranks of one group hold shares: of the embedding, of the head, and of projections whose norm goes over all heads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from ostinato.config import EngineConfig
from ostinato.engine.engine import Engine
from ostinato.engine.request import RequestOutput, SamplingParams
from ostinato.parallel.shm import shm_supported
from ostinato.parallel.topology import Topology

pytestmark = pytest.mark.skipif(not shm_supported(), reason="needs memfd and x86")

SMALL: dict[str, Any] = {"context_length": 64, "max_running_requests": 4, "num_pages": 64}
PROMPTS = [[(11 * i + j) % 160 for j in range(3 + 5 * i)] for i in range(2)]
GREEDY = SamplingParams(max_tokens=4, temperature=0, logprobs=20, ignore_eos=True)


def _values(outputs: list[RequestOutput]) -> Any:
    return [[(o.token_ids, o.logprobs) for o in output.outputs] for output in outputs]


@pytest.mark.parametrize("graph", ["tape", "eager"])
@pytest.mark.parametrize("layout", [(2, 1, 2), (4, 1, 4)], ids=str)
@pytest.mark.parametrize("family", ["olmoe", "llama_tied"])
def test_shares_and_bits(
    checkpoint: Callable[[str], Path],
    ensembles: ModuleType,
    family: str,
    layout: tuple[int, int, int],
    graph: str,
) -> None:
    """OLMoE norms queries and keys over all heads and clips them; with 4 ranks, two share each of its key heads."""
    options = {**SMALL, "model": str(checkpoint(family)), "graph": graph}
    alone = Engine(EngineConfig(progress=False, threads=1, **options), lambda *args: None)
    expected = _values(ensembles.generate(alone, PROMPTS, GREEDY))
    config, ranks_of_group = alone.model_config, layout[0]
    kv_heads = max(config.num_kv_heads // ranks_of_group, 1)
    with ensembles.ensemble(Topology(*layout), **options) as ranks:
        assert _values(ranks.generate(PROMPTS, GREEDY)) == expected
        shares: list[torch.Tensor] = []
        for engine in [ranks.front, *sorted(ranks.engines[1:], key=lambda e: e.world.topology.rank)]:
            model = engine.worker.model
            assert isinstance(model.embedding, torch.Tensor)
            shares.append(model.embedding)
            assert model.head.out_features == config.vocab_size // ranks_of_group
            heads = config.num_heads // ranks_of_group + 2 * kv_heads
            assert model.layers[0].attention.qkv.out_features == heads * config.head_dim
    assert torch.cat(shares, 1).shape == (config.vocab_size, config.hidden_size)
    assert len({share.shape for share in shares}) == 1
