"""Sampling parameters: every field at its edges, and messages that name field, value and bounds (F52)."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ostinato.engine.request import MAX_LOGPROBS, MAX_N, MAX_STOPS, SamplingParams
from ostinato.errors import OstinatoError, RequestError

INT64 = 2**63

REFUSED: list[tuple[str, Any, str]] = [
    ("n", 0, "n must be between 1 and 128, got 0"),
    ("n", MAX_N + 1, "n must be between"),
    ("n", 10**12, "n must be between"),
    ("n", 1.0, "n must be a whole number, got 1.0"),
    ("n", True, "n must be a whole number, got True"),
    ("max_tokens", 0, "max_tokens must be at least 1, got 0; ask for prompt_logprobs"),
    ("max_tokens", -1, "max_tokens must be between .* got -1"),
    ("max_tokens", 1.5, "max_tokens must be a whole number, got 1.5"),
    ("min_tokens", -1, "min_tokens must be between .* got -1"),
    ("temperature", -0.1, "temperature must be between 0 and 100, got -0.1"),
    ("temperature", 1e6, "temperature must be between 0 and 100, got 1000000.0"),
    ("temperature", math.nan, "temperature must be between 0 and 100, got nan"),
    ("temperature", math.inf, "temperature must be between 0 and 100, got inf"),
    ("temperature", 10**400, "temperature must be between 0 and 100"),
    ("temperature", "hot", "temperature must be a number, got 'hot'"),
    ("temperature", None, "temperature must be a number, got None"),
    ("top_p", -1, "top_p must be above 0 and at most 1, got -1"),
    ("top_p", 0, "top_p must be above 0 and at most 1, got 0"),
    ("top_p", 1.01, "top_p must be above 0 and at most 1, got 1.01"),
    ("top_p", math.nan, "top_p must be above 0"),
    ("top_k", -2, "top_k must be between 0 and .* got -2"),
    ("top_k", 2.0, "top_k must be a whole number"),
    ("min_p", -0.1, "min_p must be between 0 and 1"),
    ("min_p", 1.1, "min_p must be between 0 and 1"),
    ("seed", INT64, f"seed must be between -{INT64} and {INT64 - 1}, got {INT64}"),
    ("seed", -INT64 - 1, "seed must be between"),
    ("seed", 1.0, "seed must be a whole number"),
    ("presence_penalty", 2.1, "presence_penalty must be between -2 and 2"),
    ("presence_penalty", math.nan, "presence_penalty must be between -2 and 2"),
    ("frequency_penalty", -2.1, "frequency_penalty must be between -2 and 2"),
    ("repetition_penalty", 0.0, "repetition_penalty must be between 0.01 and 100"),
    ("repetition_penalty", -1.0, "repetition_penalty must be between 0.01 and 100"),
    ("logit_bias", {-1: 1.0}, "logit_bias token must be between 0"),
    ("logit_bias", {3: 101}, r"logit_bias\[3\] must be between -100 and 100, got 101"),
    ("logit_bias", {3: math.nan}, r"logit_bias\[3\] must be between"),
    ("logit_bias", [3], r"logit_bias must map token ids to numbers, got \[3\]"),
    ("stop", 5, "stop must be a list, got 5"),
    ("stop", [""], "stop must hold non-empty strings, got ''"),
    ("stop", "", "stop must hold non-empty strings, got ''"),
    ("stop", ["a", 3], "stop must hold non-empty strings, got 3"),
    ("stop", ["x"] * (MAX_STOPS + 1), "stop holds 65 strings, at most 64"),
    ("stop_token_ids", 5, "stop_token_ids must be a list, got 5"),
    ("stop_token_ids", [-1], "stop_token_ids must be between 0"),
    ("stop_token_ids", ["a"], "stop_token_ids must be a whole number"),
    ("ignore_eos", "no", "ignore_eos must be True or False, got 'no'"),
    ("skip_special_tokens", 1, "skip_special_tokens must be True or False, got 1"),
    ("include_stop_str_in_output", None, "include_stop_str_in_output must be True or False"),
    ("logprobs", -1, "logprobs must be between 0 and 100, got -1"),
    ("logprobs", MAX_LOGPROBS + 1, "logprobs must be between"),
    ("logprobs", True, "logprobs must be a whole number"),
    ("prompt_logprobs", -1, "prompt_logprobs must be between 0"),
]


@pytest.mark.parametrize(
    ("name", "value", "message"), REFUSED, ids=[f"{n}-{i}" for i, (n, _, _) in enumerate(REFUSED)]
)
def test_refused(name: str, value: Any, message: str) -> None:
    with pytest.raises(RequestError, match=f"^{message}") as caught:
        SamplingParams(**{name: value})
    assert isinstance(caught.value, OstinatoError)
    assert isinstance(caught.value, ValueError)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "accepted",
    [
        {"n": MAX_N},
        {"max_tokens": 1},
        {"max_tokens": None},
        {"max_tokens": 0, "prompt_logprobs": 0},
        {"min_tokens": 4, "max_tokens": 4},
        {"min_tokens": 4},
        {"temperature": 0},
        {"temperature": 100.0},
        {"temperature": 5e-324},
        {"top_p": 1},
        {"top_p": 5e-324},
        {"top_k": 2**31},
        {"seed": INT64 - 1},
        {"seed": -INT64},
        {"seed": 0},
        {"logprobs": 0},
        {"logit_bias": {0: -100, 7: 100.0}},
        {"stop": None},
        {"stop_token_ids": None},
        {"stop": ["a"] * MAX_STOPS},
    ],
    ids=str,
)
def test_accepted(accepted: dict[str, Any]) -> None:
    SamplingParams(**accepted)


def test_min_over_max() -> None:
    with pytest.raises(RequestError, match="min_tokens 5 is over max_tokens 4; lower it"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_normalised() -> None:
    params = SamplingParams(stop="END", stop_token_ids=[1, 2], top_k=-1, logit_bias={1: 2})
    assert params.stop_strings == ("END",)
    assert params.stop_token_ids == (1, 2)
    assert params.top_k == 0
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")


def test_values_do_not_change_behind_one() -> None:
    stops, bias = ["a"], {1: 1.0}
    params = SamplingParams(stop=stops, logit_bias=bias)
    stops.append("b")
    bias[2] = 5.0
    assert params.stop_strings == ("a",)
    assert params.logit_bias == {1: 1.0}
    with pytest.raises(AttributeError):
        params.temperature = 2.0  # type: ignore[misc]


def test_defaults_change_nothing() -> None:
    """Out of the box a request is sampled from the model's own distribution, up to the context's end."""
    params = SamplingParams()
    assert (params.n, params.max_tokens, params.temperature) == (1, None, 1.0)
    assert (params.top_p, params.top_k, params.min_p) == (1.0, 0, 0.0)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.0, 0.0, 1.0)
    assert params.seed is None
    assert params.logprobs is None
