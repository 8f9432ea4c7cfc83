"""Routers against those of transformers, on the same logits (the router's weight is the identity)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ostinato.moe.custom import PhimoeRouting, llama4_routing
from ostinato.moe.routing import TopKConfig, select_experts

E, K, N = 16, 4, 64


def _logits(seed: int = 0) -> torch.Tensor:
    return torch.randn(N, E, generator=torch.Generator().manual_seed(seed)) * 2


def _router(cls: Any, **config: Any) -> Any:
    options = {"num_experts_per_tok": K, "num_local_experts": E, "num_experts": E, "hidden_size": E, **config}
    router = cls(SimpleNamespace(**options))
    with torch.no_grad():
        router.weight.copy_(torch.eye(E))
    return router.eval()


def _by_id(weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Dense [N, E] weights, so that the order of slots does not matter."""
    return torch.zeros(N, E).scatter(1, ids.long(), weights.float())


def _check(config: TopKConfig, weights: torch.Tensor, ids: torch.Tensor, logits: torch.Tensor) -> None:
    ours, our_ids = select_experts(torch.zeros(N, 4), logits, config)
    assert torch.equal(our_ids.long().sort(-1).values, ids.sort(-1).values)
    torch.testing.assert_close(_by_id(ours, our_ids), _by_id(weights, ids), rtol=1e-5, atol=1e-6)


def test_mixtral() -> None:
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

    logits = _logits()
    with torch.no_grad():
        _, weights, ids = _router(MixtralTopKRouter)(logits)
    _check(TopKConfig(top_k=K), weights, ids, logits)


@pytest.mark.parametrize("norm", [False, True])
def test_qwen3_moe(norm: bool) -> None:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    logits = _logits(1)
    with torch.no_grad():
        _, weights, ids = _router(Qwen3MoeTopKRouter, norm_topk_prob=norm)(logits)
    _check(TopKConfig(top_k=K, renormalize=norm), weights, ids, logits)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("groups", "kept"), [(1, 1), (4, 2), (8, 4)])
def test_deepseek_v3(norm: bool, groups: int, kept: int) -> None:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    logits = _logits(2)
    bias = torch.randn(E, generator=torch.Generator().manual_seed(3)) * 0.3
    router = _router(
        DeepseekV3TopkRouter, n_group=groups, topk_group=kept, norm_topk_prob=norm, routed_scaling_factor=2.5
    )
    router.e_score_correction_bias.copy_(bias)
    with torch.no_grad():
        _, weights, ids = router(logits)
    config = TopKConfig(
        top_k=K,
        scoring_func="sigmoid",
        renormalize=norm,
        use_grouped_topk=True,
        num_expert_group=groups,
        topk_group=kept,
        correction_bias=bias,
        routed_scaling_factor=2.5,
        apply_routed_scaling_factor_on_output=True,
    )
    _check(config, weights, ids, logits)


def test_deepseek_v2_grouped() -> None:
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter

    logits = _logits(4)
    router = _router(
        DeepseekV2TopkRouter,
        n_group=4,
        topk_group=2,
        topk_method="group_limited_greedy",
        routed_scaling_factor=16.0,
    )
    with torch.no_grad():
        _, weights, ids = router(logits)
    config = TopKConfig(
        top_k=K,
        renormalize=False,
        use_grouped_topk=True,
        num_expert_group=4,
        topk_group=2,
        routed_scaling_factor=16.0,
        apply_routed_scaling_factor_on_output=True,
    )
    _check(config, weights, ids, logits)


def test_deepseek_v4_sqrtsoftplus() -> None:
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4TopKRouter

    logits = _logits(5)
    bias = torch.randn(E, generator=torch.Generator().manual_seed(6)) * 0.3
    router = _router(DeepseekV4TopKRouter, scoring_func="sqrtsoftplus", routed_scaling_factor=1.5)
    router.e_score_correction_bias.copy_(bias)
    with torch.no_grad():
        _, weights, ids = router(logits)
    config = TopKConfig(
        top_k=K,
        scoring_func="sqrtsoftplus",
        correction_bias=bias,
        routed_scaling_factor=1.5,
        apply_routed_scaling_factor_on_output=True,
    )
    _check(config, weights, ids, logits)


def test_gpt_oss_raw_logits() -> None:
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter

    logits = _logits(7)
    with torch.no_grad():
        _, weights, ids = _router(GptOssTopKRouter)(logits)
    _check(TopKConfig(top_k=K, scoring_func="raw_logits"), weights, ids, logits)


@pytest.mark.parametrize("k", [1, 3])
def test_llama4(k: int) -> None:
    from transformers.models.llama4.modeling_llama4 import Llama4Router

    logits = _logits(8)
    with torch.no_grad():
        scores, _ = _router(Llama4Router, num_experts_per_tok=k)(logits)
    ids = scores.topk(k, dim=-1).indices
    config = TopKConfig(top_k=k, renormalize=False, custom_routing_function=llama4_routing)
    _check(config, scores.gather(1, ids), ids, logits)


@pytest.mark.parametrize("eps", [0.01, 0.2])
def test_phimoe(eps: float) -> None:
    from transformers.models.phimoe.modeling_phimoe import PhimoeTopKRouter

    logits = _logits(9)
    router = _router(PhimoeTopKRouter, num_experts_per_tok=2, router_jitter_noise=eps, input_jitter_noise=0.0)
    with torch.no_grad():
        _, weights, ids = router(logits)
    assert bool((weights < 1).any()), "no near ties: the masks of SparseMixer would go untested"
    config = TopKConfig(top_k=2, renormalize=False, custom_routing_function=PhimoeRouting(eps))
    _check(config, weights, ids, logits)
    ours, our_ids = select_experts(torch.zeros(N, 4), logits, config)
    assert torch.equal(our_ids.long(), ids), "the order of the two rounds"
    torch.testing.assert_close(ours, weights)
