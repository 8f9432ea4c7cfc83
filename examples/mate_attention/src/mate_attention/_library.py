"""What a device's own library would do, in torch: the place where a real backend calls its kernels."""

from __future__ import annotations

from typing import Any

import torch


def schedule_size(max_bs: int) -> int:
    """Entries of a schedule: one a request, and a semaphore."""
    return max_bs + 1


def get_scheduler_metadata(lens: torch.Tensor, num_heads: int) -> torch.Tensor:
    """int32 [requests + 1]: tiles of each request, and a semaphore of 0 in front."""
    tiles = -(-lens // 64) * num_heads
    return torch.cat((torch.zeros(1, dtype=torch.int64), tiles)).to(torch.int32)


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """Rows [0, counts[1]) of k and v into their slots; pads write nothing."""
    real = int(counts[1])
    keys[slots[:real]], values[slots[:real]] = k[:real], v[:real]


def attend(
    q: torch.Tensor,
    cache: Any,
    requests: torch.Tensor,
    counts: torch.Tensor,
    schedule: torch.Tensor,
    scale: float,
    window: int | None,
    out: torch.Tensor,
) -> None:
    """Each request by itself: a causal softmax over its pages, fp32. Pads come out zero."""
    keys, values, table, page = cache
    bs, real = counts.tolist()
    assert int(schedule[0]) == 0, "the semaphore of the schedule was not reset"
    out[real:] = 0
    for i, (start, rows, length, row) in enumerate(requests[:, :bs].t().tolist()):
        assert int(schedule[i + 1]) == -(-length // 64) * q.shape[1], "the schedule is that of another step"
        place = torch.arange(length)
        slots = table[row, place // page].long() * page + place % page
        group = q.shape[1] // keys.shape[1]
        k, v = (x[slots].float().repeat_interleave(group, 1).transpose(0, 1) for x in (keys, values))
        for query in range(rows):  # one by one: the sums of a row must not depend on the rows beside it
            here = length - rows + query
            first = 0 if window is None else max(0, here - window + 1)
            one = q[start + query].float().unsqueeze(1)
            shares = (one @ k[:, first : here + 1].transpose(1, 2) * scale).softmax(-1)
            out[start + query] = (shares @ v[:, first : here + 1]).squeeze(1).to(out.dtype)
