"""What every launch of these kernels is: one C function called with the address of one block of int64
parameters.

The entry (serial) looks at the live counts, shares work out as numbered tasks and enters the team; workers
draw task numbers from a counter, so a disturbed thread never holds up the others. Knows nothing of what is
computed. Invariant: a launch owns everything its addresses point to; calling it allocates nothing.

    Launch()  ->  entry(p)  ->  GOMP_parallel  ->  worker(p) in each thread  ->  task = counter++ ...
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ostinato.ops.cpu.compile import Compiler
from ostinato.ops.cpu.intrinsics import call_address, run_team
from ostinato.ops.cpu.isa import Isa, select_isa
from ostinato.ops.cpu.jit import njit
from ostinato.ops.cpu.memory import fetch_add, load_i64, store_i64
from ostinato.ops.cpu.threads import ThreadPool, open_pool

# The fields every parameter block begins with.
WORKER, PARALLEL, BARRIER, THREADS, COUNTER, TASKS, FIRST_FIELD = range(7)
COUNTERS = 8  # counters of a launch, each in a cache line of its own; the last one numbers the members
PHASES = 5  # behind them lie the counters of every thread's share, by phase
SMALL_WORK = 16384  # 4-byte words touched, below which starting the team costs more than it saves

_MOST_LAUNCHES = 4096

Entry = Callable[[int], None]
_ENTRY_TYPE = ctypes.CFUNCTYPE(None, ctypes.c_int64)


class Launch:
    """A kernel bound to its tensors: call it to run. `chain` makes one call of many."""

    __slots__ = ("_chain_entry", "_run", "address", "entry", "kept")

    def __init__(self, entry: int, block: torch.Tensor, kept: tuple[Any, ...], chain_entry: int) -> None:
        self.entry = entry
        self.address = block.data_ptr()
        self.kept = (block, *kept)
        self._run: Any = _ENTRY_TYPE(entry)
        self._chain_entry = chain_entry

    def __call__(self) -> None:
        self._run(self.address)

    @staticmethod
    def chain(launches: Sequence[Launch]) -> Launch:
        """A launch that runs all of these, one after the other, without Python in between."""
        pairs = [word for launch in launches for word in (launch.entry, launch.address)]
        block = torch.tensor([len(launches), *pairs], dtype=torch.int64)
        entry = launches[0]._chain_entry
        return Launch(entry, block, tuple(launches), entry)


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
        lines = COUNTERS + PHASES * self.pool.num_threads
        counters = torch.zeros(8 * lines + 8, dtype=torch.int64)
        fixed = {
            WORKER: self.compiler.address(worker),
            PARALLEL: self.pool.parallel,
            BARRIER: self.pool.barrier,
            THREADS: self.pool.num_threads,
            COUNTER: -(-counters.data_ptr() // 64) * 64,
        }
        fields = {**fixed, **values}
        block = torch.tensor([fields.get(i, 0) for i in range(num_fields)], dtype=torch.int64)
        owned = (counters, self.compiler, *kept)
        return Launch(self.compiler.address(entry), block, owned, self.compiler.address(chain_entry))


def open_runtime(
    *, isa: str | None = None, num_threads: int | None = None, cache_dir: Path | None = None
) -> Runtime:
    """The runtime of this machine; `isa` forces a path (see `select_isa`)."""
    return Runtime(select_isa(isa), open_pool(num_threads), Compiler(cache_dir))


def chain_entry(p: int) -> None:
    """Call n entries; the block holds n, then entry and address of each."""
    for i in range(load_i64(p)):
        call_address(load_i64(p + 16 * i + 8), load_i64(p + 16 * i + 16))


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
def run_worker(p: int, work: int) -> None:
    """Run the worker in the team; alone when the work is small or there is no team."""
    threads, parallel = load_i64(p + 8 * THREADS), load_i64(p + 8 * PARALLEL)
    worker = load_i64(p + 8 * WORKER)
    if parallel == 0 or (threads > 1 and work < SMALL_WORK):
        call_address(worker, p)
    else:
        run_team(parallel, worker, p, threads)
