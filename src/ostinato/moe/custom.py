"""Model-specific routers in the form of `custom_routing_function`.

Each takes (hidden_states [N, H], gating_output fp32 [N, E], topk, renormalize) and returns (weights fp32 [N,
K], ids [N, K]). They know nothing of padding, placement or load: `select_experts` sends what they return
through the one post-process. Invariant: a row's result depends on that row alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import torch

from ostinato.errors import ConfigError
from ostinato.moe.scoring import divide_by_sum, top_k_ids
from ostinato.ops.exact import sigmoid, softmax


class CustomRoutingFunction(Protocol):
    """A router supplied by a model or a user.

    One that reads device data on the host says so by an attribute `eager_on_graph = True`: breakable graphs are broken
    for it, and on a GPU no other graph can hold it.
    """

    def __call__(
        self, hidden_states: torch.Tensor, gating_output: torch.Tensor, topk: int, renormalize: bool, /
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(weights fp32 [N, topk], ids integer [N, topk])."""
        ...


def llama4_routing(
    hidden_states: torch.Tensor, gating_output: torch.Tensor, topk: int, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Llama 4: the K largest logits, weighed by their own sigmoid (transformers `Llama4Router`)."""
    _refuse_renormalize("Llama4", renormalize)
    ids = top_k_ids(gating_output, topk)
    return sigmoid(gating_output.gather(-1, ids)), ids


@dataclass(frozen=True, slots=True)
class PhimoeRouting:
    """Phi-3.5-MoE: two rounds of SparseMixer as in evaluation (arXiv 2310.00811, transformers `sparsemixer`).

    In each round the best expert is weighed by a softmax over those within a relative distance of
    2 * `jitter_eps` (`router_jitter_noise` in the model's config); the second leaves the first expert out.
    Weights are not normalised over the two.
    """

    jitter_eps: float = 0.01

    def __call__(
        self, hidden_states: torch.Tensor, gating_output: torch.Tensor, topk: int, renormalize: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        _refuse_renormalize("PhiMoE", renormalize)
        if topk != 2:
            raise ConfigError(
                f"PhiMoE routing chooses exactly 2 experts per token, top_k is {topk}; set it to 2"
            )
        first_weight, first = self._round(gating_output)
        second_weight, second = self._round(gating_output.scatter(-1, first, float("-inf")))
        return torch.cat((first_weight, second_weight), dim=-1), torch.cat((first, second), dim=-1)

    def _round(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One round over x [N, E], experts left out at -inf: (weight [N, 1], id [N, 1]) of the best."""
        best = x.argmax(dim=-1, keepdim=True)  # the first of equal maxima
        m = x.gather(-1, best)
        far = (m - x) / torch.maximum(x.abs(), m) > 2 * self.jitter_eps
        return softmax(x.masked_fill(far, float("-inf"))).gather(-1, best), best


phimoe_routing = PhimoeRouting()


@dataclass(frozen=True, slots=True)
class InternS1ProRouting:
    """InternS1-Pro: softmax over all experts, then the best K/n within each of n consecutive groups."""

    num_groups: int

    def __call__(
        self, hidden_states: torch.Tensor, gating_output: torch.Tensor, topk: int, renormalize: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        n = self.num_groups
        rows, num_experts = gating_output.shape
        if n < 1 or topk % n or num_experts % n:
            raise ConfigError(
                f"router_n_groups {n} must divide both top_k {topk} and the number of experts {num_experts}"
            )
        scores = softmax(gating_output)
        size = num_experts // n
        local = top_k_ids(scores.view(rows * n, size), topk // n).view(rows, n, topk // n)
        first = torch.arange(0, num_experts, size, device=local.device).view(1, n, 1)
        ids = (local + first).view(rows, topk)
        weights = scores.gather(-1, ids)
        return divide_by_sum(weights) if renormalize else weights, ids


CUSTOM_ROUTING_FUNCTIONS: Mapping[str, CustomRoutingFunction] = MappingProxyType(
    {"llama4": llama4_routing, "phimoe": phimoe_routing}
)
"""The ready-made ones that need no parameter, by name; `InternS1ProRouting(num_groups)` is the third."""


def _refuse_renormalize(name: str, renormalize: bool) -> None:
    if renormalize:
        raise ConfigError(f"{name} routing does not renormalize its weights; set renormalize=False")
