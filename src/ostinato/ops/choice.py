"""Choosing a token from logits, as every kernel must: temperature, top-k, top-p, min-p, and noise of (seed, position).

Probabilities are whole numbers (fp32 powers times 2**43), so their sums are exact and no order of summation shows in a
choice; a kernel may search as it likes and must find the same token. Knows nothing of requests. Invariant: a row's
choice depends on its logits, rule, seed and position alone.

    d = (largest - x) / temperature      better first: smaller d, then the lower id
    q = whole part of 2**43 exp(-d)      q of the likeliest token is 2**43
"""

from __future__ import annotations

import torch

from ostinato.ops import exact

ONE = 1 << 43
"""The likeliest token's weight: sums over a million tokens stay below 2**63."""
MOST_TOKENS = (1 << 20) - 1
TINY = float(torch.finfo(torch.float32).tiny)
_MASK64 = (1 << 64) - 1
GOLDEN, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix64(*values: int) -> int:
    """A 64-bit hash of integers: the splitmix64 finaliser (Steele, Lea, Flood 2014) over a running sum."""
    state = 0
    for value in values:
        state = (state + (value & _MASK64) + GOLDEN) & _MASK64
        z = state
        z = ((z ^ (z >> 30)) * MIX_1) & _MASK64
        z = ((z ^ (z >> 27)) * MIX_2) & _MASK64
        state = z ^ (z >> 31)
    return state


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) that (seed, position) stands for, with 53 random bits."""
    return (mix64(seed, position) >> 11) * 2.0**-53


def weigh(x: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """d fp32 and q int64 of fp32 logits [V]; NaN weighs nothing, and temperature 0 is 1 (only d matters then)."""
    there = ~x.isnan()
    most = x.masked_fill(~there, float("-inf")).max()
    heat = torch.full_like(most, temperature or 1.0).clamp_min(TINY)
    d = ((most - x) / heat).masked_fill(x == most, 0.0).masked_fill(~there, float("inf"))
    return d, (exact.exp(-d) * float(ONE)).long()


def candidates(
    x: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids (ascending) that may be chosen from fp32 logits [V], and their weights, both int64.

    Of the `top_k` best (0: all), the smallest set of best ones whose weight reaches `top_p` of theirs, without those
    under `min_p` of the best. Temperature 0 keeps the best one.
    """
    d, q = weigh(x, temperature)
    size = x.shape[0]
    kept = torch.sort(d, stable=True).indices
    if temperature == 0.0:
        kept = kept[:1]
    elif 0 < top_k < size:
        kept = kept[:top_k]
    if top_p < 1.0:
        reached = q[kept].cumsum(0)
        need = max(int(top_p * float(reached[-1])), 1)
        kept = kept[: int(torch.searchsorted(reached, need)) + 1]
    ids = torch.sort(kept).values
    ids = ids[q[ids] >= least_weight(min_p)]
    return ids, q[ids]


def least_weight(min_p: float) -> int:
    """The smallest weight that `min_p` keeps."""
    return int(min_p * float(ONE))


def choose(x: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float, noise: float) -> int:
    """The token that `noise` in [0, 1) stands for: the first whose running weight passes that share of the whole."""
    ids, q = candidates(x, temperature, top_k, top_p, min_p)
    reached = q.cumsum(0)
    if not len(ids) or int(reached[-1]) == 0:
        return 0  # a row of NaN
    whole = int(reached[-1])
    target = min(int(noise * float(whole)), whole - 1)
    return int(ids[int(torch.searchsorted(reached, target, right=True))])
