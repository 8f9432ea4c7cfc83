"""A real server process over the demo model, on a free port of loopback: how tests start, ask and end it."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
from prometheus_client.parser import text_string_to_metric_families

from ostinato.server.answers import ChatChunk, CompletionChunk

READY_S = 90.0
_LIBC = ctypes.CDLL(None)  # loaded before any fork


@dataclass
class Server:
    """A server process. `log` holds its stdout (the access log), `errors` its stderr."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path
    errors: Path
    http: httpx.Client

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", **{"api_key": "none", "max_retries": 0} | options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.http.get(path, **options)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return self.http.post(path, json=body, **options)

    def post_raw(self, path: str, content: bytes) -> httpx.Response:
        return self.http.post(path, content=content, headers={"content-type": "application/json"})

    def stream(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The chunks of a stream, each as its schema says; the last line must be the mark."""
        with self.http.stream("POST", path, json=body) as answer:
            assert answer.status_code == 200, answer.read()
            lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
        assert lines[-1] == "[DONE]"
        shape = ChatChunk if "chat" in path else CompletionChunk
        for line in lines[:-1]:
            shape.model_validate_json(line)
        return [json.loads(line) for line in lines[:-1]]

    def schema(self, name: str) -> dict[str, Any]:
        """A component of the OpenAPI schema."""
        found = self.get("/openapi.json").json()["components"]["schemas"][name]
        assert isinstance(found, dict)
        return found

    def requests(self) -> list[dict[str, Any]]:
        """The access log's lines."""
        lines = [json.loads(line) for line in self.log.read_text().splitlines()]
        return [line for line in lines if line["event"] == "request"]

    def metric(self, name: str, **labels: str) -> float:
        """A number of `/metrics`, by name without the prefix: the sum over series with these labels."""
        return sum(s.value for s in self.samples(name) if labels.items() <= s.labels.items())

    def samples(self, name: str) -> list[Any]:
        """Samples of `/metrics` of this name."""
        families = text_string_to_metric_families(self.get("/metrics").text)
        return [s for family in families for s in family.samples if s.name == f"ostinato_{name}"]

    def wait_ready(self) -> None:
        until(lambda: self.process.poll() is not None or self.get("/ready").status_code == 200, READY_S)
        assert self.process.poll() is None, self.errors.read_text()

    def wait_idle(self) -> None:
        """Until no request is in flight and no page is held."""
        until(lambda: self.metric("num_requests_in_flight") == self.metric("kv_cache_usage_perc") == 0)

    def engine_pid(self) -> int:
        """The engine process: the server's only child."""
        (child,) = children(self.process.pid)
        return child

    def open_files(self) -> int:
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def connect(self, receive_buffer: int = 0) -> socket.socket:
        """A bare connection; `receive_buffer`: bytes that may wait to be read on this side."""
        connection = socket.socket()
        connection.settimeout(60)
        if receive_buffer:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        try:
            connection.connect(("127.0.0.1", int(self.url.rpartition(":")[2])))
        except OSError:
            connection.close()
            raise
        return connection

    def send_request(
        self, path: str, body: dict[str, Any], *, key: str = "", close: bool = False, receive_buffer: int = 0
    ) -> socket.socket:
        """A connection with a request on its way; nothing of the answer is read. `close`: it ends after it."""
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        head += f"authorization: Bearer {key}\r\n" + "connection: close\r\n" * close
        connection = self.connect(receive_buffer)
        connection.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
        return connection


def children(pid: int) -> list[int]:
    """Processes that a process has started and that are not collected."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that is dead but not yet collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def read_answer(connection: socket.socket) -> bytes:
    """All that comes on a connection until it is closed."""
    with connection:
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Poll until a condition holds; fails when it does not in time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not so within {seconds} s"
        time.sleep(0.02)


def start(
    directory: Path, *flags: str, env: dict[str, str] | None = None, command: str = "ostinato"
) -> Server:
    """Start a server; returns when it listens, which is before its engine has loaded."""
    log, errors = directory / "stdout", directory / "stderr"
    line = [sys.executable, "-m", command, "serve", "--port", "0", "--threads", "1", *flags]
    with log.open("wb") as out, errors.open("wb") as err:
        process = subprocess.Popen(
            line, stdout=out, stderr=err, env={**os.environ, **(env or {})}, preexec_fn=_die_with_the_tests
        )
    until(lambda: process.poll() is not None or b"\n" in log.read_bytes(), READY_S)
    assert process.poll() is None, errors.read_text()
    url = json.loads(log.read_text().splitlines()[0])["url"]
    return Server(process, url, log, errors, httpx.Client(base_url=url, timeout=60))


def _die_with_the_tests() -> None:
    """A test run that is killed leaves no server behind (Linux: prctl(2), PR_SET_PDEATHSIG)."""
    if sys.platform == "linux":
        _LIBC.prctl(1, signal.SIGTERM, 0, 0, 0)


def stop(server: Server) -> None:
    server.http.close()
    if server.process.poll() is None:
        server.process.terminate()
        try:
            server.process.wait(20)
        except subprocess.TimeoutExpired:
            server.process.kill()
            server.process.wait()
