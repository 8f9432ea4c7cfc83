"""The requests that are played: prompts of every length around page edges, answers of every length, three ways to
sample. Pure functions of the vocabulary's size and a seed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

from ostinato import SamplingParams

SEED = 20
ENSEMBLE = 34
"""Requests of an ensemble: each has up to 33 mates."""
LONGEST_PROMPT = 100
CONTEXT = 160
_EDGES = (1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 64, 65, 80, 97, LONGEST_PROMPT)
_SHARED = 50
"""Every third prompt begins with the same so many tokens: they hit one another's prefixes, whole pages or not."""


@dataclass(frozen=True, slots=True)
class Part:
    """A request: its name in every performance, its prompt, how it is sampled."""

    name: str
    prompt: tuple[int, ...]
    params: SamplingParams

    @property
    def length(self) -> int:
        """Tokens of its answer."""
        assert self.params.max_tokens is not None
        return self.params.max_tokens

    def after(self, tokens: tuple[int, ...]) -> Part:
        """The same request with its first answers as part of the prompt, for the rest of its length."""
        left = self.length - len(tokens)
        return Part(self.name, self.prompt + tokens, replace(self.params, max_tokens=left, min_tokens=left))

    def scored(self, tokens: tuple[int, ...]) -> Part:
        """Prompt and answer as one prompt: logits of every position are wanted, and its last token once more."""
        params = replace(self.params, max_tokens=1, min_tokens=1, prompt_logprobs=0)
        return Part(self.name, self.prompt + tokens[:-1], params)


def sampling(index: int, length: int) -> SamplingParams:
    """Greedy, seeded, and filtered requests take turns.

    They end at their length because of `min_tokens`, not by `ignore_eos`: then admission does not know when they
    end, and memory can run short.
    """
    way: dict[str, Any] = (
        {"temperature": 0},
        {"temperature": 1.0, "seed": SEED + index},
        {"temperature": 0.8, "seed": index, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2},
        {"temperature": 1.5, "seed": -index, "min_p": 0.02},
    )[index % 4]
    return SamplingParams(max_tokens=length, min_tokens=length, **way)


def ensemble(
    vocab: int, count: int = ENSEMBLE, *, leaving: int = 1, stay: int = 1, shift: int = 0
) -> list[Part]:
    """`count` requests. Played together, `leaving` of them end at every `stay`-th decode step, so its size goes from
    all of them to few; at the first such step, `shift` fewer end.
    """
    draw = random.Random(SEED)
    shared = [draw.randrange(2, vocab) for _ in range(_SHARED)]
    lengths = [_EDGES[i % len(_EDGES)] for i in range(count)]
    draw.shuffle(lengths)
    answers = [2 + stay * ((i + shift) // leaving) for i in range(count)]
    draw.shuffle(answers)
    parts = []
    for i, (length, answer) in enumerate(zip(lengths, answers, strict=True)):
        own = [draw.randrange(2, vocab) for _ in range(length)]
        prompt = (shared + own)[:length] if i % 3 == 0 else own
        parts.append(Part(f"r{i}", tuple(prompt), sampling(i, answer)))
    return parts


def decode_sizes(parts: list[Part]) -> set[int]:
    """Sizes of the decode steps when all are played together."""
    lengths = [part.length for part in parts]
    return {sum(length > step for length in lengths) for step in range(1, max(lengths))}


def filling(vocab: int, bucket: int) -> list[Part]:
    """Prompts that leave a prefill bucket no pad, one, and as many as it may have; answers of two tokens."""
    draw = random.Random(SEED + bucket)
    lengths = {min(bucket, CONTEXT - 2), bucket - 1, -(-bucket // 2)}
    return [
        Part(f"fills{n}of{bucket}", tuple(draw.randrange(2, vocab) for _ in range(n)), sampling(n, 2))
        for n in sorted(lengths)
        if n <= CONTEXT - 2
    ]


def long_answers(vocab: int, count: int = 4, length: int = 30) -> list[Part]:
    """Short prompts whose answers outgrow a small cache together."""
    draw = random.Random(SEED + 1)
    return [
        Part(f"long{i}", tuple(draw.randrange(2, vocab) for _ in range(3 + i)), sampling(i, length))
        for i in range(count)
    ]
