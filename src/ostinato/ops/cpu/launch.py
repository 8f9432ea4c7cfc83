"""What every launch of these kernels is: one C function called with the address of one block of int64
parameters.

The entry (serial) looks at the live counts, shares work out as numbered tasks and enters the team; workers
draw task numbers from a counter, so a disturbed thread never holds up the others. Knows nothing of what is
computed. Invariant: a launch owns everything its addresses point to; calling it allocates nothing.

    Launch()  ->  entry(p)  ->  GOMP_parallel  ->  worker(p) in each thread  ->  task = counter++ ...
    chain of launches  ->  GOMP_parallel once  ->  one thread calls the entries, the others help (`team`)
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ostinato.ops.cpu.compile import Compiler
from ostinato.ops.cpu.intrinsics import call_address, call_barrier, run_team
from ostinato.ops.cpu.isa import Isa, select_isa
from ostinato.ops.cpu.jit import njit
from ostinato.ops.cpu.memory import fetch_add, load_i64, prefetch_line, store_i64
from ostinato.ops.cpu.team import AHEAD_BYTES, TEAM_WORDS, YIELD, begin, end, help_out, meet, open_launch
from ostinato.ops.cpu.threads import ThreadPool, open_pool

# The fields every parameter block begins with.
(
    WORKER,
    PARALLEL,
    BARRIER,
    THREADS,
    COUNTER,
    TASKS,
    TEAM,  # address of the team of the chain that runs the launch, or one of the numbers below
    FOLLOWS,  # in a chain: address of the weights that the next launch reads, 0 for none
    FOLLOWS_SHARE,  # bytes of them that a thread begins with
    SOON,  # in a chain: address of a list, its length first, of cache lines that the next launches touch; or 0
    FIRST_FIELD,
) = range(11)
NO_TEAM, WANTED, ALONE = range(
    3
)  # for TEAM: no chain; a chain that asks whether one is worth it; nobody else
# A chain's block: the common fields, then these, then entry and block of each launch.
COUNT, NEXT, JOINED, LAUNCHES = range(FIRST_FIELD, FIRST_FIELD + 4)
COUNTERS = 8  # counters of a launch, each in a cache line of its own; the last one numbers the members
PHASES = 5  # behind them lie the counters of every thread's share, by phase
SMALL_WORK = 16384  # 4-byte words touched, below which starting the team costs more than it saves
SMALL_IN_CHAIN = 4096  # and where the team is there already

_MOST_LAUNCHES = 4096
_MOST_SOON = 256  # lines asked for at the end of a launch

Entry = Callable[[int], None]
_ENTRY_TYPE = ctypes.CFUNCTYPE(None, ctypes.c_int64)


class Streamed(NamedTuple):
    """Weights that a launch reads front to back: their address, and the bytes of each thread's share."""

    address: int
    share: int


UNKNOWN = Streamed(0, 0)  # much, but what is known only when it runs


class Launch:
    """A kernel bound to its tensors: call it to run. `chain` makes one call of many, its `parts`.

    `streamed`: what it reads; None for next to nothing. `touched`: places (address, bytes) that it reads or writes
    whatever the step, its block not among them; of tensors the first row is enough.
    """

    __slots__ = ("_make_chain", "_run", "address", "block", "entry", "kept", "parts", "streamed", "touched")

    def __init__(
        self,
        entry: int,
        block: torch.Tensor,
        kept: tuple[Any, ...],
        make_chain: Callable[[tuple[Launch, ...]], Launch],
        parts: tuple[Launch, ...] = (),
    ) -> None:
        self.entry = entry
        self.block = block
        self.address = block.data_ptr()
        self.kept = kept
        self.streamed: Streamed | None = None
        self.touched: tuple[tuple[int, int], ...] = ()
        self.parts = parts
        self._run: Any = _ENTRY_TYPE(entry)
        self._make_chain = make_chain

    def __call__(self) -> None:
        self._run(self.address)

    @staticmethod
    def chain(launches: Sequence[Launch]) -> Launch:
        """A launch that runs all of these, one after the other, without Python in between."""
        parts = tuple(part for launch in launches for part in launch.parts or (launch,))
        return parts[0]._make_chain(parts)


class LaunchCache:
    """Launches of plain calls by what they were bound to, so that a repeated call costs little more than a
    replay.

    They hold no tensor of the call: whoever passes memory at the same address again owns it.
    """

    __slots__ = ("_launches",)

    def __init__(self) -> None:
        self._launches: dict[tuple[object, ...], Launch] = {}

    def run(self, make: Callable[..., Launch], *args: Any) -> None:
        """Call the launch for these arguments, made by `make(*args)` the first time."""
        key = tuple(
            (a.data_ptr(), a.shape, a.stride(), a.dtype) if isinstance(a, torch.Tensor) else a for a in args
        )
        launch = self._launches.get(key)
        if launch is None:
            if len(self._launches) >= _MOST_LAUNCHES:
                self._launches.clear()
            launch = self._launches[key] = make(*args)
        launch()


@dataclass(frozen=True, slots=True)
class Runtime:
    """Instruction set, threads and compiled code: what kernels are made with."""

    isa: Isa
    pool: ThreadPool
    compiler: Compiler = field(repr=False)

    def launch(
        self, entry: Entry, worker: Entry, values: Mapping[int, int], num_fields: int, kept: tuple[Any, ...]
    ) -> Launch:
        """A launch of `entry` with these fields (by index), keeping `kept` alive."""
        counters = self._counters()
        fields = {**self._common(worker, counters), **values}
        block = torch.tensor([fields.get(i, 0) for i in range(num_fields)], dtype=torch.int64)
        owned = (counters, self.compiler, *kept)
        return Launch(self.compiler.address(entry), block, owned, self._chain)

    def _counters(self) -> torch.Tensor:
        return torch.zeros(8 * (COUNTERS + PHASES * self.pool.num_threads) + 8, dtype=torch.int64)

    def _common(self, worker: Entry, counters: torch.Tensor) -> dict[int, int]:
        return {
            WORKER: self.compiler.address(worker),
            PARALLEL: self.pool.parallel,
            BARRIER: self.pool.barrier,
            THREADS: self.pool.num_threads,
            COUNTER: _aligned(counters),
        }

    def _chain(self, parts: tuple[Launch, ...]) -> Launch:
        """One launch of all these, each told what the next one streams.

        They take turns with the same counters: those of its own each launch would find in memory, not in a cache.
        """
        team = torch.zeros(16, dtype=torch.int64)
        begin_of_team = (_aligned(team) - team.data_ptr()) // 8
        assert TEAM_WORDS <= 8
        team[begin_of_team + YIELD] = self.pool.yield_core
        fields = {**self._common(chain_worker, team), TEAM: _aligned(team), COUNT: len(parts)}
        words = [fields.get(i, 0) for i in range(LAUNCHES)]
        block = torch.tensor(
            [*words, *(word for part in parts for word in (part.entry, part.address))], dtype=torch.int64
        )
        counters, lists = self._counters(), [_soon(parts, number) for number in range(len(parts))]
        soon = torch.tensor([word for lines in lists for word in (len(lines), *lines)], dtype=torch.int64)
        at = soon.data_ptr()
        for number, (part, lines) in enumerate(zip(parts, lists, strict=True)):
            streamed = (later.streamed for later in parts[number + 1 :] if later.streamed is not None)
            part.block[FOLLOWS], part.block[FOLLOWS_SHARE] = next(streamed, UNKNOWN)
            part.block[COUNTER], part.block[SOON] = _aligned(counters), at
            part.kept = (*part.kept, counters, soon)
            at += 8 * (1 + len(lines))
        return Launch(self.compiler.address(chain_entry), block, (team, self.compiler), self._chain, parts)


def _soon(parts: Sequence[Launch], number: int) -> list[int]:
    """Cache lines that are touched between launch `number`, if it streams, and the next one that does, whose block is
    the last of them.
    """
    lines: dict[int, None] = {}
    if parts[number].streamed is not None:
        for part in parts[number + 1 :]:
            for address, size in ((part.address, 8 * part.block.numel()), *part.touched):
                lines |= dict.fromkeys(range(address // 64 * 64, address + size, 64))
            if part.streamed is not None:
                break
    return list(lines)[:_MOST_SOON]


def _aligned(words: torch.Tensor) -> int:
    """The first address in `words` that begins a cache line."""
    return -(-words.data_ptr() // 64) * 64


def open_runtime(
    *, isa: str | None = None, num_threads: int | None = None, cache_dir: Path | None = None
) -> Runtime:
    """The runtime of this machine; `isa` forces a path (see `select_isa`)."""
    return Runtime(select_isa(isa), open_pool(num_threads), Compiler(cache_dir))


@njit(error_model="numpy")
def _call_launch(p: int, number: int, team: int) -> int:
    """Call one launch of a chain with this team; returns what it made of the team."""
    launch = load_i64(p + 8 * (LAUNCHES + 2 * number + 1))
    store_i64(team, launch + 8 * TEAM)
    call_address(load_i64(p + 8 * (LAUNCHES + 2 * number)), launch)
    found = load_i64(launch + 8 * TEAM)
    store_i64(NO_TEAM, launch + 8 * TEAM)
    return found


def chain_entry(p: int) -> None:
    """Call all launches in order. The team gathers after the first that is worth one, and stays to the end."""
    count, done = load_i64(p + 8 * COUNT), 0
    alone = load_i64(p + 8 * PARALLEL) == 0 or load_i64(p + 8 * THREADS) == 1
    while done < count:
        wanted = _call_launch(p, done, NO_TEAM if alone else WANTED)
        done += 1
        if not alone and wanted == NO_TEAM and done + 1 < count:
            store_i64(done, p + 8 * NEXT)
            store_i64(0, p + 8 * JOINED)
            begin(load_i64(p + 8 * TEAM))
            run_team(load_i64(p + 8 * PARALLEL), load_i64(p + 8 * WORKER), p, load_i64(p + 8 * THREADS))
            return


def chain_worker(p: int) -> None:
    """The first thread to come leads, the others help."""
    team, member = load_i64(p + 8 * TEAM), fetch_add(p + 8 * JOINED, 1)
    if member > 0:
        help_out(team, member, 8 * FOLLOWS, 8 * FOLLOWS_SHARE)
        return
    for number in range(load_i64(p + 8 * NEXT), load_i64(p + 8 * COUNT)):
        _call_launch(p, number, team)
    end(team)


@njit(error_model="numpy")
def reset_counter(p: int) -> None:
    """Zero the launch's counters."""
    for i in range(COUNTERS + PHASES * load_i64(p + 8 * THREADS)):
        store_i64(0, load_i64(p + 8 * COUNTER) + 64 * i)


@njit(error_model="numpy")
def join_team(p: int) -> int:
    """A number for the calling thread, in order of arrival."""
    return fetch_add(load_i64(p + 8 * COUNTER) + 64 * (COUNTERS - 1), 1)


@njit(error_model="numpy")
def draw(p: int, phase: int, owner: int, tasks: int) -> int:
    """The next of `owner`'s share of the tasks, or -1 when none is left.

    Shares are contiguous, so a thread reads on where it stopped; who has finished draws from the others'
    shares.
    """
    threads = load_i64(p + 8 * THREADS)
    share = (tasks + threads - 1) // threads
    counter = load_i64(p + 8 * COUNTER) + 64 * (COUNTERS + phase * threads + owner)
    drawn = fetch_add(counter, 1)
    task = owner * share + drawn
    return task if drawn < share and task < tasks else -1


@njit(error_model="numpy")
def _ask_for_soon(lines: int) -> None:
    """Ask for the lines of a list: what small launches touch lies in memory, and they would wait for one line after
    the other.
    """
    if lines != 0:
        for i in range(load_i64(lines)):
            prefetch_line(load_i64(lines + 8 + 8 * i))


@njit(error_model="numpy")
def run_worker(p: int, work: int) -> None:
    """Run the worker in the team; alone when the work is small or there is no team."""
    threads, parallel = load_i64(p + 8 * THREADS), load_i64(p + 8 * PARALLEL)
    worker, team = load_i64(p + 8 * WORKER), load_i64(p + 8 * TEAM)
    if team > ALONE:
        if work < SMALL_IN_CHAIN:
            store_i64(ALONE, p + 8 * TEAM)
            call_address(worker, p)
        else:
            open_launch(team, worker, p)
            call_address(worker, p)
            _ask_for_soon(load_i64(p + 8 * SOON))
            ahead = load_i64(p + 8 * FOLLOWS)
            meet(team, ahead, ahead + min(load_i64(p + 8 * FOLLOWS_SHARE), AHEAD_BYTES))
    elif parallel == 0 or (threads > 1 and work < SMALL_WORK):
        call_address(worker, p)
    else:
        store_i64(NO_TEAM, p + 8 * TEAM)  # tells a chain that it was worth one
        run_team(parallel, worker, p, threads)


@njit(error_model="numpy")
def wait_for_team(p: int) -> None:
    """A worker's barrier: wait until all who run it have come here."""
    team = load_i64(p + 8 * TEAM)
    if team > ALONE:
        meet(team, 0, 0)
    elif team != ALONE:
        call_barrier(load_i64(p + 8 * BARRIER))
