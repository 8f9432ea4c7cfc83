"""Whether a model fits a layout: the arithmetic of ranks, of expert slots and of rows, known before any memory is.

Rank 0 asks before it starts the others, so that a layout which cannot be costs no process; each rank asks again when
it is launched, for the same values. Knows nothing of weights. Invariant: what is refused is a ConfigError with the
option's value and the remedy.
"""

from __future__ import annotations

from pathlib import Path

from ostinato.config import EngineConfig
from ostinato.errors import ConfigError
from ostinato.models.config import ModelConfig
from ostinato.models.sharding import LayerExperts, check_shares, shares_rows
from ostinato.moe.balance import Slots, balance, most_slots, read_placement
from ostinato.padding import align_up
from ostinato.parallel.topology import Topology


def check_layout(config: EngineConfig, model: ModelConfig, topology: Topology) -> None:
    """Raise ConfigError when the model cannot be shared out over these ranks."""
    slots = expert_slots(config, model, topology.ep)
    count = next((len(row) for row in slots.values()), 0 if model.moe is None else model.moe.num_experts)
    check_shares(topology, model, count)
    if model.moe is not None:
        row_shares(config, topology)


def place_experts(config: EngineConfig, model: ModelConfig, ep: int) -> dict[int, LayerExperts]:
    """Experts of each sparse layer, where they are not simply in order."""
    count = 0 if model.moe is None else model.moe.num_experts
    return {layer: LayerExperts.of(row, count) for layer, row in expert_slots(config, model, ep).items()}


def expert_slots(config: EngineConfig, model: ModelConfig, ep: int) -> dict[int, Slots]:
    """The expert in each slot of each sparse layer, where they are not simply in order."""
    if not (config.redundant_experts or config.expert_placement or config.rebalance_steps):
        return {}
    if model.moe is None:
        raise ConfigError(
            "the model has no experts to place; leave out redundant_experts and expert_placement"
        )
    count, sparse = model.moe.num_experts, [i for i, layer in enumerate(model.layers) if layer.sparse]
    if config.expert_placement is not None:
        return read_placement(Path(config.expert_placement), sparse, count, ep)
    most = most_slots(count, ep) - count
    if config.redundant_experts > most:
        raise ConfigError(
            f"redundant_experts {config.redundant_experts} is over {most}, one more slot for each of {count} experts "
            f"on each of ep {ep}; further ones are of no use: lower it"
        )
    even = balance([1] * count, count + config.redundant_experts, ep).slots
    return dict.fromkeys(sparse, even)


def row_shares(config: EngineConfig, topology: Topology) -> int:
    """Ranks that share out a step's rows evenly. Raises ConfigError when the largest step does not divide."""
    shares = topology.attn_tp if shares_rows(config.dispatch, topology) else 1
    most = config.max_running_requests
    if most % shares:
        raise ConfigError(
            f"dispatch {config.dispatch!r} shares rows out over attn_tp {shares}, max_running_requests {most} "
            f"/ {shares} = {most / shares:g}; use {align_up(most, shares)}"
        )
    return shares
