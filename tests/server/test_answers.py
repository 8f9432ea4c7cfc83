"""What answers hold: the same for the same request whatever runs beside it, whole characters, and what was logged."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

Server = Any

PROMPT = "It is a truth universally acknowledged, that"
SEEDED = {
    "prompt": PROMPT,
    "max_tokens": 60,
    "seed": 17,
    "temperature": 1.2,
    "logprobs": 5,
    "return_token_ids": True,
}


def neighbour(place: int) -> dict[str, Any]:
    """Requests of every kind: long, short, seeded, not, greedy, penalised, several, from the cache."""
    return {
        "prompt": [5 + place] * (1 + 37 * place % 400) if place % 3 else PROMPT,
        "max_tokens": 20 + 11 * place % 90,
        "temperature": (0.0, 1.0, 5.0)[place % 3],
        "n": 1 + place % 3,
        "ignore_eos": True,
    } | ({"seed": place} if place % 2 else {"repetition_penalty": 1.3})


def test_a_seeded_answer_is_the_same_beside_any_neighbours(server: Server) -> None:
    """Fault case F41, over HTTP: tokens and log-probabilities are equal to the last bit."""
    alone = server.post("/v1/completions", SEEDED).json()["choices"]
    with ThreadPoolExecutor(24) as pool:
        beside = [pool.submit(server.post, "/v1/completions", neighbour(place)) for place in range(16)]
        seeded = [pool.submit(server.post, "/v1/completions", SEEDED) for _ in range(4)]
        beside += [pool.submit(server.post, "/v1/completions", neighbour(place)) for place in range(16, 32)]
        assert all(answer.result().status_code == 200 for answer in beside)
        for answer in seeded:
            assert answer.result().json()["choices"] == alone


TEXTS = {
    "plain": {"prompt": PROMPT},
    "cjk": {"prompt": "世界中の人々が、"},
    "emoji": {"prompt": "🎵🎶 ♫"},
    "half a character": {"prompt": [ord("a"), 0xE4]},
}


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("temperature", [0.7, 100.0])
def test_a_joined_stream_is_the_final_text(server: Server, text: str, temperature: float) -> None:
    """At temperature 100 every byte token turns up, so most characters are broken, and stops end in the middle."""
    body = TEXTS[text] | {
        "max_tokens": 300,
        "seed": 3,
        "temperature": temperature,
        "ignore_eos": True,
        "n": 2,
    }
    for extra in ({}, {"stop": ["\ufffd\ufffd\ufffd", "ab"]}, {"skip_special_tokens": False}):
        whole = server.post("/v1/completions", body | extra).json()["choices"]
        joined = ["", ""]
        for chunk in server.stream("/v1/completions", body | extra | {"stream": True}):
            for choice in chunk["choices"]:
                joined[choice["index"]] += choice["text"]
        assert joined == [choice["text"] for choice in whole]


def test_text_parts_and_roles(server: Server) -> None:
    parts = [{"type": "text", "text": "My dear"}, {"type": "text", "text": "Mr. Bennet"}]
    as_parts = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    as_text = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "My dear\nMr. Bennet"}]
    ids = [
        server.post("/tokenize", {"messages": messages}).json()["tokens"] for messages in (as_parts, as_text)
    ]
    assert ids[0] == ids[1]


def test_an_answers_message_can_be_sent_back(server: Server) -> None:
    with server.client() as client:
        options: dict[str, Any] = {"model": "demo", "max_tokens": 4, "seed": 1}
        messages: list[Any] = [{"role": "user", "content": PROMPT}]
        first = client.chat.completions.create(messages=messages, **options).choices[0].message
        messages += [first, {"role": "user", "content": "And then?"}]
        assert client.chat.completions.create(messages=messages, **options).choices[0].message.content


def test_request_ids_and_the_log(server: Server, until: Callable[..., None]) -> None:
    given = server.post(
        "/v1/completions",
        {"prompt": PROMPT, "max_tokens": 3, "user": "ann"},
        headers={"x-request-id": "one-2.3"},
    )
    assert given.headers["x-request-id"] == "one-2.3"
    assert given.json()["id"] == "cmpl-one-2.3"
    strange = server.post("/v1/completions", {"prompt": 7}, headers={"x-request-id": "a b\tc" * 99})
    made = strange.headers["x-request-id"]
    assert made.isalnum()

    def logged() -> dict[str, Any]:
        return {line["request_id"]: line for line in server.requests()}

    until(lambda: {made, "one-2.3"} <= logged().keys())  # a line is written behind the answer
    lines = logged()
    expected = {
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "completion_tokens": 3,
        "user": "ann",
    }
    assert expected.items() <= lines["one-2.3"].items()
    assert lines["one-2.3"]["finish_reasons"] == ["length"]
    assert lines["one-2.3"]["duration_ms"] > 0
    assert lines[made]["status"] == 400


def test_metrics(server: Server, until: Callable[..., None]) -> None:
    def rows(**labels: str) -> float:
        return float(server.metric("step_rows_total", rows="real", **labels))

    def load(layer: str) -> float:
        return float(server.metric("expert_tokens_total", layer=layer))

    before = {name: server.metric(name) for name in COUNTERS}
    decoded = rows(kind="decode")
    *layers, last = sorted(
        {sample.labels["layer"] for sample in server.samples("expert_tokens_total")}, key=int
    )
    chosen = load(last)
    prompt = 2 * PROMPT  # more than a page, so that the second request finds a prefix
    body = {"prompt": prompt, "max_tokens": 9, "n": 2, "ignore_eos": True}
    server.post("/v1/completions", body)
    server.stream("/v1/completions", body | {"stream": True})
    server.wait_idle()
    until(
        lambda: rows(kind="decode") >= decoded + 32 and load("0") == 2 * rows()
    )  # the engine tells once a second
    added = {name: server.metric(name) - before[name] for name in COUNTERS}
    used = server.post("/tokenize", {"prompt": prompt}).json()["count"]
    assert added["generation_tokens_total"] == 36
    assert added["prompt_tokens_total"] == 2 * used
    assert added["request_success_total"] == added["time_to_first_token_seconds_count"] == 4
    assert added["e2e_request_latency_seconds_count"] == 4
    assert added["inter_token_latency_seconds_count"] == 32
    real = rows()
    assert real > 0
    # Two experts for each real row of each layer, pads and warm-ups never: the load's sum is exact. The last layer's
    # rows are those that choose a token.
    assert {load(layer) for layer in layers} == {2 * real}
    assert load(last) - chosen == 2 * added["generation_tokens_total"]
    for layer in (*layers, last):
        assert server.metric("expert_load_imbalance", layer=layer) >= 1
    assert server.metric("steps_total", how="replays") > 0
    assert server.metric("prefix_cache_queries_total") >= server.metric("prefix_cache_hits_total") > 0
    assert server.metric("num_preemptions_total") == 0
    assert server.metric("engine_ready") == 1


COUNTERS = (
    "generation_tokens_total",
    "prompt_tokens_total",
    "request_success_total",
    "time_to_first_token_seconds_count",
    "e2e_request_latency_seconds_count",
    "inter_token_latency_seconds_count",
)


def test_the_log_is_json_from_first_to_last(server: Server) -> None:
    lines = [json.loads(line) for line in server.log.read_text().splitlines()]
    assert lines[0]["event"] == "listening"
    assert {line["event"] for line in lines[1:]} <= {"request"}
