"""The OpenAPI schema is true: requests drawn from it, and from outside of it, get what it says and never a 5xx."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi import checks

Server = Any

# Not among them: that everything the schema allows is accepted. What one field means beside another (a `best_of` that
# is not `n`), or for this model (its name, its vocabulary), a schema cannot say.
CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.response_headers_conformance,
    checks.negative_data_rejection,
    checks.unsupported_method,
]
FEW = 3
EXAMPLES = 80


@pytest.fixture(scope="module")
def api(shared_server: Server) -> Any:
    return schemathesis.openapi.from_url(f"{shared_server.url}/openapi.json")


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_api_is_as_its_schema_says(api: Any, mode: GenerationMode) -> None:
    operations = [found.ok() for found in api.get_all_operations()]
    strategies = st.one_of(
        [operation.as_strategy(mode) for operation in operations if takes(operation, mode)]
    )

    @settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(case=strategies)
    def check(case: schemathesis.Case) -> None:
        clip(case.body)
        if mode is GenerationMode.POSITIVE:
            tame(case.body)
        case.call_and_validate(checks=CHECKS, timeout=60)

    check()


def takes(operation: Any, mode: GenerationMode) -> bool:
    """Whether there is anything to get wrong in a request of this operation."""
    return mode is GenerationMode.POSITIVE or operation.method.upper() == "POST"


def clip(body: Any) -> None:
    """Ask for few tokens where the request asks for many: the same kind of request, sooner done."""
    if not isinstance(body, dict) or not ({"prompt", "messages"} & body.keys()):
        return
    for name in ("max_completion_tokens", "max_tokens", "n", "best_of"):
        if isinstance(body.get(name), int) and body[name] > FEW:
            body[name] = FEW
    if body.get("max_completion_tokens") is None and body.get("max_tokens") is None:
        body["max_tokens"] = FEW
    if isinstance(body.get("min_tokens"), int) and body["min_tokens"] > FEW:
        body["min_tokens"] = FEW


# What a request cannot have beside others, or with this model.
CONDITIONAL = ("model", "best_of", "stop_token_ids", "logit_bias", "tools", "tool_choice", "response_format")
CONDITIONAL += (
    "chat_template_kwargs",
    "stream_options",
    "top_logprobs",
    "max_completion_tokens",
    "min_tokens",
)


def tame(body: Any) -> None:
    """Make a legal request one that is served, so that answers are seen and not only refusals."""
    if not isinstance(body, dict):
        return
    for name in CONDITIONAL:
        body.pop(name, None)
    for message in body.get("messages") or []:
        message["content"] = message.get("content") or "Go on."
    if isinstance(body.get("prompt"), list) and not isinstance(body["prompt"][0], str):
        body["prompt"] = [5, 6, 7]


def test_every_route_is_in_the_schema(server: Server) -> None:
    schema = server.get("/openapi.json").json()
    assert set(schema["paths"]) == {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/embeddings",
        "/v1/models",
        "/v1/models/{model}",
        "/tokenize",
        "/detokenize",
        "/health",
        "/ready",
        "/version",
        "/metrics",
    }
    for path, methods in schema["paths"].items():
        for method in methods.values():
            assert "4XX" in method["responses"], path
            assert method["description"], path
