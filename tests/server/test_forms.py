"""Structured output, tools and reasoning over HTTP, through the official client."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import openai
import pytest

from ostinato.engine.launch import locate_model

Server = Any

MESSAGES: Any = [{"role": "user", "content": "What is the weather in Verona?"}]
SCHEMA = {
    "type": "object",
    "properties": {"town": {"type": "string", "maxLength": 10}, "rain": {"type": "boolean"}},
    "required": ["town", "rain"],
    "additionalProperties": False,
}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a town",
        "parameters": SCHEMA,
        "strict": True,
    },
}
NOW: Any = {"type": "function", "function": {"name": "now"}}
TEMPLATE = """{%- if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>
call as <tool_call>{"name": ..., "arguments": ...}</tool_call>
{% endif %}
{%- for message in messages %}{{ message.role }}: {{ message.content or '' }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function.arguments.town }}</tool_call>{% endfor %}
{% endfor %}assistant:{% if thinking %}<think>{% endif %}{# </think> #}"""


@pytest.fixture(scope="module")
def tool_server(rig: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The demo model under a chat template that knows tools and thoughts."""
    model = tmp_path_factory.mktemp("model") / "demo"
    shutil.copytree(Path(locate_model(None)), model)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    server = rig.start(tmp_path_factory.mktemp("tools"), "--model", str(model), "--dtype", "float32")
    server.wait_ready()
    yield server
    server.wait_idle()
    rig.stop(server)


@pytest.fixture(scope="module")
def tools(tool_server: Server) -> Iterator[openai.OpenAI]:
    with tool_server.client() as client:
        yield client


def test_response_format_of_a_schema(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="demo",
        messages=MESSAGES,
        max_tokens=100,
        seed=1,
        n=2,
        response_format={"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}},
    )
    for choice in answer.choices:
        value = json.loads(choice.message.content or "")
        assert set(value) == {"town", "rain"}
        assert choice.finish_reason == "stop"


def test_response_format_json_object_streams(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="demo", messages=MESSAGES, max_tokens=12, response_format={"type": "json_object"}, stream=True
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream).startswith("{")


@pytest.mark.parametrize(
    "form",
    [{"regex": "[0-9]{2}"}, {"choice": ["yes", "no"]}, {"grammar": 'start: "a" /[bc]/'}, {"json": SCHEMA}],
)
def test_structured_outputs_of_completions(client: openai.OpenAI, form: dict[str, Any]) -> None:
    ask = {"model": "demo", "prompt": "Say", "max_tokens": 100, "seed": 4}
    answers = [
        client.completions.create(**ask, extra_body={"structured_outputs": form}).choices[0] for _ in range(2)
    ]
    assert answers[0].text == answers[1].text
    assert answers[0].finish_reason == "stop"


BAD: list[tuple[str, dict[str, Any]]] = [
    ("structured_outputs", {"structured_outputs": {"regex": "(a"}}),
    ("structured_outputs", {"structured_outputs": {}}),
    ("structured_outputs", {"structured_outputs": {"regex": "a", "choice": ["b"]}}),
    ("structured_outputs", {"structured_outputs": {"json": {"type": "objekt"}}}),
    ("structured_outputs.jason", {"structured_outputs": {"jason": {}}}),
    (
        "response_format",
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"$ref": "#/no"}},
            }
        },
    ),
    ("response_format.json_schema", {"response_format": {"type": "json_schema"}}),
    ("tools", {"tools": [NOW]}),
    ("tool_choice", {"tool_choice": "required"}),
]


@pytest.mark.parametrize(("param", "fields"), BAD, ids=[f"{param}-{n}" for n, (param, _) in enumerate(BAD)])
def test_f51_bad_forms_are_400(server: Server, param: str, fields: dict[str, Any]) -> None:
    """F51: the error names the field, and the engine goes on."""
    answer = server.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 4, **fields})
    assert answer.status_code == 400, answer.text
    assert (answer.json()["error"]["param"] or "").startswith(param.split(".")[0])
    assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).status_code == 200


def test_a_schema_that_never_ends(server: Server) -> None:
    """A schema without a finite value is served up to max_tokens; a huge one is refused or served, never hangs."""
    endless = {
        "$defs": {"t": {"type": "object", "properties": {"c": {"$ref": "#/$defs/t"}}, "required": ["c"]}}
    }
    body = {"prompt": "x", "max_tokens": 8, "structured_outputs": {"json": endless | {"$ref": "#/$defs/t"}}}
    answer = server.post("/v1/completions", body)
    assert answer.status_code in (200, 400)
    huge = {
        "type": "object",
        "properties": {f"field{n}": {"type": "string", "pattern": "a{1,50}b"} for n in range(400)},
    }
    answer = server.post(
        "/v1/completions", {"prompt": "x", "max_tokens": 2, "structured_outputs": {"json": huge}}
    )
    assert answer.status_code in (200, 400)


@pytest.mark.parametrize("choice", ["required", "go", "stay"])
def test_parameters_may_refer_to_definitions(tools: openai.OpenAI, choice: str) -> None:
    """As Pydantic and zod write them; those of another tool may have the same name, and a schema may hold itself."""

    def tool(name: str, way: str) -> dict[str, Any]:
        place = {"enum": [{"$ref": way}]} if way == "#north" else {"const": way}
        parameters = {
            "$defs": {"Way": place, "End": {"type": "null"}},
            "type": "object",
            "properties": {
                "way": {"$ref": "#/$defs/Way"},
                "default": {"$ref": "#/$defs/Way"},
                "then": {"anyOf": [{"$ref": "#/$defs/End"}, {"$ref": "#"}]},
            },
            "required": ["way", "default", "then"],
            "additionalProperties": False,
        }
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    ways = {"go": {"$ref": "#north"}, "stay": "here"}
    asked: Any = choice if choice == "required" else {"type": "function", "function": {"name": choice}}
    answer = tools.chat.completions.create(
        model="demo",
        messages=MESSAGES,
        max_tokens=120,
        tools=[tool("go", "#north"), tool("stay", "here")],
        tool_choice=asked,
        seed=5,
    )
    (call,) = answer.choices[0].message.tool_calls[:1]
    assert choice in ("required", call.function.name)
    arguments = json.loads(call.function.arguments)
    while arguments is not None:
        assert arguments["way"] == ways[call.function.name]
        arguments = arguments["then"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_forced_calls(tools: openai.OpenAI, choice: Any, stream: bool) -> None:
    ask: Any = {
        "model": "demo",
        "messages": MESSAGES,
        "tools": [WEATHER, NOW],
        "tool_choice": choice,
        "seed": 2,
    }
    ask |= {"max_tokens": 200, "parallel_tool_calls": False}
    if stream:
        chunks = list(tools.chat.completions.create(**ask, stream=True))
        calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
        reason = chunks[-1].choices[0].finish_reason
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ""
    else:
        (answer,) = tools.chat.completions.create(**ask).choices
        calls, reason = answer.message.tool_calls or [], answer.finish_reason
        assert answer.message.content is None
    assert reason == "tool_calls"
    (call,) = calls
    assert call.id.startswith("call_")
    assert call.function.name in ("get_weather", "now")
    arguments = json.loads(call.function.arguments)
    if call.function.name == "get_weather":
        assert set(arguments) == {"town", "rain"}
    if choice != "required":
        assert call.function.name == "get_weather"


def test_a_conversation_with_calls_and_their_results(tools: openai.OpenAI) -> None:
    """Arguments reach the template as an object; a text that calls nothing is content."""
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"town": "Verona"}'},
    }
    messages: Any = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    plain = tools.chat.completions.create(model="demo", messages=messages, max_tokens=5, tools=[WEATHER])
    assert plain.choices[0].message.tool_calls is None
    assert plain.choices[0].finish_reason == "length"
    shown = tools.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=5, tools=[WEATHER])
    hidden = tools.chat.completions.create(
        model="demo", messages=MESSAGES, max_tokens=5, tools=[WEATHER], tool_choice="none"
    )
    assert shown.usage is not None
    assert hidden.usage is not None
    assert shown.usage.prompt_tokens > hidden.usage.prompt_tokens


def test_an_open_thought_is_reasoning(tool_server: Server) -> None:
    """A template that opens `<think>` makes the answer reasoning until the closing mark comes."""
    body = {"messages": MESSAGES, "max_tokens": 6, "temperature": 0}
    plain = tool_server.post("/v1/chat/completions", body).json()["choices"][0]["message"]
    assert "reasoning_content" not in plain
    thinking = body | {"chat_template_kwargs": {"thinking": True}}
    message = tool_server.post("/v1/chat/completions", thinking).json()["choices"][0]["message"]
    assert message["reasoning_content"]
    assert message["content"] == ""
    chunks = tool_server.stream("/v1/chat/completions", thinking | {"stream": True})
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == message["reasoning_content"]


BAD_TOOLS: list[tuple[str, dict[str, Any]]] = [
    ("tool_choice", {"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "later"}}}),
    ("tools", {"tools": [NOW], "response_format": {"type": "json_object"}}),
    ("tool_choice", {"tools": [NOW], "tool_choice": "required", "response_format": {"type": "json_object"}}),
    ("tools", {"tools": [{"type": "function", "function": {"name": "no spaces"}}]}),
]


@pytest.mark.parametrize(("param", "fields"), BAD_TOOLS, ids=range(len(BAD_TOOLS)))
def test_bad_tools_are_400(tool_server: Server, param: str, fields: dict[str, Any]) -> None:
    answer = tool_server.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 4, **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith(param)
