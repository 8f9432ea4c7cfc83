"""Whatever hypothesis thinks of: which requests, in which order, when, in chunks of which size, beside how many, in a
cache of which size. A mixture of experts with shared experts, on the fastest kernels there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.ops.cpu.isa import select_isa

from .paths import NumericPath, subject
from .score import Part, ensemble, long_answers
from .stage import Setting, Stage

ARRIVALS = st.lists(st.integers(0, 4), min_size=1, max_size=12)
"""How many requests arrive before each step; the last number goes on."""
SETTINGS = st.builds(
    Setting,
    graph=st.sampled_from(["tape", "eager"]),
    chunk_pages=st.sampled_from([1, 2, 3, 5]),
    mixed=st.booleans(),
    caching=st.booleans(),
    max_running=st.sampled_from([3, 6, 12]),
    kv_tokens=st.sampled_from([144, 160, 400]),
    hopeful=st.booleans(),
)


@pytest.fixture(scope="module")
def stage(checkpoint: Callable[[str], Path]) -> Iterator[Stage]:
    made = Stage(subject("qwen2_moe", NumericPath("numba", select_isa().name, "bfloat16"), checkpoint))
    yield made
    made.close()


@pytest.fixture(scope="module")
def parts(stage: Stage) -> list[Part]:
    """Eight that grow by two pages, and four with prompts of several pages, two of which begin alike."""
    prompts = sorted(ensemble(stage.vocab, 12), key=lambda part: len(part.prompt))
    return [*long_answers(stage.vocab, 8), *prompts[-4:]]


def test_any_schedule(stage: Stage, parts: list[Part], exhaustive: bool) -> None:
    retractions, hits = 0, 0

    @settings(max_examples=400 if exhaustive else 20, deadline=None, derandomize=True, database=None)
    @given(
        setting=SETTINGS,
        order=st.lists(st.sampled_from(parts), unique=True, min_size=4, max_size=10),
        arrivals=ARRIVALS,
    )
    def play(setting: Setting, order: list[Part], arrivals: list[int]) -> None:
        nonlocal retractions, hits
        player = stage.player(setting)
        for axis in ("a schedule", "a schedule on what it left"):
            answers = player.play(order, arrivals=arrivals, warm="again")
            stage.check(f"{axis}, arrivals {arrivals}", setting, order, answers)
            hits += sum(answer.cached > 0 for answer in answers.values())
        retractions += player.count("retractions")
        stage.forget(setting)

    play()
    assert retractions > 0
    assert hits > 0
