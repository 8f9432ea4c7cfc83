"""What an engine's process and the comparison say to each other: one JSON object a line, a reply to each request.

    {"do": "load", "model": PATH, "threads": 2, "max_batch": 32, "max_context": 640, ...}  ->  versions
    {"do": "decode", "prompts": [[ids]], "warmup": 4, "steps": 64, "mode": ...}            ->  Decoded
    {"do": "prefill", "prompts": [[ids]], "mode": ...}                                     ->  seconds of each prompt

Requests come on the standard input; replies go to the file descriptor that is the script's argument, which nothing
else writes to. Runs in every engine's own environment, so it imports nothing but the standard library. Invariant: every
request has one reply; an error is a reply too.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

Ids = Sequence[int]
Request = Mapping[str, Any]


@dataclass(frozen=True)
class Decoded:
    """`tokens` were generated in `seconds`, warm-up not counted; `ids` is all that each prompt was answered."""

    tokens: int
    seconds: float
    ids: list[list[int]]


class Engine(Protocol):
    """One engine with a model loaded. Greedy, ends of sequences ignored. The first step of an answer is its prefill."""

    def decode(self, prompts: Sequence[Ids], warmup: int, steps: int, request: Request) -> Decoded:
        """All prompts as one batch: 1 + warmup tokens each, then `steps` more, which are timed."""

    def prefill(self, prompt: Ids, request: Request) -> float:
        """Seconds until the first token of one prompt is there."""


def decode_in_steps(count: int, step: Callable[[], Mapping[int, Ids]], warmup: int, steps: int) -> Decoded:
    """Drive an engine that advances by steps. `step` runs one and returns the answers it has changed, by prompt."""
    answers: dict[int, Ids] = dict.fromkeys(range(count), ())
    while min(len(ids) for ids in answers.values()) < 1 + warmup:
        answers |= step()
    before = [len(ids) for ids in answers.values()]
    if max(before) != min(before):
        raise RuntimeError(
            f"the batch does not advance together: {before}; raise the engine's prefill limits"
        )
    start = time.perf_counter()
    while min(len(ids) for ids in answers.values()) < 1 + warmup + steps:
        answers |= step()
    seconds = time.perf_counter() - start
    tokens = sum(len(ids) for ids in answers.values()) - sum(before)
    return Decoded(tokens, seconds, [list(answers[n]) for n in range(count)])


def decode_in_rounds(
    first: Callable[[], list[int]],
    following: Callable[[list[int]], list[int]],
    warmup: int,
    steps: int,
) -> Decoded:
    """Drive a bare model: `first` prefills the batch, `following` feeds each row's last token; both return tokens."""
    rows = [[token] for token in first()]
    start, seconds = 0.0, 0.0
    for number in range(warmup + steps):
        if number == warmup:
            start = time.perf_counter()
        for row, token in zip(rows, following([row[-1] for row in rows]), strict=True):
            row.append(token)
    if steps:
        seconds = time.perf_counter() - start
    return Decoded(steps * len(rows), seconds, rows)


Handler = Callable[[Request], Any]


def serve(handlers: Mapping[str, Handler]) -> None:
    """Answer requests until the input ends."""
    replies = os.fdopen(int(sys.argv[1]), "w", encoding="utf-8")
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = {"ok": True, "value": handlers[request["do"]](request)}
        except Exception as error:
            traceback.print_exc()
            reply = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def serve_engine(
    load: Callable[[Request], tuple[Engine, Mapping[str, str]]],
    more: Mapping[str, Callable[[Any, Request], Any]] | None = None,
) -> None:
    """Serve an engine that `load` makes (and says its versions); `more` are verbs of its own."""
    loaded: list[Engine] = []

    def on_load(request: Request) -> Mapping[str, str]:
        engine, versions = load(request)
        loaded.append(engine)
        return {"python": sys.version.split()[0]} | dict(versions)

    def on_decode(request: Request) -> Any:
        return asdict(loaded[0].decode(request["prompts"], request["warmup"], request["steps"], request))

    def on_prefill(request: Request) -> list[float]:
        return [loaded[0].prefill(prompt, request) for prompt in request["prompts"]]

    def with_engine(verb: Callable[[Any, Request], Any]) -> Handler:
        return lambda request: verb(loaded[0], request)

    own = {name: with_engine(verb) for name, verb in (more or {}).items()}
    serve({"load": on_load, "decode": on_decode, "prefill": on_prefill} | own)
