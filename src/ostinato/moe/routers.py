"""The table of routers: every way to get from logits to (weights, ids), with its pad contract.

A router is handed fp32 logits and a config and knows nothing of padding, placement, scaling or load; its pad
contract is what holds after the one post-process of `select_experts`, which no router can leave out.
Invariant: a config chooses exactly one router.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from ostinato.moe.scoring import (
    SCORING_FUNCS,
    divide_by_sum,
    keep_best_groups,
    raw_logits_weights,
    top_k_ids,
)
from ostinato.moe.topk import TopKConfig
from ostinato.padding import PadContract

Route = Callable[[torch.Tensor, torch.Tensor, TopKConfig], tuple[torch.Tensor, torch.Tensor]]
"""(hidden_states [N, H], router_logits fp32 [N, E], config) -> (weights fp32 [N, Kr], ids integer [N,
Kr])."""


@dataclass(frozen=True, slots=True)
class Router:
    """A way to choose experts, and what it promises about pads after the post-process."""

    name: str
    route: Route
    pad_contract: PadContract


def _route_scored(
    hidden_states: torch.Tensor, router_logits: torch.Tensor, config: TopKConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Score, choose with the bias and within the kept groups, weigh without the bias."""
    scores = SCORING_FUNCS[config.scoring_func](router_logits)
    bias = config.correction_bias
    choice = scores if bias is None else scores + bias
    if config.use_grouped_topk:
        assert config.num_expert_group is not None
        assert config.topk_group is not None
        choice = keep_best_groups(
            choice,
            num_groups=config.num_expert_group,
            num_kept=config.topk_group,
            best_pair=bias is not None,
        )
    ids = top_k_ids(choice, config.num_routed)
    if config.scoring_func == "raw_logits":
        return raw_logits_weights(router_logits, ids, renormalize=config.renormalize), ids
    weights = scores.gather(-1, ids)
    return divide_by_sum(weights) if config.renormalize else weights, ids


def _route_custom(
    hidden_states: torch.Tensor, router_logits: torch.Tensor, config: TopKConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call the custom routing function and check the form of what it returns."""
    assert config.custom_routing_function is not None
    weights, ids = config.custom_routing_function(
        hidden_states, router_logits, config.num_routed, config.renormalize
    )
    expected = (router_logits.shape[0], config.num_routed)
    if weights.shape != expected or ids.shape != expected:
        raise ValueError(
            f"custom_routing_function returned weights {tuple(weights.shape)} and ids {tuple(ids.shape)}; "
            f"both must be {expected}"
        )
    if weights.dtype not in (torch.float32, torch.float64):
        raise TypeError(
            f"custom_routing_function returned {weights.dtype} weights; compute them in torch.float32"
        )
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise TypeError(f"custom_routing_function returned {ids.dtype} ids; they must be integers")
    return weights, ids


def _router(name: str, route: Route) -> Router:
    return Router(name, route, PadContract(f"router {name}", emits_sentinel=True))


ROUTERS: Mapping[str, Router] = MappingProxyType(
    {
        name: _router(name, route)
        for name, route in (
            ("softmax", _route_scored),
            ("raw_logits", _route_scored),
            ("sigmoid", _route_scored),
            ("sqrtsoftplus", _route_scored),
            ("grouped", _route_scored),
            ("biased_grouped", _route_scored),
            ("custom", _route_custom),
        )
    }
)
"""All routers by name. A test runs each of them over pads."""


def router_for(config: TopKConfig) -> Router:
    """The one router that `config` chooses."""
    if config.custom_routing_function is not None:
        return ROUTERS["custom"]
    if config.use_grouped_topk:
        return ROUTERS["grouped" if config.correction_bias is None else "biased_grouped"]
    return ROUTERS[config.scoring_func]
