"""The official client against a real server: every endpoint, streamed and not."""

from __future__ import annotations

from typing import Any

import openai
import pytest

Server = Any

MESSAGES = [{"role": "user", "content": "My dear Mr. Bennet,"}]


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=12, temperature=0)
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12


def test_chat_stream_is_the_answer(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=24, seed=3)
    stream = client.chat.completions.create(
        model="demo",
        messages=MESSAGES,
        max_tokens=24,
        seed=3,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    *news, last = chunks
    assert last.choices == []
    assert last.usage == whole.usage
    assert all(chunk.usage is None for chunk in news)
    assert news[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in news)
    assert text == whole.choices[0].message.content
    assert whole.system_fingerprint
    assert {chunk.system_fingerprint for chunk in chunks} == {whole.system_fingerprint}
    assert [c.choices[0].finish_reason for c in news if c.choices[0].finish_reason] == ["length"]


def test_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="demo", prompt="It is a truth", max_tokens=8, temperature=0)
    assert answer.choices[0].text
    assert answer.choices[0].finish_reason == "length"


def test_completions_of_several_prompts(client: openai.OpenAI) -> None:
    """Text, texts, ids and lists of ids; choices come by prompt, then by n."""
    texts = ["It is a truth", "My dear"]
    together = client.completions.create(model="demo", prompt=texts, max_tokens=6, n=2, seed=5)
    assert [choice.index for choice in together.choices] == [0, 1, 2, 3]
    alone = [client.completions.create(model="demo", prompt=t, max_tokens=6, n=2, seed=5) for t in texts]
    assert [c.text for c in together.choices] == [c.text for answer in alone for c in answer.choices]


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").id == "demo"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-7")


def test_embeddings_are_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="embeddings"):
        client.embeddings.create(model="demo", input="text")


def test_health(server: Server) -> None:
    assert server.get("/health").json() == {"status": "ok"}
    assert server.get("/ready").json() == {"status": "ready"}
    assert server.get("/version").json()["version"]
