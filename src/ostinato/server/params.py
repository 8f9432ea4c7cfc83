"""From a request's fields to `SamplingParams`: defaults, aliases, and what one field means beside another.

Knows nothing of text or of the engine's state. Invariant: every field of a request is honoured, or is the subject of a
400 that names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ostinato.engine.request import SamplingParams
from ostinato.errors import RequestError
from ostinato.server.api_errors import bad_field, from_request_error
from ostinato.server.forms import AnswerForm, structured
from ostinato.server.protocol import ChatCompletionRequest, CompletionRequest, Sampling

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default of completions; chat completions may fill the context."""

# Passed on under the same name when given.
_SAME = (
    "n",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
    "include_stop_str_in_output",
)


def completion_params(request: CompletionRequest) -> SamplingParams:
    """Sampling of `/v1/completions`. Raises ApiError 400."""
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise bad_field(
            "best_of", f"best_of {request.best_of} is not supported beside n {request.n or 1}; remove it"
        )
    max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    extra: dict[str, Any] = {"max_tokens": max_tokens, "logprobs": request.logprobs}
    if request.echo and (request.logprobs is not None or max_tokens == 0):
        extra["prompt_logprobs"] = request.logprobs or 0
    if max_tokens == 0 and not request.echo:
        raise bad_field("max_tokens", "max_tokens 0 needs echo; ask for at least 1 token, or for echo")
    return _params(request, extra | {"structured_outputs": structured(request)})


def chat_params(request: ChatCompletionRequest, form: AnswerForm) -> SamplingParams:
    """Sampling of `/v1/chat/completions`, bound to a form. Raises ApiError 400."""
    limit = request.max_completion_tokens
    if limit is not None and request.max_tokens not in (None, limit):
        raise bad_field(
            "max_tokens",
            f"max_tokens {request.max_tokens} and max_completion_tokens {limit} differ; give one",
        )
    if request.top_logprobs and not request.logprobs:
        raise bad_field("top_logprobs", "top_logprobs needs logprobs; set logprobs to true")
    extra: dict[str, Any] = {"max_tokens": request.max_tokens if limit is None else limit}
    if request.logprobs:
        extra["logprobs"] = request.top_logprobs or 0
    extra["structured_outputs"] = form.outputs
    if form.special_tokens and request.skip_special_tokens is None:
        extra["skip_special_tokens"] = False  # the marks of calls are such tokens
    return _params(request, extra)


def check_stream_options(request: Sampling) -> None:
    """Raises ApiError 400 for options of a stream that is not asked for."""
    if request.stream_options is not None and not request.stream:
        raise bad_field("stream_options", "stream_options needs stream; set stream to true or remove it")


def _params(request: Sampling, extra: Mapping[str, Any]) -> SamplingParams:
    given = {name: value for name in _SAME if (value := getattr(request, name)) is not None}
    if request.logit_bias:
        given["logit_bias"] = _logit_bias(request.logit_bias)
    try:
        return SamplingParams(**given, **extra)
    except RequestError as error:
        raise from_request_error(error, tuple(type(request).model_fields)) from None


def _logit_bias(given: Mapping[str, float]) -> dict[int, float]:
    """The biases by token. Raises ApiError 400 for a token that stands there twice, as "300" and "0300"."""
    keys: dict[int, str] = {}
    for key in given:
        first = keys.setdefault(int(key), key)
        if first != key:
            raise bad_field(
                "logit_bias", f"logit_bias has the token {int(key)} twice, as {first!r} and {key!r}; keep one"
            )
    return {token: given[key] for token, key in keys.items()}
