"""Fixtures of the contract tests: tiny checkpoints (those of the oracle tests) and the rig that runs steps."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch


def _load(name: str, path: Path) -> ModuleType:
    """A helper module, under a name of its own (tests are no packages)."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


@pytest.fixture(scope="session")
def checkpoints() -> ModuleType:
    """The module `checkpoints.py` of the oracle tests."""
    return _load("contract_checkpoints", Path(__file__).parents[1] / "oracle" / "checkpoints.py")


@pytest.fixture(scope="session")
def tiny(checkpoints: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """tiny(family) -> the directory of its tiny random checkpoint, fp32, with a tokenizer."""
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = checkpoints.build(family, tmp_path_factory.mktemp(family))
        return made[family]

    return get


@pytest.fixture(scope="session")
def rigs() -> ModuleType:
    """The module `rig.py`."""
    return _load("contract_rig", Path(__file__).with_name("rig.py"))


@pytest.fixture(scope="session")
def rig(rigs: ModuleType, tiny: Callable[[str], Path]) -> Callable[..., Any]:
    """rig(family, dtype, kernels) -> its rig, captured at start-up; shared, so leave it as it was."""
    made: dict[tuple[str, ...], Any] = {}

    def get(family: str, dtype: str = "float32", kernels: str = "reference") -> Any:
        key = family, dtype, kernels
        if key not in made:
            made[key] = rigs.Rig(tiny(family), dtype, kernels=kernels)
        return made[key]

    return get


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield
