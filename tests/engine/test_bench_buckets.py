"""`ostinato bench buckets`: sizes from a run, a file or a server; lists that cost no more than the present ones."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ostinato.cli import app
from ostinato.cli.buckets import read_sizes
from ostinato.errors import ConfigError

SIZES = {"decode": {"sizes": {"1": 40, "7": 9}}, "prefill": {"sizes": {"50": 3}}}


def bench(*args: str) -> dict[str, Any]:
    found = CliRunner().invoke(app, ["bench", "buckets", *args])
    assert found.exit_code == 0, found.output
    made: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    return made


def test_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "stats.json"
    path.write_text("a table\n" + json.dumps({"replay": {"stats": {"graph": SIZES}}}))
    made = bench("--from", str(path), "--rows")
    assert made["unit"] == "rows"
    assert made["decode"]["present"] | {"pad_share": 0} == {
        "sizes": [1, 8],
        "graphs": 2,
        "cost": 9.0,
        "real_rows": 103,
        "pad_rows": 9,
        "eager_steps": 0,
        "bytes": 0,
        "capture_s": 0.0,
        "pad_share": 0,
    }
    assert (made["decode"]["planned"]["sizes"], made["decode"]["planned"]["cost"]) == ([1, 7, 32], 0.0)
    assert bench("--from", str(path), "--rows", "--max-graphs", "2")["decode"]["planned"]["sizes"] == [1, 32]
    path.write_text("{}")
    assert CliRunner().invoke(app, ["bench", "buckets", "--from", str(path), "--rows"]).exit_code != 0


WRONG = {
    b"": "holds no JSON",
    b"<html>": "holds no JSON",
    b"\xff\xfe": "holds no JSON",
    b"{}": "has no step sizes",
    b"[1]": "has no step sizes",
    b"null": "has no step sizes",
    json.dumps({"graph": {"decode": {"sizes": {"x": 1}}, "prefill": {"sizes": {}}}}).encode(): "has no step",
    json.dumps({"graph": {"decode": {"sizes": [1]}, "prefill": {"sizes": {}}}}).encode(): "has no step sizes",
    json.dumps(
        {"graph": {"decode": {"sizes": {"1": "2"}}, "prefill": {"sizes": {}}}}
    ).encode(): "has no step",
    json.dumps({"graphs": {"sizes": 5}}).encode(): "has no step sizes",
}


@pytest.mark.parametrize("content", WRONG)
def test_what_is_no_stats(tmp_path: Path, content: bytes) -> None:
    """Of a file and of a server, which may be another's: what it holds instead, in one line."""
    path = tmp_path / "stats.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"{path} {WRONG[content]}"):
        read_sizes(str(path))

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            return

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        address = f"http://127.0.0.1:{server.server_port}"
        with pytest.raises(ConfigError, match=f"{address} (holds no JSON|has no step sizes)"):
            read_sizes(address)
        thread.join(10)
    with pytest.raises(ConfigError, match=f"{address} cannot be read .*; give the address of a server that"):
        read_sizes(address)


def test_what_is_no_file(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(ConfigError, match=f"{path} cannot be read .*; give a file"):
            read_sizes(str(path))


def test_from_a_server() -> None:
    data = {
        "graphs": {
            "sizes": {kind: one["sizes"] for kind, one in SIZES.items()},
            "lists": {"decode": [2, 8], "prefill": [64]},
        },
    }

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/dashboard/data?after=0" else 404)
            self.end_headers()
            self.wfile.write(json.dumps(data).encode())

        def log_message(self, *_: Any) -> None:
            return

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        made = bench("--from", f"http://127.0.0.1:{server.server_port}/", "--rows")
        thread.join(10)
    assert (made["decode"]["present"]["sizes"], made["decode"]["planned"]["sizes"]) == ([2, 8], [1, 7, 8])


@pytest.mark.parametrize(
    "args",
    [("--tp", "2"), ("--graph", "eager"), ("--graph-memory", "much"), ("--graph-memory", "1GiB", "--rows")],
)
def test_what_cannot_be_measured_is_refused(args: tuple[str, ...]) -> None:
    assert CliRunner().invoke(app, ["bench", "buckets", *args]).exit_code == 2


def test_from_a_run_with_costs_of_this_machine() -> None:
    made = bench(
        "--threads", "1", "--num-prompts", "6", "--output-len", "6", "--dtype", "float32", "--max-graphs", "3"
    )
    assert made["unit"] == "seconds"
    for kind in ("decode", "prefill"):
        present, planned = made[kind]["present"], made[kind]["planned"]
        assert present["real_rows"] == planned["real_rows"] > 0
        assert len(planned["sizes"]) <= 3
        costs = made[kind]["costs"]
        assert all(cost >= 0 for cost in costs.values())
        assert costs["graph_bytes"] > 1000


def test_a_limit_of_memory_limits_the_list() -> None:
    """Two graphs' worth of bytes leave room for no more than two."""
    args = ("--threads", "1", "--num-prompts", "4", "--output-len", "4", "--dtype", "float32")
    one = bench(*args)["decode"]["costs"]["graph_bytes"]
    limited = bench(*args, "--graph-memory", str(2 * one + one // 2))
    assert len(limited["decode"]["planned"]["sizes"]) <= 2


def test_graphs_cost_something_however_the_engine_captures(tmp_path: Path) -> None:
    """What is captured at start is captured anew to be measured; else it would be steps without graphs that are."""
    path = tmp_path / "stats.json"
    path.write_text(json.dumps({"graph": SIZES}))
    small = ["--context-length", "64", "--max-running-requests", "2", "--threads", "1"]
    made = bench("--from", str(path), "--capture", "startup", *small)
    assert made["decode"]["costs"]["graph"] > 0
    assert made["decode"]["costs"]["eager"] > 0
