"""What a chat request asks of the form of its answer: tools, `response_format`, structured outputs, reasoning.

    fields ─▶ AnswerForm: tools that the template is shown, the grammar that binds the answer, the parser that reads it

Knows the model only by its chat template's text and its special tokens. Invariant: what the model's format cannot keep
is a 400 that names the field.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ostinato.config import ServerConfig
from ostinato.errors import RequestError
from ostinato.server.api_errors import ApiError, bad_field
from ostinato.server.assistant import AssistantMessage
from ostinato.server.protocol import ChatCompletionRequest, NamedToolChoice, Sampling
from ostinato.server.shapes import MessageParser
from ostinato.text.grammar import StructuredOutputs
from ostinato.text.reasoning import CLOSE, ReasoningSplitter
from ostinato.text.tokenizer import Tokenizer
from ostinato.text.tool_calls import ToolCallParser, forced_grammar, format_of, new_parser


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """How one answer is asked for and read. `special_tokens`: their text must be seen to read it. `one_call`: at most
    one tool call is wanted.
    """

    tools: list[dict[str, Any]] | None
    outputs: StructuredOutputs | None
    tool_format: str | None
    reasoning: bool
    special_tokens: bool
    one_call: bool = False

    def parser(self, *, thinking: bool) -> Callable[[], MessageParser] | None:
        """Makes a reader of each choice; None when the text is the content. `thinking`: the prompt has opened it."""
        if self.tool_format is None and not self.reasoning:
            return None

        def make() -> MessageParser:
            splitter = ReasoningSplitter(inside=thinking) if self.reasoning and self.outputs is None else None
            tools: ToolCallParser | None = None if self.tool_format is None else new_parser(self.tool_format)
            return AssistantMessage(splitter, tools, one_call=self.one_call)

        return make


class AnswerForms:
    """The forms that one model's answers can have."""

    def __init__(self, tokenizer: Tokenizer, options: ServerConfig) -> None:
        template = "\n".join(tokenizer.chat_template.sources.values())
        chosen = options.tool_call_parser
        self.tool_format = format_of(template) if chosen == "auto" else None if chosen == "none" else chosen
        self.reasoning = options.reasoning_parser == "think" or (
            options.reasoning_parser == "auto" and CLOSE in template
        )
        added = tokenizer.backend.get_added_tokens_decoder()
        self._special: Mapping[str, int] = {token.content: i for i, token in added.items() if token.special}

    def of(self, body: ChatCompletionRequest) -> AnswerForm:
        """The form that a request asks for. Raises ApiError 400."""
        choice = body.tool_choice or ("auto" if body.tools else "none")
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
        outputs = structured(body)
        if not tools:
            if choice not in ("none", "auto"):
                raise bad_field("tool_choice", "tool_choice needs tools; give tools or remove it")
            return AnswerForm(None, outputs, None, self.reasoning, False)
        if self.tool_format is None:
            raise bad_field(
                "tools",
                "this model's chat template knows no tools; remove tools, or start the server with "
                "--tool-call-parser when its format is known",
            )
        if choice == "none":
            return AnswerForm(None, outputs, None, self.reasoning, False)
        if choice != "auto":
            if outputs is not None:
                raise bad_field(
                    "tool_choice", "tool_choice that forces a call excludes other forms; remove one of them"
                )
            outputs = self._forced(body, choice)
        elif outputs is not None:
            raise bad_field(
                "tools", "tools exclude structured outputs; set tool_choice to 'none' or remove one"
            )
        seen = any(mark in self._special for mark in ("<tool_call>", "[TOOL_CALLS]"))
        return AnswerForm(
            tools, outputs, self.tool_format, self.reasoning, seen, one_call=body.parallel_tool_calls is False
        )

    def _forced(self, body: ChatCompletionRequest, choice: str | NamedToolChoice) -> StructuredOutputs:
        functions = [tool.function for tool in body.tools or ()]
        if isinstance(choice, NamedToolChoice):
            name = choice.function.name
            functions = [function for function in functions if function.name == name]
            if not functions:
                raise bad_field("tool_choice", f"tool_choice names {name!r}, which is none of the tools")
        assert self.tool_format is not None
        many = choice == "required" and body.parallel_tool_calls is not False
        specs = [{"name": f.name, "parameters": f.parameters} for f in functions]
        return StructuredOutputs(
            grammar=forced_grammar(self.tool_format, specs, parallel=many, special=self._special)
        )


def under_its_name(error: ApiError, body: ChatCompletionRequest) -> ApiError:
    """An engine's complaint about structured outputs, under the field that has asked for them."""
    if error.param != "structured_outputs" or body.structured_outputs is not None:
        return error
    field = "tools" if body.response_format is None else "response_format"
    return bad_field(
        field, str(error).replace("structured_outputs.json", field).replace("structured_outputs", field)
    )


def structured(body: Sampling) -> StructuredOutputs | None:
    """`structured_outputs` or `response_format` of a request. Raises ApiError 400."""
    form = getattr(body, "response_format", None)
    values: dict[str, Any] = {}
    field = "structured_outputs"
    if body.structured_outputs is not None:
        values = body.structured_outputs.model_dump(exclude_none=True, by_alias=True)
    if form is not None and form.type != "text":
        if values:
            raise bad_field("response_format", "response_format and structured_outputs exclude each other")
        field = "response_format"
        values = {"json_object": True} if form.type == "json_object" else {"json": form.json_schema.schema_}
    if not values and body.structured_outputs is None:
        return None
    try:
        return StructuredOutputs(**values)
    except RequestError as error:
        raise bad_field(field, str(error)) from None
