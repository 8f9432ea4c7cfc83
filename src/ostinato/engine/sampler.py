"""Choosing the next token of each row from its logits.

Every row is handled by itself, from its own logits, history, seed and position: what is sampled depends neither on
the row's place in the batch nor on its batch-mates. Noise is a pure function of (seed, position), so a request
that was retracted, chunked or resumed draws the same numbers again. Runs outside the captured graph.

Order of the transforms: logit bias, penalties, structured output, `min_tokens`; then temperature, top-k, top-p, min-p
(the order of transformers' logits processors). Log-probabilities are those of the model, before any of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ostinato.engine.request import Logprob, SamplingParams

Row = npt.NDArray[np.float32]

_MASK64 = (1 << 64) - 1
_BLOCK = 256  # weights summed at once when one is looked for
_SMALLEST = np.finfo(np.float32).tiny


@dataclass(frozen=True, slots=True)
class SampleInput:
    """What sampling one row needs beside its logits.

    `position` is the absolute position of the token to be chosen. `blocked_token_ids` may not be chosen now
    (end-of-sequence tokens before `min_tokens`), unless nothing else may be: `allowed`, bool [vocab], goes first.
    """

    params: SamplingParams
    seed: int
    position: int
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    blocked_token_ids: frozenset[int] = frozenset()
    allowed: npt.NDArray[np.bool_] | None = None


@dataclass(frozen=True, slots=True)
class Sampled:
    """A chosen token, its log-probability and the best alternatives (None unless asked for)."""

    token_id: int
    logprob: float | None = None
    top_logprobs: dict[int, Logprob] | None = None


def mix64(*values: int) -> int:
    """A 64-bit hash of integers: the splitmix64 finaliser (Steele, Lea, Flood 2014) over a running sum."""
    state = 0
    for value in values:
        state = (state + (value & _MASK64) + 0x9E3779B97F4A7C15) & _MASK64
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
        state = z ^ (z >> 31)
    return state


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) that (seed, position) stands for, with 53 random bits."""
    return (mix64(seed, position) >> 11) * 2.0**-53


def sample(
    logits: torch.Tensor, inputs: Sequence[SampleInput], greedy: Sequence[int] | None = None
) -> list[Sampled]:
    """Choose one token for each of the leading rows of `logits` (fp32 [len(inputs) or more, vocab]).

    `greedy` has the best of each row, where the step has found it already; rows without any transform take it. Ties
    go to the lowest id.
    """
    assert logits.shape[0] >= len(inputs), (logits.shape, len(inputs))
    if greedy is None:
        greedy = logits.argmax(dim=-1).tolist()
    chosen = []
    for i, row in enumerate(inputs):
        free = not row.blocked_token_ids and row.allowed is None
        plain = free and is_plain_greedy(row.params)
        token = greedy[i] if plain else _choose(logits[i].numpy(force=True), row)
        chosen.append(_with_logprobs(logits, i, token, row.params.logprobs))
    return chosen


def top_logprobs(logits: torch.Tensor, token_id: int, count: int) -> tuple[float, dict[int, Logprob]]:
    """Log-probability of `token_id`, and of the `count` best tokens and itself, from fp32 logits [vocab]."""
    logprobs = torch.log_softmax(logits.double(), dim=-1)
    value = float(logprobs[token_id])
    rank = int((logprobs > value).sum()) + 1
    top: dict[int, Logprob] = {}
    if count:
        order = torch.argsort(logprobs, descending=True, stable=True)[:count]
        for place, token in enumerate(order.tolist()):
            top[token] = Logprob(logprob=float(logprobs[token]), rank=place + 1)
    top.setdefault(token_id, Logprob(logprob=value, rank=rank))
    return value, top


def _with_logprobs(logits: torch.Tensor, row: int, token_id: int, count: int | None) -> Sampled:
    if count is None:
        return Sampled(token_id)
    logprob, top = top_logprobs(logits[row], token_id, count)
    return Sampled(token_id, logprob, top)


def is_plain_greedy(p: SamplingParams) -> bool:
    """Whether the likeliest token is chosen, whatever came before."""
    return (
        p.temperature == 0.0
        and not p.logit_bias
        and p.repetition_penalty == 1.0
        and p.presence_penalty == 0.0
        and p.frequency_penalty == 0.0
    )


def _choose(logits: Row, row: SampleInput) -> int:
    adjusted = _adjust(logits, row)
    if row.params.temperature == 0.0:
        return int(adjusted.argmax())
    ids, weights = _candidates(adjusted, row.params)
    return int(ids[_place(weights, uniform(row.seed, row.position))])


def _place(weights: Row, share: float) -> int:
    """The place at which the running sum of weights passes `share` of their mass: a block first, then in it."""
    blocks = np.add.reduceat(weights, np.arange(0, len(weights), _BLOCK), dtype=np.float64)
    ends = np.cumsum(blocks)
    target = share * ends[-1]
    last = np.searchsorted(ends, ends[-1], side="left")  # blocks behind it weigh nothing
    block = int(min(np.searchsorted(ends, target, side="right"), last))
    first = block * _BLOCK
    within = weights[first : first + _BLOCK]
    inner = np.cumsum(within, dtype=np.float64)
    place = int(np.searchsorted(inner, target - (ends[block] - blocks[block]), side="right"))
    if place == len(within) or within[place] == 0:  # rounding has put the target past the block's last weight
        place = int(np.flatnonzero(within)[-1])
    return first + place


def _adjust(logits: Row, row: SampleInput) -> Row:
    """Logit bias, penalties, and what may not be chosen, on a copy."""
    p = row.params
    out = logits.copy()
    for token, bias in (p.logit_bias or {}).items():
        out[token] += bias
    produced = np.asarray(row.output_token_ids, dtype=np.int64)
    if p.repetition_penalty != 1.0:
        # CTRL (Keskar et al. 2019): seen tokens, the prompt's included, are divided or multiplied by their sign.
        seen = np.unique(np.concatenate([np.asarray(row.prompt_token_ids, dtype=np.int64), produced]))
        values = out[seen]
        out[seen] = np.where(values > 0, values / p.repetition_penalty, values * p.repetition_penalty)
    if len(produced) and (p.presence_penalty or p.frequency_penalty):
        tokens, counts = np.unique(produced, return_counts=True)
        out[tokens] -= (p.presence_penalty + p.frequency_penalty * counts).astype(np.float32)
    if row.allowed is not None:
        out[~row.allowed] = -np.inf
    if row.blocked_token_ids:
        blocked = list(row.blocked_token_ids)
        values = out[blocked]
        out[blocked] = -np.inf
        if row.allowed is not None and not np.isfinite(out).any():
            out[blocked] = values  # the form is complete: it ends, however short
    return out


def _candidates(logits: Row, p: SamplingParams) -> tuple[npt.NDArray[np.int64], Row]:
    """Ids (ascending) that may be chosen and their unnormalised probabilities.

    In fp32, which logits are: powers in fp64 would be most of a sampled row's cost. Sums over them are fp64.
    """
    scaled = logits - logits.max()
    with np.errstate(over="ignore"):  # at a tiny temperature all but the best go to -inf, as they should
        scaled /= max(np.float32(p.temperature), _SMALLEST)
    ids: npt.NDArray[np.int64]
    if 0 < p.top_k < len(scaled):
        # Candidates by threshold first: a full sort of the vocabulary is the dear part.
        threshold = np.partition(scaled, len(scaled) - p.top_k)[len(scaled) - p.top_k]
        ids = np.flatnonzero(scaled >= threshold)
        if len(ids) > p.top_k:
            order = np.argsort(-scaled[ids], kind="stable")
            ids = np.sort(ids[order[: p.top_k]])
        weights = np.exp(scaled[ids])
    else:
        ids, weights = np.arange(len(scaled)), np.exp(scaled)
    if p.top_p < 1.0:
        kept = _nucleus(weights, p.top_p)
        ids, weights = ids[kept], weights[kept]
    if p.min_p > 0.0:
        keep = weights >= p.min_p * weights.max()
        ids, weights = ids[keep], weights[keep]
    return ids, weights


def _nucleus(weights: Row, top_p: float) -> npt.NDArray[np.int64]:
    """Places (ascending) of the smallest set whose mass reaches `top_p`; the token that crosses the line is kept.

    Only weights that can be in it are sorted: all those under (1 - top_p) / 2n of the mass have less than half of
    what may be left out.
    """
    mass = float(weights.sum(dtype=np.float64))
    places = np.flatnonzero(weights >= mass * (1.0 - top_p) / (2 * len(weights)))
    order = places[np.argsort(-weights[places], kind="stable")]
    cumulative = np.cumsum(weights[order], dtype=np.float64)
    size = int(np.searchsorted(cumulative, top_p * mass, side="left")) + 1
    return np.sort(order[:size])
