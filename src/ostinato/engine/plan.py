"""One step as it is planned: which rows of which sequences run, and how.

What the scheduler says to the worker. Knows nothing of how rows are chosen or computed. msgspec structs, since one is
made per row and step and a frozen dataclass costs five times as much. Invariant: a plan is a value; its sequences move
on, it does not.
"""

from __future__ import annotations

import msgspec

from ostinato.engine.sequence import Sequence
from ostinato.padding import StepMode


class ScheduledSequence(msgspec.Struct, frozen=True):
    """Rows [start, start + num_tokens) of a sequence, run in this step."""

    sequence: Sequence
    start: int
    num_tokens: int
    prefill: bool

    @property
    def samples(self) -> bool:
        """Whether its last row is the last known token, so that the step yields a next one."""
        return self.start + self.num_tokens == self.sequence.num_tokens

    @property
    def chooses(self) -> bool:
        """Whether that next one is chosen here."""
        return self.samples and self.sequence.max_new_tokens > 0

    @property
    def asks_prompt_logits(self) -> bool:
        """Whether the logits of all its rows are wanted."""
        return self.sequence.wants_prompt_logits and self.start < self.sequence.prompt_len

    @property
    def num_logit_rows(self) -> int:
        """Of how many rows, its last ones, logits are wanted."""
        return self.num_tokens if self.asks_prompt_logits else int(self.chooses)


class StepPlan(msgspec.Struct, frozen=True):
    """One step: its mode and its rows, in order. held: requests that could decode next and wait for a prefill now."""

    mode: StepMode
    rows: tuple[ScheduledSequence, ...]
    held: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)

    @property
    def logit_rows(self) -> list[int]:
        """Rows of the step whose logits are wanted, in order."""
        found: list[int] = []
        end = 0
        for row in self.rows:
            end += row.num_tokens
            found += range(end - row.num_logit_rows, end)
        return found
