"""Chat templates: the text of the field's template forms, where templates are found, and what they may not
do.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ostinato.errors import ModelError, RequestError
from ostinato.text.chat import ChatTemplate, check_messages

CHATML = """\
{%- if messages[0]['role'] != 'system' -%}
    {{- '<|im_start|>system\\nBe brief.<|im_end|>\\n' -}}
{%- endif -%}
{% for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}
{% endfor %}
{% if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' -}}
{% endif %}
"""
LLAMA3 = """\
{{- bos_token }}
{%- if messages[0].role == "system" %}
    {%- set system = messages[0].content | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{%- if system or tools %}
    {{- "<|start_header_id|>system<|end_header_id|>\\n\\n" + system }}
    {%- if tools is not none %}
        {%- for tool in tools %}
            {{- "\\n" + (tool | tojson(indent=2)) }}
        {%- endfor %}
    {%- endif %}
    {{- "<|eot_id|>" }}
{%- endif %}
{%- for message in messages %}
    {{- "<|start_header_id|>" + message.role + "<|end_header_id|>\\n\\n" + message.content | trim +
    "<|eot_id|>" }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|start_header_id|>assistant<|end_header_id|>\\n\\n" }}
{%- endif %}
"""
MISTRAL = """\
{{ bos_token }}{% for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Roles must alternate user/assistant/user/assistant/...') }}
{%- endif %}
{%- if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{%- elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}
{%- else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}
{%- endfor %}"""
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hello <b>世界</b> & 'you'"}]


def one(source: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, special_tokens=SPECIAL)


def test_chatml() -> None:
    text = one(CHATML).render(HELLO)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHello <b>世界</b> & 'you'<|im_end|>\n<|im_start|>assistant\n"
    )
    assert not one(CHATML).render(HELLO, add_generation_prompt=False).endswith("assistant\n")


def test_llama3_with_a_system_message_and_tools() -> None:
    tools = [{"name": "weather", "note": "<é>"}]
    text = one(LLAMA3).render([{"role": "system", "content": " Short. "}, *HELLO], tools=tools)
    head = "<s><|start_header_id|>system<|end_header_id|>\n\nShort.\n"
    assert text.startswith(head + '{\n  "name": "weather",\n  "note": "<é>"\n}<|eot_id|>')
    assert text.endswith("<|start_header_id|>assistant<|end_header_id|>\n\n")
    assert one(LLAMA3).render(HELLO).startswith("<s><|start_header_id|>user")


def test_mistral_turns_and_its_refusals() -> None:
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    assert one(MISTRAL).render(turns) == "<s>[INST] a [/INST]b</s>[INST] c [/INST]"
    with pytest.raises(RequestError, match=r"refuses these messages: Roles must alternate") as info:
        one(MISTRAL).render(turns[1:])
    assert "\n" not in str(info.value)


@pytest.mark.parametrize("source", [CHATML, LLAMA3, MISTRAL])
def test_same_text_as_transformers(source: str, tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import models
    from transformers import PreTrainedTokenizerFast

    backend = Backend(models.WordLevel({"a": 0}, unk_token="a"))
    theirs = PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL, chat_template=source)
    turns = [*HELLO, {"role": "assistant", "content": "Hi.\n"}, {"role": "user", "content": " Bye "}]
    for generate in (True, False):
        expected = theirs.apply_chat_template(turns, tokenize=False, add_generation_prompt=generate)
        assert one(source).render(turns, add_generation_prompt=generate) == expected


CALL = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}], "name": None}


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
        "{% for m in messages %}{{ m['content'] | trim }}{{ m | tojson }}{% endfor %}",
        "{% for m in messages %}{% if 'name' in m %}{{ m.name }}{% endif %}{{ m.get('content', '-') }}{% endfor %}",
        "{{ documents }}{% if documents is defined %}defined{% endif %}{% if tools is defined %}, too{% endif %}",
        "{% set x = 1 %}{% for m in messages %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}"
        "{% endfor %}{{ x }}",
    ],
)
def test_what_is_not_there_is_as_in_transformers(source: str) -> None:
    """Keys without a value, names that nobody hands in, variables behind their block."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import models
    from transformers import PreTrainedTokenizerFast

    backend = Backend(models.WordLevel({"a": 0}, unk_token="a"))
    theirs = PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL, chat_template=source)
    turns = [*HELLO, CALL, {"role": "tool", "content": "r", "tool_call_id": "1"}]
    text = one(source).render(turns, add_generation_prompt=False)
    assert text == theirs.apply_chat_template(turns, tokenize=False)
    assert CALL["content"] is None


def test_documents_are_handed_on() -> None:
    assert one("{{ documents[0].text }}").render(HELLO, documents=[{"text": "d"}]) == "d"


def test_environment_has_what_templates_use() -> None:
    assert re.fullmatch(r"\d{4}", one("{{ strftime_now('%Y') }}").render(HELLO))
    assert one("{% for m in messages %}{% break %}{{ m }}{% endfor %}-").render(HELLO) == "-"
    assert one("{% generation %}x{{ 1 }}{% endgeneration %}").render(HELLO) == "x1"
    assert one("{{ thinking }}").render(HELLO, thinking=False) == "False"
    assert one("{{ n }}{{ self is defined }}").render(HELLO, self=1, n=2) == "2True"
    assert one("{{ messages | tojson }}").render([{"role": "user", "content": "<é>"}]) == (
        '[{"role": "user", "content": "<é>"}]'
    )


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append({}) }}",
        "{{ messages[0].update(content='x') }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages[0].content.nope.nope }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 // 0 }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{% include 'other' %}",
    ],
)
def test_sandbox_and_failures_are_one_line_errors(source: str) -> None:
    with pytest.raises(RequestError) as info:
        one(source).render(HELLO)
    assert "\n" not in str(info.value)
    assert HELLO == [{"role": "user", "content": "Hello <b>世界</b> & 'you'"}]


def test_nothing_can_be_read_off_what_is_handed_in() -> None:
    """The sandbox answers an attribute it does not allow with an undefined value, which renders as
    nothing.
    """
    assert one("{{ raise_exception.__globals__ }}{{ messages.__class__ }}").render(HELLO) == ""


def test_broken_template_names_its_line() -> None:
    with pytest.raises(ModelError, match=r"'default' is broken at line 2"):
        one("ok\n{% if %}").render(HELLO)


def test_missing_template_says_what_to_do() -> None:
    template = ChatTemplate({})
    assert not template
    with pytest.raises(ModelError, match=r"no chat template; use generate\(\)"):
        template.render(HELLO)


def test_named_templates() -> None:
    template = ChatTemplate({"default": "D", "tool_use": "T", "rag": "R"})
    assert template.render(HELLO) == "D"
    assert template.render(HELLO, tools=[{"name": "f"}]) == "T"
    assert template.render(HELLO, template="rag") == "R"
    with pytest.raises(RequestError, match=r"named 'x'; the model has \['default', 'rag', 'tool_use'\]"):
        template.render(HELLO, template="x")


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(exist_ok=True)
    (root / name).write_text(text)


def test_sources_and_their_order(tmp_path: Path) -> None:
    assert ChatTemplate.from_dir(tmp_path, config={}).sources == {}
    write(tmp_path, "chat_template.json", json.dumps({"chat_template": "legacy"}))
    assert ChatTemplate.from_dir(tmp_path, config={}).sources == {"default": "legacy"}
    config = {"chat_template": "config"}
    assert ChatTemplate.from_dir(tmp_path, config=config).sources == {"default": "config"}
    write(tmp_path, "chat_template.jinja", "file")
    write(tmp_path, "additional_chat_templates/rag.jinja", "rag")
    assert ChatTemplate.from_dir(tmp_path, config=config).sources == {"default": "file", "rag": "rag"}
    listed = {"chat_template": [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]}
    sources = ChatTemplate.from_dir(tmp_path, config=listed).sources
    assert sources == {"default": "file", "tool_use": "b", "rag": "rag"}


@pytest.mark.parametrize("value", [3, ["a"], [{"name": "x"}], {"default": 1}])
def test_malformed_template_entry_is_named(tmp_path: Path, value: object) -> None:
    with pytest.raises(ModelError, match=r"chat_template in tokenizer_config\.json"):
        ChatTemplate.from_dir(tmp_path, config={"chat_template": value})


@pytest.mark.parametrize("text", ["{", '"\xff', "[" * 100_000])
def test_damaged_template_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "chat_template.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError, match=r"chat_template.json.*download it again"):
        ChatTemplate.from_dir(tmp_path, config={})


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ("hello", "messages must be a list"),
        ({"role": "user"}, "messages must be a list"),
        ([], "messages is empty"),
        (["hello"], r"messages\[0\] is a str"),
        ([{"content": "x"}], r"messages\[0\] has role None"),
        ([*HELLO, {"role": "user"}], r"messages\[1\] \(user\) has no content"),
        ([{"role": "user", "content": 3}], "content of type int"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "part of type 'image_url'"),
        ([{"role": "user", "content": [3]}], "part of type 'int'"),
    ],
)
def test_bad_messages_are_named(messages: Any, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        one(CHATML).render(messages)


def test_text_parts_are_joined_and_tool_calls_need_no_content() -> None:
    parts = [{"type": "text", "text": "a"}, "b"]
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    assert check_messages([{"role": "user", "content": parts, "name": "n"}, call]) == [
        {"role": "user", "content": "a\nb", "name": "n"},
        call,
    ]
