"""What clients may send: OpenAI's requests and the extensions that other engines have made customary.

pydantic models, strict, so that a value of the wrong type is a 400 that names its field, as is every field that is not
listed here: nothing is silently ignored. Bounds repeat `SamplingParams`, so that the OpenAPI schema tells them; what
one field means beside another is decided in `params.py`. Knows nothing of the engine's state.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema

from ostinato.engine.request import MAX_LOGPROBS, MAX_N, MAX_STOPS, MAX_TEMPERATURE
from ostinato.text.grammar import MAX_CHOICES

MAX_PROMPTS = 128
MAX_TOOLS = 128
_INT32 = 2**31
_MAX_STOP_IDS = 1024
_MAX_BIAS = 1024


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def _check_prompt(value: Any) -> str | list[str] | list[int] | list[list[int]]:
    """Text, texts, token ids, or lists of those; one message for all that it is not."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value:
        if len(value) > MAX_PROMPTS and not isinstance(value[0], int):
            raise ValueError(f"holds {len(value)} prompts, at most {MAX_PROMPTS} are allowed")
        if all(isinstance(item, str) for item in value):
            return value
        if _are_ids(value):
            return value
        if all(isinstance(item, list) and item and _are_ids(item) for item in value):
            return value
    raise ValueError(
        "must be text, a list of texts, token ids, or a list of lists of token ids, none of them empty"
    )


def _are_ids(items: list[Any]) -> bool:
    return all(type(item) is int for item in items)


_IDS_SCHEMA: Final[dict[str, Any]] = {
    "type": "array",
    "minItems": 1,
    "items": {"type": "integer", "minimum": 0},
}
Prompt = Annotated[
    Any,
    PlainValidator(_check_prompt),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": {"type": "string"}},
                _IDS_SCHEMA,
                {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": _IDS_SCHEMA},
            ]
        }
    ),
]

Stop = Annotated[str, Field(min_length=1, max_length=1024)]
TokenId = Annotated[int, Field(ge=0, le=_INT32)]
Bias = Annotated[float, Field(ge=-100.0, le=100.0)]
BiasToken = Annotated[str, Field(pattern=r"^[0-9]{1,10}$")]


class StreamOptions(_Body):
    """What a stream reports beside text."""

    include_usage: bool | None = Field(None, description="A last chunk with the usage and no choices")
    continuous_usage_stats: bool | None = Field(None, description="The usage so far in every chunk")


class StructuredOutputsRequest(_Body):
    """The form of a completion; exactly one field."""

    json_: dict[str, Any] | str | None = Field(None, alias="json", description="A JSON schema")
    json_object: Literal[True] | None = None
    regex: str | None = Field(None, min_length=1)
    choice: list[Annotated[str, Field(min_length=1)]] | None = Field(
        None, min_length=1, max_length=MAX_CHOICES
    )
    grammar: str | None = Field(None, min_length=1, description="A Lark grammar, in llguidance's dialect")


class Sampling(_Body):
    """Fields that completions and chat completions share."""

    model: str | None = Field(
        None, description="A name that /v1/models lists; the one that is served by default"
    )
    n: int | None = Field(None, ge=1, le=MAX_N)
    max_tokens: int | None = Field(None, ge=0, le=_INT32)
    min_tokens: int | None = Field(None, ge=0, le=_INT32)
    temperature: float | None = Field(None, ge=0.0, le=MAX_TEMPERATURE)
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    top_k: int | None = Field(None, ge=-1, le=_INT32)
    min_p: float | None = Field(None, ge=0.0, le=1.0)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    presence_penalty: float | None = Field(None, ge=-2.0, le=2.0)
    frequency_penalty: float | None = Field(None, ge=-2.0, le=2.0)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100.0)
    logit_bias: dict[BiasToken, Bias] | None = Field(None, max_length=_MAX_BIAS)
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: list[TokenId] | None = Field(None, max_length=_MAX_STOP_IDS)
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    structured_outputs: StructuredOutputsRequest | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = Field(None, ge=-_INT32, le=_INT32, description="Lower runs first")
    cache_salt: str | None = Field(
        None, max_length=256, description="Prefixes are shared under one salt only"
    )
    return_token_ids: bool | None = Field(None, description="Token ids of each choice, beside its text")
    user: str | None = Field(None, max_length=512, description="For the access log")
    safety_identifier: str | None = Field(None, max_length=512, description="OpenAI's newer name of `user`")
    prompt_cache_key: str | None = Field(
        None, max_length=512, description="A hint; prefixes are shared with or without it (see `cache_salt`)"
    )


class CompletionRequest(Sampling):
    """`POST /v1/completions`."""

    prompt: Prompt
    echo: bool | None = Field(None, description="The prompt stands before the completion")
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_special_tokens: bool | None = Field(None, description="Whether a text prompt gets the model's BOS")
    best_of: int | None = Field(None, ge=1, le=MAX_N, description="Only as large as n")
    suffix: Literal[""] | None = Field(None, description="Only empty: models here do not fill in the middle")


class TextPart(_Body):
    """A part of a message's content; text is the only kind."""

    type: Literal["text"]
    text: str


class FunctionCall(_Body):
    """A call that the assistant has asked for; `arguments` is JSON."""

    name: str
    arguments: str


class ToolCall(_Body):
    """One of an assistant's calls."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatMessage(_Body):
    """A message of a conversation. What OpenAI's answers hold beside text may be sent back when it is empty."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None


class ToolFunction(_Body):
    """A function that the model may ask to be called. `strict` changes nothing: forced calls keep the schema anyway."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_.\-]{1,128}$")
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema of the arguments")
    strict: bool | None = None


class Tool(_Body):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: ToolFunction


class FunctionName(_Body):
    """The function that is to be called."""

    name: str


class NamedToolChoice(_Body):
    """A `tool_choice` that forces one function."""

    type: Literal["function"]
    function: FunctionName


class NamedSchema(_Body):
    """The schema of a `response_format`. `strict` changes nothing: the schema is always kept."""

    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class PlainFormat(_Body):
    """Any text, or any JSON object."""

    type: Literal["text", "json_object"]


class SchemaFormat(_Body):
    """JSON of a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class ChatCompletionRequest(Sampling):
    """`POST /v1/chat/completions`."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, le=_INT32)
    max_tokens: int | None = Field(None, ge=1, le=_INT32)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables of the chat template")
    response_format: PlainFormat | SchemaFormat | None = Field(None, discriminator="type")
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    # Fields of OpenAI's that mean nothing here: taken where they ask for nothing.
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    modalities: Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)] | None = None
    metadata: Annotated[dict[str, str], Field(max_length=0)] | None = None
    functions: Annotated[list[Any], Field(max_length=0)] | None = None
    function_call: Literal["none"] | None = None
    audio: None = None
    prediction: None = None
    web_search_options: None = None


class EmbeddingRequest(_Body):
    """`POST /v1/embeddings`: answered 400 for models that only generate."""

    model: str | None = None
    input: Prompt
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1)
    user: str | None = None


class TokenizeRequest(_Body):
    """`POST /tokenize`: a text, or a conversation through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(_Body):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: list[TokenId]
