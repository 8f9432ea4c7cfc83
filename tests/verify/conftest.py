"""Fixtures of the verify tests: tiny checkpoints, and engines that can be verified, small enough for seconds."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ostinato.config import EngineConfig
from ostinato.engine.engine import Engine
from ostinato.verify.program import program

SMALL: dict[str, Any] = {
    "context_length": 64,
    "max_running_requests": 8,
    "chunked_prefill_size": 64,
    "decode_buckets": (1, 2, 4, 8),
    "prefill_buckets": (4, 8, 16),
    "threads": 1,
    "kernels": "reference",
    "graph": "tape",
    "progress": False,
}


def _load(name: str, path: Path) -> ModuleType:
    """A helper module of other tests, under a name of its own (tests are no packages)."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """tiny(family) -> the directory of its tiny checkpoint."""
    checkpoints = _load("oracle_checkpoints", Path(__file__).parents[1] / "oracle" / "checkpoints.py")
    made: dict[str, str] = {}

    def get(family: str) -> str:
        if family not in made:
            made[family] = str(checkpoints.build(family, tmp_path_factory.mktemp(family)))
        return made[family]

    return get


@pytest.fixture(scope="session")
def ensembles() -> ModuleType:
    """The module `ensemble.py` of the parallel tests: ranks as threads."""
    return _load("parallel_ensemble", Path(__file__).parents[1] / "parallel" / "ensemble.py")


@pytest.fixture(scope="session")
def small() -> dict[str, Any]:
    """Options of a deployment with few buckets."""
    return SMALL


@pytest.fixture
def opened(tiny: Callable[[str], str]) -> Callable[..., Engine]:
    """opened(family, **options) -> an engine of one rank to verify."""

    def get(family: str = "qwen3_moe", **options: Any) -> Engine:
        config = EngineConfig(model=tiny(family), **{**SMALL, **options})
        return Engine(config, lambda *args: None, program=program())

    return get
