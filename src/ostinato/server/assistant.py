"""An assistant's message out of a model's text: reasoning, content and tool calls, told apart while they come.

Joins the readers of `text/` into one `MessageParser`. Knows nothing of requests or of HTTP. Invariant: what a stream's
deltas hold, joined, is what the whole message holds.
"""

from __future__ import annotations

import uuid
from typing import Any

from ostinato.text.reasoning import Piece, ReasoningSplitter
from ostinato.text.tool_calls import Item, MistralParser, ToolCall, ToolCallParser


class AssistantMessage:
    """Reads one choice. Without `splitter` all is content or calls; without `tools` there are no calls. With `one_call`
    those behind the first are left out.
    """

    def __init__(
        self, splitter: ReasoningSplitter | None, tools: ToolCallParser | None, *, one_call: bool = False
    ) -> None:
        self._splitter = splitter
        self._tools = tools
        self._one_call = one_call
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[dict[str, Any]] = []

    def push(self, text: str) -> list[dict[str, Any]]:
        pieces = [Piece("content", text)] if self._splitter is None else self._splitter.push(text)
        return self._read(pieces)

    def finish(self) -> list[dict[str, Any]]:
        deltas = [] if self._splitter is None else self._read(self._splitter.finish())
        return deltas if self._tools is None else deltas + self._deltas(self._tools.finish())

    def message(self) -> dict[str, Any]:
        content = "".join(self._content)
        fields: dict[str, Any] = {"content": content if content or not self._calls else None}
        if self._reasoning:
            fields["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            fields["tool_calls"] = self._calls
        return fields

    def finish_reason(self, reason: str) -> str:
        return "tool_calls" if self._calls and reason == "stop" else reason

    def _read(self, pieces: list[Piece]) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        for kind, text in pieces:
            if kind == "reasoning":
                self._reasoning.append(text)
                deltas.append({"reasoning_content": text})
            else:
                deltas += self._deltas([text] if self._tools is None else self._tools.push(text))
        return deltas

    def _new_id(self) -> str:
        """Of the form that the model's chat template takes back: Mistral's take nine letters and digits."""
        name = uuid.uuid4().hex
        return name[:9] if isinstance(self._tools, MistralParser) else f"call_{name[:24]}"

    def _deltas(self, items: list[Item]) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        for item in items:
            if isinstance(item, ToolCall):
                if self._one_call and self._calls:
                    continue
                call = {
                    "id": self._new_id(),
                    "type": "function",
                    "function": {"name": item.name, "arguments": item.arguments},
                }
                deltas.append({"tool_calls": [{"index": len(self._calls), **call}]})
                self._calls.append(call)
            elif item:
                self._content.append(item)
                deltas.append({"content": item})
        return deltas
