"""`select_experts`: from router logits to expert slots and weights, pads masked.

    route (any router) -> scale -> remap logical to physical -> mask pads -> export, load -> shared experts

Everything after the router is `post_process`, the only place where expert ids of pads are masked; no router
can leave it out, on any device and in any parallel layout. An op set may run all of this as one kernel, the fused
twin, where `moe.fused` says so; tests hold the two together bit for bit. Knows nothing of graphs or models.
Invariant: after it, pad rows have id -1 and weight 0 in every column, whatever the router made of them, without a
host read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ostinato.errors import ConfigError
from ostinato.moe.export import RoutedExpertsExport
from ostinato.moe.load import ExpertLoad
from ostinato.moe.mask import SENTINEL, fill_pad_rows_, pad_rows
from ostinato.moe.placement import ExpertPlacement, LogicalIds, PhysicalIds
from ostinato.moe.routers import router_for
from ostinato.moe.scoring import slot_sum
from ostinato.moe.topk import TopKConfig

__all__ = ["Consumers", "TopKConfig", "post_process", "select_experts", "select_experts_into"]


@dataclass(frozen=True, slots=True, eq=False)
class Consumers:
    """Who reads the routed ids of layer `layer_id` beside the experts: load statistics, export."""

    layer_id: int = 0
    load: ExpertLoad | None = None
    export: RoutedExpertsExport | None = None


def select_experts(
    hidden_states: torch.Tensor,
    router_logits: torch.Tensor,
    config: TopKConfig,
    *,
    num_token_non_padded: torch.Tensor | None = None,
    placement: ExpertPlacement | None = None,
    gathered_counts: torch.Tensor | None = None,
    rows_per_slot: int | None = None,
    layer_id: int = 0,
    load: ExpertLoad | None = None,
    export: RoutedExpertsExport | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose `config.top_k` experts for each row: (topk_weights fp32 [N, K], topk_ids int32 [N, K]).

    hidden_states [N, H] is for custom routers; router_logits fp32 [N, E]. num_token_non_padded, a one-element
    integer tensor, counts the leading real rows; gathered_counts [dp] with rows_per_slot takes its place for
    a buffer gathered over data-parallel ranks. Pads, and only pads, get id -1 and weight 0. Ids are slots of
    `placement` (logical ids without one); fused shared experts stand in the last columns.

    Raises TypeError for logits that are not fp32, or a count that is no integer tensor; ConfigError for a
    config or placement that does not fit the number of experts; ValueError for counts of a wrong size.
    """
    shape = (router_logits.shape[0], config.top_k)
    topk_weights = torch.empty(shape, dtype=torch.float32, device=router_logits.device)
    topk_ids = torch.empty(shape, dtype=torch.int32, device=router_logits.device)
    select_experts_into(
        topk_weights,
        topk_ids,
        hidden_states,
        router_logits,
        config,
        num_token_non_padded,
        gathered_counts,
        rows_per_slot,
        placement,
        Consumers(layer_id, load, export),
    )
    return topk_weights, topk_ids


def select_experts_into(
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    hidden_states: torch.Tensor,
    router_logits: torch.Tensor,
    config: TopKConfig,
    num_token_non_padded: torch.Tensor | None = None,
    gathered_counts: torch.Tensor | None = None,
    rows_per_slot: int | None = None,
    placement: ExpertPlacement | None = None,
    consumers: Consumers | None = None,
) -> None:
    """The kernel form of `select_experts`, for `stream.launch`: writes topk_weights and topk_ids [N, K]."""
    if router_logits.dtype != torch.float32:
        raise TypeError(
            f"router_logits are {router_logits.dtype}, they must be torch.float32: near-tied experts swap in "
            "lower precision; let the router's linear write fp32 instead of converting its output"
        )
    num_experts = router_logits.shape[-1]
    config.check_num_experts(num_experts)
    placement = placement or ExpertPlacement.identity(num_experts)
    if placement.num_logical != num_experts:
        raise ConfigError(f"the placement maps {placement.num_logical} experts, the router has {num_experts}")
    slots = placement.shared_slots
    if slots is not None and slots.num_shared != config.num_fused_shared_experts:
        raise ConfigError(
            f"the placement has slots for {slots.num_shared} shared experts per rank, the config fuses "
            f"{config.num_fused_shared_experts}"
        )
    pads = pad_rows(router_logits.shape[0], num_token_non_padded, gathered_counts, rows_per_slot)
    weights, ids = router_for(config).route(hidden_states, router_logits, config)
    post_process(topk_weights, topk_ids, weights, ids, config, pads, placement, consumers or Consumers())


def post_process(
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    config: TopKConfig,
    pads: torch.Tensor | None,
    placement: ExpertPlacement,
    consumers: Consumers,
) -> None:
    """What follows any router: writes topk_weights and topk_ids [N, K] from its (weights, ids) [N, Kr].

    The scaling factor is applied here and nowhere else. The remap comes before the mask, so that no -1 of
    ours meets a table, and is safe against whatever stands in pad rows. Shared columns are written last and
    masked with their
    row: they are the same for every row, so pads would get valid ids.
    """
    routed = config.num_routed
    topk_weights[:, :routed].copy_(weights)
    _write_shared_weights(topk_weights, config, placement)
    if config.output_scale != 1.0:
        topk_weights[:, :routed].mul_(config.output_scale)

    physical = placement.to_physical(LogicalIds(ids))
    topk_ids[:, :routed].copy_(physical.ids)
    for column in range(routed, config.top_k):
        topk_ids[:, column].fill_(placement.shared_slot(column - routed))
    if pads is not None:
        fill_pad_rows_(topk_weights, pads, 0.0)
        fill_pad_rows_(topk_ids, pads, SENTINEL)

    if consumers.export is not None:
        logical = ids if pads is None else ids.masked_fill(pads, SENTINEL)
        consumers.export.record(consumers.layer_id, logical)
    masked = PhysicalIds(topk_ids[:, :routed])
    if consumers.load is not None:
        consumers.load.record(consumers.layer_id, masked)
    if placement.shared_slots is not None:
        topk_ids[:, :routed].copy_(placement.to_slots(masked).ids)


def _write_shared_weights(topk_weights: torch.Tensor, config: TopKConfig, placement: ExpertPlacement) -> None:
    """Weights of the fused shared columns, from routed weights that are not scaled yet.

    In the gate's form a shared expert weighs as much as the routed ones together, their sum / factor; that
    sum is 1 when they are renormalized. In slots of their own (one copy per rank) it weighs 1 / factor. Where
    the factor is folded into the weights, the division by it falls away.
    """
    if not config.num_fused_shared_experts:
        return
    shared = topk_weights[:, config.num_routed :]
    weight = config.shared_weight * placement.shared_weight_scale
    if config.renormalize or placement.shared_slots is not None:
        shared.fill_(weight)
    else:
        shared.copy_(slot_sum(topk_weights[:, : config.num_routed]) * weight)
