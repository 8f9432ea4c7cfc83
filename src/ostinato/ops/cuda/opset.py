"""The op set of CUDA devices: kernels in Triton, sorts and plain elementwise work by torch.

Weights stay as the checkpoint has them, on the device. Knows nothing of models. Invariant: kernels read counts from
device memory and nothing on the host, so any of them may be captured; in the exact mode each is row local, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from ostinato.ops.cuda import choice, elementwise, experts, gemm, norms, rotary, routing
from ostinato.ops.cuda.scratch import Scratch
from ostinato.ops.opset import EmbeddingTable, PackedSize, RoutingKernel, RoutingRule, Weight, pieces_of
from ostinato.ops.pairs import PairKernel, PairRule, PairTensors
from ostinato.ops.reference import ReferenceOps
from ostinato.padding import PadContract


class TritonOps:
    """`OpSet` in Triton. exact: dense products in tiles of one size (else cuBLAS, whose sums follow the batch)."""

    def __init__(
        self, device: torch.device | str = "cuda", *, exact: bool = True, tiles: gemm.Tiles | None = None
    ) -> None:
        tiles = tiles or gemm.default_tiles()
        self.device = torch.empty(0, device=device).device
        self.exact = exact
        self.scratch = Scratch(self.device)
        self.linear = gemm.Linear(tiles.dense) if exact else gemm.library_linear
        self.moe_experts = experts.MoeExperts(self.scratch, tiles.experts)
        self.combine_slots = experts.combine_slots
        self.rms_norm, self.add_rms_norm = norms.rms_norm, norms.add_rms_norm
        self.layer_norm, self.add_layer_norm = norms.layer_norm, norms.add_layer_norm
        self.rope, self.norm_rope = rotary.rope, rotary.norm_rope
        self.gather_rows = elementwise.gather_rows
        self.add, self.clamp = elementwise.add, elementwise.clamp
        self.sigmoid_gated_add, self.advance = elementwise.sigmoid_gated_add, elementwise.advance
        self.argmax, self.sample = choice.argmax, choice.sample
        self.scale_by_position = ReferenceOps().scale_by_position

    def prepare(self) -> None:
        """Compile what is first launched inside a capture: the step from one decode step to the next."""
        rows = torch.zeros(1, dtype=torch.int64, device=self.device)
        nobody = torch.zeros(1, dtype=torch.int32, device=self.device)
        for lengths in range(5):
            table = nobody.view(1, 1)
            self.advance(rows, rows, rows, rows, rows, table, 1, (rows,) * lengths, nobody)

    @property
    def name(self) -> str:
        return "triton" if self.exact else "triton.library"

    @property
    def embeds_packed(self) -> bool:
        return True

    @property
    def packed_size(self) -> PackedSize | None:
        return None

    @property
    def pad_contracts(self) -> Mapping[str, PadContract]:
        contract = PadContract(f"{self.name}.moe_experts", accepts_sentinel=True, writes_zeros=True)
        return MappingProxyType({"moe_experts": contract})

    def pack_linear(
        self, weight: Weight, bias: torch.Tensor | None = None, *, out_dtype: torch.dtype | None = None
    ) -> gemm.TritonLinear:
        """Any `out_dtype` comes of the same weight: products are summed in fp32, and what is written is `out`'s."""
        return gemm.TritonLinear(self._on_device(weight), self._bias(bias))

    def pack_gated(self, weight: Weight, bias: torch.Tensor | None = None) -> gemm.TritonLinear:
        return gemm.TritonLinear(self._on_device(weight), self._bias(bias), gated=True)

    def pack_experts(self, gate_up: Weight, down: Weight) -> experts.TritonExperts:
        return experts.TritonExperts(self._on_device(gate_up), self._on_device(down))

    def embedding(self, ids: torch.Tensor, table: EmbeddingTable, out: torch.Tensor) -> None:
        rows = table.weight if isinstance(table, gemm.TritonLinear) else table
        assert isinstance(rows, torch.Tensor), "a table packed by another op set"
        elementwise.embedding(ids, rows, out)

    def routing_kernel(self, rule: RoutingRule) -> RoutingKernel | None:
        return routing.TritonRouting(rule) if routing.supports(rule) else None

    def pair_kernel(self, memory: PairTensors, rule: PairRule, ranks: int) -> PairKernel | None:
        return None

    def _bias(self, bias: torch.Tensor | None) -> torch.Tensor | None:
        return None if bias is None else bias.to(self.device).contiguous()

    def _on_device(self, weight: Weight) -> torch.Tensor:
        """The weight on the device, copied piece by piece: the host never holds all of it."""
        if isinstance(weight, torch.Tensor):
            return weight.to(self.device).contiguous()
        whole = torch.empty(weight.shape, dtype=weight.dtype, device=self.device)
        matrices = whole if whole.dim() == 3 else whole.unsqueeze(0)
        for matrix, first, rows in pieces_of(weight):
            matrices[matrix, first : first + rows.shape[0]] = rows
        return whole
