"""The server under a local Ray Serve: a second replica while there is load, one when there is none, the same answers
throughout, and no request that a replica in its start would refuse; options are checked.
"""

from __future__ import annotations

import json
import threading
import time
import urllib.request
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from ostinato import LLM, SamplingParams
from ostinato.errors import ConfigError

ray = pytest.importorskip("ray", reason="needs the extra: pip install ostinato[ray]")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own
    from ray import serve

    from ostinato.deploy.ray import app

PORT = 18453
CLIENTS, TOKENS, PATIENCE_S = 8, 120, 180
PROMPTS = ["Once upon a time", "The bear", "A small boat"]
pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False)
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    options = {"threads": "1", "min_replicas": "1", "max_replicas": "2", "target_ongoing_requests": "2"}
    delays = {"upscale_delay": "1", "downscale_delay": "2", "access_log": "false"}
    serve.run(app(options | delays), name="test")
    yield f"http://127.0.0.1:{PORT}"
    serve.shutdown()
    ray.shutdown()


def _text(url: str, prompt: str) -> str:
    """A completion; raises for any status but 200."""
    body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"{url}/v1/completions", data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        text: str = json.load(answer)["choices"][0]["text"]
        return text


def _wait_for_replicas(count: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        states = serve.status().applications["test"].deployments["ostinato"].replica_states
        if {str(state): n for state, n in states.items() if n} == {"RUNNING": count}:
            return
        assert time.monotonic() < deadline, f"{states}, not {count} replicas"
        time.sleep(0.2)


def test_replicas_follow_the_load_and_answer_alike(url: str) -> None:
    params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
    with LLM(progress=False, threads=1) as llm:
        expected = {prompt: llm.generate(prompt, params)[0].outputs[0].text for prompt in PROMPTS}
    stop, problems, answers = threading.Event(), [], []

    def client(n: int) -> None:
        prompt = PROMPTS[n % len(PROMPTS)]
        while not stop.is_set():
            try:
                answers.append(_text(url, prompt) == expected[prompt])
            except Exception as error:
                problems.append(error)
                return

    clients = [threading.Thread(target=client, args=(n,)) for n in range(CLIENTS)]
    for thread in clients:
        thread.start()
    try:
        _wait_for_replicas(2)
        before = len(answers)
        while len(answers) < before + 4 * CLIENTS and not problems:
            time.sleep(0.1)
    finally:
        stop.set()
        for thread in clients:
            thread.join()
    assert not problems, "also while the second replica was loading"
    assert all(answers)
    _wait_for_replicas(1)
    assert _text(url, PROMPTS[0]) == expected[PROMPTS[0]]


def test_all_kinds_of_options_can_be_given_as_words() -> None:
    """As on Serve's command line."""
    words = {"shadow_rate": "0.5", "decode_buckets": "1,2", "api_keys": "a,b", "shutdown_timeout": "7"}
    made = app(words)._bound_deployment
    assert made._deployment_config.graceful_shutdown_timeout_s == 7


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"modle": "x"}, "unknown option 'modle'"),
        ({"min_replicas": 3, "max_replicas": 2}, "min_replicas 3 is over max_replicas 2"),
        ({"threads": "many"}, "threads must be a whole number"),
        ({"dtype": "float99"}, "dtype 'float99' is unknown"),
        ({"access_log": "perhaps"}, "access_log must be true or false"),
        ({"shadow_rate": "often"}, "shadow_rate must be a number"),
        ({"decode_buckets": "1,x"}, "decode_buckets must be a whole number, got 'x'"),
        ({"port": "80"}, "port is Serve's"),
    ],
)
def test_options_are_checked_before_anything_is_placed(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        app(options)
