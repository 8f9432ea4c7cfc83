"""The engine as beside a device: what host and device share on a CPU is split here, so that a copy left out shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ostinato import LLM, SamplingParams
from ostinato.engine.chooser import Chooser
from ostinato.kv.pool import KVPool

PROMPTS = ["Alice was", "The White Rabbit", "Alice was beginning to get very tired"]
PARAMS = [
    SamplingParams(max_tokens=12),
    SamplingParams(max_tokens=12, temperature=0.9, top_k=30, seed=4),
    SamplingParams(max_tokens=12, temperature=0.8, repetition_penalty=1.3, seed=5),
]


def split_choices(chooser: Chooser) -> None:
    """Rules, seeds, positions and tokens of the host lie elsewhere than the step's."""
    there = chooser.tokens, chooser.positions, chooser._seeds, chooser._rules
    chooser._staging = tuple(x.clone() for x in there)
    chooser._host = tuple(x.numpy() for x in chooser._staging)


def split_table(pool: KVPool) -> None:
    """The host's page table is another than the one that attention reads."""
    pool._host_table = pool.page_table.clone()


def test_host_and_device_that_share_no_memory(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy, sampled, and chosen on the host (relayed to the next step); pages given back and taken again."""
    options: dict[str, Any] = {"kernels": "numba", "context_length": 64, "num_pages": 14}

    def answers() -> list[Any]:
        llm = make_llm(**options)
        return [[r.outputs[0].token_ids for r in llm.generate(PROMPTS, PARAMS)] for _ in range(2)]

    want = answers()
    split = []
    for kind, apart in ((Chooser, split_choices), (KVPool, split_table)):
        made = kind.__init__

        def build(self: Any, *args: Any, made: Any = made, apart: Any = apart, **named: Any) -> None:
            made(self, *args, **named)
            apart(self)
            split.append(self)

        monkeypatch.setattr(kind, "__init__", build)
    assert answers() == want
    pool = next(x for x in split if isinstance(x, KVPool))
    assert pool._host_table.equal(pool.page_table)
    assert len(split) == 2
