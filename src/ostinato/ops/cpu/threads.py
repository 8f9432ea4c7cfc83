"""The one pool of threads: torch's own OpenMP runtime, which kernels enter directly.

Torch brings a libgomp of its own, and Numba's OpenMP layer is linked against the system's: two pools, which
would spin against each other. Kernels therefore start their parallel regions through torch's library by
address and never load Numba's layer. Knows nothing of kernels. Invariant: the addresses belong to the runtime
torch computes with.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import torch

from ostinato.errors import ConfigError

_RUNTIMES = ("libgomp", "libomp", "libiomp")


@dataclass(frozen=True, slots=True)
class ThreadPool:
    """Team size, and the addresses of GOMP_parallel and GOMP_barrier (0 without a pool: kernels run serially) and of
    sched_yield (0 where there is none).
    """

    num_threads: int
    parallel: int
    barrier: int
    library: str
    yield_core: int = 0


def openmp_libraries() -> list[str]:
    """Paths of the OpenMP runtimes mapped into this process (Linux; elsewhere empty)."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return []
    paths = {line.split()[-1] for line in maps.read_text().splitlines() if "/" in line}
    return sorted(path for path in paths if Path(path).name.startswith(_RUNTIMES))


def torch_openmp_library() -> str | None:
    """Path of the OpenMP runtime that torch uses, or None when it ships none that is known."""
    beside = Path(torch.__file__).parent
    candidates = [path for path in openmp_libraries() if Path(path).is_relative_to(beside.parent)]
    if candidates:
        return candidates[0]
    loaded = openmp_libraries()
    return loaded[0] if len(loaded) == 1 else None


def open_pool(num_threads: int | None = None) -> ThreadPool:
    """The pool with `num_threads` (default: what torch has), which torch then uses as well.

    Loads torch's runtime with global visibility, so that whatever is loaded later binds to it. Raises
    ConfigError when the number is not positive.
    """
    if num_threads is not None:
        if num_threads < 1:
            raise ConfigError(f"threads must be at least 1, got {num_threads}")
        if num_threads != torch.get_num_threads():
            torch.set_num_threads(num_threads)
    threads = torch.get_num_threads()
    path = torch_openmp_library()
    if path is None:
        return ThreadPool(1, 0, 0, "none")
    library = ctypes.CDLL(path, ctypes.RTLD_GLOBAL)
    try:
        parallel, barrier = (
            ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
            for name in ("GOMP_parallel", "GOMP_barrier")
        )
    except AttributeError:  # an LLVM runtime without the GNU entry points
        return ThreadPool(1, 0, 0, path)
    return ThreadPool(threads, parallel, barrier, path, _yield_core())


def _yield_core() -> int:
    """Address of sched_yield, or 0."""
    found = None if sys.platform == "win32" else getattr(ctypes.CDLL(None), "sched_yield", None)
    return 0 if found is None else ctypes.cast(found, ctypes.c_void_p).value or 0


def pin_threads() -> tuple[int, ...]:
    """Bind the calling thread and those of its team to a core each, for as long as they live; returns the cores.

    Threads that the caller starts later share its core. Raises ConfigError where the process may use fewer cores than
    there are threads, or where threads cannot be bound.
    """
    pool = open_pool()
    if sys.platform != "linux" or pool.parallel == 0:
        raise ConfigError("pin_threads needs Linux and torch's OpenMP threads; leave it out")
    # Of all threads: one that was pinned before says nothing of what the process may use.
    usable: set[int] = set()
    for name in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # a thread may end meanwhile
            usable |= os.sched_getaffinity(int(name))
    allowed = sorted(usable)
    if len(allowed) < pool.num_threads:
        raise ConfigError(
            f"pin_threads needs a core for each of {pool.num_threads} threads, and this process may use "
            f"{len(allowed)}; lower threads or leave pin_threads out"
        )
    caller, cores = threading.get_ident(), tuple(allowed[: pool.num_threads])
    helpers = iter(cores[1:])

    def bind(_: int | None) -> None:
        core = cores[0] if threading.get_ident() == caller else next(helpers)
        os.sched_setaffinity(0, {core})

    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    start = ctypes.CFUNCTYPE(None, function, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)(pool.parallel)
    start(function(bind), None, pool.num_threads, 0)
    return cores
