"""Fixtures of the parallel tests: engines whose ranks are threads."""

from __future__ import annotations

from types import ModuleType

import pytest

from . import ensemble


@pytest.fixture(scope="session")
def ensembles() -> ModuleType:
    """The module `ensemble.py`."""
    return ensemble
