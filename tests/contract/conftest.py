"""Fixtures of the contract tests: the rig that runs steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch


@pytest.fixture(scope="session")
def rigs(load_module: Callable[[str], ModuleType]) -> ModuleType:
    """The module `rig.py`."""
    return load_module("contract/rig.py")


@pytest.fixture(scope="session")
def rig(rigs: ModuleType, checkpoint: Callable[[str], Path]) -> Callable[..., Any]:
    """rig(family, dtype, kernels) -> its rig, captured at start-up; shared, so leave it as it was."""
    made: dict[tuple[str, ...], Any] = {}

    def get(family: str, dtype: str = "float32", kernels: str = "reference") -> Any:
        key = family, dtype, kernels
        if key not in made:
            made[key] = rigs.Rig(checkpoint(family), dtype, kernels=kernels)
        return made[key]

    return get


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield
