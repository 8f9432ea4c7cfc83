"""The MoE layer against whole MoE blocks of transformers, in fp32, with pads in the batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ostinato.graphs.stream import EagerStream
from ostinato.graphs.workspace import Workspace
from ostinato.moe import (
    MoELayer,
    SharedExpert,
    TopKConfig,
    llama4_routing,
    phimoe_routing,
    reserve_moe_buffers,
)
from ostinato.ops.opset import PackedLinear
from ostinato.ops.reference import ReferenceOps

H, E, INTER, INTER_SHARED, N, PADDED = 24, 8, 12, 20, 13, 16
OPS = ReferenceOps()


def _config(**more: Any) -> Any:
    options: dict[str, Any] = {
        "hidden_size": H,
        "num_experts": E,
        "num_local_experts": E,
        "intermediate_size": INTER,
        "moe_intermediate_size": INTER,
        "shared_expert_intermediate_size": INTER_SHARED,
        "hidden_act": "silu",
        "_experts_implementation": "eager",
    }
    return SimpleNamespace(**{**options, **more})


def _randomise(block: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)


def _layer(
    topk: TopKConfig, router: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, **more: Any
) -> MoELayer:
    workspace = Workspace()
    reserve_moe_buffers(
        workspace,
        PADDED,
        hidden_size=H,
        num_experts=E,
        top_k=topk.top_k,
        dtype=torch.float32,
        shared_intermediate_size=INTER_SHARED,
    )
    return MoELayer(
        ops=OPS,
        workspace=workspace,
        topk=topk,
        router=OPS.pack_linear(router, out_dtype=torch.float32),
        experts=OPS.pack_experts(gate_up, down),
        **more,
    )


def _check(layer: MoELayer, block: torch.nn.Module) -> None:
    x = torch.randn(PADDED, H, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = block(x[:N].unsqueeze(0))
    expected = (expected[0] if isinstance(expected, tuple) else expected).reshape(N, H)
    out = torch.empty(PADDED, H)
    layer.forward(EagerStream(), x, torch.tensor([N], dtype=torch.int32), out)
    torch.testing.assert_close(out[:N], expected, rtol=1e-4, atol=1e-5)
    assert bool((out[N:] == 0).all())


@torch.no_grad()
def _gated_mlp(mlp: Any, gate: PackedLinear | None = None) -> SharedExpert:
    gate_up = OPS.pack_gated(torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)))
    return SharedExpert(gate_up, OPS.pack_linear(mlp.down_proj.weight.detach()), gate)


@pytest.mark.parametrize("norm", [False, True])
def test_qwen2_moe(norm: bool) -> None:
    from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

    block = Qwen2MoeSparseMoeBlock(_config(num_experts_per_tok=3, norm_topk_prob=norm)).eval()
    _randomise(block)
    gate = OPS.pack_linear(block.shared_expert_gate.weight.detach(), out_dtype=torch.float32)
    layer = _layer(
        TopKConfig(top_k=3, renormalize=norm),
        block.gate.weight.detach(),
        block.experts.gate_up_proj.detach(),
        block.experts.down_proj.detach(),
        shared=_gated_mlp(block.shared_expert, gate),
    )
    _check(layer, block)


def test_llama4() -> None:
    from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

    config = _config(num_experts_per_tok=1, intermediate_size=INTER_SHARED)
    block = Llama4TextMoe(config).eval()
    _randomise(block)
    layer = _layer(
        TopKConfig(top_k=1, renormalize=False, custom_routing_function=llama4_routing),
        block.router.weight.detach(),
        block.experts.gate_up_proj.detach().transpose(1, 2),
        block.experts.down_proj.detach().transpose(1, 2),
        shared=_gated_mlp(block.shared_expert),
        weights_on_input=True,
    )
    _check(layer, block)


def test_phimoe() -> None:
    from transformers.models.phimoe.modeling_phimoe import PhimoeSparseMoeBlock

    config = _config(num_experts_per_tok=2, router_jitter_noise=0.01, input_jitter_noise=0.0)
    block = PhimoeSparseMoeBlock(config).eval()
    _randomise(block)
    layer = _layer(
        TopKConfig(top_k=2, renormalize=False, custom_routing_function=phimoe_routing),
        block.router.weight.detach(),
        block.experts.gate_up_proj.detach(),
        block.experts.down_proj.detach(),
    )
    _check(layer, block)
