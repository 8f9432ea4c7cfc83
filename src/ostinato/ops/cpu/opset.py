"""The op set of the CPU kernels: packed products, fused experts, row-wise and elementwise kernels of one runtime.

Every kernel is an object that may be called, or bound to its tensors for replay (`bind`). What has no kernel of its
own runs in the reference. Knows nothing of models. Invariant: every kernel is row local, bit for bit; its scratch
is shared, so launches of one op set run one after another, as a stream runs them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch

from ostinato.errors import ConfigError
from ostinato.ops.cpu.advance import Advance
from ostinato.ops.cpu.choice import Sample
from ostinato.ops.cpu.coded_packing import CodedPacker
from ostinato.ops.cpu.elementwise import ElementwiseOps
from ostinato.ops.cpu.experts import ExpertWeights, MoeExperts
from ostinato.ops.cpu.launch import Runtime, open_runtime
from ostinato.ops.cpu.linear import Linear, LinearWeights
from ostinato.ops.cpu.native import NativeLibrary
from ostinato.ops.cpu.packing import Packer, pack_bias
from ostinato.ops.cpu.pairs import CompiledPairs
from ostinato.ops.cpu.routing import Routing, score_library, supports
from ostinato.ops.cpu.row_ops import RowOps
from ostinato.ops.cpu.scratch import Scratch
from ostinato.ops.opset import PackedSize, RoutingKernel, RoutingRule, Weight
from ostinato.ops.pairs import PairKernel, PairRule, PairTensors
from ostinato.ops.reference import ReferenceOps
from ostinato.padding import PadContract


class NumbaOps:
    """`OpSet` of the CPU kernels. `linear` and `moe_experts` also take a live count as last argument.

    With `quantization` "int8", experts and linear layers become int8 as they are packed; those that ask for
    fp32 outputs (routers, the head, gates of shared experts) keep their dtype. With `weight_coding` "auto" bf16 weights
    are kept at 12 bits where the machine can decode them as it multiplies (`coding`), the same bits for every product;
    experts that may move between ranks (`experts_move`) stay plain, as what moves must have a fixed size.
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        quantization: str | None = None,
        weight_coding: str = "plain",
        experts_move: bool = False,
    ) -> None:
        if quantization not in (None, "int8"):
            raise ConfigError(f"quantization {quantization!r} is unknown to the CPU kernels; choose 'int8'")
        self.runtime = runtime
        self._packed_dtype = None if quantization is None else torch.int8
        self.scratch = Scratch()
        self.codes_weights = weight_coding == "auto" and runtime.isa.byte_tables
        self._packer = CodedPacker(runtime) if self.codes_weights else Packer(runtime)
        self._expert_packer = Packer(runtime) if experts_move else self._packer
        self._scores: NativeLibrary | None = None
        rows, elements, reference = RowOps(runtime), ElementwiseOps(runtime), ReferenceOps()
        self.linear = Linear(runtime, self.scratch)
        self.moe_experts = MoeExperts(runtime, self.scratch)
        self.rms_norm, self.add_rms_norm = rows.rms_norm, rows.add_rms_norm
        self.layer_norm, self.add_layer_norm = rows.layer_norm, rows.add_layer_norm
        self.rope, self.norm_rope, self.argmax = rows.rope, rows.norm_rope, rows.argmax
        self.add = elements.add
        self.sigmoid_gated_add, self.clamp = elements.sigmoid_gated_add, elements.clamp
        self.embedding, self.gather_rows = elements.embedding, elements.gather_rows
        self.combine_slots = elements.combine_slots
        self.scale_by_position = reference.scale_by_position
        self.advance = Advance(runtime)
        self.sample = Sample(runtime, self.scratch)

    def routing_kernel(self, rule: RoutingRule) -> RoutingKernel | None:
        if not supports(rule):
            return None
        self._scores = self._scores or score_library(self.runtime)
        return Routing(self.runtime, self.scratch, self._scores, rule)

    def pair_kernel(self, memory: PairTensors, rule: PairRule, ranks: int) -> PairKernel | None:
        return CompiledPairs(self.runtime, memory, rule, ranks)

    @property
    def name(self) -> str:
        suffix = "" if self._packed_dtype is None else ".int8"
        return f"numba.{self.runtime.isa.name}{suffix}"

    @property
    def embeds_packed(self) -> bool:
        return True  # the head is never quantised

    @property
    def packed_size(self) -> PackedSize:
        packers = {self._packer, self._expert_packer}
        return PackedSize(sum(p.size.stored for p in packers), sum(p.size.uncoded for p in packers))

    @property
    def pad_contracts(self) -> Mapping[str, PadContract]:
        contract = PadContract(
            f"{self.name}.moe_experts", accepts_sentinel=True, honours_count=True, writes_zeros=True
        )
        return MappingProxyType({"moe_experts": contract})

    def pack_linear(
        self, weight: Weight, bias: torch.Tensor | None = None, *, out_dtype: torch.dtype | None = None
    ) -> LinearWeights:
        """Packed `weight` [N, K] (bf16 or fp32) and `bias` [N]; sums are fp32 whatever the output."""
        keep = out_dtype == torch.float32
        panels = self._packer.pack(weight, dtype=None if keep else self._packed_dtype)
        return LinearWeights(panels, pack_bias(bias, panels), out_dtype or weight.dtype)

    def pack_gated(self, weight: Weight, bias: torch.Tensor | None = None) -> LinearWeights:
        """Packed gate and up [2I, K], gate rows first: `linear` with it gives silu(gate) * up, [T, I]."""
        panels = self._packer.pack(weight, gated=True, dtype=self._packed_dtype)
        return LinearWeights(panels, pack_bias(bias, panels), weight.dtype)

    def pack_experts(self, gate_up: Weight, down: Weight) -> ExpertWeights:
        """Packed `gate_up` [E, 2I, H], gate rows first, and `down` [E, H, I]."""
        dtype = self._packed_dtype
        return ExpertWeights(
            self._expert_packer.pack(gate_up, gated=True, dtype=dtype),
            self._expert_packer.pack(down, dtype=dtype),
        )


def open_numba_ops(
    *,
    isa: str | None = None,
    num_threads: int | None = None,
    cache_dir: Path | None = None,
    quantization: str | None = None,
    weight_coding: str = "plain",
    experts_move: bool = False,
) -> NumbaOps:
    """The op set of this machine; see `open_runtime`."""
    runtime = open_runtime(isa=isa, num_threads=num_threads, cache_dir=cache_dir)
    return NumbaOps(
        runtime, quantization=quantization, weight_coding=weight_coding, experts_move=experts_move
    )
