"""Kernels compiled by other processes, while this one loads weights.

Numba compiles one kernel at a time and holds the interpreter's lock, so each worker is a process of its own: it reads
names of kernels from its standard input, puts object files into the cache, and answers with a line for each. Knows
nothing of weights. Invariant: whatever happens to a worker, a kernel that is waited for comes, if need be compiled
by who waits; workers end with this process.
"""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from ostinato.ops.cpu.compile import Compiler
from ostinato.ops.cpu.kernel_list import KernelJob

Progress = Callable[[int, int], None]
"""Called with (kernels done, kernels in all); from other threads, one at a time."""

_JOBS_PER_WORKER = 3  # fewer are not worth a process
_WORKER = """
import sys
sys.path.insert(0, sys.argv[1])
from ostinato.ops.cpu.background import work
work(sys.argv[2])
"""


class BackgroundBuild:
    """The jobs whose files are missing, compiled by up to `workers` processes."""

    def __init__(
        self, jobs: Sequence[KernelJob], compiler: Compiler, workers: int, progress: Progress
    ) -> None:
        missing = [job for job in jobs if not compiler.has(job.name)]
        self._done = {job.name: threading.Event() for job in missing}
        self.names = frozenset(self._done)
        self._queue: queue.SimpleQueue[KernelJob] = queue.SimpleQueue()
        for job in missing:
            self._queue.put(job)
        self._root = compiler.root
        self._progress = progress
        self._lock = threading.Lock()
        count = min(workers, len(missing) // _JOBS_PER_WORKER) if sys.executable else 0
        self._left = count  # workers that may still take jobs
        self._threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(count)]
        if count:
            progress(0, len(missing))
        else:
            self._give_up()
        for thread in self._threads:
            thread.start()

    def wait(self, name: str) -> None:
        """Return when a kernel's file is there, or no worker will make it."""
        event = self._done.get(name)
        if event is not None:
            event.wait()

    def finish(self) -> None:
        """Return when all jobs are done and the processes have ended."""
        for thread in self._threads:
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
            [sys.executable, "-c", _WORKER, str(root), str(self._root)],
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
            done = sum(event.is_set() for event in self._done.values())
            self._progress(done, len(self._done))

    def _give_up(self) -> None:
        for event in self._done.values():
            event.set()


def work(root: str) -> None:
    """What a worker does: compile what it reads, a line `name arguments` for each."""
    compiler = Compiler(Path(root))
    for line in sys.stdin:
        name, arguments = line.split()
        KernelJob(name, int(arguments)).run(compiler)
        print(name, flush=True)
