"""What data-parallel ranks tell each other before a step, and what follows from it for all of them.

    own vote ──all-gather──▶ votes of the leaders ──agree──▶ GroupStep: counts, extend or decode, graph or eager

One small all-gather; no other word is exchanged about a step. Knows nothing of batches or graphs. Invariant: `agree` is
a pure function of gathered votes, so what it decides is the same on every rank, and a rank without rows takes part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ostinato.errors import ParallelError
from ostinato.padding import StepMode
from ostinato.parallel.collectives import Group
from ostinato.parallel.topology import Topology

_MODES = (StepMode.DECODE, StepMode.EXTEND, StepMode.MIXED, StepMode.IDLE)


@dataclass(frozen=True, slots=True)
class StepVote:
    """One rank's row (docs/behaviour.md, section 1.9).

    num_tokens: real rows, 0 when idle. num_logits: rows whose logits are wanted. decode_graph, prefill_graph: whether
    nothing on this rank speaks against replaying a graph of that kind; an idle rank has no objection. held: requests
    that could decode next, and wait because this rank prefills.
    """

    mode: StepMode = StepMode.IDLE
    num_tokens: int = 0
    num_logits: int = 0
    decode_graph: bool = True
    prefill_graph: bool = True
    held: int = 0

    def row(self) -> list[int]:
        """As int64 values, in the order of the reference and `held`; two-batch overlap is never in the way."""
        extend = int(self.mode.is_extend)
        mode = _MODES.index(self.mode)
        votes = int(self.decode_graph), int(self.prefill_graph)
        return [self.num_tokens, self.num_logits, votes[0], extend, 1, mode, votes[1], self.held]

    @classmethod
    def of(cls, row: Sequence[int]) -> StepVote:
        return cls(_MODES[row[5]], row[0], row[1], bool(row[2]), bool(row[6]), row[7])


WORDS = 8


@dataclass(frozen=True, slots=True)
class GroupStep:
    """What all ranks do next. `num_tokens`: real rows of every data-parallel rank.

    is_extend: some rank prefills, so all run an extend step: decode rows join as extends of one token.
    reject: why no graph may serve the step, for all ranks alike; empty otherwise. decode_next: it keeps some request
    of some rank from decoding, so the next step is left to decode rows, on all ranks.
    """

    num_tokens: tuple[int, ...]
    num_logits: tuple[int, ...]
    is_extend: bool
    reject: str = ""
    decode_next: bool = False

    @property
    def idle(self) -> bool:
        """No rank has anything to run, so none runs a forward."""
        return max(self.num_tokens) == 0

    def mode(self, own: StepMode) -> StepMode:
        """The mode that a rank runs; its own one stays what results are read with."""
        if self.is_extend:
            return own if own.is_extend else StepMode.EXTEND
        return StepMode.DECODE


def agree(votes: Sequence[StepVote]) -> GroupStep:
    """The decision from the votes of all data-parallel ranks."""
    is_extend = any(vote.mode.is_extend for vote in votes)
    graph = [vote.prefill_graph if is_extend else vote.decode_graph for vote in votes]
    against = [str(rank) for rank, vote in enumerate(graph) if not vote]
    return GroupStep(
        num_tokens=tuple(vote.num_tokens for vote in votes),
        num_logits=tuple(vote.num_logits for vote in votes),
        is_extend=is_extend,
        reject=f"data-parallel rank {', '.join(against)} votes against a graph" if against else "",
        decode_next=is_extend and any(vote.held for vote in votes),
    )


class StepSync:
    """Gathers votes over `group`, all ranks of `topology`; its buffers are made once."""

    __slots__ = ("_all", "_group", "_own", "_topology", "rounds")

    def __init__(self, topology: Topology, group: Group) -> None:
        self._topology = topology
        self._group = group
        self._own = torch.zeros(WORDS, dtype=torch.int64)
        self._all = torch.zeros(group.size, WORDS, dtype=torch.int64)
        self.rounds = 0

    def gather(self, vote: StepVote) -> GroupStep:
        """Exchange votes; with one data-parallel rank the own vote is the result, and nobody is asked.

        Raises ParallelError when ranks that share requests do not want to run the same step.
        """
        if self._topology.dp == 1:
            return agree((vote,))
        self.rounds += 1
        self._own.copy_(torch.tensor(vote.row(), dtype=torch.int64))
        self._group.all_gather(self._own, self._all)
        rows = self._all.tolist()
        for rank, row in enumerate(rows):
            leader = self._topology.ranks_of_dp(self._topology.at(rank).attn_dp_rank)[0]
            if row != rows[leader]:
                raise ParallelError(
                    f"rank {rank} wants to run {row[0]} tokens, rank {leader}, which shares its requests, "
                    f"{rows[leader][0]}; the ranks are out of step, restart them"
                )
        return agree([StepVote.of(rows[rank]) for rank in self._topology.leaders])
