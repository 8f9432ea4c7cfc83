"""From an `EngineConfig` to the op set and the attention of this machine, their kernels on the way.

The one place that decides between compiled kernels and the reference. Knows nothing of weights or requests. Invariant:
kernels that were asked for and cannot run are refused, with what to change.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ostinato.attention.backend import AttentionBackend
from ostinato.attention.capabilities import AttentionNeeds
from ostinato.attention.flash import FlashPlugin
from ostinato.attention.plugins import BUILT_IN, build_attention, find_plugin
from ostinato.attention.reference import ReferenceAttention
from ostinato.config import EngineConfig, cache_dir
from ostinato.engine.progress import Report
from ostinato.errors import ConfigError
from ostinato.kv.pool import KVLayout, KVPool
from ostinato.models.config import ModelConfig
from ostinato.ops.opset import OpSet
from ostinato.ops.reference import ReferenceOps

if TYPE_CHECKING:
    from ostinato.ops.cpu.launch import Runtime


@dataclass(frozen=True, slots=True)
class Kernels:
    """What a model runs on; `finish` returns when every kernel that it needs is compiled."""

    ops: OpSet
    attention: AttentionBackend
    finish: Callable[[], None]


def choose_kernels(
    config: EngineConfig,
    pool: KVPool,
    report: Report,
    model: ModelConfig,
    *,
    context_length: int,
    num_heads: int,
) -> Kernels:
    """The op set and the attention over `pool`; kernels that are not on disk are compiled from now on, beside what
    follows. num_heads: query heads of this rank.

    "auto" takes compiled kernels wherever they can run: bf16 or fp32, pages of a multiple of 16 tokens. Raises
    ConfigError when they are asked for, by name or by a quantization, and cannot.
    """
    ops, own, finish = _op_set(config, pool, report, mixture=model.moe is not None)
    name, fitting = config.attention_backend, own if config.attention_backend == "auto" else None
    if fitting is None and name in BUILT_IN:
        fitting = own if name == own.name else _built_in(name, pool)
    if fitting is None:
        needs = AttentionNeeds(
            device=pool.device,
            dtype=pool.layout.dtype,
            head_dim=pool.layout.head_dim,
            page_size=pool.page_size,
            context_length=context_length,
            num_heads=num_heads,
            sliding_window=any(layer.sliding_window is not None for layer in model.layers),
            attention_chunks=any(layer.attention_chunk_size is not None for layer in model.layers),
        )
        plugin = FlashPlugin() if name == "flash" else find_plugin(name)
        fitting = build_attention(plugin, needs, pool)
    return Kernels(ops, fitting, finish)


def _built_in(name: str, pool: KVPool) -> AttentionBackend | None:
    """Attention that goes with other kernels than the chosen ones; None for what is built as plug-ins are."""
    if name == "flash":
        return None
    if name == "reference" and pool.device.type == "cpu":
        return ReferenceAttention(pool)
    kernels = {"cpu": "numba", "triton": "triton", "reference": "numba' or 'reference"}[name]
    raise ConfigError(
        f"attention_backend {name!r} goes with kernels '{kernels}' only; use those, or attention_backend 'auto'"
    )


def _op_set(
    config: EngineConfig, pool: KVPool, report: Report, *, mixture: bool
) -> tuple[OpSet, AttentionBackend, Callable[[], None]]:
    """The op set, the attention that belongs to it, and what waits for its kernels."""
    if pool.device.type == "cuda" or config.kernels == "triton":
        from ostinato.attention.triton import TritonAttention
        from ostinato.ops.cuda.opset import TritonOps

        gpu = TritonOps(pool.device, exact=config.gpu_products == "exact")
        return gpu, TritonAttention(pool), gpu.prepare
    refused = _refused(pool.layout)
    if config.kernels == "numba" and refused:
        raise ConfigError(f"kernels 'numba' cannot run with {refused}, or kernels 'reference'")
    if config.quantization is not None and refused:
        raise ConfigError(f"quantization {config.quantization!r} cannot run with {refused}")
    if config.kernels == "reference" or refused:
        if refused and config.kernels == "auto":
            print(
                f"ostinato: no compiled kernels for {refused}; the reference kernels serve, many times slower",
                file=sys.stderr,
            )
        return ReferenceOps(), ReferenceAttention(pool), lambda: None
    # Imported here: loading kernels costs time that a run without them need not spend.
    from ostinato.attention.cpu import CpuAttention
    from ostinato.ops.cpu.opset import open_numba_ops

    isa = None if config.isa == "auto" else config.isa
    ops = open_numba_ops(
        isa=isa,
        num_threads=torch.get_num_threads(),
        cache_dir=cache_dir() / "kernels",
        quantization=config.quantization,
        weight_coding=config.weight_coding,
        experts_move=bool(config.redundant_experts or config.expert_placement or config.rebalance_steps),
    )
    coded = ops.codes_weights and pool.layout.dtype == torch.bfloat16
    finish = _compile_ahead(ops.runtime, pool.layout.dtype, config, report, mixture=mixture, coded=coded)
    return ops, CpuAttention(pool, ops.runtime), finish


def _refused(layout: KVLayout) -> str:
    """Why the compiled kernels cannot run, or nothing."""
    if layout.dtype not in (torch.bfloat16, torch.float32):
        return f"dtype {str(layout.dtype).removeprefix('torch.')}; use bfloat16 or float32"
    if layout.page_size % 16:
        return f"page_size {layout.page_size}; use a multiple of 16"
    return ""


def _compile_ahead(
    runtime: Runtime, dtype: torch.dtype, config: EngineConfig, report: Report, *, mixture: bool, coded: bool
) -> Callable[[], None]:
    from ostinato.ops.cpu.background import BackgroundBuild
    from ostinato.ops.cpu.compile import discard_unused
    from ostinato.ops.cpu.kernel_list import kernel_jobs

    compiler = runtime.compiler
    discard_unused(compiler.root)
    ranks, quantized = config.tp_size or config.dp_size, config.quantization is not None
    jobs = kernel_jobs(
        runtime.isa, dtype, mixture=mixture, quantized=quantized, coded=coded, parallel=ranks > 1
    )
    if not os.access(compiler.directory, os.W_OK) and not all(compiler.has(job.name) for job in jobs):
        print(
            f"ostinato: compiled kernels cannot be kept in {compiler.root}, so every start compiles them anew; set "
            "OSTINATO_CACHE_DIR to a directory that can be written",
            file=sys.stderr,
        )
        return lambda: None  # other processes could not hand over what they compile
    build = BackgroundBuild(
        jobs,
        compiler,
        # One of an engine's ranks compiles for all of them, with the threads of all.
        min(runtime.pool.num_threads * ranks, os.cpu_count() or 1),
        lambda done, total: report("Compiling kernels", done, total),
    )
    compiler.pending = build
    return build.finish
