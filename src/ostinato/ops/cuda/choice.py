"""Choosing tokens on the device: the greedy choice as a kernel, the sampled one in sorts and running sums of torch.

Weights are whole numbers (`ops.choice`), so no order of summation shows in a choice. Knows nothing of requests.
Invariant: the token that `ops.choice.choose` finds, for any row, whatever else is sampled beside it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ostinato.ops import exact
from ostinato.ops.choice import GOLDEN, MIX_1, MIX_2, ONE, TINY
from ostinato.ops.cuda.arithmetic import ordered_key, place_key, place_of
from ostinato.ops.cuda.launching import count_argument, power_of_two, run
from ostinato.padding import real_row_mask

_BLOCK = 4096
_NAN_KEY = tl.constexpr(0x7FFFFFFF)
_BELOW_ALL = tl.constexpr(-0x7FFFFFFF)
_LEAST_KEY = tl.constexpr(-(1 << 63))


@triton.jit
def argmax_kernel(
    x: tl.tensor,
    out: tl.tensor,
    live: tl.tensor,
    width: tl.tensor,
    x_row: tl.tensor,
    HAS_LIVE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    real = row >= 0
    if HAS_LIVE:
        real = row < tl.load(live)
    chosen = tl.zeros((), tl.int64)
    if real:
        best = tl.full((BLOCK,), _LEAST_KEY, tl.int64)
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            key = ordered_key(
                tl.load(x + row * x_row + column, mask=column < width, other=0.0).to(tl.float32)
            )
            key = tl.where(key == _NAN_KEY, _BELOW_ALL, key)
            best = tl.maximum(best, tl.where(column < width, place_key(key, column), _LEAST_KEY))
        chosen = place_of(tl.max(best, axis=0)).to(tl.int64)
    tl.store(out + row, chosen)


def argmax(x: torch.Tensor, out: torch.Tensor, live: torch.Tensor | None = None) -> None:
    """`OpSet.argmax`."""
    if len(x):
        block = min(_BLOCK, power_of_two(x.shape[1]))
        arguments = x, out, count_argument(live, x), x.shape[1], x.stride(0)
        run(argmax_kernel, (len(x),), *arguments, HAS_LIVE=live is not None, BLOCK=block)


def sample(
    x: torch.Tensor,
    rules: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    out: torch.Tensor,
    live: torch.Tensor | None = None,
) -> None:
    """`OpSet.sample`."""
    size = x.shape[1]
    temperature, top_k, top_p, min_p = rules.t().unsqueeze(2)
    d, q = _weigh(x, temperature)
    order = torch.sort(d, dim=1, stable=True).indices
    reached = q.gather(1, order).cumsum(1)
    limit = torch.where((top_k > 0) & (top_k < size), top_k, float(size)).long()
    limit = torch.where(temperature == 0.0, 1, limit)
    need = (top_p * reached.gather(1, limit - 1).double()).long().clamp_min(1)
    enough = (reached < need).sum(1, keepdim=True) + 1
    limit = torch.where(top_p < 1.0, torch.minimum(limit, enough), limit)
    place = torch.arange(size, device=x.device).unsqueeze(0)
    kept = torch.zeros_like(q, dtype=torch.bool).scatter_(1, order, place < limit)
    kept &= q >= (min_p * float(ONE)).long()
    running = q.masked_fill(~kept, 0).cumsum(1)
    whole = running[:, -1:]
    noise = uniform(seeds, positions + 1).unsqueeze(1)
    target = torch.minimum((noise * whole.double()).long(), whole - 1)
    chosen = (running <= target).sum(1)
    chosen = chosen.masked_fill(whole.squeeze(1) == 0, 0)  # a row of NaN
    if live is not None:
        chosen = chosen.masked_fill(~real_row_mask(live, len(x)), 0)
    out.copy_(chosen)


def _weigh(x: torch.Tensor, temperature: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`ops.choice.weigh` of rows [T, V], temperature fp64 [T, 1]."""
    there = ~x.isnan()
    most = x.masked_fill(~there, float("-inf")).amax(1, keepdim=True)
    heat = torch.where(temperature == 0.0, 1.0, temperature).float().clamp_min(TINY)
    d = ((most - x) / heat).masked_fill(x == most, 0.0).masked_fill(~there, float("inf"))
    return d, (exact.exp(-d) * float(ONE)).long()


def uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """`ops.choice.uniform` of int64 [T]: fp64 [T] in [0, 1)."""
    state = _mixed(seeds + _signed(GOLDEN))
    state = _mixed(state + positions + _signed(GOLDEN))
    return _shifted(state, 11).double() * 2.0**-53


def _mixed(z: torch.Tensor) -> torch.Tensor:
    """The finaliser of splitmix64; products and sums wrap."""
    z = (z ^ _shifted(z, 30)) * _signed(MIX_1)
    z = (z ^ _shifted(z, 27)) * _signed(MIX_2)
    return z ^ _shifted(z, 31)


def _shifted(z: torch.Tensor, by: int) -> torch.Tensor:
    """A logical shift of 64 bits to the right."""
    return (z >> by) & ((1 << (64 - by)) - 1)


def _signed(value: int) -> int:
    """The int64 of the same 64 bits."""
    return value - (1 << 64) if value >> 63 else value
