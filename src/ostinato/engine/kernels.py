"""From an `EngineConfig` to the op set and the attention of this machine, their kernels on the way.

The one place that decides between compiled kernels and the reference. Knows nothing of weights or requests. Invariant:
kernels that were asked for and cannot run are refused, with what to change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ostinato.attention.backend import AttentionBackend
from ostinato.attention.reference import ReferenceAttention
from ostinato.config import EngineConfig, cache_dir
from ostinato.engine.progress import Report
from ostinato.errors import ConfigError
from ostinato.kv.pool import KVLayout, KVPool
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


def choose_kernels(config: EngineConfig, pool: KVPool, report: Report, *, mixture: bool) -> Kernels:
    """The op set and the attention over `pool`; kernels that are not on disk are compiled from now on, beside what
    follows. `mixture`: the model has experts.

    "auto" takes compiled kernels wherever they can run: bf16 or fp32, pages of a multiple of 16 tokens. Raises
    ConfigError when they are asked for, by name or by a quantization, and cannot.
    """
    if pool.device.type == "cuda" or config.kernels == "triton":
        from ostinato.attention.triton import TritonAttention
        from ostinato.ops.cuda.opset import TritonOps

        gpu = TritonOps(pool.device, exact=config.gpu_products == "exact")
        return Kernels(gpu, TritonAttention(pool), lambda: None)
    refused = _refused(pool.layout)
    if config.kernels == "numba" and refused:
        raise ConfigError(f"kernels 'numba' cannot run with {refused}, or kernels 'reference'")
    if config.quantization is not None and refused:
        raise ConfigError(f"quantization {config.quantization!r} cannot run with {refused}")
    if config.kernels == "reference" or refused:
        return Kernels(ReferenceOps(), ReferenceAttention(pool), lambda: None)
    # Imported here: loading kernels costs time that a run without them need not spend.
    from ostinato.attention.cpu import CpuAttention
    from ostinato.ops.cpu.opset import open_numba_ops

    isa = None if config.isa == "auto" else config.isa
    ops = open_numba_ops(
        isa=isa,
        num_threads=torch.get_num_threads(),
        cache_dir=cache_dir() / "kernels",
        quantization=config.quantization,
    )
    finish = _compile_ahead(ops.runtime, pool.layout.dtype, config, report, mixture)
    return Kernels(ops, CpuAttention(pool, ops.runtime), finish)


def _refused(layout: KVLayout) -> str:
    """Why the compiled kernels cannot run, or nothing."""
    if layout.dtype not in (torch.bfloat16, torch.float32):
        return f"dtype {str(layout.dtype).removeprefix('torch.')}; use bfloat16 or float32"
    if layout.page_size % 16:
        return f"page_size {layout.page_size}; use a multiple of 16"
    return ""


def _compile_ahead(
    runtime: Runtime, dtype: torch.dtype, config: EngineConfig, report: Report, mixture: bool
) -> Callable[[], None]:
    from ostinato.ops.cpu.background import BackgroundBuild
    from ostinato.ops.cpu.compile import discard_unused
    from ostinato.ops.cpu.kernel_list import kernel_jobs

    discard_unused(runtime.compiler.root)
    build = BackgroundBuild(
        kernel_jobs(runtime.isa, dtype, mixture=mixture, quantized=config.quantization is not None),
        runtime.compiler,
        runtime.pool.num_threads,
        lambda done, total: report("Compiling kernels", done, total),
    )
    runtime.compiler.pending = build
    return build.finish
