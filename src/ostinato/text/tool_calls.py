"""Tool calls in a model's text: the customary formats, read while the text comes, and as grammars to force them.

    hermes      <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number     Hermes 2 Pro, Qwen
    llama3_json {"name": ..., "parameters": {...}}, separated by ";", instead of a text   Llama 3.1 and later
    mistral     [TOOL_CALLS][{"name": ..., "arguments": {...}}], or [TOOL_CALLS]name{...}  Mistral

Knows nothing of HTTP. Invariants: text that is no well-formed call stays content, so nothing is lost; a call is handed
out whole, once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ostinato.text.stop import begun

FORMATS = ("hermes", "llama3_json", "mistral")
_VALUES = ("const", "enum", "default", "examples")  # keywords of a JSON schema whose parts are no schemas
_NAMED = ("properties", "patternProperties", "$defs", "definitions")  # whose parts have names of any kind
_OPEN, _CLOSE, _MISTRAL, _PYTHON = "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model asks for; `arguments` is the text of a JSON object."""

    name: str
    arguments: str


Item = str | ToolCall


class ToolCallParser(Protocol):
    """Reads one answer."""

    def push(self, text: str) -> list[Item]:
        """Content and calls that this text completes, in order."""
        ...

    def finish(self) -> list[Item]:
        """What was held back; the answer has ended."""
        ...


def format_of(template: str) -> str | None:
    """The format that a chat template teaches, or None when it knows no tools."""
    if "tools" not in template:
        return None
    if _OPEN in template:
        return None if "<function=" in template else "hermes"  # the former's calls are XML (Qwen3-Coder)
    if _MISTRAL in template:
        return "mistral"
    if _PYTHON in template or '"parameters"' in template:
        return "llama3_json"
    return None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)  # without it, Python takes NaN and Infinity as well


def new_parser(name: str) -> ToolCallParser:
    """A parser of one of `FORMATS`, for one answer."""
    makers: dict[str, Callable[[], ToolCallParser]] = {
        "hermes": HermesParser,
        "llama3_json": Llama3Parser,
        "mistral": MistralParser,
    }
    return makers[name]()


class HermesParser:
    """Calls between tags; text around them is content."""

    def __init__(self) -> None:
        self._held = ""
        self._behind_call = False  # newlines there belong to the format

    def push(self, text: str) -> list[Item]:
        self._held += text
        items: list[Item] = []
        while True:
            if self._behind_call:
                self._held = self._held.lstrip("\n")
                self._behind_call = not self._held
            at = self._held.find(_OPEN)
            if at < 0:
                ready = len(self._held) - begun(self._held, _OPEN)
                ready -= len(self._held[:ready]) - len(self._held[:ready].rstrip("\n"))
                items += self._content(ready)
                return items
            end = self._close(at)
            if end < 0:
                items += self._content(len(self._held[:at].rstrip("\n")))
                return items
            block, rest = self._held[at : end + len(_CLOSE)], self._held[end + len(_CLOSE) :]
            call = _call(block[len(_OPEN) : -len(_CLOSE)], "arguments")
            before = self._held[:at]
            items += [before.rstrip("\n") if call else before, call or block]
            items = [item for item in items if item != ""]
            self._held, self._behind_call = rest, call is not None

    def finish(self) -> list[Item]:
        """An unclosed last call is taken when its JSON is whole: some models end with it."""
        held, self._held = self._held, ""
        before, mark, rest = held.partition(_OPEN)
        call = _call(rest, "arguments") if mark else None
        if call is not None:
            return [item for item in (before.rstrip("\n"), call) if item != ""]
        return [held] if held.strip("\n") else []

    def _close(self, at: int) -> int:
        """Where the mark is that closes the call, or -1: not one that the call's own JSON holds in a string."""
        end = self._held.find(_CLOSE, at)
        while end >= 0 and _ends_in_string(self._held[at + len(_OPEN) : end]):
            end = self._held.find(_CLOSE, end + 1)
        return end

    def _content(self, size: int) -> list[Item]:
        text, self._held = self._held[:size], self._held[size:]
        return [text] if text else []


class Llama3Parser:
    """An answer that is JSON from its first character may be calls, which only its end tells; any other is content."""

    def __init__(self) -> None:
        self._held = ""
        self._content = False

    def push(self, text: str) -> list[Item]:
        if self._content:
            return [text] if text else []
        self._held += text
        seen = self._held.lstrip()
        if not seen or seen[0] == "{" or _PYTHON.startswith(seen) or seen.startswith(_PYTHON):
            return []
        self._content = True
        held, self._held = self._held, ""
        return [held]

    def finish(self) -> list[Item]:
        held, self._held = self._held, ""
        text = held.strip().removeprefix(_PYTHON).strip()
        calls: list[Item] = []
        while text:
            value, end = _object(text)
            call = _as_call(value, text, "parameters") or _as_call(value, text, "arguments")
            if call is None:
                return [held] if held else []
            calls.append(call)
            text = text[end:].lstrip(" ;\n")
        return calls or ([held] if held else [])


class MistralParser:
    """Content up to the mark; behind it a list of calls, or names with their arguments."""

    def __init__(self) -> None:
        self._held = ""
        self._calls = False

    def push(self, text: str) -> list[Item]:
        self._held += text
        if self._calls:
            return []
        at = self._held.find(_MISTRAL)
        self._calls = at >= 0
        ready = at if self._calls else len(self._held) - begun(self._held, _MISTRAL)
        text, self._held = self._held[:ready], self._held[ready:]
        return [text] if text else []

    def finish(self) -> list[Item]:
        held, self._held = self._held, ""
        calls: list[Item] = []
        for block in held.split(_MISTRAL):
            found = _mistral_calls(block.strip())
            if found is None:
                return [held]
            calls += found
        return calls or ([held] if held else [])


def _mistral_calls(block: str) -> list[ToolCall] | None:
    """The calls of one block, or None when it is something else."""
    if not block:
        return []
    if block[0] == "[":
        try:
            _DECODER.decode(block)
            parts = _parts(block)
        except (ValueError, RecursionError):
            return None
        calls = [_call(part, "arguments") for part in parts]
        return None if None in calls else [call for call in calls if call is not None]
    named = re.match(r"([\w.\-]+)\s*(?:\[ARGS\])?\s*(?=\{)", block)
    if named is None:
        return None
    value, end = _object(block[named.end() :])
    if value is None or block[named.end() + end :].strip():
        return None
    return [ToolCall(named.group(1), block[named.end() :][:end])]


def _call(text: str, arguments: str) -> ToolCall | None:
    text = text.strip()
    value, end = _object(text)
    return _as_call(value, text, arguments) if not text[end:] else None


def _object(text: str) -> tuple[Any, int]:
    """The JSON object at the start of a text and where it ends; (None, 0) when there is none."""
    try:
        value, end = _DECODER.raw_decode(text)
    except (ValueError, RecursionError):
        return None, 0
    return (value, end) if isinstance(value, dict) else (None, 0)


def _ends_in_string(text: str) -> bool:
    """Whether a text is JSON that breaks off within a string."""
    try:
        _DECODER.raw_decode(text.lstrip())
    except json.JSONDecodeError as error:
        return error.msg.startswith("Unterminated string")
    except (ValueError, RecursionError):
        pass
    return False


def _parts(text: str) -> list[str]:
    """The texts of what the well-formed array or object at the start of a text holds: keys and values by turns."""
    parts: list[str] = []
    at = 1
    while True:
        while text[at] in " \t\r\n,:":
            at += 1
        if text[at] in "]}":
            return parts
        _, end = _DECODER.raw_decode(text, at)
        parts.append(text[at:end])
        at = end


def _as_call(value: object, text: str, key: str) -> ToolCall | None:
    """The call that the JSON object at the start of `text` is. Its arguments, at `key`, stay as they were written."""
    if not isinstance(value, Mapping) or key not in value:
        return None
    name, given = value.get("name"), value[key]
    if isinstance(given, str):  # some models write the object as text
        inner, end = _object(given)
        given, written = inner, given[:end]
    else:
        parts = _parts(text)
        written = {json.loads(name): part for name, part in zip(parts[::2], parts[1::2], strict=True)}[key]
    if not isinstance(name, str) or not isinstance(given, Mapping):
        return None
    return ToolCall(name, written) if _can_be_sent(name + written) else None


def _can_be_sent(text: str) -> bool:
    """Whether UTF-8 can hold it: JSON's escapes can leave half a surrogate pair in a text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def forced_grammar(
    name: str, tools: Sequence[Mapping[str, Any]], *, parallel: bool, special: Mapping[str, int]
) -> str:
    """A Lark grammar (llguidance's dialect) of answers that are calls of `tools` and nothing else.

    tools: {"name", "parameters" (a JSON schema)}. parallel: one or more calls. special: ids of
    marks that are special tokens of the tokenizer, which a grammar has to name as such.
    """
    key = "parameters" if name == "llama3_json" else "arguments"
    roots = {
        f"tool{number}": tool.get("parameters") or {"type": "object"} for number, tool in enumerate(tools)
    }
    schemas = [
        {
            "type": "object",
            "properties": {"name": {"const": tool["name"]}, key: {"$ref": f"#/$defs/{root}"}},
            "required": ["name", key],
            "additionalProperties": False,
        }
        for root, tool in zip(roots, tools, strict=True)
    ]
    call: dict[str, Any] = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    style = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    if name == "mistral":
        call = {"type": "array", "items": call, "minItems": 1, **({} if parallel else {"maxItems": 1})}
    definitions = {root: _moved(schema, root) for root, schema in roots.items()}
    body = f"call: %json {json.dumps(call | {'$defs': definitions, 'x-guidance': style})}\n"
    if name == "llama3_json":
        return f"start: call\n{body}"
    opening = _token(_MISTRAL if name == "mistral" else _OPEN, special)
    if name == "mistral":
        return f"start: {opening} call\n{body}"
    one = f'{opening} "\\n" call "\\n" {_token(_CLOSE, special)}'
    more = ' ("\\n" one)*' if parallel else ""
    return f"start: one{more}\none: {one}\n{body}"


def _moved(schema: Any, root: str) -> Any:
    """A schema for its place under the `$defs` of another: references within it start at its own root."""
    if isinstance(schema, Mapping):
        return {
            name: f"#/$defs/{root}{part[1:]}"
            if name == "$ref" and isinstance(part, str) and part.startswith("#")
            else {key: _moved(one, root) for key, one in part.items()}
            if name in _NAMED and isinstance(part, Mapping)
            else (part if name in _VALUES else _moved(part, root))
            for name, part in schema.items()
        }
    return [_moved(part, root) for part in schema] if isinstance(schema, list) else schema


def _token(mark: str, special: Mapping[str, int]) -> str:
    """A mark in a grammar: the special token by its id, or its characters."""
    return f"<[{special[mark]}]>" if mark in special else json.dumps(mark)
