"""A program runs on all ranks in one round, and steps go on after it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from ostinato.engine.engine import Engine
from ostinato.engine.program import RankProgram
from ostinato.engine.request import SamplingParams
from ostinato.parallel.shm import shm_supported
from ostinato.parallel.topology import Topology

pytestmark = pytest.mark.skipif(not shm_supported(), reason="needs memfd and x86")


def _gathered(engine: Engine, message: bytes) -> bytes:
    """Every rank's number, by a collective of the program's own, behind the message."""
    world = engine.world
    ranks = torch.zeros(world.topology.tp, 1, dtype=torch.int64)
    world.world.all_gather(torch.tensor([world.topology.rank]), ranks)
    return message + bytes([world.topology.rank, *ranks.flatten().tolist()])


def test_all_ranks_run_a_program_in_step(checkpoint: Callable[[str], Path], ensembles: ModuleType) -> None:
    sizes = {"context_length": 32, "max_running_requests": 2, "num_pages": 6}
    model = str(checkpoint("mixtral"))
    with ensembles.ensemble(Topology(2, 2, 2), RankProgram(_gathered), model=model, **sizes) as ranks:
        params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
        before = ranks.generate([[1, 2, 3]], params)
        long = b"x" * 10_000
        assert ranks.front.call(long) == [long + bytes([rank, 0, 1]) for rank in range(2)]
        assert ranks.generate([[1, 2, 3]], params)[0].outputs == before[0].outputs
