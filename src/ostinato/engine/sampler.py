"""Choosing the next token of each row from its logits.

Every row is handled by itself, from its own logits, history, seed and position: what is sampled depends neither on
the row's place in the batch nor on its batch-mates. Noise is a pure function of (seed, position), so a request
that was retracted, chunked or resumed draws the same numbers again. Rows that need no history are chosen by the step
itself (`ops.choice`); here are the others, and log-probabilities.

Order of the transforms: logit bias, penalties, structured output, `min_tokens`; then temperature, top-k, top-p, min-p
(the order of transformers' logits processors). Log-probabilities are those of the model, before any of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ostinato.engine.delta import TokenLogprobs
from ostinato.engine.request import Logprob, SamplingParams
from ostinato.ops.opset import OpSet

_SCORED_AT_ONCE = 1 << 21  # log-probabilities in fp64, so that many rows take little memory

Rule = tuple[float, int, float, float]
"""Temperature, top-k (0: all), top-p, min-p: what `OpSet.sample` takes for a row."""


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


def rule_of(params: SamplingParams) -> Rule:
    return params.temperature, params.top_k, params.top_p, params.min_p


def needs_history(p: SamplingParams) -> bool:
    """Whether logits are transformed on the host before a token is chosen from them."""
    return bool(
        p.min_tokens
        or p.logit_bias
        or p.repetition_penalty != 1.0
        or p.presence_penalty != 0.0
        or p.frequency_penalty != 0.0
    )


def signed64(seed: int) -> int:
    """The int64 of the same 64 bits."""
    seed &= (1 << 64) - 1
    return seed - (1 << 64) if seed >> 63 else seed


def sample(logits: torch.Tensor, inputs: Sequence[SampleInput], ops: OpSet) -> list[Sampled]:
    """Choose one token for each row of `logits` (fp32 [len(inputs), vocab]), which stay as they are."""
    rows = torch.stack([adjust(logits[i], row) for i, row in enumerate(inputs)])
    rules = torch.tensor([rule_of(row.params) for row in inputs], dtype=torch.float64)
    seeds = torch.tensor([signed64(row.seed) for row in inputs])
    out = torch.zeros(len(inputs), dtype=torch.int64)
    ops.sample(rows, rules, seeds, torch.tensor([row.position - 1 for row in inputs]), out)
    return [
        with_logprobs(logits[i], token, row.params.logprobs)
        for i, (token, row) in enumerate(zip(out.tolist(), inputs, strict=True))
    ]


def with_logprobs(logits: torch.Tensor, token_id: int, count: int | None) -> Sampled:
    """The token, with its and the `count` best log-probabilities from fp32 logits [vocab] unless `count` is None."""
    if count is None:
        return Sampled(token_id)
    logprob, top = top_logprobs(logits, token_id, count)
    return Sampled(token_id, logprob, top)


def top_logprobs(logits: torch.Tensor, token_id: int, count: int) -> tuple[float, dict[int, Logprob]]:
    """Log-probability of `token_id`, and of the `count` best tokens and itself, from fp32 logits [vocab]."""
    (rows,) = score(logits.unsqueeze(0), [token_id], count)
    top = {token: Logprob(value, rank) for token, value, rank in rows}
    return top[token_id].logprob, top


def score(logits: torch.Tensor, token_ids: Sequence[int], count: int) -> list[TokenLogprobs]:
    """Of each row of fp32 `logits` [len(token_ids), vocab]: the `count` best tokens, then its own if it is not one."""
    step = max(1, _SCORED_AT_ONCE // logits.shape[-1])
    found: list[TokenLogprobs] = []
    for first in range(0, len(token_ids), step):
        found += _score(logits[first : first + step], token_ids[first : first + step], count)
    return found


def _score(logits: torch.Tensor, token_ids: Sequence[int], count: int) -> list[TokenLogprobs]:
    logprobs = torch.log_softmax(logits.double(), dim=-1)
    own = logprobs.gather(1, torch.tensor(token_ids, device=logits.device).unsqueeze(1))
    ranks = (logprobs > own).sum(dim=-1) + 1
    order = _best(logprobs, min(count, logprobs.shape[-1]))
    places = range(1, order.shape[-1] + 1)
    found: list[TokenLogprobs] = []
    for token, (value,), rank, tokens, values in zip(
        token_ids,
        own.tolist(),
        ranks.tolist(),
        order.tolist(),
        logprobs.gather(1, order).tolist(),
        strict=True,
    ):
        rows = list(zip(tokens, values, places, strict=True))
        if token not in tokens:
            rows.append((token, value, rank))
        found.append(rows)
    return found


def _best(logprobs: torch.Tensor, count: int) -> torch.Tensor:
    """Ids of the `count` best of each row, int64 [rows, count]: the first ones of a stable sort, for less."""
    values, order = torch.topk(logprobs, count, dim=-1)
    if not count:
        return order
    # Which of several equals `topk` takes, and in what order, is open; the lowest ids come first.
    order = order.sort(dim=-1).values
    places = logprobs.gather(1, order).sort(dim=-1, descending=True, stable=True).indices
    order = order.gather(1, places)
    # Where the last value has equals left out (or is NaN), the set itself is open.
    (torn,) = ((logprobs >= values[:, -1:]).sum(dim=-1) != count).nonzero(as_tuple=True)
    if len(torn):
        order[torn] = logprobs[torn].argsort(dim=-1, descending=True, stable=True)[:, :count]
    return order


def adjust(logits: torch.Tensor, row: SampleInput) -> torch.Tensor:
    """Logit bias, penalties, and what may not be chosen, on a copy of fp32 logits [vocab]."""
    p = row.params
    copy = logits.clone()
    out = copy.numpy(force=True)
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
    return copy
