"""A decoder captured on the tape: short contexts at capture, longer ones and other tokens at replay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest
import torch

from ostinato.graphs.tape import TapeBackend
from ostinato.padding import StepMode


@pytest.mark.parametrize("family", ["llama", "qwen2_moe", "olmoe", "phimoe", "llama4"])
def test_a_replay_has_the_bits_of_an_eager_step(
    family: str, checkpoint: Callable[[str], Path], driver: ModuleType
) -> None:
    eager, graph = (driver.Driver.load(checkpoint(family), 3, 64, padding=2) for _ in range(2))
    static, shape = graph.view([[3], [4], []], StepMode.DECODE)
    graph.model.attention.plan(static, shape)
    captured = TapeBackend().capture(lambda stream: graph.run(static, stream), 1)

    prompt = [list(range(7, 47)), list(range(90, 101)), list(range(5, 12))]
    for run in (eager, graph):
        run.step(prompt)
    for tokens in ([[9], [], [8]], [[150], [2], []], [[1], [], []]):
        want = torch.cat(eager.step(tokens, mode=StepMode.DECODE))
        view, shape = graph.view(tokens, StepMode.DECODE)
        for name in (field.name for field in fields(static)):
            buffer, values = getattr(static, name), getattr(view, name)
            if isinstance(buffer, torch.Tensor):
                buffer[: values.shape[0]] = values
        graph.model.attention.plan(static, shape)
        graph.model.workspace.fill(torch.nan)
        assert torch.equal(captured.replay()[: len(want)], want)
        graph.lengths = list(eager.lengths)
