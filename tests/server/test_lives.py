"""Lives of the server and of its engine: crashes, restarts, signals, and what limits do when they are reached."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

Server = Any
StartServer = Callable[..., Server]
Until = Callable[..., None]

PROMPT = "It is a truth universally acknowledged, that"
SHORT = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}
LONG = {"prompt": PROMPT, "max_tokens": 900, "ignore_eos": True}


def outcome(answer: bytes) -> dict[str, Any]:
    """The error that a request ends with: its own answer, or the last event of its stream."""
    status = int(answer.split(maxsplit=2)[1])
    start = answer.rindex(b'{"error"')
    error, _ = json.JSONDecoder().raw_decode(answer[start:].decode())
    return {"status": status, **error["error"]}


def test_a_killed_engine_comes_back(start_server: StartServer, until: Until, rig: Any) -> None:
    """Every waiting client is told while the engine is away; then the server serves again; nothing is orphaned."""
    server = start_server("--max-restarts", "2")
    assert server.get("/health").status_code == 200
    early = server.post("/v1/completions", SHORT)
    assert early.status_code in (200, 503)  # 503 while it loads
    server.wait_ready()
    text = server.post("/v1/completions", SHORT).json()["choices"][0]["text"]
    engine = server.engine_pid()
    asked = [
        server.send_request("/v1/completions", LONG | {"stream": place % 2 == 0, "n": 8}, close=True)
        for place in range(30)
    ]
    until(lambda: server.metric("generation_tokens_total") > 8 + 32)
    until(lambda: server.metric("num_requests_running") > 0)
    os.kill(engine, signal.SIGKILL)
    ends = [outcome(rig.read_answer(connection)) for connection in asked]
    assert server.get("/ready").status_code == 503
    for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert server.metric(gauge) == 0  # of an engine that is gone
    assert {end["code"] for end in ends} == {"engine_unavailable"}
    assert all(end["status"] == 503 for place, end in enumerate(ends) if place % 2)
    assert server.get("/health").status_code == 200
    server.wait_ready()
    assert server.post("/v1/completions", SHORT).json()["choices"][0]["text"] == text
    assert server.metric("engine_restarts_total") == 1
    assert not rig.is_alive(engine)
    server.wait_idle()
    # The server itself is killed: its engine must not outlive it.
    engine = server.engine_pid()
    server.process.kill()
    until(lambda: not rig.is_alive(engine))


def test_a_lost_rank_is_named_and_replaced_while_restarts_last(
    start_server: StartServer, until: Until, rig: Any
) -> None:
    """An engine of two processes dies with either, be it idle; at the last allowed restart the server gives up."""
    server = start_server("--dp", "2", "--max-restarts", "1", "--rank-timeout", "3")
    server.wait_ready()
    with server.client() as client:
        ask = partial(client.completions.create, model="demo", prompt=PROMPT, temperature=0)
        text = ask(max_tokens=8).choices[0].text
        asked = server.send_request("/v1/completions", LONG | {"n": 8, "max_tokens": 1900}, close=True)
        told = server.metric("generation_tokens_total")
        until(lambda: server.metric("generation_tokens_total") > told)
        (rank,) = rig.children(server.engine_pid())
        os.kill(rank, signal.SIGSTOP)  # Ctrl-Z, a machine that swaps
        assert outcome(rig.read_answer(asked))["code"] == "engine_unavailable"
        server.wait_ready()
        assert ask(max_tokens=8).choices[0].text == text
    assert not rig.is_alive(rank)
    assert "ostinato: rank 1 gave no sign of life within 3 s" in server.errors.read_text()
    engine = server.engine_pid()
    (rank,) = rig.children(engine)
    waiting = [server.send_request("/v1/completions", LONG | {"n": 8}, close=True) for _ in range(4)]
    told = server.metric("generation_tokens_total")
    until(lambda: server.metric("generation_tokens_total") > told)
    os.kill(rank, signal.SIGKILL)
    assert {outcome(rig.read_answer(connection))["status"] for connection in waiting} == {503}
    assert server.process.wait(30) == 1
    errors = server.errors.read_text()
    assert "rank 1 was killed by SIGKILL" in errors
    assert "giving up" in errors
    assert "Traceback" not in errors
    until(lambda: not rig.is_alive(engine))


def test_sigterm_lets_streams_finish(start_server: StartServer, until: Until, rig: Any) -> None:
    server = start_server("--shutdown-timeout", "60")
    server.wait_ready()
    engine, found = server.engine_pid(), []
    body = LONG | {"stream": True, "seed": 1}
    thread = threading.Thread(target=lambda: found.append(server.stream("/v1/completions", body)))
    thread.start()
    until(lambda: server.metric("generation_tokens_total") > 0)
    kept = server.connect()
    kept.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    assert b" 200 " in kept.recv(4096)
    for process in (engine, server.process.pid):  # as a service manager does, which signals all of a service
        os.kill(process, signal.SIGTERM)
    assert server.process.wait(60) == 0
    thread.join()
    assert sum(len(chunk["choices"][0]["text"]) > 0 for chunk in found[0]) > 100
    assert found[0][-1]["choices"][0]["finish_reason"] == "length"
    assert not rig.is_alive(engine)
    kept.close()


def test_what_the_end_cuts_off_is_told(start_server: StartServer, until: Until, rig: Any) -> None:
    """A request that is not done within `--shutdown-timeout` has an answer all the same: a 503, or a last event."""
    server = start_server("--shutdown-timeout", "1")
    server.wait_ready()
    body = LONG | {"n": 96, "logprobs": 20}
    late = server.connect()
    late.sendall(
        b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{"
    )
    stream = server.send_request("/v1/completions", body | {"stream": True}, close=True)
    whole = server.send_request("/v1/completions", body, close=True)
    until(
        lambda: (
            server.metric("num_requests_in_flight") == 192 and server.metric("generation_tokens_total") > 0
        )
    )
    server.process.terminate()
    for connection, status in ((stream, 200), (whole, 503), (late, 503)):
        found = outcome(rig.read_answer(connection))
        assert (found["status"], found["code"]) == (status, "engine_unavailable")
    assert server.process.wait(30) == 0
    assert "Traceback" not in server.errors.read_text()
    assert sorted(line["status"] for line in server.requests() if line["method"] == "POST") == [200, 503, 503]


def test_sigint_twice_does_not_wait(start_server: StartServer, until: Until, rig: Any) -> None:
    server = start_server("--shutdown-timeout", "60")
    server.wait_ready()
    engine = server.engine_pid()
    connection = server.send_request("/v1/completions", LONG | {"n": 128})
    until(lambda: server.metric("generation_tokens_total") > 0)
    server.process.send_signal(signal.SIGINT)
    until(lambda: refuses(server))  # two signals at once are one
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(30) == 0
    connection.close()
    until(lambda: not rig.is_alive(engine))


def refuses(server: Server) -> bool:
    """Whether the server takes no more connections."""
    try:
        server.connect().close()
    except ConnectionRefusedError:
        return True
    return False


def run_serve(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ostinato", "serve", "--threads", "1", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_what_cannot_start_says_why_in_a_line(server: Server, tmp_path: Path) -> None:
    port = server.url.rpartition(":")[2]
    taken = run_serve("--port", port)
    missing = run_serve("--port", "0", "--model", str(tmp_path))
    nowhere = run_serve("--port", "0", "--host", "127.0.0..1")
    homeless = run_serve("--port", "0", "--model", "~nobody-of-this-name/model")
    said = ((taken, port), (missing, "config.json"), (nowhere, "127.0.0..1"), (homeless, "~nobody"))
    for done, word in said:
        assert done.returncode == 2
        assert word in done.stderr
        assert "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def strict(rig: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A server with every limit low, a key, and one origin."""
    flags = ["--max-running-requests", "1", "--max-queued-requests", "2", "--max-body-bytes", "64KiB"]
    flags += ["--body-timeout", "1", "--request-timeout", "1"]
    flags += ["--cors-origin", "https://chat.example", "--served-model-name", "mine"]
    server = rig.start(tmp_path_factory.mktemp("strict"), *flags, env={"OSTINATO_API_KEY": "sésame"})
    server.http.headers["authorization"] = "Bearer sésame"
    server.wait_ready()
    yield server
    rig.stop(server)


def test_a_full_queue_is_429(strict: Server, until: Until) -> None:
    """Fault: one more than fits is refused with the time to wait; more at once than ever fits is a bad request."""
    connection = strict.send_request("/v1/completions", LONG | {"n": 3}, key="sésame")
    until(lambda: strict.metric("num_requests_in_flight") == 3)
    refused = strict.post("/v1/completions", SHORT)
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["type"] == "rate_limit_error"
    connection.close()
    strict.wait_idle()
    assert strict.post("/v1/completions", SHORT).status_code == 200
    never = strict.post("/v1/completions", SHORT | {"n": 4, "temperature": 1})
    assert (never.status_code, never.json()["error"]["param"]) == (400, "n")


@pytest.mark.parametrize("stream", [True, False])
def test_a_deadline_ends_a_request(strict: Server, stream: bool) -> None:
    slow = LONG | {"n": 3, "stream": stream, "logprobs": 100}
    with strict.http.stream("POST", "/v1/completions", json=slow) as answer:
        last = [line for line in answer.iter_lines() if line][-1]
    assert answer.status_code == (200 if stream else 504)
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
    strict.wait_idle()


def test_a_request_may_set_a_deadline_of_its_own(server: Server) -> None:
    slow = LONG | {"n": 32, "logprobs": 20}
    ended = server.post("/v1/completions", slow, headers={"x-request-timeout": "0.05"})
    assert (ended.status_code, ended.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert server.post("/v1/completions", SHORT, headers={"x-request-timeout": "99"}).status_code == 200
    for bad in ("0", "-1", "soon", "nan"):
        refused = server.post("/v1/completions", SHORT, headers={"x-request-timeout": bad})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "x-request-timeout")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_deadline_holds_for_the_way_from_text_to_tokens(server: Server, path: str) -> None:
    """Which waits for other texts too, so it may take any time."""
    text = "a b " * 200_000
    body = {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
    ended = server.post(path, body, headers={"x-request-timeout": "0.01"})
    assert (ended.status_code, ended.json()["error"]["code"]) == (504, "deadline_exceeded")
    refused = server.post(path, body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_a_body_that_does_not_come_is_408(strict: Server) -> None:
    connection = strict.connect()
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer sésame\r\ncontent-length: 100\r\n\r\n{"
    connection.sendall(head.encode())
    assert b" 408 " in connection.recv(4096)
    connection.close()


def test_many_large_bodies_at_once_are_429(strict: Server, until: Until) -> None:
    """Each is within the limit; together they are more than the server keeps in memory. Those that wait are 408."""
    size = 60_000
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer sésame\r\n"
    head += f"content-type: application/json\r\ncontent-length: {size + 1}\r\n\r\n"
    waiting = []
    for _ in range(20):
        waiting.append(strict.connect())
        waiting[-1].sendall(head.encode() + b" " * size)
    before = strict.metric("requests_rejected_total")
    statuses = [int(connection.recv(4096).split()[1]) for connection in waiting]
    for connection in waiting:
        connection.close()
    assert set(statuses) == {408, 429}
    until(lambda: strict.metric("requests_rejected_total") == before + statuses.count(429))
    assert strict.post("/v1/completions", SHORT).status_code == 200


def test_keys(strict: Server) -> None:
    for path in ("/health", "/ready", "/version", "/metrics", "/"):
        assert httpx.get(strict.url + path).status_code == 200
    for path in ("/v1/models", "/dashboard/data"):
        assert httpx.get(strict.url + path).status_code == 401
        assert strict.get(path).status_code == 200
    for key in ("sesame", "sésame-", "x", "sésam"):
        answer = httpx.post(
            f"{strict.url}/v1/completions", json=SHORT, headers={"authorization": f"Basic {key}".encode()}
        )
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
    paths = strict.get("/openapi.json").json()["paths"]
    assert paths["/v1/completions"]["post"]["security"] == [{"key": []}]
    assert paths["/health"]["get"]["security"] == []
    with strict.client(api_key="wrong") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_cross_origin(strict: Server, server: Server) -> None:
    ask = {"origin": "https://chat.example", "access-control-request-method": "POST"}
    allowed = strict.http.options("/v1/completions", headers=ask)
    assert allowed.headers["access-control-allow-origin"] == "https://chat.example"
    other = strict.http.options("/v1/completions", headers=ask | {"origin": "https://evil.example"})
    assert "access-control-allow-origin" not in other.headers
    assert "access-control-allow-origin" not in server.get("/v1/models", headers=ask).headers


def test_the_served_name(strict: Server) -> None:
    assert [model["id"] for model in strict.get("/v1/models").json()["data"]] == ["mine"]
    assert strict.post("/v1/completions", SHORT | {"model": "demo"}).status_code == 404
