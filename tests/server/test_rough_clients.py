"""Clients that are slow, broken or hostile: each gets a 4xx or what it asked for, and nobody else notices."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

Server = Any

PROMPT = "It is a truth universally acknowledged, that"
LONG = {"prompt": PROMPT, "max_tokens": 600, "ignore_eos": True, "seed": 8, "stream": True}
JSON_HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


def text_of(chunks: list[dict[str, Any]]) -> str:
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


@pytest.fixture(scope="module")
def long_answer(shared_server: Server) -> str:
    return text_of(shared_server.stream("/v1/completions", LONG))


@pytest.fixture
def undisturbed(server: Server, long_answer: str) -> Iterator[None]:
    """While the test runs, another stream goes on, and gives what it gives alone."""
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(text_of(server.stream("/v1/completions", LONG))))
    thread.start()
    yield
    thread.join()
    assert found == [long_answer]


def answer_of(server: Server, raw: bytes) -> tuple[int, dict[str, Any]]:
    """Status and JSON of the answer to raw bytes on a connection of their own."""
    connection = server.connect()
    connection.sendall(raw)
    return parse(connection)


def parse(connection: Any) -> tuple[int, dict[str, Any]]:
    reader = connection.makefile("rb")
    status = int(reader.readline().split()[1])
    length = 0
    while line := reader.readline().strip():
        if line.lower().startswith(b"content-length:"):
            length = int(line.partition(b":")[2])
    body = json.loads(reader.read(length))
    connection.close()
    return status, body


BODIES: list[tuple[str, bytes]] = [
    ("invalid UTF-8", b'{"prompt": "\xff\xfe"}'),
    ("deep JSON", b"[" * 100_000),
    ("deep JSON in a field", b'{"prompt": ' + b"[" * 5000 + b"1" + b"]" * 5000 + b"}"),
    ("half a surrogate pair", b'{"prompt": "\\ud800"}'),
    ("a number of 10,000 digits", b'{"prompt": "a", "seed": ' + b"9" * 10_000 + b"}"),
    ("cut off", b'{"prompt": "a'),
    ("empty", b""),
    ("not an object", b"[1, 2]"),
    ("null", b"null"),
    ("a NUL", b'{"prompt": "a\x00"}'),
]


@pytest.mark.usefixtures("undisturbed")
@pytest.mark.parametrize(("name", "body"), BODIES, ids=[name for name, _ in BODIES])
def test_bad_bodies(server: Server, name: str, body: bytes) -> None:
    answer = server.post_raw("/v1/completions", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


def test_a_deep_template_variable(server: Server) -> None:
    """JSON that is deep but legal, in the one field that takes any."""
    deep: Any = 1
    for _ in range(150):
        deep = {"a": deep}
    messages = [{"role": "user", "content": PROMPT}]
    body = {"messages": messages, "max_tokens": 1, "chat_template_kwargs": deep}
    assert server.post("/v1/chat/completions", body).status_code == 200


@pytest.mark.parametrize("arguments", ["[" * 100_000, '{"a":' * 100_000, "9" * 10_000, "\ud800", "no JSON"])
def test_arguments_of_a_call_that_are_no_object(server: Server, arguments: str) -> None:
    """What an assistant is said to have called with is text that anybody may have written."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": [call]}]
    answer = server.post_raw(
        "/v1/chat/completions", json.dumps({"messages": messages, "max_tokens": 1}).encode()
    )
    assert answer.status_code in (200, 400), answer.text


@pytest.mark.usefixtures("undisturbed")
@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_of_100_mb(server: Server, chunked: bool) -> None:
    size, piece = 100_000_000, b" " * 1_000_000
    connection = server.connect()
    kind = b"transfer-encoding: chunked" if chunked else b"content-length: %d" % size
    connection.sendall(JSON_HEAD + kind + b"\r\n\r\n")
    frame = b"%x\r\n%s\r\n" % (len(piece), piece) if chunked else piece
    for _ in range(size // len(piece)):
        connection.sendall(frame)
    connection.sendall(b"0\r\n\r\n" if chunked else b"")
    status, body = parse(connection)
    assert status == 413
    assert body["error"]["code"] == "body_too_large"


@pytest.mark.usefixtures("undisturbed")
def test_a_half_sent_body(server: Server) -> None:
    """It waits for the rest, which may come; then it is served."""
    body = json.dumps({"prompt": PROMPT, "max_tokens": 2}).encode()
    connection = server.connect()
    connection.sendall(JSON_HEAD + b"content-length: %d\r\n\r\n" % len(body) + body[:10])
    assert server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 1}).status_code == 200
    connection.sendall(body[10:])
    assert parse(connection)[0] == 200
    gone = server.connect()
    gone.sendall(JSON_HEAD + b"content-length: %d\r\n\r\n" % len(body) + body[:10])
    gone.close()


@pytest.mark.usefixtures("undisturbed")
def test_no_http_at_all(server: Server) -> None:
    connection = server.connect()
    connection.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 10)
    assert b" 400 " in connection.recv(1 << 16)
    connection.close()


@pytest.mark.usefixtures("undisturbed")
@pytest.mark.parametrize("line", [b"x-one: " + b"a" * 2_000_000, b"x: y\r\n" * 300_000], ids=["long", "many"])
def test_an_endless_head(server: Server, line: bytes) -> None:
    """Refused, or cut off amid it; never kept."""
    connection = server.connect()
    try:
        connection.sendall(JSON_HEAD + line)
        answer = connection.recv(1 << 16)
    except (BrokenPipeError, ConnectionResetError):
        answer = b""
    assert not answer or b" 400 " in answer
    connection.close()


HEAVY = LONG | {
    "n": 4,
    "logprobs": 100,
    "max_tokens": 400,
}  # more than the buffers between server and client hold


def events(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in data.split(b"\n") if line.startswith(b'data: {"')]


def test_a_slow_reader_gets_it_all(server: Server, long_answer: str) -> None:
    """It reads nothing while another stream runs from start to end, then everything."""
    whole = server.stream("/v1/completions", HEAVY)
    slow = server.send_request("/v1/completions", HEAVY, receive_buffer=4096)
    assert text_of(server.stream("/v1/completions", LONG)) == long_answer
    data = b""
    while b"[DONE]" not in data[-100:]:
        data += slow.recv(1 << 16)
    slow.close()
    for index in range(4):
        found, expected = (
            [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
            for chunks in (events(data), whole)
        )
        assert found == expected


def test_a_reader_that_never_reads_costs_no_page(server: Server, until: Callable[..., None]) -> None:
    before, ends = aborts(server), server.metric("request_success_total", finished_reason="length")
    connection = server.send_request("/v1/completions", HEAVY, receive_buffer=4096)
    # All is generated, though nothing is read.
    until(lambda: server.metric("request_success_total", finished_reason="length") == ends + 4)
    until(lambda: server.metric("kv_cache_usage_perc") == 0)
    assert server.metric("num_requests_in_flight") == 4
    connection.close()
    server.wait_idle()
    assert aborts(server) == before  # it had ended by itself


def test_a_wrong_content_type(server: Server) -> None:
    raw = b'{"prompt": "a"}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(raw)
    status, body = answer_of(server, head + raw)
    assert status == 400
    assert "application/json" in body["error"]["message"]


def test_unknown_paths_and_methods(server: Server) -> None:
    for method, path, status in (
        ("GET", "/v1/nothing", 404),
        ("POST", "/chat/completions", 404),
        ("GET", "/v1/completions", 405),
        ("PUT", "/", 405),
    ):
        answer = server.http.request(method, path)
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert ("allow" in answer.headers) == (status == 405)
        assert ("begin with /v1" in answer.text) == (path == "/chat/completions")


def test_head_is_get_without_the_body(server: Server) -> None:
    """Load balancers and `curl -I` ask so."""
    for path in ("/health", "/v1/models", "/metrics", "/", "/v1/nothing"):
        asked, got = (server.http.request(method, path) for method in ("HEAD", "GET"))
        assert (asked.status_code, asked.content) == (got.status_code, b"")
        assert asked.headers["content-type"] == got.headers["content-type"]
    assert server.http.head("/v1/completions").headers["allow"] == "POST"


@pytest.mark.parametrize(
    "path", ["/dashboard/../../config.json", "/dashboard/%2e%2e%2fdata.py", "/dashboard//etc/passwd"]
)
def test_no_path_leads_out(server: Server, path: str) -> None:
    connection = server.connect()
    connection.sendall(f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
    assert parse(connection)[0] == 404


def test_templates_are_sandboxed_and_never_a_clients(server: Server) -> None:
    content = "{{ ''.__class__.__mro__ }}{% for x in range(10) %}x{% endfor %}"
    messages = [{"role": "user", "content": content}]
    ids = server.post("/tokenize", {"messages": messages}).json()["tokens"]
    assert content in server.post("/detokenize", {"tokens": ids}).json()["prompt"]
    refused = server.post("/v1/chat/completions", {"messages": messages, "chat_template": "x"}).json()
    assert refused["error"]["param"] == "chat_template"


# ---- clients that go away ----


def aborts(server: Server) -> float:
    count = server.metric("request_success_total", finished_reason="abort")
    assert isinstance(count, float | int)
    return count


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnect_aborts(server: Server, until: Callable[..., None], stream: bool) -> None:
    """Fault case F48: the request ends at once, not at its 900 tokens; a normal end is no abort."""
    before, generated = aborts(server), server.metric("generation_tokens_total")
    server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 2})
    connection = server.send_request("/v1/completions", LONG | {"max_tokens": 900, "n": 8, "stream": stream})
    if stream:
        assert b" 200 OK" in connection.recv(4096)
    else:
        until(lambda: server.metric("generation_tokens_total") > generated + 2)
    connection.close()
    until(lambda: aborts(server) == before + 8)
    server.wait_idle()
    assert server.metric("generation_tokens_total") < generated + 8 * 900
    server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 2})
    assert aborts(server) == before + 8


def test_a_disconnect_then_the_next_turn(server: Server, client: openai.OpenAI) -> None:
    """Fault case F49: the conversation that was cut off goes on, on the pages that it has left."""
    messages: list[Any] = [{"role": "user", "content": PROMPT}]
    extra = {"ignore_eos": True}
    for _ in range(3):
        text = ""
        with client.chat.completions.create(
            model="demo", messages=messages, max_tokens=300, stream=True, temperature=0, extra_body=extra
        ) as stream:
            for chunk in stream:
                text += chunk.choices[0].delta.content or ""
                if len(text) > 40:
                    break
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Go on."}]
    cold = [*messages[:-1], {"role": "user", "content": "Go on."}]
    options: dict[str, Any] = {"model": "demo", "messages": cold, "max_tokens": 16, "temperature": 0}
    hit = client.chat.completions.create(**options)
    alone = client.chat.completions.create(**options, extra_body={"cache_salt": "another"})
    assert hit.usage.prompt_tokens_details.cached_tokens > 0
    assert alone.usage.prompt_tokens_details.cached_tokens == 0
    assert hit.choices[0].message.content == alone.choices[0].message.content


def test_nothing_is_left_of_many_connections(server: Server, until: Callable[..., None]) -> None:
    """1,000 idle connections, and 200 that hang up in the middle of a stream: no page, task or file stays."""
    server.wait_idle()
    server.http.get("/health")
    files, tasks = server.open_files(), server.metric("server_tasks")
    idle = [server.connect() for _ in range(1000)]
    streams = [
        server.send_request(
            "/v1/completions", {"prompt": [7, 8, i], "max_tokens": 900, "ignore_eos": True, "stream": True}
        )
        for i in range(200)
    ]
    until(lambda: server.metric("num_requests_in_flight") == 200)
    assert server.post("/tokenize", {"prompt": PROMPT}).status_code == 200
    for connection in [*streams, *idle]:
        connection.close()
    server.wait_idle()
    until(lambda: server.open_files() <= files and server.metric("server_tasks") <= tasks)
    assert server.metric("num_requests_running") == server.metric("num_requests_waiting") == 0
