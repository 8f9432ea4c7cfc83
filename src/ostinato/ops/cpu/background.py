"""Kernels compiled by other processes, while this one loads weights.

Numba compiles one kernel at a time and holds the interpreter's lock, so each worker is a process of its own: it reads
names of kernels from its standard input, puts object files into the cache, and answers with a line for each. Of
starts that share a cache (ranks of one engine, say) one compiles at a time, and the others wait for its files. Knows
nothing of weights. Invariant: whatever happens to a worker or to another start, a kernel that is waited for comes, if
need be compiled by who waits; workers end with this process.
"""

from __future__ import annotations

import fcntl
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ostinato.ops.cpu.compile import Compiler
from ostinato.ops.cpu.kernel_list import KernelJob

Progress = Callable[[int, int], None]
"""Called with (kernels done, kernels in all); from other threads, one at a time."""

PATIENCE_S = 60.0
"""How long another start may bring no kernel before this one compiles beside it: none takes nearly as long."""

_JOBS_PER_WORKER = 3  # fewer are not worth a process
_LOOK_S = 0.02
_WORKER = """
import sys
sys.path.insert(0, sys.argv[1])
from ostinato.ops.cpu.background import work
work(sys.argv[2])
"""


class Turn:
    """The right to compile into a directory, by a lock on a file in it, which the system takes back from who ends."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "building.lock"
        self._file: int | None = None

    def take(self) -> bool:
        """Whether it is ours now; so it is where files cannot be locked."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.give_back()
            return False
        except OSError:
            self.give_back()
        return True

    def give_back(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


class BackgroundBuild:
    """The jobs whose files are missing, compiled by up to `workers` processes, or by another start's."""

    def __init__(
        self, jobs: Sequence[KernelJob], compiler: Compiler, workers: int, progress: Progress
    ) -> None:
        self._missing = [job for job in jobs if not compiler.has(job.name)]
        self._done = {job.name: threading.Event() for job in self._missing}
        self.names = frozenset(self._done)
        self._queue: queue.SimpleQueue[KernelJob] = queue.SimpleQueue()
        self._compiler = compiler
        self._workers = workers
        self._progress = progress
        self._lock = threading.Lock()
        self._turn = Turn(compiler.directory)
        self._left = 0  # workers that may still take jobs
        self._threads: list[threading.Thread] = []
        if not self._missing:
            return
        if self._turn.take():
            self._begin()
        else:
            self._start(self._follow)

    def _begin(self) -> None:
        """Start workers for what is still missing."""
        left = [job for job in self._missing if not self._done[job.name].is_set()]
        for job in left:
            self._queue.put(job)
        self._left = min(self._workers, len(left) // _JOBS_PER_WORKER) if sys.executable else 0
        if not self._left:
            self._give_up()
            return
        self._report()
        for _ in range(self._left):
            self._start(self._serve)

    def _start(self, run: Callable[[], None]) -> None:
        thread = threading.Thread(target=run, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _follow(self) -> None:
        """Take the files that another start makes; begin where it ends, or brings nothing for long."""
        news = time.monotonic()
        while True:
            mine = self._turn.take()  # first: who gives the turn back has left all its files
            there = [job for job in self._missing if self._compiler.has(job.name)]
            fresh = [job for job in there if not self._done[job.name].is_set()]
            for job in fresh:
                self._end(job)
                news = time.monotonic()
            if mine or time.monotonic() - news > PATIENCE_S:
                self._begin()
                return
            if len(there) == len(self._missing):
                return
            time.sleep(_LOOK_S)

    def wait(self, name: str) -> None:
        """Return when a kernel's file is there, or no worker will make it."""
        event = self._done.get(name)
        if event is not None:
            event.wait()

    def finish(self) -> None:
        """Return when all jobs are done and the processes have ended."""
        for thread in self._threads:  # grows while the first is waited for
            thread.join()

    def _serve(self) -> None:
        """Give jobs to one process until none is left."""
        try:
            self._drive()
        except OSError:
            pass  # the process is gone or never began: the others go on, or who waits compiles by itself
        finally:
            with self._lock:
                self._left -= 1
                if not self._left:
                    self._give_up()

    def _drive(self) -> None:
        root = Path(__file__).parents[3]
        # Of a group of its own: an interrupt at the terminal is for this process, whose end ends the worker.
        with subprocess.Popen(
            [sys.executable, "-c", _WORKER, str(root), str(self._compiler.root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            while (job := self._next()) is not None:
                try:
                    print(job.name, job.arguments, file=process.stdin, flush=True)
                    if process.stdout.readline().strip() != job.name:
                        break
                finally:
                    self._end(job)

    def _next(self) -> KernelJob | None:
        try:
            return self._queue.get_nowait()
        except queue.Empty:
            return None

    def _end(self, job: KernelJob) -> None:
        with self._lock:
            self._done[job.name].set()
            self._report()

    def _report(self) -> None:
        self._progress(sum(event.is_set() for event in self._done.values()), len(self._done))

    def _give_up(self) -> None:
        """No worker is left: who still waits compiles by itself."""
        self._turn.give_back()
        for event in self._done.values():
            event.set()


def work(root: str) -> None:
    """What a worker does: compile what it reads, a line `name arguments` for each."""
    compiler = Compiler(Path(root))
    for line in sys.stdin:
        name, arguments = line.split()
        KernelJob(name, int(arguments)).run(compiler)
        print(name, flush=True)
