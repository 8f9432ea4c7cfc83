"""Experts' kernels that take no negative ids: a declaration is all it needs for a MoE layer to serve them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch

from ostinato.errors import PadContractError
from ostinato.graphs import EagerStream, Workspace
from ostinato.moe.layer import MoELayer, reserve_moe_buffers
from ostinato.moe.topk import TopKConfig
from ostinato.ops.reference import ReferenceOps
from ostinato.padding import PadContract

ROWS, HIDDEN, INNER, EXPERTS, TOP_K = 7, 16, 8, 4, 2


class HipOps(ReferenceOps):
    """The reference with an experts' kernel as on ROCm: a negative id would be an illegal access."""

    __slots__ = ("declared", "seen")

    def __init__(self, declared: bool = True) -> None:
        self.declared = declared
        self.seen: list[torch.Tensor] = []

    @property
    def pad_contracts(self) -> Mapping[str, PadContract]:
        contract = PadContract("hip.moe_experts", accepts_zero_weight=self.declared, writes_zeros=True)
        return MappingProxyType({"moe_experts": contract})

    def moe_experts(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, *rest: Any) -> None:
        assert int(ids.min()) >= 0, "illegal access"
        self.seen.append(weights)
        ReferenceOps.moe_experts(self, x, weights, ids, *rest)


def run(ops: ReferenceOps) -> torch.Tensor:
    """A layer over 7 rows, 4 of them real; pad rows hold NaN."""
    generator = torch.Generator().manual_seed(0)
    workspace = Workspace()
    sizes: dict[str, Any] = {"hidden_size": HIDDEN, "num_experts": EXPERTS, "top_k": TOP_K}
    reserve_moe_buffers(workspace, ROWS, **sizes, dtype=torch.float32)
    layer = MoELayer(
        ops=ops,
        workspace=workspace,
        topk=TopKConfig(top_k=TOP_K),
        router=ops.pack_linear(torch.randn(EXPERTS, HIDDEN, generator=generator)),
        experts=ops.pack_experts(
            torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=generator),
            torch.randn(EXPERTS, HIDDEN, INNER, generator=generator),
        ),
    )
    x, out = torch.randn(ROWS, HIDDEN, generator=generator), torch.full((ROWS, HIDDEN), 5.0)
    x[4:] = torch.nan
    layer.forward(EagerStream(), x, torch.tensor([4], dtype=torch.int32), out)
    return out


def test_pads_reach_such_a_kernel_as_expert_0_with_weight_0() -> None:
    hip = HipOps()
    out = run(hip)
    assert torch.equal(out, run(ReferenceOps()))
    assert not out[4:].any()
    assert not hip.seen[0][4:].any()


def test_without_the_declaration_the_pair_is_refused() -> None:
    with pytest.raises(PadContractError, match=r"hip\.moe_experts does not honour"):
        run(HipOps(declared=False))
