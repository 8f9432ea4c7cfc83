"""Fixtures of the oracle tests: tiny checkpoints and transformers' models of them, built once per session."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch


def _load(name: str) -> ModuleType:
    """A helper module of this directory, under a name of its own (tests are no packages)."""
    qualified = f"oracle_{name}"
    if qualified not in sys.modules:
        spec = importlib.util.spec_from_file_location(qualified, Path(__file__).with_name(f"{name}.py"))
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[qualified] = module
        spec.loader.exec_module(module)
    return sys.modules[qualified]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Matrices are tiny here: a second thread only waits, for long where the cores are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def checkpoints() -> ModuleType:
    """The module `checkpoints.py`."""
    return _load("checkpoints")


@pytest.fixture(scope="session")
def driver() -> ModuleType:
    """The module `driver.py`."""
    return _load("driver")


@pytest.fixture(scope="session")
def checkpoint(checkpoints: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """checkpoint(family) -> the directory of its tiny checkpoint."""
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = checkpoints.build(family, tmp_path_factory.mktemp(family))
        return made[family]

    return get


@pytest.fixture(scope="session")
def oracle(checkpoints: ModuleType, checkpoint: Callable[[str], Path]) -> Callable[[str], Any]:
    """oracle(family) -> transformers' model of the tiny checkpoint."""
    made: dict[str, Any] = {}

    def get(family: str) -> Any:
        if family not in made:
            made[family] = checkpoints.oracle(checkpoint(family))
        return made[family]

    return get


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield
