"""Servers for tests: one that all share, and some with options of their own; the official client."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import openai
import pytest


def _load() -> ModuleType:
    """The module beside this file, under a name of its own (tests are no packages)."""
    name = "server_rig"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("rig.py"))
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


_rig = _load()
Server = Any


@pytest.fixture(scope="session")
def rig() -> ModuleType:
    """The module `rig.py`."""
    return _rig


@pytest.fixture(scope="session")
def until() -> Callable[..., None]:
    """Poll until a condition holds."""
    wait: Callable[..., None] = _rig.until
    return wait


StartServer = Callable[..., Server]


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = _rig.start(tmp_path_factory.mktemp("server"), "--dtype", "float32", "--max-body-bytes", "1MiB")
    server.wait_ready()
    yield server
    _rig.stop(server)


@pytest.fixture
def server(shared_server: Server) -> Iterator[Server]:
    """The server that tests share; each leaves it at rest, its engine never restarted."""
    yield shared_server
    shared_server.wait_idle()
    assert shared_server.metric("engine_restarts_total") == 0


@pytest.fixture(scope="session")
def shared_client(shared_server: Server) -> Iterator[openai.OpenAI]:
    with shared_server.client() as client:
        yield client


@pytest.fixture
def client(server: Server, shared_client: openai.OpenAI) -> openai.OpenAI:
    return shared_client


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[StartServer]:
    """Servers with options of their own; stopped when the test ends."""
    started: list[Server] = []

    def begin(*flags: str, **options: Any) -> Server:
        directory = tmp_path / str(len(started))
        directory.mkdir()
        started.append(_rig.start(directory, *flags, **options))
        return started[-1]

    yield begin
    for server in started:
        _rig.stop(server)
