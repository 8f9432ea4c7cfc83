"""What ranks do in `test_collectives.py`; a module of its own, so that fresh processes can import it."""

from __future__ import annotations

import os
import signal
import time

import torch

from ostinato.parallel.collectives import all_reduce
from ostinato.parallel.rendezvous import World


def operations(world: World) -> tuple[str, list[list[float]]]:
    """Every operation once, on each group; sums whose bits depend on the order."""
    group, attn = world.world, world.attn
    rank, size = group.rank, group.size
    gathered = torch.empty(size, 2, 3, dtype=torch.bfloat16)
    group.all_gather(torch.full((2, 3), float(rank), dtype=torch.bfloat16), gathered)
    empty = torch.empty(size, 0, 3)
    group.all_gather(torch.empty(0, 3), empty)
    uneven = torch.empty(sum(range(size)), 1)
    group.all_gather_rows(torch.full((rank, 1), float(rank)), range(size), uneven)
    send = torch.full((rank + 1, 2), float(rank))
    # All rows go to the last rank.
    counts = [0] * (size - 1) + [rank + 1]
    expected = [0] * size if rank < size - 1 else [r + 1 for r in range(size)]
    recv = torch.empty(sum(expected), 2)
    group.all_to_all(send, counts, recv, expected)
    told = torch.full((4,), float(rank))
    group.broadcast(told, 1)
    total = torch.empty(1)
    all_reduce(group, torch.tensor([(1e8, 1.0, -1e8, 0.25)[rank]]), total, torch.empty(size, 1))
    near = torch.empty(attn.size, 1)
    attn.all_gather(torch.tensor([float(rank)]), near)
    world.control.barrier()
    return world.transport, [
        gathered.float().flatten().tolist(),
        uneven.flatten().tolist(),
        recv.flatten().tolist(),
        told.tolist(),
        total.tolist(),
        near.flatten().tolist(),
    ]


def kill_one(world: World, victim: int) -> None:
    """Rank `victim` is killed in the middle of a step; the others go on."""
    group = world.world
    group.barrier()
    if group.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(3):
        group.all_gather(torch.zeros(4), torch.zeros(group.size, 4))
        time.sleep(0.01)
