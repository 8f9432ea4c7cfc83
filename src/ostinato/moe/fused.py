"""When a layer's routing runs as one kernel: the fused twin of `select_experts`, mask of pads included.

The twin covers configs without a custom router, on layers without placement or export; whatever else comes goes
through `moe.routing`. Knows nothing of kernels. Invariant: a rule says all that the twin has to do, so where it
serves, its ids, weights and load are those of `select_experts`.
"""

from __future__ import annotations

from ostinato.moe.placement import ExpertPlacement
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
    if placement is not None or consumers.export is not None:
        return None
    rule = routing_rule(config, num_experts)
    return None if rule is None else ops.routing_kernel(rule)
