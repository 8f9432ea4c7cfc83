"""What clients get: the shapes of OpenAI's answers, for the OpenAPI schema.

The answers themselves are built by hand (`frames.py`), since a pydantic model for each token would cost more than the
token; tests hold the two together. Knows nothing of the engine.
"""

from __future__ import annotations

from typing import Literal

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
    choices: list[ChatChoice]
    usage: Usage


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
