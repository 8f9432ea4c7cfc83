"""Too little memory, in the words of Python, the system and torch: one line with the sizes and the remedy."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ostinato.engine.memory import memory_for
from ostinato.errors import ConfigError

REQUESTS: dict[str, Callable[[], Any]] = {
    "python": lambda: bytearray(1 << 62),
    "a mapping": lambda: mmap.mmap(-1, 1 << 60, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS),
    "a mapping beyond any address": lambda: mmap.mmap(-1, 1 << 70),
    "torch": lambda: torch.zeros(1 << 58),
    "torch beyond any address": lambda: torch.zeros(1 << 40, 1 << 40),
}


@pytest.mark.parametrize("request_", REQUESTS)
def test_each_way_to_ask_for_too_much(request_: str) -> None:
    with (
        pytest.raises(ConfigError, match="there is too little memory for 9 pages; take fewer") as caught,
        memory_for("9 pages", "take fewer"),
    ):
        REQUESTS[request_]()
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("error", [FileNotFoundError(2, "x"), RuntimeError("x"), ValueError("x")], ids=repr)
def test_other_errors_pass(error: Exception) -> None:
    with pytest.raises(type(error), match="x"), memory_for("a", "b"):
        raise error
