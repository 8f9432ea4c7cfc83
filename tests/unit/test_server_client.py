"""The server's side of the engine, over processes that only pretend to be one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ostinato.config import DEMO_NAME, EngineConfig, ServerConfig
from ostinato.errors import ParallelError
from ostinato.server import client
from ostinato.server.client import EngineClient, EngineState
from ostinato.server.dashboard.data import About
from ostinato.server.dashboard.recorder import Recorder
from ostinato.server.messages import EngineInfo, Event, Ready
from ostinato.server.metrics import Metrics
from ostinato.server.service import Service, model_name

NUMBERS = {"layers": 1, "vocab_size": 9, "context_length": 9, "total_tokens": 9, "page_size": 1}
WORDS = {"directory": "", "family": "", "dtype": "", "backend": "", "ops": "", "fingerprint": ""}
INFO = EngineInfo(experts=None, max_running_requests=1, threads=1, chat=False, **NUMBERS, **WORDS)  # type: ignore[arg-type]
ABOUT = About(
    model="",
    version="",
    started=0.0,
    chat=False,
    family="",
    layers=1,
    experts=None,
    dtype="",
    backend="",
    ops="",
    threads=1,
    max_running_requests=1,
)


def test_a_service_whose_engine_was_given_up_says_so() -> None:
    """What a supervisor asks, in order to put another in its place."""
    service = Service(EngineConfig(), ServerConfig())
    service.check_engine()
    service.client._give_up()
    with pytest.raises(ParallelError, match="given up"):
        service.check_engine()


@pytest.mark.parametrize(
    ("model", "name"),
    [(None, DEMO_NAME), ("owner/name", "owner/name"), ("./a/b/", "b"), ("/a/b", "b"), ("~nobody/b", "b")],
)
def test_what_a_model_is_called(model: str | None, name: str) -> None:
    assert model_name(model) == name


def test_a_model_here_is_called_as_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "inner")
    assert [model_name(model) for model in (".", "./", "..", "../inner")] == [
        "inner",
        "inner",
        tmp_path.name,
        "inner",
    ]
    assert model_name("/") == "/"


class Short:
    """The first of its kind says that it has loaded and is dead by the time this is heard; the next one never loads."""

    begun = 0

    def __init__(self, on_event: Callable[[Event], None], module: str) -> None:
        type(self).begun += 1
        self._first = type(self).begun == 1
        self._on_event = on_event
        self.pid = type(self).begun

    async def start(self, config: EngineConfig) -> None:
        await asyncio.sleep(0.01)

    async def wait(self) -> int:
        if not self._first:
            await asyncio.Event().wait()
        self._on_event(Ready(INFO))
        return 1

    async def stop(self, *, loaded: bool = True) -> None: ...

    def close(self) -> None: ...


def test_last_words_of_an_engine_do_not_speak_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not loaded takes no request: it would be lost, and whoever has sent it would wait for ever."""
    monkeypatch.setattr(client, "EngineProcess", Short)

    async def run() -> None:
        async def load(info: Any) -> None: ...

        engine = EngineClient(EngineConfig(), ServerConfig(), Metrics(Recorder(ABOUT)))
        engine.start(load)
        async with asyncio.timeout(10):
            while Short.begun < 2:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert engine.state is EngineState.STARTING
        await engine.stop()

    asyncio.run(run())
