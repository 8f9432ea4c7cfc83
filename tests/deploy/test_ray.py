"""Two replicas of the server under a local Ray Serve: both answer, and answer the same; options are checked."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from ostinato.errors import ConfigError

ray = pytest.importorskip("ray", reason="needs the extra: pip install ostinato[ray]")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own
    from ray import serve

    from ostinato.deploy.ray import app

PORT = 18453
pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False)
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    serve.run(
        app({"threads": "1", "min_replicas": "2", "max_replicas": "2", "access_log": "false"}), name="test"
    )
    yield f"http://127.0.0.1:{PORT}"
    serve.shutdown()
    ray.shutdown()


def _post(url: str, body: dict[str, Any]) -> Any:
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"{url}/v1/completions", data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def _ready(url: str) -> Any:
    """An answer, once an engine is loaded; until then the server says 503."""
    for _ in range(600):
        try:
            return _post(url, {"prompt": "Once upon a time", "max_tokens": 6, "temperature": 0})
        except urllib.error.HTTPError as error:
            if error.code != 503:
                raise
        time.sleep(0.1)
    raise AssertionError("no replica became ready")


def test_replicas_answer_alike(url: str) -> None:
    first = _ready(url)["choices"][0]["text"]
    assert first
    replicas = serve.status().applications["test"].deployments["ostinato"].replica_states
    assert sum(replicas.values()) == 2
    for _ in range(6):
        assert _ready(url)["choices"][0]["text"] == first


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"modle": "x"}, "unknown option 'modle'"),
        ({"min_replicas": 3, "max_replicas": 2}, "min_replicas 3 is over max_replicas 2"),
        ({"threads": "many"}, "threads must be a whole number"),
        ({"dtype": "float99"}, "dtype 'float99' is unknown"),
        ({"access_log": "perhaps"}, "access_log must be true or false"),
    ],
)
def test_options_are_checked_before_anything_is_placed(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        app(options)
