"""`ostinato bench serve` from its arguments to its last line, against a server that answers at once."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from typer.testing import CliRunner

from ostinato.cli import app

PIECE = b'data: {"choices":[{"index":0,"text":"a","finish_reason":null}],"usage":null}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":4,"completion_tokens":2}}\n\n'


class Handler(BaseHTTPRequestHandler):
    """Two pieces for every prompt but those with "poison" in them; keeps the bodies it was sent."""

    bodies: list[dict[str, Any]]
    keys: ClassVar[set[str | None]] = set()

    def do_GET(self) -> None:
        self._answer(200, b'{"data":[{"id":"fake"}]}')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append(body)
        self.keys.add(self.headers["Authorization"])
        if "poison" in body["prompt"]:
            self._answer(400, b'{"error":{"message":"no poison"}}')
        else:
            self._answer(200, PIECE + PIECE + USAGE + b"data: [DONE]\n\n")

    def _answer(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server's address, and the bodies it is sent."""
    bodies: list[dict[str, Any]] = []
    handler = type("Handler", (Handler,), {"bodies": bodies})
    Handler.keys.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_address[1]}", bodies
        httpd.shutdown()
        thread.join()


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["bench", "serve", *arguments], env={"COLUMNS": "100"})
    return result.exit_code, result.stdout, result.stderr


def test_a_run_ends_with_json(server: tuple[str, list[dict[str, Any]]], tmp_path: Path) -> None:
    url, bodies = server
    out, plot = tmp_path / "out.json", tmp_path / "plot.svg"
    sizes = ("--num-requests", "6", "--concurrency", "2", "--warmup", "2", "--token-ids", "5:9")
    code, text, _ = run(url, *sizes, "--slo", "ttft:60000", "--out", str(out), "--plot", str(plot))
    assert code == 0
    result = json.loads(text.splitlines()[-1])
    assert (result["model"], result["completed"], result["failed"]) == ("fake", 6, 0)
    assert (result["prompt_tokens"], result["output_tokens"]) == (24, 12)
    assert result["goodput"]["share"] == 1.0
    assert len(bodies) == 8, "six and two to warm up"
    assert all(body["prompt"] not in [b["prompt"] for b in bodies[:2]] for body in bodies[2:])
    every = json.loads(out.read_text())["every_request"]
    assert [len(one["pieces_s"]) for one in every] == [2] * 6
    assert plot.read_text().startswith("<svg")
    assert "6 completed, 0 failed" in text


def test_a_file_warms_up_with_lines_of_its_own(
    server: tuple[str, list[dict[str, Any]]], tmp_path: Path
) -> None:
    """A server that caches prefixes would answer those that it has met too soon; how many there are is told."""
    file = tmp_path / "requests.jsonl"
    file.write_text("".join(f'{{"prompt": "number {n}"}}\n' for n in range(5)))
    url, bodies = server
    for more, asked, repeated in (
        (["--warmup", "2"], [0, 1, 2, 3, 4], 0),
        (["--warmup", "2", "--num-requests", "5"], [0, 1, 2, 3, 4, 2, 3], 2),
        (["--warmup", "6"], [0, 1, 2, 3, 4, 0, 0, 1, 2, 3, 4], 5),
    ):
        bodies.clear()
        code, text, _ = run(url, "--dataset", str(file), "--concurrency", "1", *more)
        assert code == 0
        assert [int(body["prompt"].split()[1]) for body in bodies] == asked
        assert json.loads(text.splitlines()[-1])["repeated_prompts"] == repeated


def test_the_key_is_the_options_or_the_environments(
    server: tuple[str, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = ("--num-requests", "1", "--warmup", "0")
    run(server[0], *sizes)
    monkeypatch.setenv("OSTINATO_API_KEY", "sesame")
    run(server[0], *sizes)
    run(server[0], *sizes, "--api-key", "mine")
    assert Handler.keys == {None, "Bearer sesame", "Bearer mine"}


def test_open_loop_and_a_file(server: tuple[str, list[dict[str, Any]]], tmp_path: Path) -> None:
    url, bodies = server
    file = tmp_path / "requests.jsonl"
    file.write_text('{"prompt": "hello"}\n{"prompt": "poison"}\n')
    code, text, _ = run(
        url, "--dataset", str(file), "--rate", "1000", "--extra", '{"seed": 1}', "--warmup", "0"
    )
    assert code == 0
    result = json.loads(text.splitlines()[-1])
    assert (result["rate"], result["concurrency"]) == (1000.0, None)
    assert result["errors"] == {"HTTP 400": {"count": 1, "first": "no poison"}}
    assert "1 × HTTP 400: no poison" in text
    assert sorted((body["prompt"], body["seed"]) for body in bodies) == [("hello", 1), ("poison", 1)]


def test_when_nothing_went_well_the_exit_code_says_so(
    server: tuple[str, list[dict[str, Any]]], tmp_path: Path
) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_text('{"prompt": "poison"}\n')
    code, text, _ = run(server[0], "--dataset", str(file))
    assert code == 1
    assert json.loads(text.splitlines()[-1])["ttft_ms"] is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rate", "1", "--concurrency", "2"], "are two ways to send"),
        (["--dataset", "nothing"], "there is no dataset 'nothing'"),
        (["--extra", "[1]"], "--extra '[1]' is no JSON object"),
        (["--slo", "speed:3"], "--slo 'speed:3' is no limit"),
        (["--input-len", "0"], "--input-len '0' is no range"),
        (["--token-ids", "1:9", "--chat"], "do not go together"),
        (["http://127.0.0.1:9"], "no server answers at http://127.0.0.1:9"),
        (["--dataset", "/nowhere/x.jsonl"], "No such file"),
        (["--out", "/nowhere/x.json"], "/nowhere/x.json cannot be written: there is no directory /nowhere"),
        (["--plot", "/"], "/ cannot be written: it is a directory"),
    ],
)
def test_refusals_are_one_line(arguments: list[str], words: str) -> None:
    code, text, error = run(*arguments)
    assert (code, text) == (2, "")
    assert error.startswith("ostinato: error: ")
    assert words in error
    assert error.count("\n") == 1


def test_an_engine_is_measured_unless_a_command_is_named() -> None:
    text = CliRunner().invoke(app, ["bench", "--help"]).stdout
    assert "serve" in text
    assert "engine" in text
    assert (
        "there is no benchmark 'all the things'"
        in CliRunner().invoke(app, ["bench", "all the things"]).stderr
    )
