"""Signs of life: who is named, and who is not."""

from __future__ import annotations

import time

import pytest
from torch.distributed import TCPStore

from ostinato.errors import ParallelError
from ostinato.parallel.heartbeat import MISSED, Heartbeat, looked


def test_looks_without_a_sign_are_counted_by_rank() -> None:
    old, new = [b"1", b"1", b"1"], [b"1", b"2", b"1"]
    assert looked([0, 3, 4], old, new, 0) == [0, 0, 5], (
        "oneself is never missing, whoever gives a sign is not"
    )
    assert looked([0, 3, 4], old, new, 1) == [1, 0, 5]


def test_a_store_that_gives_no_answer_is_rank_0s() -> None:
    assert looked([2, 3, 4], [b""] * 3, None, 1) == [3, 3, 4]
    assert looked([2, 3, 4], [b""] * 3, None, 0) == [2, 3, 4]


def test_a_long_pause_of_ones_own_is_one_look() -> None:
    """Whoever was stopped itself finds old signs once, and new ones soon."""
    missed = looked([0, 0], [b"1", b"1"], [b"9", b"1"], 0)
    assert max(missed) < MISSED
    assert looked(missed, [b"9", b"1"], [b"10", b"2"], 0) == [0, 0]


def test_a_silent_rank_is_named_by_all_others() -> None:
    store = TCPStore("127.0.0.1", 0, 3, True, wait_for_workers=False)
    told: list[str] = []
    ranks = [Heartbeat(store, rank, 3, 1.0) for rank in range(3)]
    for rank in ranks[:2]:
        rank.on_missing(lambda error: told.append(str(error)))
        rank.start()
    deadline = time.monotonic() + 30
    while len(told) < 2:
        assert time.monotonic() < deadline, "nobody was named"
        time.sleep(0.02)
    for rank in ranks:
        rank.stop()
    assert all("rank 2 gave no sign of life within 1 s" in text for text in told)
    with pytest.raises(ParallelError, match="rank 2 gave"):
        ranks[0].check()
    ranks[0].on_missing(lambda error: told.append("late"))
    assert told[2:] == ["late"], "who asks late hears of it at once"
    ranks[2].check()
