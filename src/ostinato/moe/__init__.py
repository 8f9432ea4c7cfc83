"""Mixture of experts: choosing experts, where they live, and the layer that runs them.

Usable alone, on any torch model: `select_experts` with a `TopKConfig` masks pads by a device count. Knows
nothing of models or engines.
"""

from ostinato.moe.custom import InternS1ProRouting, llama4_routing, phimoe_routing
from ostinato.moe.dispatch import Dispatched, Dispatcher, LocalDispatcher
from ostinato.moe.export import RoutedExpertsExport
from ostinato.moe.layer import MoELayer, SharedExpert, reserve_moe_buffers
from ostinato.moe.load import ExpertLoad
from ostinato.moe.placement import ExpertPlacement
from ostinato.moe.routers import ROUTERS
from ostinato.moe.routing import Consumers, TopKConfig, select_experts, select_experts_into

__all__ = [
    "ROUTERS",
    "Consumers",
    "Dispatched",
    "Dispatcher",
    "ExpertLoad",
    "ExpertPlacement",
    "InternS1ProRouting",
    "LocalDispatcher",
    "MoELayer",
    "RoutedExpertsExport",
    "SharedExpert",
    "TopKConfig",
    "llama4_routing",
    "phimoe_routing",
    "reserve_moe_buffers",
    "select_experts",
    "select_experts_into",
]
