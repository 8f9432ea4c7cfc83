"""The processes of a parallel engine: rank 0 is the caller's own, it starts the others and ends them.

    rank 0 ──stdin: one JSON line, then silence──▶ `python -m ostinato.engine.rank`    its end means that rank 0 is gone

Knows nothing of models. Invariants: no rank outlives rank 0, however that one ends; when a rank ends by itself, rank 0
hears of it the next time it waits, says which one and how, and ends the rest.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from dataclasses import asdict

from torch._C._distributed_c10d import Store, TCPStore

from ostinato.config import EngineConfig
from ostinato.engine.program import RANK_MODULE
from ostinato.errors import ParallelError
from ostinato.parallel.rendezvous import World, join
from ostinato.parallel.topology import Topology
from ostinato.parallel.watchdog import Watchdog

LOCALHOST = "127.0.0.1"
STOP_TIMEOUT_S = 10.0


class RankProcesses:
    """Ranks 1 to tp - 1 of a layout, on this machine; each runs `module`."""

    def __init__(self, topology: Topology, config: EngineConfig, module: str = RANK_MODULE) -> None:
        store = TCPStore(LOCALHOST, 0, topology.tp, True, wait_for_workers=False)
        self._store = store
        self._processes: list[subprocess.Popen[bytes]] = []
        # Also when the engine is collected, or the interpreter ends, without a close.
        self.end = weakref.finalize(self, _kill, self._processes)
        for rank in range(1, topology.tp):
            self._processes.append(_spawn(topology.at(rank), config, store.port, module))

    @property
    def store(self) -> Store:
        return self._store

    @property
    def pids(self) -> tuple[int, ...]:
        """Of ranks 1, 2, ..."""
        return tuple(process.pid for process in self._processes)

    def check(self) -> None:
        """Raise ParallelError, and end all ranks, when one of them has ended."""
        for rank, process in enumerate(self._processes, start=1):
            status = process.poll()
            if status is not None:
                self.kill()
                raise ParallelError(
                    f"rank {rank} {_how(status)}; all ranks were ended, see its output and start again"
                )

    def wait(self) -> None:
        """Wait, for a while, for ranks that were told to stop; then end those that did not."""
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0.0))
        self.kill()

    def kill(self) -> None:
        """End all ranks now."""
        self.end()


def _spawn(topology: Topology, config: EngineConfig, port: int, module: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", module],
        stdin=subprocess.PIPE,
        stdout=sys.stderr.fileno() if _has_fileno() else subprocess.DEVNULL,  # stdout belongs to rank 0
        start_new_session=True,  # Ctrl-C reaches rank 0 alone
    )
    assert process.stdin is not None
    sizes = {"tp": topology.tp, "dp": topology.dp, "ep": topology.ep, "rank": topology.rank}
    launch = {"topology": sizes, "config": asdict(config), "port": port}
    process.stdin.write(json.dumps(launch).encode() + b"\n")
    process.stdin.flush()
    return process


def _has_fileno() -> bool:
    try:
        sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):
        return False
    return True


def _kill(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.kill()
    for process in processes:
        process.wait()
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()


def _how(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    return f"was killed by {signal.Signals(-status).name}"


def own_threads(config: EngineConfig, ranks: int, cores: int) -> int:
    """CPU threads of one of so many ranks of a machine: as asked, else its share of the cores."""
    return config.threads or max(cores // ranks, 1)


def meet(topology: Topology, store: Store, config: EngineConfig, watchdog: Watchdog) -> World:
    """Join the groups of a layout; local ranks meet on this machine alone."""
    return join(topology, store, watchdog, transport=config.transport, host=LOCALHOST)
