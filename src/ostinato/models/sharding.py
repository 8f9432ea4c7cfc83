"""Which part of each weight a rank holds: a table from logical axes to parallel ones, and the plan of a parallel model.

Layers are split by output columns (see `parallel.columns`), so every axis here is one of outputs, but for the width of
experts that several ranks slice. Knows nothing of names or files. Invariant: spans of the ranks cover an axis once, and
what does not divide is refused with the arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

from ostinato.errors import ConfigError
from ostinato.graphs.workspace import Workspace
from ostinato.models.config import ModelConfig
from ostinato.models.decoder import CausalLM
from ostinato.models.parts import WHOLE_QK
from ostinato.moe.all_to_all import AllToAllDispatcher, most_between
from ostinato.moe.dispatch import Dispatcher, LocalDispatcher
from ostinato.moe.gathered import GatheredDispatcher
from ostinato.moe.home import Home
from ostinato.moe.layer import MoELayer
from ostinato.moe.load import ExpertRows
from ostinato.moe.pairs import ExpertShare, PairBuffers, StepWidths
from ostinato.moe.placement import ExpertPlacement
from ostinato.moe.rebalance import PlacedLayer
from ostinato.ops.opset import OpSet
from ostinato.parallel.columns import ColumnGather
from ostinato.parallel.rendezvous import World, single_world
from ostinato.parallel.topology import Topology

Span = tuple[int, int]

AXES: Mapping[str, str] = MappingProxyType(
    {
        "heads": "attn_tp",
        "kv_heads": "attn_tp",
        "hidden": "attn_tp",
        "intermediate": "attn_tp",
        "vocab": "attn_tp",
        "experts": "ep",
        "expert_intermediate": "moe_tp",
    }
)
"""Logical axis of a weight -> parallel axis that splits it. What is not here is whole on every rank."""


@dataclass(frozen=True, slots=True)
class Sharding:
    """Spans of one rank."""

    topology: Topology

    def span(self, axis: str, size: int) -> Span:
        """This rank's [first, last) of `size`. Raises ConfigError when ranks cannot have equal shares."""
        name = AXES[axis]
        ranks = int(getattr(self.topology, name))
        rank = int(getattr(self.topology, f"{name}_rank"))
        if axis == "kv_heads" and size < ranks and ranks % size == 0:
            first = rank * size // ranks  # several ranks share a head
            return first, first + 1
        if size % ranks:
            raise ConfigError(
                f"{size} {axis.replace('_', ' ')} cannot be shared out over {name} {ranks}: {size} / {ranks} = "
                f"{size / ranks:g}; choose a layout whose {name} divides {size}"
            )
        share = size // ranks
        return rank * share, (rank + 1) * share

    def splits(self, axis: str, size: int) -> bool:
        """Whether `size` of an axis can be shared out, and is by more than one rank."""
        ranks = int(getattr(self.topology, AXES[axis]))
        return ranks > 1 and size % ranks == 0


def check_shares(topology: Topology, config: ModelConfig, num_physical: int) -> None:
    """Raise ConfigError when ranks of a layout cannot have equal shares of a model; num_physical: its expert slots."""
    share, moe = Sharding(topology), config.moe
    sizes = [("heads", config.num_heads), ("kv_heads", config.num_kv_heads), ("hidden", config.hidden_size)]
    sizes += [("intermediate", layer.intermediate_size) for layer in config.layers if not layer.sparse]
    if moe is not None:
        if moe.shared_intermediate_size:
            sizes.append(("intermediate", moe.shared_intermediate_size))
        sizes += [("experts", num_physical), ("expert_intermediate", moe.intermediate_size)]
    for axis, size in sizes:
        share.span(axis, size)


def shares_rows(dispatch: str, topology: Topology) -> bool:
    """Whether ranks that have the same rows each dispatch a slice of them, so that widths must divide."""
    return dispatch != "gathered" and topology.attn_tp > 1


@dataclass(frozen=True, slots=True, eq=False)
class LayerExperts:
    """Experts of one layer in a parallel model: the map for routers, and the logical expert in each physical slot."""

    placement: ExpertPlacement | None
    logical: tuple[int, ...]

    @classmethod
    def of(cls, slots: tuple[int, ...], num_experts: int) -> LayerExperts:
        """Experts in these slots."""
        return cls(ExpertPlacement.of_slots(slots, num_experts), slots)

    @classmethod
    def plain(cls, num_experts: int) -> LayerExperts:
        """Every expert once, in order."""
        return cls(None, tuple(range(num_experts)))


@dataclass(frozen=True, slots=True, eq=False)
class ParallelPlan:
    """How a model is spread over ranks. `widths` is set before each step, by whoever decides about it.

    dispatch: "gathered", "sharded", "all_to_all", or "all_to_all_fixed" with `capacity` slots between two ranks (None:
    as many as there can be). layers: experts by layer where they are not the plain ones.
    computed: where dispatchers count rows.
    """

    world: World = field(default_factory=single_world)
    widths: StepWidths = field(default_factory=StepWidths)
    dispatch: str = "gathered"
    capacity: int | None = None
    layers: Mapping[int, LayerExperts] = field(default_factory=lambda: MappingProxyType({}))
    computed: ExpertRows | None = None

    @property
    def topology(self) -> Topology:
        return self.world.topology

    @property
    def shares_rows(self) -> bool:
        """Whether ranks that have the same rows each dispatch a slice of them, so that widths must divide."""
        return shares_rows(self.dispatch, self.topology)

    def num_physical(self, num_experts: int) -> int:
        """Expert slots of a layer, on all ranks together; the same in every layer."""
        return next((len(layer.logical) for layer in self.layers.values()), num_experts)

    def columns(
        self, workspace: Workspace, config: ModelConfig, rows: int, logit_rows: int
    ) -> ColumnGather | None:
        """What puts columns together, with its buffers; None without attention TP."""
        if self.topology.attn_tp == 1:
            return None
        gather, dtype = ColumnGather(self.world.attn, workspace), config.dtype
        widths = {
            "attention": (config.num_heads * config.head_dim, dtype),
            "delta": (config.hidden_size, dtype),
            "ffn_act": (max(layer.intermediate_size for layer in config.layers), dtype),
        }
        if config.moe is not None and config.moe.shared_intermediate_size:
            widths["moe.shared_act"] = (config.moe.shared_intermediate_size, dtype)
        share, ranks = Sharding(self.topology), self.topology.attn_tp
        if share.splits("vocab", config.vocab_size):
            widths["logits"] = (config.vocab_size, torch.float32)
        if config.qk_norm == "full":
            kv = share.span("kv_heads", config.num_kv_heads)
            widths["qkv"] = (config.head_dim * (config.num_heads + 2 * ranks * (kv[1] - kv[0])), dtype)
            for name, heads in zip(WHOLE_QK, (config.num_heads, config.num_kv_heads), strict=True):
                workspace.reserve(name, (rows, heads * config.head_dim), dtype)
        gather.reserve(rows, widths, logit_rows=logit_rows)
        return gather

    def dispatcher(self, config: ModelConfig, ops: OpSet, rows: int) -> Dispatcher:
        """What moves rows to experts, with its buffers; one serves all layers, which run one after the other."""
        moe, topology = config.moe, self.topology
        if moe is None or topology.tp == 1:
            return LocalDispatcher()
        first, last = Sharding(topology).span("experts", self.num_physical(moe.num_experts))
        travels, capacity = self.dispatch.startswith("all_to_all"), None
        if self.dispatch == "all_to_all_fixed":
            capacity = self.capacity or most_between(-(-rows // topology.attn_tp), moe.top_k, last - first)
        buffers = PairBuffers.reserve(
            topology,
            max_rows=rows,
            hidden_size=config.hidden_size,
            top_k=moe.top_k,
            dtype=config.dtype,
            all_to_all=travels,
            capacity=capacity,
            computed=self.computed,
        )
        share, groups = ExpertShare(topology, last - first), (self.world.world, self.world.attn)
        sharded = self.dispatch != "gathered"
        home = Home(*groups, share, ops, buffers, self.widths, moe.weights_on_input, sharded)
        return AllToAllDispatcher(home, capacity) if travels else GatheredDispatcher(home)


def dispatch_stats(model: CausalLM) -> dict[str, int]:
    """What the one dispatcher that all sparse layers share has counted; empty without one."""
    sparse = (layer.ffn for layer in model.layers if isinstance(layer.ffn, MoELayer))
    return next((ffn.dispatcher.stats() for ffn in sparse), {})


def placed_layers(model: CausalLM, plan: ParallelPlan) -> list[PlacedLayer]:
    """The sparse layers of a loaded model whose experts have a map."""
    found = []
    for index, experts in plan.layers.items():
        ffn = model.layers[index].ffn
        assert isinstance(ffn, MoELayer)
        assert experts.placement is not None
        found.append(PlacedLayer(index, experts.logical, experts.placement, ffn.experts))
    return found
