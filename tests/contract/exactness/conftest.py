"""Fixtures of the exactness contract. Checkpoints are made once a session, by the conftest of all contract tests."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def exhaustive(request: pytest.FixtureRequest) -> bool:
    """Whether `--exhaustive` was given: the full product is played."""
    return bool(request.config.getoption("--exhaustive"))
