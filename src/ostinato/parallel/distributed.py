"""Collectives over torch.distributed: gloo between CPUs of several machines.

Wraps one process group that was made for it alone; nothing of torch's process-wide state is touched. Everything travels
as bytes, so any dtype does. Sums are not here: they are built on gathers, in rank order. Knows nothing of what it
carries. Invariant: a rank that does not come is named, by what every rank last wrote to the store.
"""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from ostinato.errors import ParallelError
from ostinato.parallel.meeting import wait_for_ranks
from ostinato.parallel.watchdog import Watchdog

_NO_TIMEOUT = datetime.timedelta(days=365)
_LOOK = datetime.timedelta(seconds=0.05)  # how often a rank that waits looks whether it should go on
_ROLL_CALL_S = 2.0  # how long ranks that waited in vain look for each other


class GlooGroup:
    """A `Group` over gloo. `store` is its own (a prefix of the job's), `ranks` the members' names in messages.

    host: the address of this machine that the others reach; None for what its name resolves to.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        ranks: Sequence[int],
        watchdog: Watchdog,
        *,
        host: str | None = None,
        name: str = "gloo",
    ) -> None:
        self.rank = rank
        self.size = len(ranks)
        self.name = name
        self._ranks = tuple(ranks)
        self._store = store
        self.watchdog = watchdog
        self._count = 0
        store.set(f"here/{rank}", "1")  # gloo waits for ever, and for nobody else meanwhile
        wait_for_ranks(store, {f"here/{r}": name for r, name in enumerate(ranks)}, watchdog.check)
        gloo: Any = ProcessGroupGloo
        options = gloo._Options()
        device = gloo.create_default_device() if host is None else gloo.create_device(hostname=host)
        options._devices = [device]
        options._timeout = _NO_TIMEOUT  # gloo's own would close connections; time is kept in `_wait`
        self._group: Any = gloo(PrefixStore("pairs", store), rank, self.size, options)

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        if x.numel():
            parts = list(_bytes(out).view(self.size, -1).unbind(0))
            self._run("all_gather", lambda: self._group.allgather([parts], [_bytes(x)]))
        else:
            self.barrier()

    def all_gather_rows(self, x: torch.Tensor, counts: Sequence[int], out: torch.Tensor) -> None:
        # Gloo gathers one size from all, so the others' rows are padded on their way.
        most = max(counts)
        padded = x.new_zeros(most, *x.shape[1:])
        padded[: counts[self.rank]] = x[: counts[self.rank]]
        gathered = x.new_empty(self.size, most, *x.shape[1:])
        self.all_gather(padded, gathered)
        at = 0
        for r, count in enumerate(counts):
            out[at : at + count] = gathered[r, :count]
            at += count

    def broadcast(self, x: torch.Tensor, root: int) -> None:
        options = torch.distributed.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        self._run("broadcast", lambda: self._group.broadcast([_bytes(x)], options))

    def barrier(self) -> None:
        token = torch.zeros(1, dtype=torch.uint8)
        parts = [torch.zeros(1, dtype=torch.uint8) for _ in range(self.size)]
        self._run("barrier", lambda: self._group.allgather([parts], [token]))

    def all_to_all(
        self, send: torch.Tensor, send_counts: Sequence[int], recv: torch.Tensor, recv_counts: Sequence[int]
    ) -> None:
        # Gloo checks no counts: ranks that disagree would hang or mix rows up, so they are compared first.
        told = torch.empty(self.size, self.size, dtype=torch.int64)
        self.all_gather(torch.tensor(list(send_counts), dtype=torch.int64), told)
        for r, expected in enumerate(recv_counts):
            if int(told[r, self.rank]) != expected:
                raise ParallelError(
                    f"{self.name}: rank {self._ranks[r]} sent {int(told[r, self.rank])} rows to rank "
                    f"{self._ranks[self.rank]}, which expects {expected}; the ranks are out of step, restart them"
                )
        if not told.any():
            return
        source, target = _rows(send, sum(send_counts)), _rows(recv, sum(recv_counts))
        self._run(
            "all_to_all",
            lambda: self._group.alltoall_base(target, source, list(recv_counts), list(send_counts)),
        )

    def close(self) -> None:
        self._group = None

    def _run(self, op: str, start: Callable[[], Any]) -> None:
        self._count += 1
        try:
            self._wait(start())
        except RuntimeError as error:
            self.watchdog.check()  # who knows better says so
            raise ParallelError(self._why(op, error)) from error

    def _wait(self, work: Any) -> None:
        """Until an operation is done. Raises RuntimeError when it fails or takes too long, or what `check` raises."""
        began = time.monotonic()
        while True:
            try:
                work.wait(_LOOK)
                return
            except RuntimeError:
                if work.is_completed():
                    work.wait()  # it was done just now, or this says why it failed
                    return
            try:
                self.watchdog.check()
                timeout = self.watchdog.timeout_s
                if timeout is not None and time.monotonic() - began > timeout:
                    raise RuntimeError(f"no answer within {timeout:g} s")
            except BaseException:
                # Gloo ends no operation before its time, and a group not before its operations: this one outlives us.
                threading.Thread(target=_outwait, args=(self._group, work), daemon=True).start()
                raise

    def _why(self, op: str, error: RuntimeError) -> str:
        """Who is missing: ranks that gave up say so in the store, and whoever says nothing is the one."""
        try:
            self._store.set(f"waiting/{self.rank}", op)
            keys = [f"waiting/{r}" for r in range(self.size)]
            deadline = time.monotonic() + _ROLL_CALL_S
            missing = keys
            while missing and time.monotonic() < deadline:
                missing = [key for key in missing if not self._store.check([key])]
                time.sleep(0.02)
            names = [str(self._ranks[int(key.rsplit("/", 1)[1])]) for key in missing]
        except RuntimeError:  # the store went with rank 0
            names = ["0"]
        if not names:
            return f"{op} {self._count} of {self.name} failed on every rank: {error}"
        timeout = self.watchdog.timeout_s
        limit = "" if timeout is None else f" within {timeout:g} s"
        return (
            f"rank{'s' if len(names) > 1 else ''} {', '.join(names)} did not come to {op} {self._count} of "
            f"{self.name}{limit}; it hangs or is gone: look at its output, or allow more time"
        )


def _outwait(group: Any, work: Any) -> None:
    """Hold an operation and its group until it ends, be it with the process."""
    with contextlib.suppress(RuntimeError):
        work.wait()
    del group


def _bytes(x: torch.Tensor) -> torch.Tensor:
    if not x.is_contiguous():
        raise ValueError(f"tensors must be contiguous, got {tuple(x.shape)}, strides {x.stride()}")
    return x.view(-1).view(torch.uint8)


def _rows(x: torch.Tensor, count: int) -> torch.Tensor:
    width = x[:1].numel() * x.element_size() if len(x) else 0
    return _bytes(x[:count]).view(count, width) if width else torch.empty(0, 1, dtype=torch.uint8)
