"""Flags derived from the engine's options and the sampling parameters.

A command takes `engine` and `sampling` as dicts of what the user gave; the decorators replace these two by
one flag per field. Must not import torch. Invariant: a new field of `EngineConfig` is a flag without a change
here, and its choices and limits are checked by `EngineConfig` alone, so that all front ends say the same.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, dataclass, fields, replace
from typing import Annotated, Any, Optional

import typer

from ostinato.config import EngineConfig, ServerConfig

_TYPES: Mapping[str, Any] = {"int": int, "float": float, "bool": bool, "str": str}


@dataclass(frozen=True, slots=True)
class SamplingFlag:
    """A flag for one field of `SamplingParams`; `kind` is its type, or a list of it when given repeatedly.

    `default` repeats the field's, for the help alone; `advised`: the checkpoint's recommendation goes before it.
    """

    name: str
    kind: Any
    help: str
    flags: tuple[str, ...] = ()
    default: float | None = None
    advised: bool = False


SAMPLING_FLAGS = (
    SamplingFlag("max_tokens", int, "Tokens to generate at most.", ("--max-tokens",)),
    SamplingFlag(
        "temperature",
        float,
        "0 for greedy; higher for more varied text.",
        ("--temperature", "-t"),
        default=1,
        advised=True,
    ),
    SamplingFlag("seed", int, "Seed of the sampling noise; the same in every run when left out."),
    SamplingFlag(
        "top_p", float, "Sample from the smallest set with this probability.", default=1, advised=True
    ),
    SamplingFlag("top_k", int, "Sample from the k likeliest tokens; 0 for all.", default=0, advised=True),
    SamplingFlag(
        "min_p", float, "Drop tokens below this share of the likeliest one.", default=0, advised=True
    ),
    SamplingFlag(
        "repetition_penalty",
        float,
        "Over 1: avoid tokens seen in prompt and answer.",
        default=1,
        advised=True,
    ),
    SamplingFlag("presence_penalty", float, "Subtract for every token already generated.", default=0),
    SamplingFlag("frequency_penalty", float, "Subtract per time a token was generated.", default=0),
    SamplingFlag("stop", list[str], "Stop before this text (repeatable)."),
    SamplingFlag("stop_token_ids", list[int], "Stop at this token id (repeatable).", ("--stop-token-id",)),
    SamplingFlag("include_stop_str_in_output", bool, "Keep the stop text.", ("--include-stop",)),
    SamplingFlag("ignore_eos", bool, "Go on past the end-of-sequence token.", ("--ignore-eos",)),
    SamplingFlag("min_tokens", int, "Tokens to generate at least.", default=0),
    SamplingFlag("logprobs", int, "Log-probabilities of this many alternatives per token (with --json)."),
    SamplingFlag("n", int, "Answers to generate.", ("--n",), default=1),
)


def engine_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the parameter `engine` by one flag per engine option; the command gets those given."""
    flags = [_option_flag(s, "Engine") for s in fields(EngineConfig) if s.metadata["flag"]]
    return _expand(command, "engine", flags)


def server_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the parameter `server` by one flag per option of the server."""
    flags = [_option_flag(s, "Server") for s in fields(ServerConfig) if s.metadata["flag"]]
    return _expand(command, "server", flags)


def sampling_flags(
    *, max_tokens: int, without: Iterable[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace the parameter `sampling` by the sampling flags; `max_tokens` is the command's default."""
    left_out = frozenset(without)
    known = [
        replace(flag, default=max_tokens) if flag.name == "max_tokens" else flag for flag in SAMPLING_FLAGS
    ]
    flags = [_sampling_flag(flag) for flag in known if flag.name not in left_out]
    return lambda command: _expand(command, "sampling", flags)


@dataclass(frozen=True, slots=True)
class _Flag:
    """A parameter of a command, and the field it sets: to the value given, or to `constant`."""

    field: str
    parameter: inspect.Parameter
    constant: Any = None


def _expand(command: Callable[..., None], group: str, flags: list[_Flag]) -> Callable[..., None]:
    signature = inspect.signature(command, eval_str=True)
    own = [parameter for parameter in signature.parameters.values() if parameter.name != group]

    @functools.wraps(command)
    def wrapper(**given: Any) -> None:
        values = {}
        for flag in flags:
            value = given.pop(flag.parameter.name)
            if value is not None and value != []:  # a repeatable flag that was not given is an empty list
                values[flag.field] = value if flag.constant is None else flag.constant
        command(**given, **{group: values})

    merged = [*own, *(flag.parameter for flag in flags)]
    wrapper.__signature__ = signature.replace(parameters=merged)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in merged}
    del wrapper.__wrapped__
    return wrapper


def _parameter(name: str, kind: Any, option: Any) -> inspect.Parameter:
    annotation = Annotated[Optional[kind], option]  # noqa: UP045  (kind is a value here, not a type expression)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _option_flag(spec: Field[Any], panel: str) -> _Flag:
    """A switch has the one direction that changes something: what is on by default gets a `--no-` flag."""
    kind = _TYPES.get(str(spec.type).split(" | ")[0], str)
    name, text = spec.name, spec.metadata["help"]
    if isinstance(spec.metadata["flag"], str):
        name = spec.metadata["flag"]
    negated = kind is bool and spec.default is True
    if negated:
        name = "no_" + name.removeprefix("enable_")
        text = "Do not " + text[0].lower() + text[1:]
    choices = spec.metadata["choices"]
    notes = [", ".join(choices)] if choices else []
    if spec.default is not None and kind is not bool:
        notes.append(f"default {spec.default}")
    text += f" ({'; '.join(notes)})" if notes else ""
    option = typer.Option(
        f"--{name.replace('_', '-')}", help=f"{text}.", rich_help_panel=panel, show_default=False
    )
    return _Flag(spec.name, _parameter(name, kind, option), constant=False if negated else None)


def _sampling_flag(flag: SamplingFlag) -> _Flag:
    decls = flag.flags or (f"--{flag.name.replace('_', '-')}",)
    text = flag.help
    if flag.default is not None:
        advice = "the checkpoint's, or " if flag.advised else ""
        text = f"{text.rstrip('.')} (default {advice}{flag.default:g})."
    option = typer.Option(*decls, help=text, rich_help_panel="Sampling", show_default=False)
    return _Flag(flag.name, _parameter(flag.name, flag.kind, option))
