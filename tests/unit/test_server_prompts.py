"""The text side of a server: what waits for what."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from ostinato.server.api_errors import ApiError
from ostinato.server.messages import EngineInfo
from ostinato.server.prompts import Prompts
from ostinato.server.protocol import ChatMessage
from ostinato.server.route import JsonRequest

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


def test_ids_are_checked_and_decoded_off_the_event_loop() -> None:
    threads: list[threading.Thread] = []

    class Decoder:
        def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
            threads.append(threading.current_thread())
            return str(len(token_ids))

    tokenizer: Any = Decoder()
    prompts = Prompts(tokenizer, INFO)
    real = prompts.check_ids

    def check(field: str, ids: Any) -> None:
        threads.append(threading.current_thread())
        real(field, ids)

    prompts.check_ids = check  # type: ignore[method-assign]
    try:
        assert asyncio.run(prompts.decode([1] * 100_000)) == "100000"
        with pytest.raises(ApiError, match="tokens holds 9, token ids of this model"):
            asyncio.run(prompts.decode([9]))
    finally:
        prompts.close()
    assert len(threads) == 3
    assert threading.main_thread() not in threads


def read(body: Any) -> tuple[Any, int]:
    """What a request with this body says, and how often the event loop came round meanwhile."""

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}

    async def run() -> tuple[Any, int]:
        task = asyncio.create_task(JsonRequest({"type": "http"}, receive).json())
        rounds = 0
        while not task.done():
            await asyncio.sleep(0.001)
            rounds += 1
        return await task, rounds

    return asyncio.run(run())


def test_the_event_loop_goes_on_while_a_long_conversation_is_checked() -> None:
    messages: list[Any] = [{"role": "user", "content": "hi"}] * 50_000
    value, rounds = read({"messages": messages, "n": 2})
    assert value["n"] == 2
    assert value["messages"] == [ChatMessage(role="user", content="hi")] * 50_000
    assert rounds >= 5
    value, _ = read({"messages": [*messages[:3000], {"role": "user", "content": 5}, *messages[:3000]]})
    assert isinstance(value["messages"][2999], ChatMessage)
    assert value["messages"][3000] == {"role": "user", "content": 5}, "for the refusal that names its place"


@pytest.mark.parametrize("body", [[1] * 50_000, {"messages": "m" * 100_000}, "m" * 100_000])
def test_a_large_body_that_is_no_conversation_stays_as_it_is(body: Any) -> None:
    assert read(body)[0] == body
