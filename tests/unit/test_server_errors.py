"""Every 4xx names its field: pydantic's locations and the engine's messages as `param`."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from ostinato.engine.request import SamplingParams
from ostinato.errors import RequestError
from ostinato.server.api_errors import ApiError, from_request_error, from_validation, spell
from ostinato.server.protocol import ChatCompletionRequest, CompletionRequest


@pytest.mark.parametrize(
    ("location", "text"),
    [
        (("body", "n"), "n"),
        (("body", "messages", 0, "content", "str"), "messages[0].content"),
        (("body", "messages", 0, "content", "list[TextPart]", 1, "type"), "messages[0].content[1].type"),
        (("body", "stop", "constrained-str"), "stop"),
        (("body", "stream_options", "foo"), "stream_options.foo"),
        (("body",), None),
        ((), None),
        (("query", "after"), "after"),
    ],
)
def test_locations(location: tuple[str | int, ...], text: str | None) -> None:
    assert spell(location) == text


def problem(model: Any, body: dict[str, Any]) -> ApiError:
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    return from_validation([{**e, "loc": ("body", *e["loc"])} for e in caught.value.errors()])


def test_a_union_names_the_branch_that_got_furthest() -> None:
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": 7}]}]}
    assert problem(ChatCompletionRequest, body).param == "messages[0].content[0].text"


def test_unknown_and_missing_fields() -> None:
    unknown = problem(CompletionRequest, {"prompt": "a", "best": 1})
    assert problem(CompletionRequest, {"prompt": "a", "Strange Field[]": 1}).param == "Strange Field[]"
    assert (unknown.param, unknown.message) == ("best", "best is not supported here; remove it")
    assert problem(CompletionRequest, {}).param == "prompt"


@pytest.mark.parametrize("field", ["n", "temperature", "top_p", "seed", "stop", "logit_bias", "min_tokens"])
def test_the_engines_own_messages_name_the_field(field: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: object()})
    assert from_request_error(caught.value, tuple(CompletionRequest.model_fields)).param == field


def test_the_body_is_openais() -> None:
    found = ApiError(429, "full", retry_after=2)
    assert json.loads(found.body()) == {
        "error": {"message": "full", "type": "rate_limit_error", "param": None, "code": None}
    }
    assert (b"retry-after", b"2") in found.headers()
