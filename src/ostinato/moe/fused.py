"""When a layer's routing runs as one kernel: the fused twin of `select_experts`, mask of pads included.

The twin covers configs without a custom router, on layers without export; where experts are placed, a remap follows it.
Whatever else comes goes through `moe.routing`. Knows nothing of kernels. Invariant: a rule says all that the twin has
to do, so where it serves, its ids, weights and load are those of `select_experts`.
"""

from __future__ import annotations

import torch

from ostinato.moe.placement import ExpertPlacement, LogicalIds
from ostinato.moe.routing import Consumers
from ostinato.moe.topk import TopKConfig
from ostinato.ops.opset import OpSet, RoutingKernel, RoutingRule


def routing_rule(config: TopKConfig, num_experts: int) -> RoutingRule | None:
    """`config` as a rule; None for a custom router."""
    if config.custom_routing_function is not None:
        return None
    groups, kept = 1, 1
    if config.use_grouped_topk:
        assert config.num_expert_group is not None
        assert config.topk_group is not None
        groups, kept = config.num_expert_group, config.topk_group
    return RoutingRule(
        num_experts=num_experts,
        num_routed=config.num_routed,
        scoring_func=config.scoring_func,
        renormalize=config.renormalize,
        correction_bias=config.correction_bias,
        num_groups=groups,
        num_kept_groups=kept,
        scale=config.output_scale,
        num_shared=config.num_fused_shared_experts,
        shared_weight=config.shared_weight,
    )


def fused_routing(
    ops: OpSet,
    config: TopKConfig,
    num_experts: int,
    placement: ExpertPlacement | None,
    consumers: Consumers,
) -> RoutingKernel | None:
    """The op set's kernel for a layer, or None when it must go through `select_experts`."""
    if consumers.export is not None:
        return None
    # Columns of fused shared experts lie behind the physical ones, which the kernel does not know.
    if placement is not None and config.num_fused_shared_experts:
        return None
    rule = routing_rule(config, num_experts)
    routing = None if rule is None else ops.routing_kernel(rule)
    return routing if routing is None or placement is None else RemappedRouting(routing, placement)


class RemappedRouting:
    """A routing kernel, then the map from logical to physical experts; load is counted on the latter.

    The kernel has masked pads before, and -1 comes through the map as it is.
    """

    __slots__ = ("_placement", "_routing")

    def __init__(self, routing: RoutingKernel, placement: ExpertPlacement) -> None:
        self._routing = routing
        self._placement = placement

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
        self._routing(logits, topk_weights, topk_ids, live, None, None)
        topk_ids.copy_(self._placement.to_physical(LogicalIds(topk_ids)).ids)
        if load is not None and load_live is not None:
            ids = topk_ids.reshape(-1).long()
            load.scatter_add_(0, ids.clamp_min(0), (ids >= 0).long() * load_live)
