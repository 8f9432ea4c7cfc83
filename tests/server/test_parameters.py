"""Every parameter reaches the engine, and every bad value is a 400 that names its field."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

Server = Any

PROMPT = "It is a truth universally acknowledged, that"
MESSAGES = [{"role": "user", "content": PROMPT}]

EXTENSIONS = {
    "top_k",
    "min_p",
    "min_tokens",
    "repetition_penalty",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "return_token_ids",
}


def complete(client: openai.OpenAI, prompt: Any = PROMPT, **options: Any) -> Any:
    extra = {name: options.pop(name) for name in EXTENSIONS & options.keys()}
    return client.completions.create(
        model="demo", prompt=prompt, **({"max_tokens": 12, "temperature": 0} | options), extra_body=extra
    )


def test_what_is_not_given_has_openai_defaults(server: Server) -> None:
    answer = server.post("/v1/completions", {"prompt": PROMPT, "temperature": 0}).json()
    assert answer["model"] == "demo"
    assert answer["usage"]["completion_tokens"] == 16


def test_null_is_the_default(server: Server, client: openai.OpenAI) -> None:
    names = [
        name for name in server.schema("CompletionRequest")["properties"] if name not in ("prompt", "seed")
    ]
    body = {"prompt": PROMPT, "seed": 3} | dict.fromkeys(names)
    given = server.post("/v1/completions", body).json()
    left_out = server.post("/v1/completions", {"prompt": PROMPT, "seed": 3}).json()
    assert given["choices"] == left_out["choices"]
    chat = {"messages": MESSAGES, "seed": 3, "max_tokens": 8}
    names = [name for name in server.schema("ChatCompletionRequest")["properties"] if name not in chat]
    given = server.post("/v1/chat/completions", chat | dict.fromkeys(names)).json()
    assert given["choices"] == server.post("/v1/chat/completions", chat).json()["choices"]


def test_fields_that_mean_nothing_here_are_taken_when_they_ask_for_nothing(server: Server) -> None:
    chat = {"messages": MESSAGES, "seed": 3, "max_tokens": 4}
    neutral = {
        "store": False,
        "service_tier": "auto",
        "modalities": ["text"],
        "metadata": {},
        "functions": [],
        "logprobs": False,
        "top_logprobs": 0,
        "prompt_cache_key": "k",
        "safety_identifier": "someone",
    }
    assert server.post("/v1/chat/completions", chat | neutral).status_code == 200
    asking = {
        "store": True,
        "service_tier": "flex",
        "modalities": ["audio"],
        "metadata": {"a": "b"},
        "audio": {},
    }
    for name, value in asking.items():
        answer = server.post("/v1/chat/completions", chat | {name: value})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"].startswith(name)


def test_stop_string_ends_and_is_held_back(client: openai.OpenAI) -> None:
    whole = complete(client, max_tokens=24).choices[0].text
    stop = whole[9:16]
    cut = complete(client, max_tokens=24, stop=stop)
    assert cut.choices[0].text == whole[: whole.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    chunks = list(complete(client, max_tokens=24, stop=[stop, "never"], stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == cut.choices[0].text
    kept = complete(client, max_tokens=24, stop=stop, include_stop_str_in_output=True)
    assert kept.choices[0].text == whole[: whole.index(stop) + len(stop)]


def test_stop_token_ids(server: Server, client: openai.OpenAI) -> None:
    whole = complete(client, return_token_ids=True).choices[0]
    token = whole.token_ids[4]
    cut = complete(client, stop_token_ids=[token], return_token_ids=True).choices[0]
    assert cut.token_ids == whole.token_ids[: whole.token_ids.index(token) + 1]
    assert cut.finish_reason == "stop"
    assert cut.stop_reason == token


def test_logit_bias_and_ignore_eos(client: openai.OpenAI) -> None:
    end = 1
    ended = complete(client, logit_bias={str(end): 100}, return_token_ids=True).choices[0]
    assert (ended.token_ids, ended.finish_reason, ended.text) == ([end], "stop", "")
    going_on = complete(
        client, logit_bias={str(end): 100}, ignore_eos=True, max_tokens=3, return_token_ids=True
    )
    assert going_on.choices[0].token_ids == [end] * 3
    banned = complete(client, logit_bias={str(end): 100}, min_tokens=4, return_token_ids=True).choices[0]
    assert banned.token_ids.index(end) == 4


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "top_k 1": {"top_k": 1},
    "top_p": {"top_p": 0.05},
    "min_p": {"min_p": 0.9},
    "repetition": {"repetition_penalty": 50.0},
    "presence": {"presence_penalty": 2.0},
    "frequency": {"frequency_penalty": 2.0},
    "another seed": {"seed": 12},
    "temperature": {"temperature": 0.2},
}


def test_sampling_fields_change_the_answer(client: openai.OpenAI) -> None:
    base = {"temperature": 1.5, "seed": 11, "max_tokens": 24}
    texts = {name: complete(client, **(base | extra)).choices[0].text for name, extra in VARIANTS.items()}
    same = {name for name, text in texts.items() if name != "plain" and text == texts["plain"]}
    assert not same
    assert texts["top_k 1"] == complete(client, max_tokens=24).choices[0].text


def test_completion_logprobs(client: openai.OpenAI) -> None:
    answer = complete(client, logprobs=3, max_tokens=5, return_token_ids=True).choices[0]
    lists = answer.logprobs
    assert "".join(lists.tokens) == answer.text
    assert len(lists.tokens) == len(lists.token_logprobs) == len(lists.top_logprobs) == 5
    for token, value, top in zip(lists.tokens, lists.token_logprobs, lists.top_logprobs, strict=True):
        assert top[token] == value == max(top.values())
        assert len(top) == 3
    for token, offset in zip(lists.tokens, lists.text_offset, strict=True):
        assert answer.text[offset:].startswith(token)
    chunks = list(complete(client, logprobs=3, max_tokens=5, stream=True))
    assert [t for chunk in chunks for t in chunk.choices[0].logprobs.tokens] == lists.tokens
    assert [o for chunk in chunks for o in chunk.choices[0].logprobs.text_offset] == lists.text_offset


def test_chat_logprobs(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "model": "demo",
        "messages": MESSAGES,
        "max_tokens": 5,
        "logprobs": True,
        "seed": 4,
    }
    answer = client.chat.completions.create(**options, top_logprobs=2).choices[0]
    content = answer.logprobs.content
    assert "".join(entry.token for entry in content) == answer.message.content
    assert all(len(entry.top_logprobs) == 2 for entry in content)
    assert all(bytes(entry.bytes).decode() == entry.token for entry in content)
    plain = client.chat.completions.create(**options).choices[0].logprobs.content
    assert [entry.logprob for entry in plain] == [entry.logprob for entry in content]
    assert all(entry.top_logprobs == [] for entry in plain)


@pytest.mark.parametrize("stream", [False, True])
def test_echo(client: openai.OpenAI, stream: bool) -> None:
    plain = complete(client, max_tokens=4).choices[0].text
    answer = complete(client, max_tokens=4, echo=True, logprobs=1, n=2, stream=stream)
    choices = [c for chunk in answer for c in chunk.choices] if stream else answer.choices
    for index in (0, 1):
        own = [choice for choice in choices if choice.index == index]
        assert "".join(choice.text for choice in own) == PROMPT + plain
        lists = [choice.logprobs for choice in own if choice.logprobs is not None]
        tokens = [token for part in lists for token in part.tokens]
        assert "".join(tokens[1:]) == PROMPT + plain  # behind the begin token, which has no text of its own
        offsets = [offset for part in lists for offset in part.text_offset]
        assert offsets == [0] + [len("".join(tokens[1:place])) for place in range(1, len(tokens))]
        values = [value for part in lists for value in part.token_logprobs]
        assert values[0] is None
        assert all(value < 0 for value in values[1:])


def test_a_bad_message_in_a_long_conversation_is_named(server: Server) -> None:
    """The checks of the messages before it do not change what is said of it."""
    messages: list[Any] = MESSAGES * 3000
    messages[2000] = {"role": "user", "content": 5}
    for path in ("/v1/chat/completions", "/tokenize"):
        answer = server.post(path, {"messages": messages})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"].startswith("messages[2000].content")


@pytest.mark.parametrize("stream", [False, True])
def test_echo_of_an_unfinished_character(server: Server, stream: bool) -> None:
    """It is the completion's: whole where that finishes it, and else U+FFFD, once."""

    def ids(text: str) -> list[int]:
        return server.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json()["tokens"]

    *prompt, last = ids("A 世")
    assert len(prompt) == 4
    assert server.post("/detokenize", {"tokens": prompt}).json() == {"prompt": "A \ufffd"}
    for following, limit, text in ((last, 1, "A 世"), (ids("B")[0], 1, "A \ufffdB"), (last, 0, "A \ufffd")):
        body = {"prompt": prompt, "max_tokens": limit, "logit_bias": {str(following): 100}, "temperature": 0}
        body |= {"echo": True, "logprobs": 0, "stream": stream}
        found = (
            server.stream("/v1/completions", body)
            if stream
            else [server.post("/v1/completions", body).json()]
        )
        choices = [choice for part in found for choice in part["choices"]]
        assert "".join(choice["text"] for choice in choices) == text
        lists = [choice["logprobs"] for choice in choices if choice["logprobs"]]
        assert [offset for part in lists for offset in part["text_offset"]] == [0, 1, 2, 2, *[2] * limit]


def test_echo_with_no_token_to_generate(client: openai.OpenAI) -> None:
    """Fault case F50."""
    answer = complete(client, max_tokens=0, echo=True, logprobs=1)
    assert answer.choices[0].text == PROMPT
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 0
    lists = answer.choices[0].logprobs
    assert lists.token_logprobs[0] is None
    assert len(lists.tokens) == answer.usage.prompt_tokens
    assert complete(client, max_tokens=0, echo=True).choices[0].text == PROMPT


def test_prompts_as_ids(server: Server, client: openai.OpenAI) -> None:
    ids = server.post("/tokenize", {"prompt": PROMPT}).json()["tokens"]
    by_text = complete(client).choices[0].text
    assert complete(client, prompt=ids).choices[0].text == by_text
    assert complete(client, prompt=[ids, ids[:3]]).choices[0].text == by_text


def test_tokenize_there_and_back(server: Server) -> None:
    text = "a naïve 世界 🎵\n"
    there = server.post(
        "/tokenize", {"prompt": text, "add_special_tokens": False, "return_token_strs": True}
    ).json()
    assert there["count"] == len(there["tokens"]) == len(there["token_strs"])
    assert server.post("/detokenize", {"tokens": there["tokens"]}).json() == {"prompt": text}
    chat = server.post("/tokenize", {"messages": MESSAGES}).json()
    used = server.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1}).json()["usage"]
    assert chat["count"] == used["prompt_tokens"]


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_usage_of_a_stream(server: Server, path: str, n: int) -> None:
    """Fault case F53: the last chunk has no choices and the usage of all of them, every other one a null usage."""
    prompt = {"prompt": PROMPT} if path == "/v1/completions" else {"messages": MESSAGES}
    body = {**prompt, "max_tokens": 6, "n": n, "stream": True, "seed": 1, "ignore_eos": True}
    chunks = server.stream(path, body | {"stream_options": {"include_usage": True}})
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 6 * n
    assert all("usage" not in chunk for chunk in server.stream(path, body))
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [
        c["usage"]["completion_tokens"] for c in server.stream(path, body | {"stream_options": options})
    ]
    assert counts == sorted(counts)
    assert counts[-1] == 6 * n


BAD: list[tuple[str, Any]] = [
    ("n", 0),
    ("n", 10**6),
    ("n", 1.5),
    ("n", True),
    ("max_tokens", -1),
    ("max_tokens", "5"),
    ("max_tokens", 2**40),
    ("temperature", -0.1),
    ("temperature", 1e6),
    ("temperature", float("nan")),
    ("temperature", float("inf")),
    ("temperature", [1]),
    ("top_p", -1),
    ("top_p", 0),
    ("top_p", 1.5),
    ("top_k", -2),
    ("min_p", 2),
    ("seed", 2**70),
    ("seed", -(2**64)),
    ("presence_penalty", 3),
    ("frequency_penalty", -3),
    ("repetition_penalty", 0),
    ("logit_bias", {"1": 101}),
    ("logit_bias", {"word": 1}),
    ("logit_bias", {"999999": 1}),
    ("logit_bias", [1]),
    ("logit_bias", {"300": 1, "7": 1, "0300": -1}),
    ("stop", ""),
    ("stop", ["a"] * 10_000),
    ("stop", "a" * 10_000),
    ("stop", [1]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [2**20]),
    ("stop_token_ids", list(range(5000))),
    ("stream", "yes"),
    ("stream_options", {"include_usage": True}),
    ("priority", 2**40),
    ("min_tokens", 100),
    ("best_of", 5),
    ("suffix", "the end"),
    ("logprobs", -1),
    ("logprobs", 10**6),
    ("user", 7),
    ("functions", []),
    ("guided_json", {}),
    ("a field with spaces", 1),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=lambda v: str(v)[:24])
def test_a_bad_value_is_named(server: Server, name: str, value: Any) -> None:
    """Fault case F52, at the edges of every field."""
    body = {"prompt": PROMPT, "max_tokens": 4, name: value}
    answer = server.post_raw("/v1/completions", json.dumps(body).encode())
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"].partition("[")[0].partition(".")[0] == name, error
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "prompt", [7, None, [], [[]], [1, "a"], [10**6], [-1], [[1], [2**70]], ["a"] * 999], ids=str
)
def test_bad_prompts(server: Server, prompt: Any) -> None:
    error = server.post("/v1/completions", {"prompt": prompt}).json()["error"]
    assert error["param"] == "prompt"


BAD_CHATS: list[tuple[str, dict[str, Any]]] = [
    ("messages", {"messages": []}),
    ("messages", {}),
    ("messages", {"messages": "hello"}),
    ("messages[0].role", {"messages": [{"role": "robot", "content": "x"}]}),
    ("messages[1].content", {"messages": [*MESSAGES, {"role": "user", "content": 7}]}),
    ("messages[0].content[0].type", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    ("messages", {"messages": [{"role": "user"}]}),
    ("tools[0].function", {"messages": MESSAGES, "tools": [{"type": "function"}]}),
    ("response_format", {"messages": MESSAGES, "response_format": {"type": "poem"}}),
    ("top_logprobs", {"messages": MESSAGES, "top_logprobs": 3}),
    ("max_tokens", {"messages": MESSAGES, "max_tokens": 3, "max_completion_tokens": 4}),
    ("chat_template_kwargs", {"messages": MESSAGES, "chat_template_kwargs": {"messages": []}}),
    ("stream_options.foo", {"messages": MESSAGES, "stream": True, "stream_options": {"foo": 1}}),
    ("model", {"messages": MESSAGES, "model": "gpt-7"}),
]


@pytest.mark.parametrize(("param", "body"), BAD_CHATS, ids=[param for param, _ in BAD_CHATS])
def test_bad_chats_are_named(server: Server, param: str, body: dict[str, Any]) -> None:
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == (404 if param == "model" else 400)
    assert answer.json()["error"]["param"] == param


def test_a_call_without_content_in_a_template_without_tools(server: Server) -> None:
    """OpenAI's clients send null back; this template puts contents together as texts."""
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    turns = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}]
    answers = [
        server.post(
            "/v1/chat/completions", {"messages": [*turns[:-1], turns[-1] | more], "max_tokens": 4, "seed": 3}
        )
        for more in ({}, {"content": ""})
    ]
    assert answers[0].status_code == 200, answers[0].text
    assert answers[0].json()["choices"] == answers[1].json()["choices"]


def test_lengths_at_the_edge(server: Server) -> None:
    """Fault case F54: what does not fit the context of 1,024 is refused with both numbers, and nothing is cut."""
    for length in range(1016, 1026):
        answer = server.post("/v1/completions", {"prompt": [5] * length, "max_tokens": 1, "ignore_eos": True})
        if length < 1024:
            assert answer.json()["usage"] == answer.json()["usage"] | {
                "prompt_tokens": length,
                "completion_tokens": 1,
            }
        else:
            error = answer.json()["error"]
            assert answer.status_code == 400
            assert error["param"] == "prompt"
            assert error["code"] == "context_length_exceeded"
            assert str(length) in error["message"]
            assert "1024" in error["message"]


def test_more_tokens_than_the_context_holds(server: Server) -> None:
    answer = server.post(
        "/v1/completions", {"prompt": [5] * 1000, "max_tokens": 100, "ignore_eos": True}
    ).json()
    assert answer["usage"]["completion_tokens"] == 24
    assert answer["choices"][0]["finish_reason"] == "length"
