"""Every family on every instruction path: alone, beside others, and along each axis of the contract."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from types import ModuleType

import pytest
import torch

from . import axes
from .paths import DEMO, FAMILIES, PATHS, subject
from .programme import GRAPHS, PREFILL_BUCKETS, RUNNING, Programme, programmes
from .score import ENSEMBLE, Part, decode_sizes, filling
from .stage import Setting, Stage


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "on_stage" in metafunc.fixturenames:
        played = programmes(metafunc.config.getoption("--exhaustive"))
        metafunc.parametrize("on_stage", played, indirect=True, ids=str)


class OnStage:
    """A subject's engines, its requests, and the settings it is played in."""

    def __init__(self, stage: Stage, programme: Programme) -> None:
        self.stage = stage
        self.programme = programme
        self.parts: list[Part] = programme.parts(stage.vocab)

    def for_setting(self, setting: Setting) -> list[Part]:
        """All requests; in the many settings of an exhaustive run every other one, the next model the others."""
        return self.parts[self.programme.turn % 2 :: 2] if setting.shared else self.parts

    def rest(self, setting: Setting) -> None:
        """Close the engine of a setting that nobody plays on any more."""
        keeps = setting.shared or setting in (self.programme.main, self.programme.mixed, self.programme.whole)
        if self.programme.exhaustive and not keeps:
            self.stage.forget(setting)


@pytest.fixture(scope="module")
def on_stage(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> Iterator[OnStage]:
    programme: Programme = request.param
    stage = Stage(subject(programme.name, programme.path, checkpoint))
    yield OnStage(stage, programme)
    stage.close()
    torch.set_num_threads(1)


def test_together(on_stage: OnStage) -> None:
    """Up to 33 mates in every bucket, eager and captured, prompts whole and in chunks."""
    for setting in on_stage.programme.together():
        single = setting.decode_buckets is not None and len(setting.decode_buckets) == 1
        # Requests that fill the bucket, then leave it.
        parts = on_stage.parts[: setting.decode_buckets[0]] if single else on_stage.parts
        axes.together(on_stage.stage, setting, parts)
        on_stage.rest(setting)


def test_prefill_buckets(on_stage: OnStage) -> None:
    for setting, size in on_stage.programme.prefills():
        axes.prefilled_in_bucket(on_stage.stage, setting, filling(on_stage.stage.vocab, size))
        on_stage.rest(setting)


def test_any_order(on_stage: OnStage) -> None:
    for setting in on_stage.programme.orders():
        axes.any_order(on_stage.stage, setting, on_stage.for_setting(setting))
        on_stage.rest(setting)


def test_mates(on_stage: OnStage) -> None:
    axes.mates(on_stage.stage, on_stage.programme.main, on_stage.parts, on_stage.programme.mates())


def test_prefix_hits(on_stage: OnStage) -> None:
    longest = max(on_stage.parts, key=lambda part: len(part.prompt))
    axes.hits(on_stage.stage, on_stage.programme.main, longest, on_stage.programme.hit_pages())


def test_decoded_or_prefilled(on_stage: OnStage) -> None:
    """Whatever was decoded, prefilled again as part of a longer prompt."""
    for setting in on_stage.programme.chunkings():
        parts = on_stage.for_setting(setting)
        axes.prefilled_again(on_stage.stage, setting, parts)
        axes.continued(on_stage.stage, setting, parts)
        on_stage.rest(setting)


def test_retraction(on_stage: OnStage) -> None:
    parts = on_stage.programme.long_parts(on_stage.stage.vocab)
    for setting in on_stage.programme.retractions():
        axes.retracted(on_stage.stage, setting, parts)
        on_stage.rest(setting)


def test_every_family_is_here(checkpoints: ModuleType) -> None:
    assert checkpoints.FAMILIES == FAMILIES


def test_the_samples_hold_every_value_of_every_axis() -> None:
    """No bucket, chunk size, number of mates or way of running is left to the exhaustive run alone."""
    sampled = programmes(False)
    assert {p.path for p in sampled} == set(PATHS)
    assert {p.name for p in sampled} == {DEMO, *FAMILIES}
    kernels = [p for p in sampled if p.path.kernels == "numba"]
    assert {p.size for p in kernels} == {ENSEMBLE}
    assert {n for p in kernels for n in decode_sizes(p.parts(100))} == set(range(1, ENSEMBLE + 1))
    assert {p.mixed.decode_buckets for p in kernels} == {(n,) for n in range(1, ENSEMBLE + 1)}
    assert {p.whole.prefill_buckets for p in kernels} == {(n,) for n in PREFILL_BUCKETS}
    assert {n for p in kernels for n in p.mates()} == set(range(1, ENSEMBLE))
    assert {p.whole.threads for p in kernels} == {1, 2}
    for path in [path for path in PATHS if path.dtype == "bfloat16" and path.kernels == "numba"]:
        mine = [p for p in sampled if p.path.isa == path.isa]
        chunks = mine[0].chunks
        assert {p.main.chunk_pages for p in mine} == set(chunks)
        assert {p.mixed.chunk_pages for p in mine} == set(chunks[:-1])
        assert {p.mixed.graph for p in mine} == set(GRAPHS)
        assert {p.mixed.max_running for p in mine} == set(RUNNING)
        assert {(s.graph, s.caching) for p in mine for s in p.retractions()} == set(
            product(GRAPHS, (False, True))
        )
