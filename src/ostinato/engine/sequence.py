"""The one mutable record of the engine: a sequence that is being completed, owned by the scheduler.

    WAITING ──admit──▶ RUNNING ──finish/abort──▶ FINISHED
       ▲──────retract──────┘

Positions: `num_tokens` tokens are known (prompt and output), the KV of the first `num_computed` is in `pages`, of which
the first `num_tree_pages` belong to the prefix tree and are locked at `node`, the rest to the sequence.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from ostinato.engine.request import FinishReason, Request
from ostinato.kv.radix import Node
from ostinato.text.grammar import Matcher


class SequenceState(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """Completion `index` of `request`. `arrival` orders the queue; `leader` is the sibling whose prefill it awaits.

    rule: temperature, top-k, top-p and min-p. by_step: the step chooses its tokens, from logits as they are; bare: and
    nothing more is asked about them. matcher: its place in the form that its request asks for; it has been told all of
    `output_token_ids`. problem: why it cannot go on.
    """

    request: Request
    index: int
    arrival: int
    seed: int
    page_size: int
    max_new_tokens: int
    stop_token_ids: frozenset[int]
    leader: Sequence | None = None
    rule: tuple[float, int, float, float] = (0.0, 0, 1.0, 0.0)
    by_step: bool = True
    bare: bool = False
    matcher: Matcher | None = None
    state: SequenceState = SequenceState.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_cached: int = 0
    retractions: int = 0
    pages: list[int] = field(default_factory=list)
    num_tree_pages: int = 0
    node: Node | None = None
    row: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    problem: str | None = None
    prompt_len: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_len = len(self.request.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens known: prompt and output."""
        return self.prompt_len + len(self.output_token_ids)

    @property
    def remaining_new(self) -> int:
        """Tokens that it may still generate."""
        return max(self.max_new_tokens - len(self.output_token_ids), 0)

    @property
    def wants_prompt_logits(self) -> bool:
        """Whether its prefill must yield logits of every prompt position (asked of the first completion only)."""
        asked = self.index == 0 and self.request.params.prompt_logprobs is not None
        return asked and not self.output_token_ids  # once it has generated, they were all there

    @property
    def tokens_without_pages(self) -> int:
        """Known tokens that no page has been taken for (the rest of a prompt prefilled in chunks)."""
        return max(self.num_tokens - len(self.pages) * self.page_size, 0)

    @property
    def queue_key(self) -> tuple[int, int]:
        return self.request.priority, self.arrival

    def slot(self, position: int) -> int:
        """KV slot of a position that has a page."""
        page, offset = divmod(position, self.page_size)
        return self.pages[page] * self.page_size + offset

    def tokens(self, start: int, stop: int) -> list[int]:
        """Token ids of positions [start, stop)."""
        prompt = self.request.prompt_token_ids
        head = list(prompt[start:stop])
        tail_from, tail_to = max(start - len(prompt), 0), stop - len(prompt)
        return head + self.output_token_ids[tail_from:tail_to] if tail_to > 0 else head
