"""How ranks find each other: a key-value store, and the groups that a layout needs, made over the best transport.

    control   all ranks; waits for ever, since between two calls of a user nothing has to happen
    world     all ranks; what a step gathers
    attn      the ranks that split the attention heads of one data-parallel group

Ranks on one machine share memory, others use gloo. Knows nothing of models, and starts no process. Invariant: every
rank makes the same groups in the same order, and all of them take the same transport.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch._C._distributed_c10d import PrefixStore, Store

from ostinato.errors import ConfigError, ParallelError
from ostinato.parallel.collectives import Group, SingleGroup
from ostinato.parallel.distributed import GlooGroup
from ostinato.parallel.heartbeat import Heartbeat
from ostinato.parallel.meeting import wait_for_ranks
from ostinato.parallel.shm import (
    DEFAULT_CAPACITY,
    ShmGroup,
    create_memory,
    memory_bytes,
    shm_supported,
)
from ostinato.parallel.topology import Topology
from ostinato.parallel.watchdog import Watchdog


@dataclass(frozen=True, slots=True)
class World:
    """This rank's place and its groups, and the signs of life that it gives and watches for."""

    topology: Topology
    control: Group
    world: Group
    attn: Group
    transport: str = "single"
    heartbeat: Heartbeat | None = None

    def close(self) -> None:
        if self.heartbeat is not None:
            self.heartbeat.stop()
        for group in (self.control, self.world, self.attn):
            group.close()

    def wait_for(self, timeout_s: float | None) -> None:
        """From now on this rank waits no longer than that for the others in the control group; None: for ever."""
        if isinstance(self.control, ShmGroup | GlooGroup):
            self.control.watchdog = replace(self.control.watchdog, timeout_s=timeout_s)

    def check(self) -> None:
        """Raise ParallelError when a rank has given no sign of life for too long."""
        if self.heartbeat is not None:
            self.heartbeat.check()

    def on_missing(self, tell: Callable[[ParallelError], None]) -> None:
        """Call `tell`, on another thread, when that is so."""
        if self.heartbeat is not None:
            self.heartbeat.on_missing(tell)

    def fail(self) -> None:
        """Tell the others, where the transport can, that this rank gives up."""
        for group in (self.control, self.world, self.attn):
            if isinstance(group, ShmGroup):
                group.fail()


def single_world() -> World:
    """One rank, alone: every collective is the identity."""
    alone = SingleGroup()
    return World(Topology(), alone, alone, alone)


def join(
    topology: Topology,
    store: Store,
    watchdog: Watchdog,
    *,
    transport: str = "auto",
    host: str | None = None,
    capacity: int = DEFAULT_CAPACITY,
) -> World:
    """Meet the other ranks at `store` and make the groups of `topology`.

    transport: "shm", "gloo", or "auto" for shared memory where all ranks are on one machine that has it. host: this
    machine's address for gloo. Raises ParallelError when ranks disagree about the layout, ConfigError for "shm" where
    it cannot be.
    """
    if topology.tp == 1:
        return single_world()
    _agree(topology, store, watchdog.check)
    heartbeat = None
    if watchdog.timeout_s is not None:
        heartbeat = Heartbeat(PrefixStore("life", store), topology.rank, topology.tp, watchdog.timeout_s)
    near = _one_machine(topology, store, watchdog.check)
    if transport == "shm" and not near:
        raise ConfigError("transport 'shm' needs all ranks on one x86 Linux machine; use transport 'gloo'")
    chosen = "shm" if near and transport != "gloo" else "gloo"
    everybody, attn_ranks = tuple(range(topology.tp)), topology.attn_tp_ranks

    def make(name: str, ranks: Sequence[int], dog: Watchdog) -> Group:
        rank = ranks.index(topology.rank)
        label = f"{name} group"
        if len(ranks) == 1:
            return SingleGroup(label)
        own = PrefixStore(f"{name}/{ranks[0]}", store)
        if chosen == "gloo":
            return GlooGroup(own, rank, ranks, dog, host=host, name=label)
        memory = _share(own, rank, ranks, capacity, watchdog.check)
        return ShmGroup(memory, rank, ranks, dog, capacity=capacity, name=label)

    def check() -> None:
        if heartbeat is not None and topology.rank == 0:
            heartbeat.check()  # first: what else there is to see may follow from what it has found
        watchdog.check()

    strict, patient = Watchdog(watchdog.timeout_s, check), Watchdog(None, check)
    world = World(
        topology,
        make("control", everybody, patient),
        make("world", everybody, strict),
        make("attn", attn_ranks, strict),
        chosen,
        heartbeat,
    )
    if heartbeat is not None:
        heartbeat.start()
    return world


def _agree(topology: Topology, store: Store, check: Callable[[], None]) -> None:
    """Every rank was given the same layout, or all of them stop here."""
    mine = f"tp {topology.tp}, dp {topology.dp}, ep {topology.ep}, cp {topology.cp}"
    if topology.rank == 0:
        store.set("layout", mine)
    wait_for_ranks(store, {"layout": 0}, check)
    theirs = store.get("layout").decode()
    if theirs != mine:
        raise ParallelError(
            f"rank {topology.rank} was started with {mine}, rank 0 with {theirs}; start all ranks with the same options"
        )


def _one_machine(topology: Topology, store: Store, check: Callable[[], None]) -> bool:
    """Whether all ranks see the same processes, so that each can find the others' memory."""
    boot, pids = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    here = f"rank {topology.rank}"
    if shm_supported() and boot.exists() and pids.exists():
        here = f"{boot.read_text().strip()} {pids.readlink()} {os.getuid()}"
    store.set(f"machine/{topology.rank}", here)
    wait_for_ranks(store, {f"machine/{r}": r for r in range(topology.tp)}, check)
    return all(store.get(f"machine/{r}").decode() == here for r in range(topology.tp))


def _share(
    store: Store, rank: int, ranks: Sequence[int], capacity: int, check: Callable[[], None]
) -> mmap.mmap:
    """Shared memory of a group: its first rank makes it, the others open it through that rank's process.

    rank: this one's place in the group, whose members are `ranks`.
    """
    size = len(ranks)
    length = memory_bytes(size, capacity)
    if rank == 0:
        fd = create_memory(size, capacity=capacity)
        store.set("memory", f"/proc/{os.getpid()}/fd/{fd}")
    else:
        wait_for_ranks(store, {"memory": ranks[0]}, check)
        fd = os.open(store.get("memory").decode(), os.O_RDWR)
    try:
        memory = mmap.mmap(fd, length)
        store.set(f"mapped/{rank}", "1")
        wait_for_ranks(store, {f"mapped/{r}": name for r, name in enumerate(ranks)}, check)
    finally:
        os.close(fd)
    return memory
