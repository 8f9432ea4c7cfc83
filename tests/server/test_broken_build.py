"""A build with a fault in it, seen by clients: found while it serves, told, kept away from the answers that follow."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from typer.testing import CliRunner

from ostinato.cli import app
from ostinato.engine.rerun import rerun
from ostinato.engine.trace import read_trace

Server = Any
HERE = Path(__file__).parent
PROMPT = list(range(400, 420))
TOKENS = 60
FOUND = 35
"""The first step that `--shadow-rate 0.02` checks."""


def ask(client: openai.OpenAI, prompt: list[int], tokens: int = TOKENS) -> list[int]:
    answer = client.completions.create(
        model="demo",
        prompt=prompt,
        max_tokens=tokens,
        temperature=0,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    ids: list[int] = answer.choices[0].model_extra["token_ids"]
    return ids


def test_a_wrong_graph_is_found_and_serves_nothing_more(
    client: openai.OpenAI,
    start_server: Callable[..., Server],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also what it had written before is used no more: by its own request, nor as a cached prefix."""
    env = {"PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}
    traces = tmp_path / "traces"
    flags = ["--dtype", "float32", "--shadow-rate", "0.02", "--trace-dir", str(traces)]
    flags += ["--prefill-graph", "eager"]  # one wrong graph
    server = start_server(*flags, env=env, command="broken_ostinato")
    server.wait_ready()
    with server.client() as faulty:
        given = ask(faulty, PROMPT)
        right = ask(client, PROMPT)
        assert given[:FOUND] != right[:FOUND]  # nobody had looked
        assert given[FOUND:] == ask(client, PROMPT + given[:FOUND], TOKENS - FOUND)
        for prompt in (PROMPT, PROMPT + given, PROMPT[::-1]):
            assert ask(faulty, prompt) == ask(client, prompt)
    server.wait_idle()
    assert server.metric("shadow_mismatches_total", kind="decode") == 1
    assert server.metric("quarantined_buckets", kind="decode") == 1
    assert server.metric("eager_steps_total", kind="decode", reason="quarantined") > 3 * TOKENS
    (trace,) = traces.iterdir()
    (line,) = [line for line in server.errors.read_text().splitlines() if "differ" in line]
    assert f"step {FOUND}, a decode of 1 rows in bucket decode/1" in line
    assert line.endswith(str(trace))

    sound = CliRunner().invoke(app, ["replay-trace", str(trace)])
    assert (sound.exit_code, "a graph captured now is right" in " ".join(sound.output.split())) == (1, True)
    monkeypatch.syspath_prepend(HERE)
    broken = importlib.import_module("broken_ostinato")
    again = rerun(read_trace(trace), None, lambda *_: None, broken.put)
    assert again.same("eager", "expected")
    assert not again.same("replayed", "expected")
