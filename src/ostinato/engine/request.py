"""What callers ask for and what they get: plain frozen values.

Knows nothing of scheduling, tokens' text or models. Invariant: a `SamplingParams` that exists is valid; every bad
value was refused with the field's name, the value and the bounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from ostinato.errors import RequestError
from ostinato.text.grammar import StructuredOutputs

FinishReason = Literal["stop", "length", "abort", "error"]

MAX_N = 128
MAX_STOPS = 64
MAX_LOGPROBS = 100
MAX_TEMPERATURE = 100.0


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural log-probability of a token, and its rank among all tokens (1 is the likeliest)."""

    logprob: float
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when a completion ends. Raises RequestError for a value out of range.

    n: completions per prompt, each with noise of its own.
    max_tokens: tokens generated at most; None for as many as the context holds. 0 only with `prompt_logprobs`.
    min_tokens: no end-of-sequence token, stop token or stop string before so many tokens.
    temperature: 0 is greedy (ties go to the lowest id). top_k 0 (or -1), top_p 1 and min_p 0 switch a filter off.
    seed: noise is a function of (seed, position); None takes the engine's.
    presence_penalty, frequency_penalty (OpenAI's formula, over generated tokens), repetition_penalty (CTRL's, over
    prompt and generated tokens): 0, 0 and 1 switch them off.
    logit_bias: added to logits of token ids, within [-100, 100].
    stop: strings that end a completion and are not part of it unless include_stop_str_in_output.
    stop_token_ids: further tokens that end it. ignore_eos: the model's own do not.
    structured_outputs: the form of the completion, as `StructuredOutputs` or a mapping of its fields.
    logprobs: log-probabilities of the chosen token and so many best per position. prompt_logprobs: of the prompt's.
    """

    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    stop: str | tuple[str, ...] | list[str] = ()
    stop_token_ids: tuple[int, ...] | list[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputs | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        _set(self, "stop", (self.stop,) if isinstance(self.stop, str) else _items("stop", self.stop))
        _set(self, "stop_token_ids", _items("stop_token_ids", self.stop_token_ids))
        if self.top_k == -1:
            _set(self, "top_k", 0)
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be True or False, got {getattr(self, name)!r}")
        self._check_lengths()
        for name, (low, high) in _FLOATS.items():
            _check_float(name, getattr(self, name), low, high)
        _check_int("top_k", self.top_k, 0, 2**31)
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), 2**63 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 0, MAX_LOGPROBS)
        self._check_stops()
        _set(self, "structured_outputs", _structured(self.structured_outputs))
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise RequestError(f"logit_bias must map token ids to numbers, got {self.logit_bias!r}")
            _set(self, "logit_bias", dict(self.logit_bias))
            for token, bias in self.logit_bias.items():
                _check_int("logit_bias token", token, 0, 2**31)
                _check_float(f"logit_bias[{token}]", bias, -100.0, 100.0)

    @property
    def form(self) -> StructuredOutputs | None:
        """`structured_outputs` as the value that it always is after construction."""
        assert not isinstance(self.structured_outputs, Mapping)
        return self.structured_outputs

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as the tuple that it always is after construction."""
        assert isinstance(self.stop, tuple)
        return self.stop

    def _check_lengths(self) -> None:
        _check_int("n", self.n, 1, MAX_N)
        _check_int("min_tokens", self.min_tokens, 0, 2**31)
        if self.max_tokens is None:
            return
        _check_int("max_tokens", self.max_tokens, 0, 2**31)
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise RequestError(
                "max_tokens must be at least 1, got 0; ask for prompt_logprobs as well to score a prompt only"
            )
        if self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens {self.min_tokens} is over max_tokens {self.max_tokens}; lower it")

    def _check_stops(self) -> None:
        if len(self.stop) > MAX_STOPS:
            raise RequestError(f"stop holds {len(self.stop)} strings, at most {MAX_STOPS} are allowed")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise RequestError(f"stop must hold non-empty strings, got {text!r}; remove it")
            check_text(text, "stop")
        for token in self.stop_token_ids:
            _check_int("stop_token_ids", token, 0, 2**31)


_FLOATS: Mapping[str, tuple[float, float]] = {
    "temperature": (0.0, MAX_TEMPERATURE),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 100.0),
}


def as_token_ids(prompt: Iterable[int]) -> tuple[int, ...]:
    """A prompt that is no text. Raises RequestError for what is no list."""
    try:
        if not isinstance(prompt, bytes):
            return tuple(prompt)
    except TypeError:
        pass
    raise RequestError(f"a prompt must be text or a list of token ids, got {prompt!r}")


def check_text(text: str, what: str = "the prompt") -> None:
    """Raises RequestError for half characters, which JSON can carry and neither tokenizers nor other ranks can read."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{what} has half a surrogate pair, {text[error.start]!r}, at character {error.start}; remove it"
        ) from None


def _structured(value: object) -> StructuredOutputs | None:
    if value is None or isinstance(value, StructuredOutputs):
        return value
    if not isinstance(value, Mapping):
        raise RequestError(f"structured_outputs must be StructuredOutputs or a mapping, got {value!r}")
    unknown = sorted(str(name) for name in value if name not in StructuredOutputs.__dataclass_fields__)
    if unknown:
        raise RequestError(f"structured_outputs has no field {unknown[0]!r}; remove it")
    return StructuredOutputs(**value)


def _set(params: SamplingParams, name: str, value: Any) -> None:
    object.__setattr__(params, name, value)


def _items(name: str, values: Any) -> tuple[Any, ...]:
    """A list, a tuple or nothing, as a tuple."""
    if not isinstance(values, list | tuple | None):
        raise RequestError(f"{name} must be a list, got {values!r}")
    return tuple(values or ())


def _check_int(name: str, value: Any, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise RequestError(f"{name} must be a whole number, got {value!r}")
    if not low <= value <= high:
        raise RequestError(f"{name} must be between {low} and {high}, got {value}")


def _check_float(name: str, value: Any, low: float, high: float) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise RequestError(f"{name} must be a number, got {value!r}")
    # Compared first: a whole number too large for a float is out of range, and no NaN is within it.
    if not low <= value <= high or (name == "top_p" and value == 0.0):
        above = "above 0 and at most 1" if name == "top_p" else f"between {low:g} and {high:g}"
        raise RequestError(f"{name} must be {above}, got {value!r}")


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to complete. `priority`: lower runs first; equals run in order of arrival.

    `extra_key` separates prefix-cache namespaces: requests share cached prefixes only with their own.
    Raises RequestError for a name, key or priority of the wrong kind.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    prompt: str | None = None
    priority: int = 0
    extra_key: str = ""

    def __post_init__(self) -> None:
        for name in ("request_id", "extra_key"):
            if not isinstance(getattr(self, name), str):
                raise RequestError(f"{name} must be a string, got {getattr(self, name)!r}")
            check_text(getattr(self, name), name)
        _check_int("priority", self.priority, -(2**31), 2**31)


class CompletionOutput(msgspec.Struct, frozen=True):
    """One completion so far. `delta` is the text since the last output of a stream."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float | None = None
    logprobs: tuple[dict[int, Logprob], ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    delta: str = ""


class RequestOutput(msgspec.Struct, frozen=True):
    """The state of a request: its prompt and `n` completions.

    `prompt_logprobs` has an entry per prompt token, None for the first (nothing predicts it).
    `num_cached_tokens` counts prompt tokens taken from the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    prompt_logprobs: tuple[dict[int, Logprob] | None, ...] | None = None
    num_cached_tokens: int = 0
