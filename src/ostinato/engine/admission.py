"""Whether a sequence may start: the one KV formula, the budgets of a prefill step, and the estimate of growth.

Intake and admission use the same numbers, so whatever intake accepts fits an empty pool. Host only; knows nothing of
tensors. Units are tokens unless a name says pages. Source of the policy: docs/behaviour.md, section 7.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field

from ostinato.engine.sequence import Sequence
from ostinato.errors import RequestError
from ostinato.padding import align_up

CLIP = 4096
"""Tokens to come that a request reserves at most; a longer answer is covered by retraction."""

RATIO_INIT = 0.7
RATIO_MIN_FACTOR = 0.14
RATIO_STEPS = 600
RETRACT_HEADROOM = 20
"""Decode steps whose growth a retraction must leave room for, per request."""


class Admission(enum.Enum):
    """Verdict on one waiting sequence."""

    CONTINUE = "continue"  # admitted, try the next
    NO_TOKEN = "no_token"  # the KV pool is too full
    OTHER = "other"  # another limit of this step, or a peer rank, says wait


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """What can be had at all: tokens of the pool (trash page excluded), page size, context length."""

    total_tokens: int
    page_size: int
    context_length: int

    def max_new_tokens(self, prompt_len: int) -> int:
        """Tokens that may follow a prompt in an otherwise empty pool and within the context."""
        in_pool = self.total_tokens - align_up(prompt_len, self.page_size) - self.page_size - 1
        return min(in_pool, self.context_length - prompt_len)

    def clamp(self, prompt_len: int, wanted: int | None) -> int:
        """Tokens a request will generate at most. Raises RequestError, with the numbers, if it can never fit.

        A wish for more than the context holds is cut to it (the completion then ends with reason "length"); one that
        the KV pool can never hold is refused. `wanted` 0 scores the prompt only, which may then fill the context.
        """
        least = 0 if wanted == 0 else 1
        in_context = self.context_length - prompt_len
        if in_context < least:
            raise RequestError(
                f"the prompt has {prompt_len} tokens, the context holds {self.context_length} with at least {least} "
                "to generate; shorten the prompt or raise context_length"
            )
        room = self.max_new_tokens(prompt_len)
        asked = in_context if wanted is None else min(wanted, in_context)
        if room < least or (wanted is not None and asked > room):
            least_asked = least if wanted is None else asked
            raise RequestError(
                f"a prompt of {prompt_len} tokens and {least_asked} to generate need "
                f"{align_up(prompt_len, self.page_size) + least_asked + self.page_size + 1} tokens of KV cache, the "
                f"pool holds {self.total_tokens}; lower max_tokens, shorten the prompt or raise kv_memory"
            )
        return min(asked, room)


def reserved_tokens(extend: int, remaining_new: int, page_size: int) -> int:
    """KV tokens a sequence will need from here: what it extends by now, its growth (clipped), page overhead."""
    return extend + min(remaining_new, CLIP) + page_size


@dataclass(slots=True)
class NewTokenRatio:
    """The share of their allowed growth that running requests are assumed to take; learns from retractions."""

    conservativeness: float = 1.0
    value: float = field(init=False)
    initial: float = field(init=False)
    minimum: float = field(init=False)

    def __post_init__(self) -> None:
        self.initial = min(RATIO_INIT * self.conservativeness, 1.0)
        self.minimum = min(self.initial * RATIO_MIN_FACTOR, 1.0)
        self.reset()

    def reset(self) -> None:
        """Back to the start: the engine is idle."""
        self.value = self.initial

    def decay(self) -> None:
        """A decode step went without retraction."""
        if self.value != self.minimum:
            self.value = max(self.value - (self.initial - self.minimum) / RATIO_STEPS, self.minimum)

    def after_retraction(self, kept: Iterable[Sequence]) -> None:
        """Estimate anew from the sequences that stay."""
        sequences = list(kept)
        generated = sum(len(s.output_token_ids) for s in sequences)
        allowed = sum(s.max_new_tokens for s in sequences)
        self.value = min(1.0, (generated + RETRACT_HEADROOM * len(sequences)) / (allowed + 1))


def expected_growth(running: Iterable[Sequence], ratio: float) -> float:
    """Tokens that live sequences are assumed to need yet: a share of their growth, and prompt without pages yet."""
    return sum(min(s.remaining_new, CLIP) * ratio + s.tokens_without_pages for s in running)


def fits_by_simulation(available: int, extend: int, candidate: Sequence, running: Iterable[Sequence]) -> bool:
    """Whether a sequence that surely runs to its length (`ignore_eos`) fits, simulating the frees in order.

    Sequences end in the order of their remaining tokens; each end gives its tokens back. `available` excludes any
    estimate of growth: here the growth is played through instead.
    """
    live = list(running)
    states = sorted((s.remaining_new, s.num_tokens) for s in [*live, candidate])
    free = available - extend - sum(s.tokens_without_pages for s in live)
    for i, (left, occupied) in enumerate(states):
        alive = len(states) - i
        if free < left * alive:
            return False
        free += occupied
    return True


def held_decodes(running: Iterable[Sequence], prefilling: Iterable[Sequence]) -> int:
    """Sequences that will have a token to decode and wait, because a step prefills: those beside it and its own."""
    now = set(prefilling)
    return sum(s.remaining_new > (s in now) for s in running)


def retraction_order(running: Iterable[Sequence]) -> list[Sequence]:
    """Running sequences, the first to be retracted last: shortest output, among equals the longest prompt."""
    return sorted(running, key=lambda s: (-len(s.output_token_ids), s.prompt_len))


@dataclass(slots=True)
class StepBudget:
    """What one prefill step may still take: prompt tokens in all, and tokens of the chunk (None: no chunking)."""

    page_size: int
    input_tokens: int
    chunk_tokens: int | None
    admitted: int = 0

    def take(self, extend: int) -> None:
        """Charge an admitted extend, in whole pages."""
        tokens = align_up(extend, self.page_size)
        self.input_tokens -= tokens
        if self.chunk_tokens is not None:
            self.chunk_tokens -= tokens
        self.admitted += 1

    def extend_for(self, extend: int) -> int:
        """How much of `extend` may run now: all, a whole number of pages (a chunk), or 0 (wait)."""
        if self.chunk_tokens is None:
            # Without chunks the first request passes whatever its length, or it never could.
            return (
                extend if self.admitted == 0 or align_up(extend, self.page_size) <= self.input_tokens else 0
            )
        allowed = min(self.chunk_tokens, self.input_tokens)
        if extend <= allowed:
            return extend
        return max(allowed // self.page_size, 0) * self.page_size
