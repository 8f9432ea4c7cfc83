"""Seeds: what is sampled depends on the request's seed, prompt and parameters, and on no other request (F41)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ostinato import SamplingParams
from ostinato.ops.cpu.isa import select_isa

from .paths import DEMO, NumericPath, subject
from .score import Part, ensemble
from .stage import Setting, Stage

SETTING = Setting(graph="tape", chunk_pages=2)


@pytest.fixture(scope="module")
def stage(checkpoint: Callable[[str], Path]) -> Iterator[Stage]:
    made = Stage(subject(DEMO, NumericPath("numba", select_isa().name, "bfloat16"), checkpoint))
    yield made
    made.close()


def test_f41_unseeded_mates_disturb_nobody(stage: Stage) -> None:
    """Seeded requests beside requests that use the engine's seed."""
    parts = ensemble(stage.vocab, 8)
    unseeded = SamplingParams(temperature=1.3, max_tokens=5, min_tokens=5)
    mates = [Part(f"unseeded{i}", part.prompt, unseeded) for i, part in enumerate(parts[:4])]
    answers = stage.player(SETTING).play([*mates, *parts])
    stage.check("beside unseeded mates", SETTING, parts, {part.name: answers[part.name] for part in parts})


def test_tokens_depend_on_what_they_should(stage: Stage) -> None:
    """Not the same by being constant: another seed, another prompt, another temperature; else the same."""
    prompt, other = (part.prompt for part in ensemble(stage.vocab, 2))
    length = {"max_tokens": 8, "min_tokens": 8}
    parts = [
        Part("first", prompt, SamplingParams(seed=1, **length)),
        Part("seed", prompt, SamplingParams(seed=2, **length)),
        Part("prompt", other, SamplingParams(seed=1, **length)),
        Part("greedy", prompt, SamplingParams(temperature=0, **length)),
    ]
    player = stage.player(SETTING)
    answers = player.play([*parts, replace(parts[0], name="again")])
    assert len({answers[part.name].tokens for part in parts}) == len(parts)
    assert answers["again"].tokens == answers["first"].tokens
