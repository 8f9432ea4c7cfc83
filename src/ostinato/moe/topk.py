"""`TopKConfig`: how a MoE layer chooses its experts, validated when it is made.

A value, with the field names of the field. It knows nothing of padding or placement. Invariant: options that
would silently do nothing or silently lose precision do not construct.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ostinato.errors import ConfigError
from ostinato.moe.custom import CustomRoutingFunction
from ostinato.moe.scoring import SCORING_FUNCS


@dataclass(frozen=True, slots=True, eq=False)
class TopKConfig:
    """How experts are chosen and weighed.

    top_k: columns of the result, the fused shared experts among them.
    scoring_func: one of `SCORING_FUNCS`; "softmax", "sigmoid", "sqrtsoftplus", "raw_logits".
    renormalize: divide the routed weights by their own sum (raw logits: softmax over the chosen ones).
    use_grouped_topk, num_expert_group, topk_group: keep `topk_group` of `num_expert_group` equal groups
    first.
    correction_bias: fp32 [E], added to the scores to choose, never to weigh.
    num_fused_shared_experts: the last S columns, which every token uses, with ids from E on.
    routed_scaling_factor: factor of the routed experts' sum; `apply_routed_scaling_factor_on_output` says
    that it
        is multiplied into the weights, else the caller multiplies. Independent of `renormalize`.
    custom_routing_function: replaces scoring and selection, see `CustomRoutingFunction`.
    """

    top_k: int
    scoring_func: str = "softmax"
    renormalize: bool = True
    use_grouped_topk: bool = False
    num_expert_group: int | None = None
    topk_group: int | None = None
    correction_bias: torch.Tensor | None = None
    num_fused_shared_experts: int = 0
    routed_scaling_factor: float | None = None
    apply_routed_scaling_factor_on_output: bool = False
    custom_routing_function: CustomRoutingFunction | None = None

    def __post_init__(self) -> None:
        if self.scoring_func not in SCORING_FUNCS:
            raise ConfigError(
                f"unknown scoring_func {self.scoring_func!r}; choose one of {sorted(SCORING_FUNCS)}"
            )
        if self.num_fused_shared_experts < 0 or self.num_routed < 1:
            raise ConfigError(
                f"top_k {self.top_k} leaves no routed expert beside {self.num_fused_shared_experts} fused "
                "shared ones; top_k counts both"
            )
        self._check_groups()
        self._check_bias()
        self._check_scaling()
        if self.custom_routing_function is not None and (
            self.use_grouped_topk or self.correction_bias is not None or self.scoring_func != "softmax"
        ):
            raise ConfigError(
                "custom_routing_function replaces scoring and selection: leave scoring_func, "
                "use_grouped_topk and correction_bias at their defaults beside it"
            )

    @property
    def num_routed(self) -> int:
        """Routed experts per token: `top_k` without the fused shared columns."""
        return self.top_k - self.num_fused_shared_experts

    @property
    def routes_outside(self) -> bool:
        """The custom function says, by an attribute `eager_on_graph`, that it reads device data on the host."""
        return bool(getattr(self.custom_routing_function, "eager_on_graph", False))

    @property
    def output_scale(self) -> float:
        """What the weights are multiplied with, once, after any router."""
        if self.apply_routed_scaling_factor_on_output and self.routed_scaling_factor is not None:
            return self.routed_scaling_factor
        return 1.0

    @property
    def shared_weight(self) -> float:
        """Weight of a fused shared expert that counts fully in the layer's output.

        1 when the scaling factor is folded into the routed weights, else 1 / factor, as the caller multiplies
        the sum with it.
        """
        if self.apply_routed_scaling_factor_on_output or self.routed_scaling_factor is None:
            return 1.0
        return 1.0 / self.routed_scaling_factor

    def check_num_experts(self, num_experts: int) -> None:
        """Raise ConfigError when `num_experts` routed experts do not fit this config (at load, and per
        call)."""
        if self.num_routed > num_experts:
            raise ConfigError(f"top_k asks for {self.num_routed} routed experts, the layer has {num_experts}")
        if self.correction_bias is not None and self.correction_bias.shape != (num_experts,):
            raise ConfigError(
                f"correction_bias has shape {tuple(self.correction_bias.shape)}, the layer has {num_experts} "
                "experts"
            )
        if not self.use_grouped_topk:
            return
        assert self.num_expert_group is not None
        assert self.topk_group is not None
        if num_experts % self.num_expert_group:
            raise ConfigError(f"{num_experts} experts do not split into {self.num_expert_group} equal groups")
        reachable = num_experts // self.num_expert_group * self.topk_group
        if reachable < self.num_routed:
            raise ConfigError(
                f"{self.topk_group} kept groups hold {reachable} experts, {self.num_routed} are to be chosen"
            )

    def _check_groups(self) -> None:
        n, kept = self.num_expert_group, self.topk_group
        if self.use_grouped_topk:
            if n is None or kept is None or not 1 <= kept <= n:
                raise ConfigError(
                    "use_grouped_topk needs 1 <= topk_group <= num_expert_group, got topk_group "
                    f"{kept}, num_expert_group {n}"
                )
            if self.scoring_func == "raw_logits":
                raise ConfigError("raw_logits cannot be grouped; use scoring_func='softmax'")
        elif (n or 1) != 1 or (kept or 1) != 1:
            raise ConfigError(
                f"num_expert_group {n} and topk_group {kept} do nothing without use_grouped_topk=True"
            )

    def _check_bias(self) -> None:
        bias = self.correction_bias
        if bias is not None and bias.dtype != torch.float32:
            raise ConfigError(
                f"correction_bias is {bias.dtype}, it must be torch.float32: near-tied experts swap in lower "
                "precision; load it in fp32 instead of converting it with the other weights"
            )

    def _check_scaling(self) -> None:
        factor = self.routed_scaling_factor
        if factor is not None and not 0.0 < factor < float("inf"):
            raise ConfigError(f"routed_scaling_factor must be positive and finite, got {factor}")
        if factor is None and self.apply_routed_scaling_factor_on_output:
            raise ConfigError("apply_routed_scaling_factor_on_output needs a routed_scaling_factor")
