"""Frames built by hand are JSON of the shapes in the schema, and a stream's frames, joined, are the whole answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.engine.delta import SequenceDelta
from ostinato.server.answers import ChatChunk, ChatCompletion, Completion, CompletionChunk
from ostinato.server.api_errors import ApiError
from ostinato.server.frames import AnswerHead, Frames, Shape
from ostinato.server.shapes import ChatShape, CompletionShape
from ostinato.server.token_text import TokenText
from ostinato.text.tokenizer import Tokenizer

DEMO = Path(__file__).parents[2] / "src" / "ostinato" / "demo"
TOKENS = TokenText(Tokenizer.from_dir(DEMO))
PROMPTS, N = 2, 2

# Whatever text may come, quotes, line ends, marks of the protocol itself; empty while a character is not whole.
TEXT = st.one_of(
    st.just(""), st.text(max_size=8), st.sampled_from(["\n\n", 'data: "', "[DONE]", "\\", "\u2028", "世"])
)
TOKEN = st.integers(0, 2047)
STEPS = st.lists(
    st.lists(st.tuples(TEXT, st.lists(TOKEN, min_size=1, max_size=2)), min_size=4, max_size=4), min_size=1
)


def news_of(
    steps: list[list[tuple[str, list[int]]]], logprobs: bool
) -> list[list[tuple[int, SequenceDelta]]]:
    """Deltas of two prompts with two completions each, step by step."""
    found = []
    for number, step in enumerate(steps):
        last = number == len(steps) - 1
        deltas = []
        for choice, (text, tokens) in enumerate(step):
            place, index = divmod(choice, N)
            rows = (
                [[(token, -0.5, 1), ((token + 1) % 2048, -1.5, 2)] for token in tokens] if logprobs else None
            )
            end = ("length", None) if choice else ("stop", "x")
            delta = SequenceDelta(
                f"r{place}", index, text, tokens, end[0] if last else None, last and index == 1
            )
            delta.stop_reason = end[1] if last else None
            delta.logprobs = rows
            delta.num_cached_tokens = 16 if number == 0 and index == 0 else 0
            deltas.append((place, delta))
        found.append(deltas)
    return found


def chat(logprobs: bool, ids: bool = False) -> Shape:
    return ChatShape(TOKENS, top_logprobs=2 if logprobs else None, every_token=ids)


def completion(logprobs: bool, ids: bool = False) -> Shape:
    return CompletionShape(
        TOKENS, n=N, logprobs=logprobs, every_token=ids, echoed=[("one ", [5]), ('"two"\n', [6, 7])]
    )


def head(**options: Any) -> AnswerHead:
    return AnswerHead("id-1", 17, 'a "model"', N, PROMPTS * N, 9, **options)


@pytest.mark.parametrize(
    ("make", "whole", "chunk"), [(chat, ChatCompletion, ChatChunk), (completion, Completion, CompletionChunk)]
)
@settings(max_examples=40, deadline=None)
@given(
    steps=STEPS,
    logprobs=st.booleans(),
    ids=st.booleans(),
    usage=st.sampled_from([(0, 0), (1, 0), (1, 1), (0, 1)]),
)
def test_a_joined_stream_is_the_answer(
    make: Callable[[bool, bool], Shape],
    whole: Any,
    chunk: Any,
    steps: list[list[tuple[str, list[int]]]],
    logprobs: bool,
    ids: bool,
    usage: tuple[int, int],
) -> None:
    news = news_of(steps, logprobs)
    body = Frames(head(return_token_ids=ids), make(logprobs, ids)).body(
        [item for step in news for item in step]
    )
    answer = json.loads(body)
    whole.model_validate_json(body)
    options = {"include_usage": bool(usage[0]), "continuous_usage": bool(usage[1])}
    frames = Frames(head(return_token_ids=ids, **options), make(logprobs, ids))
    data = b"".join(frames.stream(step) for step in news) + frames.tail()
    events = [event.removeprefix(b"data: ") for event in data.split(b"\n\n")]
    assert events[-2:] == [b"[DONE]", b""]
    chunks = [json.loads(event) for event in events[:-2]]
    for event in events[:-2]:
        chunk.model_validate_json(event)
    for index, expected in enumerate(answer["choices"]):
        own = [c["choices"][0] for c in chunks if c["choices"] and c["choices"][0]["index"] == index]
        if make is chat:
            assert "".join(c["delta"].get("content", "") for c in own) == expected["message"]["content"]
            lists = [entry for c in own if c["logprobs"] for entry in c["logprobs"]["content"]]
            assert lists == (expected["logprobs"]["content"] if logprobs else [])
        else:
            assert "".join(c["text"] for c in own) == expected["text"]
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset") if logprobs else ():
                joined = [entry for c in own if c["logprobs"] for entry in c["logprobs"][name]]
                assert joined == expected["logprobs"][name]
        assert [c["finish_reason"] for c in own if c["finish_reason"]] == [expected["finish_reason"]]
        assert own[-1]["stop_reason"] == expected["stop_reason"]
        if ids:
            assert [token for c in own for token in c.get("token_ids", [])] == expected["token_ids"]
    last = [c for c in chunks if not c["choices"]]
    assert [c["usage"] for c in last] == ([answer["usage"]] if usage[0] else [])
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 16 * PROMPTS


@pytest.mark.parametrize(
    ("why", "status"),
    [("the KV cache is full", 500), ("structured_outputs could not be kept: x", 400), (None, 500)],
)
def test_a_completion_that_failed_is_a_problem(why: str | None, status: int) -> None:
    """It is the client's only where the form that it has asked for is at fault."""
    delta = SequenceDelta("r0", 0, "", [], "error", True, why)
    with pytest.raises(ApiError, match=why or "log") as caught:
        Frames(head(), chat(False)).stream([(0, delta)])
    assert caught.value.status == status


def test_a_token_that_is_part_of_a_character_is_spelt_in_bytes() -> None:
    broken = next(i for i in range(2048) if TOKENS.of(i)[1][:1] == b"\xe4")
    assert TOKENS.of(broken)[0].startswith("bytes:\\xe4")


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.lists(st.sampled_from([0, 1, 40, 300, 900, 1500]), min_size=1, max_size=9), skip=st.booleans()
)
@pytest.mark.parametrize("echoed", [None, "one "])
def test_offsets_are_places_in_the_text(tokens: list[int], skip: bool, echoed: str | None) -> None:
    """Also behind special tokens, which a text holds or leaves out as it was asked for."""
    tokenizer = Tokenizer.from_dir(DEMO)
    assert {0, 1} <= TOKENS.special
    texts = [tokenizer.decode([token], skip_special_tokens=skip) for token in tokens]
    prompt = [0, *tokenizer.encode(echoed or "", add_special_tokens=False)]
    shape = CompletionShape(
        TOKENS,
        n=1,
        logprobs=True,
        echoed=None if echoed is None else [(echoed, prompt)],
        silent=TOKENS.special if skip else (),
    )
    delta = SequenceDelta("r0", 0, "".join(texts), tokens, "length", True)
    delta.logprobs = [[(token, -0.5, 1)] for token in tokens]
    delta.prompt_logprobs = None if echoed is None else [[(token, -0.5, 1)] for token in prompt]
    choice = shape.whole(0, [delta])
    offsets = choice["logprobs"]["text_offset"][-len(tokens) :]
    for offset, text in zip(offsets, texts, strict=True):
        assert choice["text"][offset:].startswith(text)
    assert offsets[0] == len(echoed or "")
    assert offsets[-1] + len(texts[-1]) == len(choice["text"])
