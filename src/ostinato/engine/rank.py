"""A rank's own process: `python -m ostinato.engine.rank`, started by rank 0, never by a person.

    stdin: one JSON line (layout, config, port of the store), then silence; its end means that rank 0 is gone
    loop:  wait for a round ─▶ carry it out ─▶ step ─▶ send news

Knows nothing of users. Invariants: it never outlives rank 0; whatever goes wrong here is told to the other ranks before
this one ends, so that nobody waits for it.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
from itertools import chain, repeat
from typing import Any

from torch._C._distributed_c10d import TCPStore

from ostinato.config import EngineConfig
from ostinato.engine.engine import Engine
from ostinato.engine.load_reports import LoadReports
from ostinato.engine.program import RankProgram
from ostinato.engine.progress import Report, bars
from ostinato.engine.ranks import LOCALHOST, meet
from ostinato.engine.rounds import Courier, News, Round, accepted
from ostinato.errors import OstinatoError, ParallelError
from ostinato.parallel.rendezvous import World
from ostinato.parallel.topology import Topology
from ostinato.parallel.watchdog import Watchdog

FAILED = 1
RANK_0_FIRST = 2
"""Looks that rank 0 has to see for itself that a rank is missing, and to end the others, before they end themselves."""


def main(program: RankProgram | None = None) -> int:
    """Serve one rank until told to stop; the exit status. program: what rank 0 may call."""
    launch: dict[str, Any] = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_exit_at_end_of_stdin, daemon=True).start()
    config = EngineConfig(**launch["config"]).replace(progress=False)
    topology = Topology(**launch["topology"])
    store = TCPStore(LOCALHOST, launch["port"], topology.tp, False)
    try:
        world = meet(topology, store, config, Watchdog(float(config.rank_timeout)))
    except OstinatoError as error:
        print(f"rank {topology.rank}: {error}", file=sys.stderr, flush=True)
        return FAILED
    return run_rank(config, world, LoadReports(topology, store), program)


def run_rank(
    config: EngineConfig, world: World, reports: LoadReports, program: RankProgram | None = None
) -> int:
    """Load this rank's part of the model and follow rank 0; the exit status."""
    topology = world.topology

    def end(error: ParallelError) -> None:
        if world.heartbeat is not None:
            world.heartbeat.pause(RANK_0_FIRST)
        print(f"rank {topology.rank}: {error}", file=sys.stderr, flush=True)
        os._exit(
            FAILED
        )  # the main thread waits in vain; to say that this rank failed would hide which one did

    world.on_missing(end)
    try:
        with bars(shown=False) as report:
            engine = _loaded(config, report, world, reports, program)
        if engine is None:
            return FAILED
        gc.freeze()  # as rank 0's process does, whose steps wait for these
        follow(engine, world, float(config.rank_timeout))
    except OstinatoError as error:
        print(f"rank {topology.rank}: {error}", file=sys.stderr, flush=True)
        world.fail()
        return FAILED
    except BaseException:
        world.fail()
        raise
    world.close()
    return 0


def _loaded(
    config: EngineConfig, report: Report, world: World, reports: LoadReports, program: RankProgram | None
) -> Engine | None:
    """The engine of this rank; None when rank 0 tells why there is none."""
    try:
        engine = Engine(config, report, world, program)
    except OstinatoError as error:
        if not reports.failed(error):
            raise
        world.fail()
        return None
    reports.loaded()
    return engine


def follow(engine: Engine, world: World, timeout_s: float | None = None) -> None:
    """Carry out rank 0's rounds until it says stop; but for the first, they end within `timeout_s` once begun."""
    courier, topology = Courier(world.control), world.topology
    limits = chain((None,), repeat(timeout_s))  # in the first, other ranks may still load
    for limit in limits:
        world.wait_for(None)
        round_ = courier.follow()
        world.wait_for(limit)
        if round_.op == "stop":
            return
        carry_out(engine, round_, topology.attn_dp_rank)
        news = News()
        if round_.op == "call":
            news.answer = engine.run_program(round_.message)
        elif round_.op == "step":
            deltas = engine.step_deltas()
            if topology.is_leader:
                news.deltas = deltas
        else:
            news.expert_rows = engine.expert_rows()
            if topology.is_leader:
                news.stats = json.dumps(engine.stats()).encode()
        news.digest = engine.digest
        courier.gather(news)


def carry_out(engine: Engine, round_: Round, dp_rank: int) -> None:
    """Take the requests of this rank's group, and end those that were aborted; in the same order on all its ranks."""
    for submit in accepted(round_.submits, dp_rank):
        engine.enqueue(submit.request())
    for request_id in round_.aborts:
        engine.abort(request_id)


def _exit_at_end_of_stdin() -> None:
    while os.read(0, 4096):
        pass
    os._exit(FAILED)


if __name__ == "__main__":
    sys.exit(main())
