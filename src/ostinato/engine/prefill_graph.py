"""How prefill steps run: one full graph, a graph broken around attention, or eager; and when a graph may serve a step.

    facts of a step ─▶ can_replay_locally ─▶ "" or a reason: at the vote before the step, and again for the forward

Knows nothing of models or of other ranks (what follows from their votes is `step_sync`'s and `decide_shape`'s).
Invariant: the answer depends on the facts and on what is fixed at start alone, and plan and batch give the same facts.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Self

from ostinato.attention.backend import AttentionBackend, CaptureLimits
from ostinato.engine.batch import ForwardBatch
from ostinato.engine.plan import StepPlan
from ostinato.errors import ConfigError
from ostinato.graphs import Backend, BreakableBackend, EagerBackend, LiveStep, SegmentBackend
from ostinato.padding import ShapeRules, StepMode, extend_reject

_NO_LIMITS = CaptureLimits()
TOKENS_PER_SLOT = 512
"""Prefill tokens for each request slot of a graph that works for every slot."""


class PrefillGraph(enum.Enum):
    """What is captured of a prefill's body; its head always runs eagerly on the rows that need it."""

    FULL = "full"
    """All of it, attention planned for fixed request slots."""
    BREAKABLE = "breakable"
    """Segments; attention runs between them, on the real rows."""
    EAGER = "eager"
    """Nothing."""


_MEASURED: Mapping[str, PrefillGraph] = MappingProxyType(
    {"cpu": PrefillGraph.FULL, "cuda": PrefillGraph.BREAKABLE}
)
"""What serves each device best where nothing else decides (docs/design.md, section 7)."""


def default_prefill_graph(device: str, *, dp_attention: bool) -> PrefillGraph:
    """The mode of "auto". Under data-parallel attention ranks differ in requests and contexts, which only metadata that
    is read at replay can follow.
    """
    return PrefillGraph.BREAKABLE if dp_attention else _MEASURED[device]


def choose_prefill_graph(
    asked: str, attention: AttentionBackend, backend: Backend, device: str, *, dp_attention: bool
) -> PrefillGraph:
    """The mode for an option. Raises ConfigError for a full graph of attention that cannot be captured."""
    if not backend.captures:
        return PrefillGraph.EAGER
    capturable = attention.can_capture(StepMode.EXTEND)
    if asked != "auto":
        if asked == PrefillGraph.FULL.value and not capturable:
            raise ConfigError(
                f"prefill_graph 'full' cannot capture {attention.name} attention; use 'breakable', which runs it"
            )
        return PrefillGraph(asked)
    chosen = default_prefill_graph(device, dp_attention=dp_attention)
    return chosen if capturable else PrefillGraph.BREAKABLE


@dataclass(frozen=True, slots=True)
class PrefillAbility:
    """What prefill graphs can do here; fixed at start, equal on every rank.

    limits: of the attention inside full graphs. chunk_tokens: keys of one prefix chunk, where they have such.
    eager_tail: the head runs behind the graph, so any row's logits can be had.
    """

    mode: PrefillGraph
    limits: CaptureLimits = _NO_LIMITS
    chunk_tokens: int = 0
    eager_tail: bool = True

    @classmethod
    def of(cls, mode: PrefillGraph, attention: AttentionBackend, max_num_tokens: int, slots: int) -> Self:
        """Limits bind full graphs only: elsewhere attention is never captured."""
        limits = attention.capture_limits if mode is PrefillGraph.FULL else CaptureLimits()
        return cls(mode, limits, max_num_tokens // slots if limits.prefix_chunks else 0)

    @property
    def variants(self) -> tuple[str, ...]:
        """All values of `prefix_variant`: a graph of each bucket is captured for each."""
        return ("", *(f"prefix{n}" for n in self.limits.prefix_chunks))


@dataclass(frozen=True, slots=True)
class ExtendFacts:
    """What a rank knows of its step, if it runs as a prefill; lengths in tokens.

    longest_context: KV of its longest request after the step; longest_prefix: before it. prompt_logits: some request
    wants the logits of all its rows.
    """

    mode: StepMode
    num_tokens: int
    bs: int
    longest_context: int
    longest_prefix: int
    prompt_logits: bool

    @classmethod
    def of_plan(cls, plan: StepPlan) -> Self:
        """Before the step. Decode rows count as extends of one, which they become beside a rank that prefills."""
        rows = plan.rows
        return cls(
            plan.mode if plan.mode.is_extend else StepMode.EXTEND,
            plan.num_tokens,
            len(rows),
            max((row.start + row.num_tokens for row in rows), default=0),
            max((row.start for row in rows), default=0),
            any(row.asks_prompt_logits for row in rows),
        )

    @classmethod
    def of_batch(cls, batch: ForwardBatch, *, prompt_logits: bool) -> Self:
        """For the forward."""
        prefix = batch.extend_prefix_lens
        return cls(
            batch.mode,
            batch.global_num_token_non_padded_cpu,
            batch.batch_size,
            int(batch.seq_lens_cpu.max()) if batch.batch_size else 0,
            int(prefix.max()) if prefix is not None and batch.batch_size else 0,
            prompt_logits,
        )


def can_replay_locally(facts: ExtendFacts, rules: ShapeRules, ability: PrefillAbility) -> str:
    """Why no prefill graph may serve the step, as far as this rank alone can tell; empty when one may.

    A rank without rows has no objection: what its being idle means for the others is decided with their counts.
    """
    if ability.mode is PrefillGraph.EAGER:
        return "prefill graphs are off"
    if facts.num_tokens == 0:
        return ""
    limits = ability.limits
    if facts.prompt_logits and not ability.eager_tail:
        return "prompt logits"
    if limits.max_context is not None and facts.longest_context > limits.max_context:
        return "context above the limit of captured attention"
    if limits.prefix_chunks and _chunks(facts, ability) > max(limits.prefix_chunks):
        return "too many prefix chunks"
    return extend_reject(facts.mode, facts.num_tokens, facts.bs, rules)


def prefix_variant(facts: ExtendFacts, ability: PrefillAbility) -> str:
    """The variant in the graph key: the smallest captured number of prefix chunks that covers the longest prefix."""
    needed = _chunks(facts, ability)
    fitting = [n for n in ability.limits.prefix_chunks if n >= needed]
    return f"prefix{min(fitting)}" if needed and fitting else ""


def _chunks(facts: ExtendFacts, ability: PrefillAbility) -> int:
    return -(-facts.longest_prefix // ability.chunk_tokens) if ability.chunk_tokens else 0


def prefill_slots(
    asked: int | None, mode: PrefillGraph, limits: CaptureLimits, max_bs: int, tokens: int
) -> int:
    """Requests that a prefill graph holds at most: few only where captured attention works for every slot."""
    if mode is not PrefillGraph.FULL:
        return max_bs
    if asked is None:
        asked = max(1, tokens // TOKENS_PER_SLOT) if limits.request_slots else max_bs
    return min(asked, max_bs)


def prefill_backend(mode: PrefillGraph, backend: SegmentBackend | EagerBackend, live: LiveStep) -> Backend:
    """The backend of prefill steps, over that of decode steps."""
    if mode is PrefillGraph.EAGER or isinstance(backend, EagerBackend):
        return EagerBackend()
    return backend if mode is PrefillGraph.FULL else BreakableBackend(backend, live)
