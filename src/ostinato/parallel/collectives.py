"""Collectives over a group of ranks: the protocol, what is derived from it, and the group of one.

A transport brings four operations that move bytes (`all_gather`, `all_to_all`, `broadcast`, `barrier`). Everything that
adds is built here on top of them: gather first, then add in rank order, so a sum has the same bits on every rank and in
every transport. Knows nothing of models. Invariant: no operation's order depends on who arrives first, and none
allocates when its scratch is given, so all of them may be launched on a stream and replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


class Group(Protocol):
    """Some ranks that enter the same operations in the same order. Tensors are contiguous and on the CPU.

    Every operation raises ParallelError, naming the rank, when one does not arrive in time or enters another one.
    """

    @property
    def rank(self) -> int:
        """This rank's place in the group."""
        ...

    @property
    def size(self) -> int: ...

    @property
    def name(self) -> str: ...

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """out [size, *x.shape] = x of every rank, in rank order; x has one shape on all of them."""
        ...

    def all_gather_rows(self, x: torch.Tensor, counts: Sequence[int], out: torch.Tensor) -> None:
        """out [:sum(counts)] = the leading counts[rank] rows of every rank's x, one behind the other."""
        ...

    def all_to_all(
        self, send: torch.Tensor, send_counts: Sequence[int], recv: torch.Tensor, recv_counts: Sequence[int]
    ) -> None:
        """Rows of `send` go out, send_counts[r] of them to rank r in turn; recv_counts[r] rows come from rank r.

        Rows past the counts are left alone. Row sizes are the same on all ranks, counts may differ, be 0 included.
        """
        ...

    def broadcast(self, x: torch.Tensor, root: int) -> None:
        """x on every rank = x of `root`."""
        ...

    def barrier(self) -> None:
        """Return when every rank has come here."""
        ...

    def close(self) -> None:
        """Give the transport's memory back; no operation may follow."""
        ...


@dataclass(frozen=True, slots=True)
class SingleGroup:
    """The group of one: every operation is the identity."""

    name: str = "single"
    rank: int = 0
    size: int = 1

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        out.view(x.shape).copy_(x)

    def all_gather_rows(self, x: torch.Tensor, counts: Sequence[int], out: torch.Tensor) -> None:
        out[: counts[0]].copy_(x[: counts[0]])

    def all_to_all(
        self, send: torch.Tensor, send_counts: Sequence[int], recv: torch.Tensor, recv_counts: Sequence[int]
    ) -> None:
        assert send_counts == recv_counts, (send_counts, recv_counts)
        recv[: recv_counts[0]].copy_(send[: send_counts[0]])

    def broadcast(self, x: torch.Tensor, root: int) -> None:
        assert root == 0, root

    def barrier(self) -> None:
        return

    def close(self) -> None:
        return


def all_gather_columns(group: Group, x: torch.Tensor, out: torch.Tensor, scratch: torch.Tensor) -> None:
    """out [T, size * w] = the columns x [T, w] of every rank side by side; scratch has as many elements as out."""
    if group.size == 1:
        out.copy_(x)
        return
    rows, width = x.shape
    gathered = scratch.view(-1)[: group.size * rows * width].view(group.size, rows, width)
    group.all_gather(x, gathered)
    out.view(rows, group.size, width).copy_(gathered.transpose(0, 1))


def all_gather_parts(
    group: Group, x: torch.Tensor, widths: Sequence[int], outs: Sequence[torch.Tensor], scratch: torch.Tensor
) -> None:
    """outs[i] [T, n * widths[i]] = part i of x [T, W] of every rank, side by side, or of every (size / n)th."""
    rows, start = x.shape[0], 0
    gathered = scratch.view(-1)[: group.size * x.numel()].view(group.size, *x.shape)
    group.all_gather(x, gathered)
    for width, out in zip(widths, outs, strict=True):
        every = group.size * width // out.shape[1]
        part = gathered[::every, :, start : start + width]
        out.view(rows, len(part), width).copy_(part.transpose(0, 1))
        start += width


def ordered_sum(parts: torch.Tensor, out: torch.Tensor) -> None:
    """out = parts[0] + parts[1] + ... in this order, in fp32 where parts are shorter floats, rounded once."""
    wide = parts.dtype in (torch.bfloat16, torch.float16)
    total = parts[0].float() if wide else parts[0].clone()
    for part in parts[1:]:
        total += part
    out.copy_(total)


def all_reduce(group: Group, x: torch.Tensor, out: torch.Tensor, scratch: torch.Tensor) -> None:
    """out = the sum over ranks of x, in rank order; scratch [size, *x.shape], out may be x."""
    if group.size == 1:
        out.copy_(x)
        return
    group.all_gather(x, scratch)
    ordered_sum(scratch, out)


def reduce_scatter(group: Group, x: torch.Tensor, out: torch.Tensor, scratch: torch.Tensor) -> None:
    """out [n, ...] = the sum over ranks of their x[rank], in rank order; x and scratch are [size, n, ...]."""
    if group.size == 1:
        out.copy_(x[0])
        return
    ones = [1] * group.size
    group.all_to_all(x, ones, scratch, ones)
    ordered_sum(scratch, out)
