"""How long a collective takes between rank processes of this machine: shared memory beside gloo, in one run.

    python bench/collectives.py [--ranks 2] [--rounds 5]

Rounds of the two transports alternate; the table gives the median of all calls in microseconds, and gloo over shared
memory. Payloads are those of a decode step: a row of counts, some rows of hidden states.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from typing import Any

import torch
from torch.distributed import PrefixStore, TCPStore

from ostinato.parallel.collectives import Group, all_reduce
from ostinato.parallel.rendezvous import join
from ostinato.parallel.topology import Topology
from ostinato.parallel.watchdog import Watchdog

CALLS = 200
PAYLOADS = (56, 4 << 10, 64 << 10, 1 << 20)
"""Bytes of each rank: the step sync's row, one and sixteen rows of 2048 bf16 values, a prefill chunk."""


def _calls(group: Group, op: str, nbytes: int) -> list[float]:
    x = torch.zeros(nbytes // 4)
    gathered, out = torch.zeros(group.size, nbytes // 4), torch.zeros(nbytes // 4)
    times = []
    for _ in range(CALLS if nbytes < 1 << 20 else CALLS // 10):
        began = time.perf_counter()
        if op == "all_gather":
            group.all_gather(x, gathered)
        else:
            all_reduce(group, x, out, gathered)
        times.append((time.perf_counter() - began) * 1e6)
    return times


def _rank(rank: int, size: int, port: int, rounds: int, pipe: Any) -> None:
    torch.set_num_threads(1)
    layout, dog = Topology(tp=size, rank=rank), Watchdog(60.0)
    store = TCPStore("127.0.0.1", port, size, False)
    worlds = {}
    for name in ("shm", "gloo"):
        worlds[name] = join(layout, PrefixStore(name, store), dog, transport=name, host="127.0.0.1")
    found: dict[tuple[str, str, int], list[float]] = {}
    for _ in range(rounds):
        for op in ("all_gather", "all_reduce"):
            for nbytes in PAYLOADS:
                for name, world in worlds.items():
                    world.world.barrier()
                    found.setdefault((op, name, nbytes), []).extend(_calls(world.world, op, nbytes))
    pipe.send({key: statistics.median(times) for key, times in found.items()})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    store = TCPStore("127.0.0.1", 0, options.ranks, True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(False)
    inputs = [(r, options.ranks, store.port, options.rounds, there) for r in range(options.ranks)]
    processes = [context.Process(target=_rank, args=each) for each in inputs]
    for process in processes:
        process.start()
    found = here.recv()
    for process in processes:
        process.join()
    print(f"{options.ranks} ranks, median microseconds of a call")
    print(f"{'operation':12}{'bytes':>10}{'shm':>10}{'gloo':>10}{'gloo/shm':>10}")
    for op in ("all_gather", "all_reduce"):
        for nbytes in PAYLOADS:
            shm, gloo = found[op, "shm", nbytes], found[op, "gloo", nbytes]
            print(f"{op:12}{nbytes:>10}{shm:>10.1f}{gloo:>10.1f}{gloo / shm:>10.1f}")


if __name__ == "__main__":
    main()
