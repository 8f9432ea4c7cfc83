"""What clients get: the shapes of OpenAI's answers, for the OpenAPI schema.

The answers themselves are built by hand (`frames.py`), since a pydantic model for each token would cost more than the
token; tests hold the two together. Knows nothing of the engine.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

FinishReason = Literal["stop", "length", "abort", "error", "tool_calls"]


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ErrorObject(_Answer):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(_Answer):
    """Every answer that is no success."""

    error: ErrorObject


class PromptTokensDetails(_Answer):
    cached_tokens: int


class Usage(_Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(_Answer):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(_Answer):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class Completion(_Answer):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[CompletionChoice]
    usage: Usage


class TopLogprob(_Answer):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(_Answer):
    content: list[TokenLogprob]
    refusal: None


class CalledFunction(_Answer):
    name: str
    arguments: str


class AnswerToolCall(_Answer):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(_Answer):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[AnswerToolCall] | None = None


class ChatChoice(_Answer):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    token_ids: list[int] | None = None


class ChatCompletion(_Answer):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[ChatChoice]
    usage: Usage


class CompletionChunkChoice(_Answer):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class CompletionChunk(_Answer):
    """An event of a streamed completion; the last one may have the usage and no choices."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[CompletionChunkChoice]
    usage: Usage | None = None


class MessageDelta(_Answer):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None


class ChatChunkChoice(_Answer):
    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatChunk(_Answer):
    """An event of a streamed chat completion; the last one may have the usage and no choices."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


def event_stream(chunk: type[BaseModel]) -> dict[str, Any]:
    """The schema of one event of a stream: JSON of `chunk`, an error object, or the mark at the end."""
    data = {
        "type": "string",
        "description": f"A {chunk.__name__} as JSON; then [DONE]. An error object when the stream cannot go on",
        "contentMediaType": "application/json",
        "contentSchema": chunk.model_json_schema(),
    }
    return {"schema": {"type": "object", "required": ["data"], "properties": {"data": data}}}


class ModelCard(_Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None


class ModelList(_Answer):
    object: Literal["list"]
    data: list[ModelCard]


class Tokenized(_Answer):
    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None


class Detokenized(_Answer):
    prompt: str


class Status(_Answer):
    status: str


class Version(_Answer):
    version: str
