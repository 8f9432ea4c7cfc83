"""For every test: the real SmolLM2 checkpoints, fetched once; one torch thread; the option `--exhaustive`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

# Tiny shapes gain nothing from a second thread, and pools that spin on shared cores slow each other down.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--exhaustive",
        action="store_true",
        help="Play the full product of the exactness contract (about an hour)",
    )


def _fetch(name: str) -> Path:
    """The checkpoint `name`; skips where pip cannot download it, and fails on any other fault."""
    from ostinato.config import cache_dir
    from ostinato.errors import ModelError
    from ostinato.models.fetch import fetch

    try:
        return fetch(name, cache_dir=cache_dir())
    except ModelError as error:
        if "could not download" not in str(error):
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The directory of SmolLM2-135M-Instruct (269 MB; about ten seconds to make the first time)."""
    return _fetch("smollm2")


@pytest.fixture(scope="session")
def smollm2_moe_path() -> Path:
    """The directory of its mixture of experts (1.4 GB; about twenty seconds more to make the first time)."""
    return _fetch("smollm2-moe")
