"""Routing in one launch: score, add the bias, keep the best groups, choose, weigh, scale, mask pads, count load.

The fused twin of `moe.routing`, one program a row. Knows nothing of models. Invariant: the twin's bits, whatever a row
holds: NaN counts as the largest score, ties go to the lowest id, ids of a real row are distinct experts. A row at or
past the live count comes out with id -1 and weight 0, and counts nowhere.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ostinato.ops.cuda.arithmetic import (
    exp,
    ordered_key,
    place_key,
    place_of,
    sigmoid,
    softplus,
    sum_of_lanes,
    value_of_key,
)
from ostinato.ops.cuda.launching import MOST_IN_A_BLOCK, count_argument, power_of_two, run
from ostinato.ops.exact import LANES
from ostinato.ops.opset import RoutingRule

MOST_ROUTED = 2 * LANES
"""More experts a row would be summed in another order than the twin's."""
_SCORES = ("softmax", "sigmoid", "sqrtsoftplus", "raw_logits")
SOFTMAX, SIGMOID, SQRT_SOFTPLUS, RAW = (tl.constexpr(i) for i in range(4))
LANE_COUNT = tl.constexpr(LANES)
LEAST_KEY = tl.constexpr(-(1 << 63))
MINUS_INFINITY = tl.constexpr(float("-inf"))
TINY = tl.constexpr(float(torch.finfo(torch.float32).tiny))
_HIGH_WORD = tl.constexpr(32)


@triton.jit
def _largest(x: tl.tensor, there: tl.tensor) -> tl.tensor:
    """The largest of fp32 [A, B] where `there`, NaN if one is."""
    key = tl.where(there, ordered_key(x), -0x80000000)
    return value_of_key(tl.max(tl.max(key, axis=1), axis=0))


@triton.jit
def _sum_of_powers(logits: tl.tensor, most: tl.tensor, EXPERTS: tl.constexpr) -> tl.tensor:
    """The sum of exp(logits - most) over a row, in the order of `ops.exact`."""
    lane = tl.arange(0, LANE_COUNT)
    total = tl.zeros((LANE_COUNT,), tl.float32)
    for start in range(0, EXPERTS, LANE_COUNT):
        inside = start + lane < EXPERTS
        powers = exp(tl.load(logits + start + lane, mask=inside, other=0.0) - most)
        total += tl.where(inside, powers, 0.0)
    return sum_of_lanes(total)


@triton.jit
def _chosen_softmax(values: tl.tensor, slot: tl.tensor, ROUTED: tl.constexpr, K: tl.constexpr) -> tl.tensor:
    """Softmax over the leading ROUTED of fp32 [K], as `ops.exact` sums it."""
    there = slot < ROUTED
    key = tl.where(there, ordered_key(values), -0x80000000)
    powers = tl.where(there, exp(values - value_of_key(tl.max(key, axis=0))), 0.0)
    lanes = tl.sum(tl.reshape(powers, (K // LANE_COUNT, LANE_COUNT)), axis=0)  # two at most: no order to it
    return tl.div_rn(powers, tl.zeros((K,), tl.float32) + sum_of_lanes(lanes))


@triton.jit
def _keep_groups(
    choice: tl.tensor,
    expert: tl.tensor,
    there: tl.tensor,
    group: tl.tensor,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    PAIR: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr,
) -> tl.tensor:
    """`choice` with the experts outside the best groups at minus infinity."""
    keys = tl.where(there, place_key(ordered_key(choice), expert), LEAST_KEY)
    best = tl.max(keys, axis=1)
    worth = value_of_key((best >> _HIGH_WORD).to(tl.int32))
    if PAIR:
        second = tl.max(tl.where(keys == best[:, None], LEAST_KEY, keys), axis=1)
        worth += value_of_key((second >> _HIGH_WORD).to(tl.int32))
    place = tl.arange(0, GROUPS_BLOCK)
    left = tl.where(place < GROUPS, place_key(ordered_key(worth), place), LEAST_KEY)
    kept = place < 0
    for _ in tl.static_range(KEPT):
        found = tl.max(left, axis=0)
        kept = kept | (left == found)
        left = tl.where(left == found, LEAST_KEY, left)
    return tl.where(kept[:, None], choice, MINUS_INFINITY)


@triton.jit
def routing_kernel(
    logits: tl.tensor,
    bias: tl.tensor,
    weights: tl.tensor,
    chosen: tl.tensor,
    live: tl.tensor,
    load: tl.tensor,
    load_live: tl.tensor,
    logits_row: tl.tensor,
    weights_row: tl.tensor,
    chosen_row: tl.tensor,
    scale: tl.tensor,
    shared_weight: tl.tensor,
    HAS_LIVE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_LOAD: tl.constexpr,
    SCORE: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROUTED: tl.constexpr,
    SHARED: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
    K: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, K)
    real = row >= 0
    if HAS_LIVE:
        real = row < tl.load(live)
    value = tl.zeros((K,), tl.float32)
    expert_of = tl.zeros((K,), tl.int32) - 1
    if real:
        values, expert_of, total = _route(
            logits + row * logits_row, bias, slot, HAS_BIAS, SCORE, RENORMALIZE, EXPERTS, ROUTED, GROUPS, KEPT,
            GROUPS_BLOCK, SIZE_BLOCK, K,
        )  # fmt: skip
        shared = shared_weight
        if not RENORMALIZE:
            shared = total * shared_weight
        value = tl.where(slot < ROUTED, values * scale, shared)
        expert_of = tl.where(slot < ROUTED, expert_of, EXPERTS + slot - ROUTED)
        if HAS_LOAD:
            one = tl.zeros((K,), tl.int64) + tl.load(load_live)
            tl.atomic_add(load + expert_of, one, mask=slot < ROUTED, sem="relaxed")
    tl.store(weights + row * weights_row + slot, value, mask=slot < ROUTED + SHARED)
    tl.store(chosen + row * chosen_row + slot, expert_of, mask=slot < ROUTED + SHARED)


@triton.jit
def _route(
    logits: tl.tensor,
    bias: tl.tensor,
    slot: tl.tensor,
    HAS_BIAS: tl.constexpr,
    SCORE: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROUTED: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
    K: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Weights (not scaled), experts and the sum of the weights of one real row."""
    SIZE: tl.constexpr = EXPERTS // GROUPS
    group = tl.arange(0, GROUPS_BLOCK)[:, None]
    inside = tl.arange(0, SIZE_BLOCK)[None, :]
    expert = group * SIZE + inside
    there = (group < GROUPS) & (inside < SIZE)
    x = tl.load(logits + expert, mask=there, other=0.0)
    score = x
    if SCORE == SOFTMAX or (SCORE == RAW and not RENORMALIZE):
        most = _largest(x, there)
        powers = exp(x - most)
        shares = tl.div_rn(powers, tl.zeros_like(powers) + _sum_of_powers(logits, most, EXPERTS))
    if SCORE == SOFTMAX:
        score = shares
    elif SCORE == SIGMOID:
        score = sigmoid(x)
    elif SCORE == SQRT_SOFTPLUS:
        score = tl.sqrt_rn(softplus(x))
    choice = score
    if HAS_BIAS:
        choice = score + tl.load(bias + expert, mask=there, other=0.0)
    if KEPT < GROUPS:
        choice = _keep_groups(choice, expert, there, group, GROUPS, KEPT, HAS_BIAS and SIZE > 1, GROUPS_BLOCK)
    if SCORE == RAW and not RENORMALIZE:
        score = shares
    keys = tl.where(there, place_key(ordered_key(choice), expert), LEAST_KEY)
    values = tl.zeros((K,), tl.float32)
    expert_of = tl.zeros((K,), tl.int32)
    total = tl.zeros((), tl.float32)
    for k in tl.static_range(ROUTED):
        best = tl.max(tl.max(keys, axis=1), axis=0)
        mine = keys == best
        weight = tl.sum(tl.sum(tl.where(mine, score, 0.0), axis=1), axis=0)
        values = tl.where(slot == k, weight, values)
        expert_of = tl.where(slot == k, place_of(best), expert_of)
        keys = tl.where(mine, LEAST_KEY, keys)
        total += weight
    if RENORMALIZE:
        if SCORE == RAW:
            values = _chosen_softmax(values, slot, ROUTED, K)
        else:
            values = tl.div_rn(values, tl.zeros((K,), tl.float32) + tl.where(total < TINY, TINY, total))
    return values, expert_of, total


class TritonRouting:
    """`RoutingKernel` of one rule."""

    __slots__ = ("_bias", "_constants", "_rule")

    def __init__(self, rule: RoutingRule) -> None:
        self._rule = rule
        self._bias = rule.correction_bias
        self._constants = {
            "HAS_BIAS": rule.correction_bias is not None,
            "SCORE": _SCORES.index(rule.scoring_func),
            "RENORMALIZE": rule.renormalize,
            "EXPERTS": rule.num_experts,
            "ROUTED": rule.num_routed,
            "SHARED": rule.num_shared,
            "GROUPS": rule.num_groups,
            "KEPT": rule.num_kept_groups,
            "GROUPS_BLOCK": power_of_two(rule.num_groups),
            "SIZE_BLOCK": power_of_two(rule.num_experts // rule.num_groups),
            "K": power_of_two(rule.num_routed + rule.num_shared, LANES),
        }

    def __call__(
        self,
        logits: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        live: torch.Tensor | None,
        load: torch.Tensor | None,
        load_live: torch.Tensor | None,
        /,
    ) -> None:
        columns = self._rule.num_routed + self._rule.num_shared
        if topk_ids.shape[1] != columns or topk_weights.shape[1] != columns:
            raise ValueError(
                f"the rule has {columns} columns, weights have {tuple(topk_weights.shape)}, ids {tuple(topk_ids.shape)}"
            )
        if not len(logits):
            return
        run(
            routing_kernel,
            (len(logits),),
            logits,
            logits if self._bias is None else self._bias,
            topk_weights,
            topk_ids,
            count_argument(live, logits),
            logits if load is None else load,
            logits if load_live is None else load_live,
            logits.stride(0),
            topk_weights.stride(0),
            topk_ids.stride(0),
            self._rule.scale,
            self._rule.shared_weight,
            HAS_LIVE=live is not None,
            HAS_LOAD=load is not None,
            **self._constants,
        )


def supports(rule: RoutingRule) -> bool:
    """Whether the kernel runs by this rule."""
    columns = power_of_two(rule.num_routed + rule.num_shared, LANES)
    return (
        rule.scoring_func in _SCORES and columns <= MOST_ROUTED and rule.num_experts <= MOST_IN_A_BLOCK // 8
    )
