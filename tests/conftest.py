"""For every test: tiny checkpoints of all families, made once; the real SmolLM2 ones, fetched once; one torch thread;
the option `--exhaustive`; Triton's interpreter where there is no GPU. Modules that tests of several folders use are
loaded by path: the folders are no packages.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

TESTS = Path(__file__).parent

# Triton decides when it is first imported whether its kernels are interpreted.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Tiny shapes gain nothing from a second thread, and pools that spin on shared cores slow each other down.
torch.set_num_threads(1)


def pytest_configure() -> None:
    """A shell lets what it starts in the background ignore Ctrl-C, and tests of it would fail there."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--exhaustive",
        action="store_true",
        help="Play the full product of the exactness contract (50 minutes) and of the layout table (30)",
    )


@pytest.fixture(scope="session")
def load_module() -> Callable[[str], ModuleType]:
    """load_module("oracle/driver.py") -> the module in that file of `tests`, loaded once."""

    def load(path: str) -> ModuleType:
        name = path.removesuffix(".py").replace("/", "_")
        if name not in sys.modules:
            spec = importlib.util.spec_from_file_location(name, TESTS / path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module
            spec.loader.exec_module(module)
        return sys.modules[name]

    return load


@pytest.fixture(scope="session")
def checkpoints(load_module: Callable[[str], ModuleType]) -> ModuleType:
    """The module `oracle/checkpoints.py`, which loads transformers."""
    return load_module("oracle/checkpoints.py")


@pytest.fixture(scope="session")
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """checkpoint(family) -> the directory of its tiny random checkpoint, fp32, with a tokenizer."""
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            checkpoints = request.getfixturevalue("checkpoints")
            made[family] = checkpoints.build(family, tmp_path_factory.mktemp(family))
        return made[family]

    return get


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
