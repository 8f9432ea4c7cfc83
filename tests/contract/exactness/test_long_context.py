"""Contexts over which attention sums in several parts (512 positions each), merged in order, shared out to threads when
the batch is small: on the demo model, whose context holds 1024 tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from . import axes
from .paths import DEMO, PATHS, subject
from .score import SEED, Part, ensemble, sampling
from .stage import Setting, Stage

CONTEXT = 1024
LENGTHS = ((500, 24), (511, 3), (512, 2), (700, 6), (1010, 14))
"""Prompt and answer: some decode across the first edge."""
COMPILED = [path for path in PATHS if path.kernels == "numba" and path.weight_coding == "auto"]
"""Coded and plain weights differ in products alone."""
SETTINGS = (
    Setting(graph="tape", chunk_pages=5),
    Setting(graph="tape", chunk_pages=32, threads=2, max_running=3),
    Setting(chunk_pages=17, mixed=True, threads=2),
)


@pytest.fixture(scope="module", params=COMPILED, ids=str)
def stage(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> Iterator[Stage]:
    made = Stage(subject(DEMO, request.param, checkpoint), context=CONTEXT)
    yield made
    made.close()
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def parts(stage: Stage) -> list[Part]:
    """Five long ones, and three short ones beside which they are decoded."""
    draw = random.Random(SEED)
    long = [
        Part(f"long{i}", tuple(draw.randrange(2, stage.vocab) for _ in range(length)), sampling(i, answer))
        for i, (length, answer) in enumerate(LENGTHS)
    ]
    return [*long, *ensemble(stage.vocab, 3)]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_together(stage: Stage, parts: list[Part], setting: Setting) -> None:
    axes.together(stage, setting, parts)


def test_on_hits_and_prefilled_again(stage: Stage, parts: list[Part]) -> None:
    axes.any_order(stage, SETTINGS[0], parts)
    axes.prefilled_again(stage, SETTINGS[0], parts)
    axes.hits(stage, SETTINGS[1], parts[0], (7, 31))
