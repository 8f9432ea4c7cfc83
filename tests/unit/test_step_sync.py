"""What data-parallel ranks agree on: pure functions of gathered votes, and the worked numbers of the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from ostinato.errors import ParallelError
from ostinato.padding import (
    Buckets,
    DpCounts,
    DpPaddingMode,
    ShapeRules,
    StepMode,
    decide_shape,
    gathered_rows,
    pad_dp_counts,
)
from ostinato.parallel.step_sync import GroupStep, StepSync, StepVote, agree
from ostinato.parallel.topology import Topology

DECODE, EXTEND, MIXED, IDLE = StepMode.DECODE, StepMode.EXTEND, StepMode.MIXED, StepMode.IDLE
RULES = ShapeRules(Buckets((1, 2, 4, 8)), Buckets((4, 8, 16)), decode_gather=True, extend_gather=True)


@dataclass
class Scripted:
    """A group whose other ranks answer with fixed rows."""

    rows: Sequence[Sequence[int]]
    rank: int = 0
    calls: int = 0

    @property
    def size(self) -> int:
        return len(self.rows)

    name: str = "scripted"

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self.calls += 1
        out.copy_(torch.tensor(self.rows))
        out[self.rank] = x


def test_rows_come_back_as_votes() -> None:
    votes = StepVote(), StepVote(EXTEND, 7, 2, False, True, held=2), StepVote(DECODE, 3, 3, True, False)
    assert [StepVote.of(vote.row()) for vote in votes] == list(votes)
    assert StepVote().row() == [0, 0, 1, 0, 1, 3, 1, 0], (
        "the reference's row of an inactive rank, that votes for graphs"
    )


def test_any_extend_makes_all_extend() -> None:
    step = agree([StepVote(DECODE, 3), StepVote(EXTEND, 9), StepVote()])
    assert step.is_extend
    assert step.num_tokens == (3, 9, 0)
    assert [step.mode(m) for m in (DECODE, EXTEND, MIXED, IDLE)] == [EXTEND, EXTEND, MIXED, EXTEND]
    step = agree([StepVote(DECODE, 3), StepVote()])
    assert [step.mode(m) for m in (DECODE, IDLE)] == [DECODE, DECODE]
    assert not step.idle
    assert agree([StepVote(), StepVote()]).idle


def test_one_vote_against_is_enough_and_counts_for_its_kind_only() -> None:
    assert not agree([StepVote(DECODE, 1), StepVote(DECODE, 1, prefill_graph=False)]).reject
    assert "rank 1 votes" in agree([StepVote(DECODE, 1), StepVote(DECODE, 1, decode_graph=False)]).reject
    assert "rank 0 votes" in agree([StepVote(EXTEND, 1, prefill_graph=False), StepVote()]).reject


def test_one_rank_asks_nobody() -> None:
    group = Scripted([[0] * 7])
    sync = StepSync(Topology(), group)
    assert sync.gather(StepVote(DECODE, 5)) == GroupStep((5,), (0,), False)
    assert group.calls == 0


def test_leaders_speak_for_their_groups() -> None:
    one, two = StepVote(DECODE, 5, 5), StepVote(EXTEND, 8, 1)
    rows = [one.row(), one.row(), two.row(), two.row()]
    sync = StepSync(Topology(tp=4, dp=2), Scripted(rows))
    assert sync.gather(one) == GroupStep((5, 8), (5, 1), True)
    rows[3] = StepVote(EXTEND, 7, 1).row()
    with pytest.raises(
        ParallelError, match="rank 3 wants to run 7 tokens, rank 2, which shares its requests, 8"
    ):
        StepSync(Topology(tp=4, dp=2), Scripted(rows)).gather(one)


def test_a_prefill_that_holds_up_answers_is_followed_by_a_turn_of_decode_rows() -> None:
    assert agree([StepVote(EXTEND, 8, held=3), StepVote(DECODE, 1)]).decode_next
    assert agree([StepVote(), StepVote(EXTEND, 8, held=1)]).decode_next, "of any rank, for all ranks"
    assert not agree([StepVote(EXTEND, 8), StepVote(DECODE, 1)]).decode_next, "decode rows have joined"
    assert not agree([StepVote(DECODE, 1), StepVote()]).decode_next, "never twice in a row"


@pytest.mark.parametrize(
    ("counts", "attn_tp", "mode", "padded", "chosen"),
    [
        ((3, 0), 2, None, (4, 4), DpPaddingMode.MAX_LEN),
        ((3, 0), 2, DpPaddingMode.SUM_LEN, (4, 0), DpPaddingMode.SUM_LEN),
        ((8, 0, 0, 0), 1, None, (8, 0, 0, 0), DpPaddingMode.SUM_LEN),
        ((8, 8, 0, 0), 1, None, (8, 8, 8, 8), DpPaddingMode.MAX_LEN),
    ],
)
def test_worked_counts(
    counts: tuple[int, ...],
    attn_tp: int,
    mode: DpPaddingMode | None,
    padded: tuple[int, ...],
    chosen: DpPaddingMode,
) -> None:
    """docs/behaviour.md, section 1.8; twice, since the unpadded counts must survive."""
    first = pad_dp_counts(counts, attn_tp_size=attn_tp, mode=mode)
    again = pad_dp_counts(first.unpadded, attn_tp_size=attn_tp, mode=mode)
    assert first == again == DpCounts(chosen, counts, padded)


@pytest.mark.parametrize(
    ("mode", "counts", "widths", "padding"),
    [
        (DECODE, (3, 0), (4, 4), DpPaddingMode.MAX_LEN),
        (DECODE, (3, 7), (8, 8), DpPaddingMode.MAX_LEN),
        (DECODE, (9, 1), (9, 9), DpPaddingMode.MAX_LEN),
        (EXTEND, (6, 5), (8, 8), DpPaddingMode.MAX_LEN),
        (EXTEND, (6, 0), (6, 0), DpPaddingMode.SUM_LEN),
        (EXTEND, (17, 5), (17, 5), DpPaddingMode.SUM_LEN),
        (EXTEND, (16, 1), (16, 1), DpPaddingMode.SUM_LEN),
    ],
)
def test_every_rank_knows_all_widths(
    mode: StepMode, counts: tuple[int, ...], widths: tuple[int, ...], padding: DpPaddingMode
) -> None:
    """A graph runs all ranks at one bucket; an eager extend at exact rows; a rank with 0 rows keeps extends eager."""
    for rank in range(len(counts)):
        shape = decide_shape(mode, counts, min(counts[rank], 1), RULES, dp_rank=rank)
        found = gathered_rows(shape, RULES)
        assert found == DpCounts(padding, counts, widths)
        assert shape.padded_num_tokens == widths[rank]
