"""SmolLM2 and its mixture of experts: real weights, real text, prompts longer than the tiny checkpoints' contexts.

Skips where the checkpoints cannot be downloaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from . import axes
from .paths import PATHS, Subject
from .programme import GRAPHS
from .score import ENSEMBLE, Part, sampling
from .stage import ALONE, Setting, Stage

CONTEXT = 384
OPENINGS = (
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of",
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "It is a truth universally acknowledged, that a single man in possession of a good temper, is",
    "Once upon a time",
    "In the beginning God created the heaven and the earth. And the earth was without form, and void; and darkness",
)
LONG = (
    "A mixture of experts sends each token to a few of many small networks, and adds what they answer. " * 14
)
"""Some 300 tokens: attention over keys in several chunks."""
CHUNKED = Setting(graph="tape", chunk_pages=4, max_running=8)
MIXED = Setting(chunk_pages=9, mixed=True, decode_buckets=(5,), max_running=8, threads=2)
SMALL = Setting(graph="tape", chunk_pages=1, max_running=8, kv_tokens=144, hopeful=True)
MODELS = ("smollm2", "smollm2_moe")


COMPILED = [path for path in PATHS if path.kernels == "numba"]
SAMPLED = (("smollm2", COMPILED[1]), ("smollm2_moe", COMPILED[0]))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Both models on all paths of compiled kernels, or each on one."""
    if "real" in metafunc.fixturenames:
        every = metafunc.config.getoption("--exhaustive")
        played = list(product(MODELS, COMPILED)) if every else SAMPLED
        ids = [f"{model}-{path}" for model, path in played]
        metafunc.parametrize("real", played, indirect=True, ids=ids)


class Real:
    """A stage with a real model, its requests, and one with a long prompt."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        tokenizer = stage.player(ALONE).llm.tokenizer
        texts = [tuple(tokenizer.encode(text)) for text in OPENINGS]
        self.parts = [Part(f"text{i}", ids, sampling(i, 4 + 2 * i)) for i, ids in enumerate(texts)]
        self.long = Part("long", tuple(tokenizer.encode(LONG)), sampling(0, 6))
        self.growing = [
            Part(f"grows{i}", p.prompt[:5], sampling(i, 44)) for i, p in enumerate(self.parts[:4])
        ]
        words = self.long.prompt
        self.many = [
            Part(f"many{i}", words[7 * i : 7 * i + 1 + i * 5 % 12], sampling(i, 2 + 7 * i % ENSEMBLE // 5))
            for i in range(ENSEMBLE)
        ]
        self.know([*self.parts, self.long, *self.growing])

    def know(self, parts: list[Part]) -> None:
        """What these are given alone; then its engine goes. One at a time: each holds the weights."""
        self.stage.alone(parts)
        self.stage.forget(ALONE)


@pytest.fixture(scope="module")
def real(request: pytest.FixtureRequest) -> Iterator[Real]:
    model, path = request.param
    path.skip_where_missing()
    checkpoint: Path = request.getfixturevalue(f"{model}_path")
    stage = Stage(Subject(model, checkpoint, path), context=CONTEXT)
    yield Real(stage)
    stage.close()
    torch.set_num_threads(1)


def test_beside_others_on_hits_and_prefilled_again(real: Real) -> None:
    """The short texts come and go beside the long one, which is prefilled in chunks between their decode steps."""
    parts = [*real.parts, real.long]
    axes.together(real.stage, CHUNKED, parts)
    axes.any_order(real.stage, CHUNKED, parts)
    axes.prefilled_again(real.stage, CHUNKED, parts[-3:])
    real.stage.forget(CHUNKED)


def test_mixed_steps_on_two_threads(real: Real, exhaustive: bool) -> None:
    if not exhaustive:
        pytest.skip("one more engine of this size is played by --exhaustive alone")
    axes.together(real.stage, MIXED, [*real.parts, real.long])
    real.stage.forget(MIXED)


def test_every_bucket_and_number_of_mates(real: Real, exhaustive: bool) -> None:
    """1 to 34 requests that fill a bucket, then leave it; in one of default buckets, in any order."""
    if not exhaustive:
        pytest.skip("played by --exhaustive alone")
    real.know(real.many)
    setting = Setting(graph="tape", shared=True)
    for size in range(1, ENSEMBLE + 1):
        bucket = replace(setting, decode_buckets=(size,), prefill_buckets=())
        axes.together(real.stage, bucket, real.many[:size])
    axes.any_order(real.stage, replace(setting, chunk_pages=2), [*real.parts, *real.many[6:]])


@pytest.mark.parametrize("graph", GRAPHS)
def test_every_chunk_size(real: Real, exhaustive: bool, graph: str) -> None:
    """All that cut the long prompt, some of them eager, and hits of every third number of its pages."""
    if not exhaustive:
        pytest.skip("played by --exhaustive alone")
    setting = Setting(graph=graph, shared=True)
    every = range(len(real.long.prompt) // 16 + 2)
    for pages in every if graph == "tape" else (0, 1, 3, 8, 18):
        axes.together(real.stage, replace(setting, chunk_pages=pages), [*real.parts[:3], real.long])
    axes.prefilled_again(real.stage, replace(setting, chunk_pages=7), [*real.parts, real.long])
    axes.continued(real.stage, replace(setting, chunk_pages=7), [*real.growing, real.long])
    axes.hits(real.stage, replace(setting, chunk_pages=3), real.long, every[::3])
    real.stage.forget(setting)


def test_retraction(real: Real) -> None:
    """Answers that outgrow the cache."""
    axes.retracted(real.stage, SMALL, real.growing)
    real.stage.forget(SMALL)
