"""Which kernels a model needs, by name, so that they can be compiled before they are asked for.

A kernel's name is `module.function`, a library's `name.kind`; both are the names of their files. Knows nothing of
models beyond what decides it. Invariant: a kernel that is missing here is compiled when it is asked for; nothing
depends on the list but the time of a first start.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from ostinato.ops.cpu.advance import advance_entry
from ostinato.ops.cpu.attention_state_ir import ATTENTION_FUNCTIONS
from ostinato.ops.cpu.choice_ir import CHOICE_FUNCTIONS
from ostinato.ops.cpu.choice_rows import choice_entry, choice_worker
from ostinato.ops.cpu.coding import code_worker, coding_entry, plan_worker
from ostinato.ops.cpu.compile import Compiler, Kernel, kernel_name
from ostinato.ops.cpu.elementwise_ir import ELEMENTWISE_FUNCTIONS
from ostinato.ops.cpu.gemm import gemm_entry, gemm_worker
from ostinato.ops.cpu.int8 import quantise_bf16_row, quantise_fp32_row
from ostinato.ops.cpu.isa import Isa
from ostinato.ops.cpu.lane_kinds import DottedBFloat16, Float32, Kind, PairedBFloat16, kind_for
from ostinato.ops.cpu.launch import chain_entry, chain_worker
from ostinato.ops.cpu.moe import moe_entry, moe_worker
from ostinato.ops.cpu.native import NativeFunction, NativeLibrary
from ostinato.ops.cpu.packing import pack_entry, pack_worker
from ostinato.ops.cpu.paged_step import attention_entry, attention_worker
from ostinato.ops.cpu.pairs import pairs_entry
from ostinato.ops.cpu.prepare import PREPARE_ARGUMENTS, copy_bf16_row, copy_fp32_row
from ostinato.ops.cpu.rope_ir import ROW_FUNCTIONS
from ostinato.ops.cpu.routing_ir import SCORE_FUNCTIONS, SCORE_KIND
from ostinato.ops.cpu.routing_rows import routing_entry, routing_worker
from ostinato.ops.cpu.rows import rows_entry, rows_worker
from ostinato.ops.cpu.tile_choice import panel_decoder, tile_function
from ostinato.ops.cpu.tiles import TILE_ARGUMENTS

LIBRARIES: Mapping[str, Mapping[str, NativeFunction]] = MappingProxyType(
    {
        "attention": ATTENTION_FUNCTIONS,
        "choice": CHOICE_FUNCTIONS,
        "elementwise": ELEMENTWISE_FUNCTIONS,
        "routing": SCORE_FUNCTIONS,
        "rows": ROW_FUNCTIONS,
    }
)
_KINDS: Mapping[str, Kind] = MappingProxyType(
    {kind.name: kind for kind in (Float32(), PairedBFloat16(), DottedBFloat16(), SCORE_KIND)}
)


@dataclass(frozen=True, slots=True)
class KernelJob:
    """A kernel of so many arguments, or (none) a library."""

    name: str
    arguments: int = 0

    def run(self, compiler: Compiler) -> None:
        """Compile it, or load it if it is there."""
        first, _, second = self.name.partition(".")
        if self.arguments:
            module = importlib.import_module(f"ostinato.ops.cpu.{first}")
            compiler.address(getattr(module, second), self.arguments)
        else:
            NativeLibrary(first, LIBRARIES[first], _KINDS[second], compiler)


def kernel_jobs(
    isa: Isa,
    dtype: torch.dtype,
    *,
    mixture: bool,
    quantized: bool,
    coded: bool = False,
    parallel: bool = False,
) -> list[KernelJob]:
    """Jobs of a model in `dtype`, those that loading waits for first, then the longest."""
    kind = kind_for(dtype, isa).name
    loading: list[Kernel] = [pack_worker, pack_entry]
    if coded:
        loading += [plan_worker, code_worker, coding_entry]
    kernels: list[Kernel] = [attention_worker, gemm_worker, attention_entry]
    kernels += [gemm_entry, rows_entry, rows_worker, advance_entry, chain_entry, chain_worker]
    kernels += [choice_worker, choice_entry]
    libraries = [
        f"rows.{Float32().name}",
        f"attention.{kind}",
        f"rows.{kind}",
        f"elementwise.{Float32().name}",
        f"choice.{Float32().name}",
    ]
    libraries.append(f"elementwise.{kind}")
    if mixture:
        libraries.insert(0, f"routing.{SCORE_KIND.name}")
        kernels = [moe_worker, routing_worker, moe_entry, *kernels, routing_entry]
        if parallel:
            loading.append(pairs_entry)
    jobs = [KernelJob(kernel_name(kernel), 1) for kernel in loading]
    jobs += [KernelJob(name) for name in libraries[: int(mixture)]]
    jobs += [KernelJob(kernel_name(kernel), 1) for kernel in kernels]
    jobs += [KernelJob(name) for name in libraries[int(mixture) :]]
    jobs += _product_jobs(isa, dtype, quantized, coded)
    return list(dict.fromkeys(jobs))


def _product_jobs(isa: Isa, dtype: torch.dtype, quantized: bool, coded: bool) -> Iterator[KernelJob]:
    """Tiles for the weights (of int8 models the router's and the head's too), and what prepares rows."""
    yield KernelJob(kernel_name(tile_function(dtype, isa, coded=coded)), TILE_ARGUMENTS)
    if quantized:
        yield KernelJob(kernel_name(tile_function(torch.int8, isa)), TILE_ARGUMENTS)
    wide = dtype == torch.float32
    decoder = panel_decoder(isa, coded=coded)
    if decoder is not None:
        yield KernelJob(kernel_name(decoder), PREPARE_ARGUMENTS)
        yield KernelJob(kernel_name(tile_function(dtype, isa)), TILE_ARGUMENTS)
    prepare: list[Kernel] = [copy_fp32_row if wide else copy_bf16_row]
    if quantized:
        prepare.append(quantise_fp32_row if wide else quantise_bf16_row)
    for kernel in prepare:
        yield KernelJob(kernel_name(kernel), PREPARE_ARGUMENTS)
