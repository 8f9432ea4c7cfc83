"""The MoE layer: router logits -> select_experts -> dispatch -> experts -> combine -> shared expert.

Built once from packed weights; `forward` only launches kernels into workspace buffers, so it may be captured.
Knows nothing of models, attention or engines. Invariant: pad rows of the result are zero, shared expert
included, before anyone (a collective above all) sees them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ostinato.errors import ConfigError
from ostinato.graphs.stream import Kernel, Stream
from ostinato.graphs.workspace import Workspace
from ostinato.moe.dispatch import Dispatcher, LocalDispatcher
from ostinato.moe.fused import fused_routing
from ostinato.moe.hip import experts_kernel
from ostinato.moe.mask import mask_pad_rows_
from ostinato.moe.placement import ExpertPlacement
from ostinato.moe.routers import router_for
from ostinato.moe.routing import Consumers, select_experts_into
from ostinato.moe.topk import TopKConfig
from ostinato.ops.opset import OpSet, PackedExperts, PackedLinear, RoutingKernel
from ostinato.padding import PadContract, check_pad_contracts
from ostinato.parallel.columns import ColumnGather


@dataclass(frozen=True, slots=True, eq=False)
class SharedExpert:
    """A dense gated MLP (SiLU) that every token passes, beside the routed experts.

    gate_up: H -> I, packed as gated; down: I -> H. gate: H -> 1 in fp32, whose sigmoid scales the result
    (Qwen2-MoE); None adds it as it is. With `columns`, gate_up and down hold the columns of this rank: nothing is
    summed over ranks, so the expert counts once without any scaling.
    """

    gate_up: PackedLinear
    down: PackedLinear
    gate: PackedLinear | None = None
    columns: ColumnGather | None = None


def reserve_moe_buffers(
    workspace: Workspace,
    max_num_tokens: int,
    *,
    hidden_size: int,
    num_experts: int,
    top_k: int,
    dtype: torch.dtype,
    shared_intermediate_size: int = 0,
) -> None:
    """Reserve what `MoELayer.forward` works in. Once per workspace: all layers share the buffers.

    `top_k` counts fused shared columns; `shared_intermediate_size` is that of a `SharedExpert`, 0 without.
    """
    n = max_num_tokens
    workspace.reserve("moe.router_logits", (n, num_experts), torch.float32)
    workspace.reserve("moe.topk_weights", (n, top_k), torch.float32)
    workspace.reserve("moe.topk_ids", (n, top_k), torch.int32)
    if shared_intermediate_size:
        workspace.reserve("moe.shared_act", (n, shared_intermediate_size), dtype)
        workspace.reserve("moe.shared_out", (n, hidden_size), dtype)
        workspace.reserve("moe.shared_gate", (n, 1), torch.float32)


@dataclass(frozen=True, slots=True, eq=False)
class MoELayer:
    """One layer's experts and how they are chosen.

    ops: the kernels. workspace: holds the buffers of `reserve_moe_buffers`. topk: how experts are chosen.
    router: packed H -> E with fp32 output. experts: packed, E routed ones, then the fused shared ones.
    weights_on_input: the routing weight scales an expert's input instead of its output (Llama 4).

    Raises PadContractError when the router's way of marking pads is not what the experts' kernel takes, and
    ConfigError for parts that do not fit together.
    """

    ops: OpSet
    workspace: Workspace
    topk: TopKConfig
    router: PackedLinear
    experts: PackedExperts
    shared: SharedExpert | None = None
    weights_on_input: bool = False
    placement: ExpertPlacement | None = None
    dispatcher: Dispatcher = field(default_factory=LocalDispatcher)
    consumers: Consumers = field(default_factory=Consumers)
    _fused: RoutingKernel | None = field(init=False)
    _experts_kernel: Kernel = field(init=False)

    def __post_init__(self) -> None:
        undeclared = PadContract(f"{self.ops.name}.moe_experts")
        kernel = self.ops.pad_contracts.get("moe_experts", undeclared)
        check_pad_contracts(router_for(self.topk).pad_contract, kernel)
        num_routed = self.router.out_features
        self.topk.check_num_experts(num_routed)
        num_fused = self.topk.num_fused_shared_experts
        whole = isinstance(self.dispatcher, LocalDispatcher) and self.placement is None
        if whole and self.experts.num_experts != num_routed + num_fused:
            raise ConfigError(
                f"{self.experts.num_experts} experts are packed; the router chooses among {num_routed} and "
                f"{num_fused} are fused shared ones"
            )
        if num_fused and self.shared is not None:
            raise ConfigError(
                "shared experts are either fused into the routed ones or a SharedExpert, not both"
            )
        factor = self.topk.routed_scaling_factor
        if factor not in (None, 1.0) and not self.topk.apply_routed_scaling_factor_on_output:
            raise ConfigError(
                f"routed_scaling_factor {factor} would be lost: the layer does not scale its output; set "
                "apply_routed_scaling_factor_on_output=True"
            )
        fused = fused_routing(self.ops, self.topk, num_routed, self.placement, self.consumers)
        object.__setattr__(self, "_fused", fused)
        shown = experts_kernel(self.ops.moe_experts, kernel)
        object.__setattr__(self, "_experts_kernel", self.dispatcher.kernel(shown))

    def forward(
        self,
        stream: Stream,
        x: torch.Tensor,
        num_token_non_padded: torch.Tensor | None,
        out: torch.Tensor,
        *,
        gathered_counts: torch.Tensor | None = None,
        rows_per_slot: int | None = None,
    ) -> None:
        """Launch the layer: x [T, H] -> out [T, H], two different buffers; pad rows of out are zero.

        num_token_non_padded is the device count of leading real rows among these T, or None when all are
        real; gathered_counts and rows_per_slot replace it for rows gathered over data-parallel ranks.
        """
        rows = x.shape[0]
        router_logits = self.workspace.take("moe.router_logits", rows, self.router.out_features)
        topk_weights = self.workspace.take("moe.topk_weights", rows, self.topk.top_k)
        topk_ids = self.workspace.take("moe.topk_ids", rows, self.topk.top_k)
        counts = (num_token_non_padded, gathered_counts, rows_per_slot)

        stream.launch(self.ops.linear, x, self.router, router_logits, num_token_non_padded)
        self._route(stream, x, router_logits, topk_weights, topk_ids, counts)
        sent = self.dispatcher.dispatch(stream, x, topk_weights, topk_ids, out)
        stream.launch(
            self._experts_kernel,
            sent.x,
            sent.topk_weights,
            sent.topk_ids,
            self.experts,
            self.weights_on_input,
            sent.out,
        )
        self.dispatcher.combine(stream, sent, out)
        if self.shared is not None:
            self._add_shared(stream, self.shared, x, num_token_non_padded, out)
            if gathered_counts is not None:
                stream.launch(mask_pad_rows_, out, None, 0.0, gathered_counts, rows_per_slot)

    def _route(
        self,
        stream: Stream,
        x: torch.Tensor,
        router_logits: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        counts: tuple[torch.Tensor | None, torch.Tensor | None, int | None],
    ) -> None:
        """One launch: the fused kernel where it serves this layer and these counts, else `select_experts`."""
        load = self.consumers.load
        if self._fused is not None and counts[1] is None:
            counters = (None, None) if load is None else (load.counts[self.consumers.layer_id], load.live)
            stream.launch(self._fused, router_logits, topk_weights, topk_ids, counts[0], *counters)
        else:
            launch = stream.outside if self.topk.routes_outside else stream.launch
            launch(
                select_experts_into,
                topk_weights,
                topk_ids,
                x,
                router_logits,
                self.topk,
                *counts,
                self.placement,
                self.consumers,
            )

    def _add_shared(
        self,
        stream: Stream,
        shared: SharedExpert,
        x: torch.Tensor,
        live: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """out += shared expert of x, which is zero past the live rows."""
        rows, hidden_size = x.shape
        act = self.workspace.take("moe.shared_act", rows, shared.down.in_features)
        result = self.workspace.take("moe.shared_out", rows, hidden_size)
        if shared.columns is None:
            stream.launch(self.ops.linear, x, shared.gate_up, act, live)
            stream.launch(self.ops.linear, act, shared.down, result, live)
        else:
            own = shared.columns.own("moe.shared_act", *act.shape)
            stream.launch(self.ops.linear, x, shared.gate_up, own, live)
            shared.columns.gather(stream, own, act)
            own = shared.columns.own("delta", *result.shape)
            stream.launch(self.ops.linear, act, shared.down, own, live)
            shared.columns.gather(stream, own, result)
        if shared.gate is None:
            stream.launch(self.ops.add, out, result, out)
            return
        gate = self.workspace.take("moe.shared_gate", rows, 1)
        stream.launch(self.ops.linear, x, shared.gate, gate, live)
        stream.launch(self.ops.sigmoid_gated_add, out, gate, result, out)
