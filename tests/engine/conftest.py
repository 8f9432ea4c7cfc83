"""Engines over the bundled demo model in float32, and transformers' model of the same checkpoint as the oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from ostinato import LLM
from ostinato.engine.launch import locate_model

MakeLLM = Callable[..., LLM]


def _assert_at_rest(llm: LLM) -> None:
    """Nothing is left of any request, and every page is free or evictable."""
    scheduler = llm.engine.scheduler
    assert not llm.engine.has_work
    assert not scheduler.has_work
    scheduler.check_leaks()
    assert llm.stats()["scheduler"]["kv_pages_used"] == 0
    assert scheduler.kv.pool.free_rows == scheduler.kv.pool.max_requests


@pytest.fixture(scope="session")
def shared_llm() -> Iterator[LLM]:
    with LLM(threads=1, progress=False, dtype="float32") as llm:
        yield llm


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    """The default engine in float32; each test must leave it at rest."""
    yield shared_llm
    _assert_at_rest(shared_llm)


@pytest.fixture
def make_llm() -> Iterator[MakeLLM]:
    """Engines with options of their own; each must be at rest when the test ends."""
    made: list[LLM] = []

    def make(**options: Any) -> LLM:
        made.append(LLM(**{"threads": 1, "progress": False, "dtype": "float32"} | options))
        return made[-1]

    yield make
    for llm in made:
        _assert_at_rest(llm)
        llm.close()


class Oracle:
    """transformers' forward of the demo model, float32."""

    def __init__(self) -> None:
        import transformers

        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            locate_model(None), dtype=torch.float32
        )

    def logits(self, token_ids: tuple[int, ...] | list[int]) -> torch.Tensor:
        """Logits [tokens, vocab] of one sequence."""
        with torch.no_grad():
            return self.model(torch.tensor([list(token_ids)])).logits[0]

    def greedy(
        self,
        prompt: tuple[int, ...],
        count: int,
        adjust: Callable[[torch.Tensor, list[int]], torch.Tensor] = lambda logits, output: logits,
    ) -> list[int]:
        """The likeliest next tokens, one forward of the whole sequence each; `adjust` sees logits and output."""
        output: list[int] = []
        for _ in range(count):
            output.append(int(adjust(self.logits([*prompt, *output])[-1], output).argmax()))
        return output


@pytest.fixture(scope="session")
def oracle() -> Oracle:
    return Oracle()
