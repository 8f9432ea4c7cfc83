"""Fixtures of the oracle tests: transformers' models of the tiny checkpoints, built once per session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch


@pytest.fixture(scope="session")
def driver(load_module: Callable[[str], ModuleType]) -> ModuleType:
    """The module `driver.py`."""
    return load_module("oracle/driver.py")


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
