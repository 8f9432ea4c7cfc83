"""Tests that need several processes: `run_ranks` starts them, and ends them whatever happens."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from ostinato.parallel.rendezvous import World, join
from ostinato.parallel.topology import Topology
from ostinato.parallel.watchdog import Watchdog

PATIENCE_S = 60
GONE = "gone"
Work = Callable[..., Any]


def _enter(
    work: Work, layout: Topology, port: int, transport: str, timeout_s: float, pipe: Connection, args: Any
) -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, layout.tp, False)
    try:
        world = join(layout, store, Watchdog(timeout_s), transport=transport, host="127.0.0.1")
        pipe.send((True, work(world, *args)))
        world.close()
    except BaseException as error:
        pipe.send((False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))


def _result(pipe: Connection) -> Any:
    assert pipe.poll(PATIENCE_S), "a rank gave no result"
    try:
        return pipe.recv()[1]
    except EOFError:
        return GONE


RunRanks = Callable[..., list[Any]]


@pytest.fixture
def run_ranks() -> RunRanks:
    """run_ranks(work, layout, *args) -> what work(world, *args) returned on every rank, or its error text."""

    def run(
        work: Callable[[World], Any],
        layout: Topology,
        *args: Any,
        transport: str = "auto",
        timeout_s: float = 20.0,
    ) -> list[Any]:
        context = multiprocessing.get_context("spawn")
        store = TCPStore("127.0.0.1", 0, layout.tp, True, wait_for_workers=False)
        pipes, ends, processes = [], [], []
        for rank in range(layout.tp):
            here, there = context.Pipe(False)
            inputs = (work, layout.at(rank), store.port, transport, timeout_s, there, args)
            processes.append(context.Process(target=_enter, args=inputs))
            pipes.append(here)
            ends.append(there)
        try:
            for process, end in zip(processes, ends, strict=True):
                process.start()
                end.close()
            return [_result(pipe) for pipe in pipes]
        finally:
            for process in processes:
                process.kill()
                process.join()

    return run
