"""Every 4xx names its field: pydantic's locations and the engine's messages as `param`."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from ostinato.engine.request import SamplingParams
from ostinato.errors import RequestError
from ostinato.server.api_errors import ApiError, from_request_error, from_validation
from ostinato.server.protocol import ChatCompletionRequest, CompletionRequest


def problem(model: Any, body: Any) -> ApiError:
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    return from_validation([{**e, "loc": ("body", *e["loc"])} for e in caught.value.errors()], body)


USER = {"role": "user", "content": "a"}
CALL = {"type": "function", "function": {"name": "not a name"}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 0}, "n"),
        ({"messages": [{**USER, "content": 7}]}, "messages[0].content"),
        (
            {"messages": [{**USER, "content": [{"type": "text", "text": "a"}, {"type": "b"}]}]},
            "messages[0].content[1].type",
        ),
        ({"stop": 7}, "stop"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stream_options": {"foo": 1}}, "stream_options.foo"),
        ({"logit_bias": {"word": 1}}, "logit_bias.word"),
        ({"structured_outputs": {"json": 7}}, "structured_outputs.json"),
        ({"tools": [CALL]}, "tools[0].function.name"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tool_choice": "perhaps"}, "tool_choice"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "poem"}}, "response_format"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_path_to_the_fault_is_the_bodys(fields: dict[str, Any], param: str) -> None:
    """Also where the names of union branches are those of fields, such as `function` and `json_schema`."""
    assert problem(ChatCompletionRequest, {"messages": [USER], **fields}).param == param


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"store": True}, "store must be false, got true"),
        ({"metadata": {"a": "b"}}, "metadata is not supported here; remove it"),
        ({"messages": []}, "messages must hold at least 1, got 0"),
        ({"stop": ["a"] * 99}, "stop must hold at most 64, got 99"),
        ({"web_search_options": {}}, "web_search_options is not supported here; remove it"),
        ({"modalities": ["audio"]}, "modalities[0] must be 'text', got \"audio\""),
        (
            {"response_format": {"type": "poem"}},
            "response_format.type must be one of 'text', 'json_object', 'json_schema', got 'poem'",
        ),
    ],
)
def test_messages_speak_json(fields: dict[str, Any], message: str) -> None:
    assert problem(ChatCompletionRequest, {"messages": [USER], **fields}).message == message
    assert problem(CompletionRequest, {"prompt": 7}).message.startswith("prompt must be text, ")


def test_places_beside_the_body() -> None:
    error = {"type": "int_parsing", "loc": ("query", "after"), "msg": "Input should be a number"}
    assert from_validation([error], None).param == "after"
    assert "JSON object" in problem(CompletionRequest, []).message


def test_a_union_names_the_branch_that_got_furthest() -> None:
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": 7}]}]}
    assert problem(ChatCompletionRequest, body).param == "messages[0].content[0].text"


def test_unknown_and_missing_fields() -> None:
    unknown = problem(CompletionRequest, {"prompt": "a", "best": 1})
    assert problem(CompletionRequest, {"prompt": "a", "Strange Field[]": 1}).param == "Strange Field[]"
    nameless = problem(CompletionRequest, {"prompt": "a", "": 1})
    assert (nameless.param, nameless.message) == ('""', '"" is not supported here; remove it')
    deep = {"prompt": "a", "stream_options": {"": 1}}
    assert problem(CompletionRequest, deep).param == 'stream_options.""'
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
