"""What is sent: bodies of requests, random or from a file.

Pure functions of their arguments and a seed: the same ones give the same requests on every machine. Knows nothing of
HTTP or of time. Invariant: a job's body is complete but for the model's name and the streaming flags.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ostinato.errors import ConfigError

# Short, frequent words: about one token each in most vocabularies.
_TEXT = (
    "the of and to in that is was for it with as his on be at by had not are but from or have an they which one you "
    "were her all she there would their we him been has when who will no more if out so said what up its about into "
    "than them can only other new some could time these two may then do first any my now such like our over man me "
    "even most made after also did many before must through back years where much your way well down should because "
    "each just those people how too little state good very make world still own see men work long get here between"
)


@dataclass(frozen=True, slots=True)
class Job:
    """One request. `chat` says which endpoint it is for."""

    body: Mapping[str, Any]
    chat: bool = False


@dataclass(frozen=True, slots=True)
class Span:
    """Whole numbers from `least` to `most`, both included."""

    least: int
    most: int

    @classmethod
    def parse(cls, text: str, *, name: str, floor: int = 1) -> Self:
        """From "64" or "16:256". Raises ConfigError naming `name`."""
        parts = text.split(":")
        if len(parts) <= 2 and all(part.strip().isdigit() for part in parts):
            span = cls(int(parts[0]), int(parts[-1]))
            if floor <= span.least <= span.most:
                return span
        raise ConfigError(
            f"{name} {text!r} is no range; give a number of at least {floor}, or two like 16:256"
        )

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.least, self.most)


@dataclass(frozen=True, slots=True)
class RandomJobs:
    """Random prompts of random lengths, answered by exactly as many tokens as drawn where the server lets it.

    With `prefixes`, each prompt begins with one of that many fixed texts of `prefix_len` tokens, drawn anew for each
    request. `token_ids`: range of ids for prompts of exact lengths; None for text of that many words, about one token
    each. `extra`: fields added to every body.
    """

    count: int
    input_len: Span
    output_len: Span
    seed: int = 0
    prefixes: int = 0
    prefix_len: int = 0
    token_ids: Span | None = None
    chat: bool = False
    ignore_eos: bool = True
    extra: Mapping[str, Any] | None = None

    def __iter__(self) -> Iterator[Job]:
        rng = random.Random(self.seed)
        shared = [self._tokens(rng, self.prefix_len) for _ in range(self.prefixes)]
        for _ in range(self.count):
            prefix = rng.choice(shared) if shared else []
            tokens = prefix + self._tokens(rng, self.input_len.draw(rng))
            yield Job(self._body(tokens, self.output_len.draw(rng)), self.chat)

    def _tokens(self, rng: random.Random, count: int) -> list[Any]:
        if self.token_ids is None:
            return rng.choices(_TEXT.split(), k=count)
        return rng.choices(range(self.token_ids.least, self.token_ids.most + 1), k=count)

    def _body(self, tokens: list[Any], max_tokens: int) -> dict[str, Any]:
        prompt = tokens if self.token_ids is not None else " ".join(tokens)
        content = {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        stop = {"ignore_eos": True} if self.ignore_eos else {}
        return content | {"max_tokens": max_tokens, "temperature": 0.0} | stop | dict(self.extra or {})


def read_jobs(path: Path, count: int | None, *, extra: Mapping[str, Any] | None = None) -> list[Job]:
    """Jobs from a JSON Lines file: each line a request's body, with `messages` (chat) or `prompt`.

    `count`: how many; the file is gone through again when it has fewer. `extra`: fields added where a line has none of
    that name. Raises ConfigError naming the line.
    """
    jobs = []
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error}; convert it") from None
    for number, line in enumerate(
        text.split("\n"), 1
    ):  # JSON may hold what `splitlines` takes for a line's end
        if not line.strip():
            continue
        try:
            body = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{path}, line {number} is no JSON: {error}") from None
        if not isinstance(body, dict) or ("messages" in body) == ("prompt" in body):
            raise ConfigError(f"{path}, line {number} must be an object with either 'messages' or 'prompt'")
        jobs.append(Job(dict(extra or {}) | body, "messages" in body))
    if not jobs:
        raise ConfigError(f"{path} holds no requests; give one JSON object a line")
    if count is None:
        return jobs
    return [jobs[number % len(jobs)] for number in range(count)]
