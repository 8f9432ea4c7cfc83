"""Ranks that wait for each other before there is any group: whoever is gone, or does not come, is named at once."""

from __future__ import annotations

import threading
import time

import pytest
from torch._C._distributed_c10d import HashStore, TCPStore

from ostinato.errors import ParallelError
from ostinato.parallel import meeting
from ostinato.parallel.meeting import wait_for_ranks


def nothing() -> None:
    return


def test_it_ends_when_the_last_key_is_there() -> None:
    store = HashStore()
    store.set("a", "1")
    threading.Timer(0.1, lambda: store.set("b", "1")).start()
    wait_for_ranks(store, {"a": 0, "b": 1}, nothing)
    assert store.check(["b"])
    wait_for_ranks(store, {}, nothing)


def test_what_the_check_knows_ends_it() -> None:
    looks = iter(range(3))

    def check() -> None:
        if next(looks) == 2:
            raise ParallelError("rank 1 was killed by SIGSEGV")

    began = time.monotonic()
    with pytest.raises(ParallelError, match="rank 1 was killed by SIGSEGV"):
        wait_for_ranks(HashStore(), {"machine/1": 1}, check)
    assert time.monotonic() - began < meeting.MEETING_S / 10


def test_ranks_that_do_not_come_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "MEETING_S", 0.05)
    store = HashStore()
    store.set("machine/1", "1")
    with pytest.raises(ParallelError, match=r"rank 2, 3 did not come within 0\.05 s"):
        wait_for_ranks(store, {f"machine/{rank}": rank for rank in (1, 2, 3)}, nothing)


def test_a_meeting_point_that_is_gone_is_rank_0() -> None:
    server = TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", server.port, 2, False)
    assert not client.check(["layout"])
    del server
    with pytest.raises(ParallelError, match="rank 0, where the ranks meet, is gone"):
        wait_for_ranks(client, {"layout": 0}, nothing)
