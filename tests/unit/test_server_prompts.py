"""The text side of a server: what waits for what."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from ostinato.server.messages import EngineInfo
from ostinato.server.prompts import Prompts

NUMBERS = {"layers": 1, "vocab_size": 9, "context_length": 9, "total_tokens": 9, "page_size": 1}
WORDS = {"directory": "", "family": "", "dtype": "", "backend": "", "ops": "", "fingerprint": ""}
INFO = EngineInfo(experts=None, max_running_requests=1, threads=1, chat=True, **NUMBERS, **WORDS)  # type: ignore[arg-type]


class Slow:
    """Takes a long text's tokens to be ready only when `done` is set."""

    def __init__(self) -> None:
        self.done = threading.Event()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if len(text) > 100:
            self.done.wait(60)
        return [len(text)]


def test_short_texts_do_not_wait_for_long_ones() -> None:
    """However many of them there are."""
    tokenizer: Any = Slow()
    prompts = Prompts(tokenizer, INFO)

    async def run() -> None:
        long = [asyncio.create_task(prompts.completion(["a" * 50_000, "b" * 50_000])) for _ in range(6)]
        await asyncio.sleep(0.05)
        async with asyncio.timeout(10):
            assert await prompts.completion("short") == [[5]]
        assert not any(task.done() for task in long)
        tokenizer.done.set()
        assert await asyncio.gather(*long) == [[[50_000], [50_000]]] * 6

    try:
        asyncio.run(run())
    finally:
        tokenizer.done.set()
        prompts.close()
