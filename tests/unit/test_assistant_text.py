"""Reasoning and tool calls read out of text: the same whatever the pieces it comes in, and nothing is lost."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.server.assistant import AssistantMessage
from ostinato.server.frames import Json
from ostinato.text.reasoning import ReasoningSplitter
from ostinato.text.tool_calls import FORMATS, ToolCall, forced_grammar, format_of, new_parser

PARIS = ToolCall("get_weather", '{"city": "Paris"}')
NOW = ToolCall("now", "{}")
H_PARIS = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
H_NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'

M_NOW = '[TOOL_CALLS] [{"name": "now", "arguments": {}}]'
CALLS = [
    ("hermes", H_PARIS, [PARIS]),
    ("hermes", f"Let me look.\n\n{H_PARIS}\n{H_NOW}", ["Let me look.", PARIS, NOW]),
    ("hermes", f"{H_NOW}\nand then", [NOW, "and then"]),
    ("hermes", '<tool_call>{"name": "now", "arguments": {}}', [NOW]),
    (
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>',
        [PARIS],
    ),
    ("hermes", "1 < 2 <tool", ["1 < 2 <tool"]),
    ("hermes", "<tool_call>no json</tool_call> tail", ["<tool_call>no json</tool_call> tail"]),
    (
        "hermes",
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        ['<tool_call>{"name": 3, "arguments": {}}</tool_call>'],
    ),
    ("llama3_json", '{"name": "get_weather", "parameters": {"city": "Paris"}}', [PARIS]),
    (
        "llama3_json",
        '<|python_tag|>{"name": "now", "parameters": {}}; {"name": "now", "parameters": {}}',
        [NOW, NOW],
    ),
    ("llama3_json", "It is noon.", ["It is noon."]),
    ("llama3_json", '{"answer": 42}', ['{"answer": 42}']),
    (
        "llama3_json",
        '{"name": "now", "parameters": {}} is what I would call',
        ['{"name": "now", "parameters": {}} is what I would call'],
    ),
    ("llama3_json", '{"name": "no', ['{"name": "no']),
    ("mistral", '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}]', [PARIS]),
    (
        "mistral",
        'Well.[TOOL_CALLS]get_weather{"city": "Paris"}[TOOL_CALLS]now[ARGS]{}',
        ["Well.", PARIS, NOW],
    ),
    ("mistral", "[TOOL", ["[TOOL"]),
    ("mistral", "[TOOL_CALLS]now", ["[TOOL_CALLS]now"]),
    ("mistral", "[TOOL_CALLS][1]", ["[TOOL_CALLS][1]"]),
]


# JSON's escapes can spell what UTF-8 cannot hold, its numbers what no float is; Python's reader takes more than JSON.
ARGUMENTS = [
    (r'{"a": "\ud83d"}', True),
    (r'{"\ude00": "é", "b": "\ud83d\ude00"}', True),
    ('{"a": 1.10, "b": 1e2, "c": 12345678901234567.89, "d": 1e999}', True),
    ('{ "a" :[1 ,{"name":"b"}],"arguments":{}, "parameters":{} }', True),
    ('{"a": "</tool_call>", "b": "<tool_call>\\"</tool_call>"}', True),
    ("{}", True),
    ('{"a": NaN}', False),
    ('{"a": [-Infinity]}', False),
]
LAYOUTS = [
    ("hermes", '<tool_call>{"name": "f", "arguments": %s}</tool_call>'),
    ("llama3_json", '{"name": "f", "parameters": %s}'),
    ("mistral", '[TOOL_CALLS][ {"arguments": %s , "name":"f"}]'),
    ("mistral", "[TOOL_CALLS]f%s"),
]


def joined(items: list[Any]) -> list[Any]:
    """Neighbouring texts as one."""
    found: list[Any] = []
    for item in items:
        if isinstance(item, str) and found and isinstance(found[-1], str):
            found[-1] += item
        else:
            found.append(item)
    return found


def split(text: str, cuts: list[int]) -> list[str]:
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[a:b] for a, b in pairwise(places)]


@pytest.mark.parametrize(("name", "text", "wanted"), CALLS)
@settings(max_examples=40, deadline=None)
@given(cuts=st.lists(st.integers(0, 200), max_size=8))
def test_calls(name: str, text: str, wanted: list[Any], cuts: list[int]) -> None:
    parser = new_parser(name)
    items = [item for piece in split(text, cuts) for item in parser.push(piece)]
    assert joined(items + parser.finish()) == wanted


@pytest.mark.parametrize(("given", "is_json"), ARGUMENTS)
@pytest.mark.parametrize(("name", "layout"), LAYOUTS)
@settings(max_examples=20, deadline=None)
@given(cuts=st.lists(st.integers(0, 200), max_size=8))
def test_arguments_are_what_the_model_wrote(
    name: str, layout: str, given: str, is_json: bool, cuts: list[int]
) -> None:
    """To the letter, where they are JSON; else the text is content."""
    reader = AssistantMessage(None, new_parser(name))
    text = layout % given
    deltas = [delta for piece in split(text, cuts) for delta in reader.push(piece)] + reader.finish()
    assert json.loads(Json.encode(deltas))
    if is_json:
        (call,) = reader.message()["tool_calls"]
        assert call["function"] == {"name": "f", "arguments": given}
    else:
        assert reader.message() == {"content": text}


@pytest.mark.parametrize(
    "inside",
    [r'"name": "\ud83d", "arguments": {}', r'"name": "f", "arguments": "{\"a\": \"\ud83d\"}"'],
    ids=["name", "text"],
)
def test_a_call_that_cannot_be_sent_is_content(inside: str) -> None:
    text = f"<tool_call>{{{inside}}}</tool_call>"
    assert joined(new_parser("hermes").push(text)) == [text]


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=60, deadline=None)
@given(
    text=st.text('<>/tool_callTOOL_CALLS[]{}"name: ,;\n', max_size=60),
    cuts=st.lists(st.integers(0, 60), max_size=5),
)
def test_text_without_calls_is_not_lost(name: str, text: str, cuts: list[int]) -> None:
    """Newlines around marks aside, what goes in comes out."""
    parser = new_parser(name)
    items = [item for piece in split(text, cuts) for item in parser.push(piece)] + parser.finish()
    if all(isinstance(item, str) for item in items):
        assert "".join(items).replace("\n", "") == text.replace("\n", "")


THOUGHTS = [
    (False, "<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
    (False, "\n<think>a</think>b <think>c</think>", "a", "b <think>c</think>"),
    (True, "Hm.\nWell.</think>\nYes.", "Hm.\nWell.", "Yes."),
    (True, "never ends </thi", "never ends </thi", ""),
    (False, "Plain <think>", "", "Plain <think>"),
    (False, "<thin", "", "<thin"),
    (False, "<think></think>\n\nYes", "", "Yes"),
    (False, "", "", ""),
]


@pytest.mark.parametrize(("inside", "text", "reasoning", "content"), THOUGHTS)
@settings(max_examples=40, deadline=None)
@given(cuts=st.lists(st.integers(0, 60), max_size=8))
def test_reasoning(inside: bool, text: str, reasoning: str, content: str, cuts: list[int]) -> None:
    splitter = ReasoningSplitter(inside=inside)
    pieces = [p for piece in split(text, cuts) for p in splitter.push(piece)] + splitter.finish()
    assert "".join(p.text for p in pieces if p.kind == "reasoning") == reasoning
    assert "".join(p.text for p in pieces if p.kind == "content") == content


@settings(max_examples=60, deadline=None)
@given(cuts=st.lists(st.integers(0, 200), max_size=8))
def test_deltas_of_a_message_are_the_message(cuts: list[int]) -> None:
    text = f"<think>Paris?</think>\nI look.\n{H_PARIS}\n{H_NOW}"
    reader = AssistantMessage(ReasoningSplitter(inside=False), new_parser("hermes"))
    deltas = [delta for piece in split(text, cuts) for delta in reader.push(piece)] + reader.finish()
    message = reader.message()
    assert message["content"] == "I look."
    assert message["reasoning_content"] == "Paris?"
    for field in ("content", "reasoning_content"):
        assert "".join(delta.get(field, "") for delta in deltas) == message[field]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert [call.pop("index") for call in calls] == [0, 1]
    assert calls == message["tool_calls"]
    assert len({call["id"] for call in calls}) == 2
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"city": "Paris"}, {}]
    assert reader.finish_reason("stop") == "tool_calls"
    assert reader.finish_reason("length") == "length"


@pytest.mark.parametrize("cuts", [[], [*range(0, 120, 7)]])
def test_calls_behind_the_first_are_left_out_where_one_is_wanted(cuts: list[int]) -> None:
    reader = AssistantMessage(None, new_parser("hermes"), one_call=True)
    deltas = [delta for piece in split(f"{H_PARIS}\n{H_NOW}", cuts) for delta in reader.push(piece)]
    calls = [call for delta in deltas + reader.finish() for call in delta.get("tool_calls", ())]
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"city": "Paris"}]
    assert len(reader.message()["tool_calls"]) == 1
    assert reader.finish_reason("stop") == "tool_calls"


@pytest.mark.parametrize(
    ("name", "text", "form"), [(*CALLS[0][:2], r"call_\w{24}"), ("mistral", M_NOW, r"[A-Za-z0-9]{9}")]
)
def test_names_of_calls_are_those_that_templates_take_back(name: str, text: str, form: str) -> None:
    """Mistral's refuse a conversation whose calls are named otherwise."""
    reader = AssistantMessage(None, new_parser(name))
    reader.push(text)
    reader.finish()
    (call,) = reader.message()["tool_calls"]
    assert re.fullmatch(form, call["id"])


@pytest.mark.parametrize(
    ("template", "found"),
    [
        ("{% if tools %}<tool_call>{% endif %}", "hermes"),
        ("{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]", "mistral"),
        ("{% if tools %}<|python_tag|>{% endif %}", "llama3_json"),
        ("{{ messages }}<tool_call>", None),
        ("{% if tools %}<tool_call><function=name><parameter=p>{% endif %}", None),
        ("{{ tools }}", None),
    ],
)
def test_formats_are_read_off_templates(template: str, found: str | None) -> None:
    assert format_of(template) == found


@pytest.mark.parametrize("name", FORMATS)
def test_forced_grammars_name_special_tokens_by_id(name: str) -> None:
    tools = [{"name": "now", "parameters": None}]
    marks = {"<tool_call>": 7, "</tool_call>": 8, "[TOOL_CALLS]": 9}
    grammar = forced_grammar(name, tools, parallel=False, special=marks)
    assert ("<[" in grammar) == (name != "llama3_json")
    assert "<tool_call>" not in grammar
