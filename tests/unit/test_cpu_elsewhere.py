"""Portable kernels become machine code for CPUs that are not here: ARM, x86 without AVX512, x86 without fused
multiply-adds. LLVM lowers them; nothing runs.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest
import torch
from llvmlite import binding

from ostinato.ops.cpu import isa, lane_kinds, native
from ostinato.ops.cpu.jit import compile_to_ir
from ostinato.ops.cpu.kernel_list import _KINDS, LIBRARIES, KernelJob, kernel_jobs
from ostinato.ops.cpu.tiles import TILE_ARGUMENTS

ARM, X86 = "aarch64-unknown-linux-gnu", "x86_64-unknown-linux-gnu"
LIBRARY_CALLS = {"log", "memcpy", "memset"}
# How each architecture is told of a loop that waits: declared and called.
PAUSES = {
    ARM: ("declare void @llvm.aarch64.isb(i32)", "call void @llvm.aarch64.isb(i32 15)"),
    X86: ("declare void @llvm.x86.sse2.pause()", "call void @llvm.x86.sse2.pause()"),
}
FEW = [
    "tiles.tile_bf16_portable",
    "tiles.tile_fp32",
    "int8_tiles.tile_int8_portable",
    "int8.quantise_bf16_row",
    "launch.chain_worker",
    "gemm.gemm_worker",
    "routing.fp32",
    "elementwise.bf16",
]


@pytest.fixture(autouse=True)
def plain_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes of register tiles are those of a CPU without AVX512."""
    monkeypatch.setattr(isa, "host_features", dict)
    monkeypatch.setattr(lane_kinds, "host_has", lambda *features: False)
    monkeypatch.setattr(native, "emit_object", lambda module, machine: machine.emit_assembly(module))


def all_jobs() -> dict[str, KernelJob]:
    path = isa.select_isa(isa.PORTABLE, {})
    return {
        job.name: job
        for dtype in (torch.bfloat16, torch.float32)
        for quantized in (False, True)
        for job in kernel_jobs(path, dtype, mixture=True, quantized=quantized)
    }


def machine_for(triple: str, cpu: str) -> Any:
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    target = binding.Target.from_triple(triple)
    return target.create_target_machine(cpu=cpu, opt=3, reloc="pic", jit=True)


def assembly(job: KernelJob, triple: str, machine: Any) -> str:
    """What the job is on that machine; Numba's code is made here and its instructions are chosen there."""
    first, _, second = job.name.partition(".")
    if not job.arguments:
        made: Any = native._compile(LIBRARIES[first], _KINDS[second], machine)
        return str(made)
    function = getattr(importlib.import_module(f"ostinato.ops.cpu.{first}"), second)
    ir, _ = compile_to_ir(function, job.arguments)
    for old, new in zip(PAUSES[ARM if "llvm.aarch64" in ir else X86], PAUSES[triple], strict=True):
        ir = ir.replace(old, new)
    ir = re.sub(r'target triple = ".*"', f'target triple = "{triple}"', ir)
    ir = re.sub(r'target datalayout = ".*"', f'target datalayout = "{machine.target_data}"', ir)
    module = binding.parse_assembly(ir)
    module.verify()
    return str(machine.emit_assembly(module))


def outside(text: str) -> set[str]:
    """Functions that the code calls and does not hold, but for those by which Numba would raise errors."""
    named = set(re.findall(r"\s(?:bl|callq|jmp|b)\s+([A-Za-z_]\w*)(?:@PLT)?$", text, re.M))
    named |= set(re.findall(r"\smovabsq\s+\$([A-Za-z_]\w*)@GOT\b", text))
    defined = set(re.findall(r"^([A-Za-z_.]\w*):", text, re.M))
    return {name for name in named - defined if not name.startswith(("Py", "_Py", "NRT_", "numba_"))}


@pytest.mark.parametrize(("triple", "cpu"), [(ARM, "generic"), (X86, "x86-64-v3")])
def test_portable_kernels_need_nothing_special(triple: str, cpu: str, request: pytest.FixtureRequest) -> None:
    machine, jobs = machine_for(triple, cpu), all_jobs()
    for name in jobs if request.config.getoption("--exhaustive") else FEW:
        text = assembly(jobs[name], triple, machine)
        assert outside(text) <= LIBRARY_CALLS, name
        assert "zmm" not in text, name
        if name == "tiles.tile_fp32":
            assert re.search(r"\bfmla\b" if triple == ARM else r"\bvfmadd\w+ps\b.*ymm", text)


@pytest.mark.parametrize(
    "name",
    [
        "narrow_tiles.tile_bf16_avx2",
        "narrow_tiles.tile_fp32_avx2",
        "narrow_coded.tile_coded_avx2",
        "narrow_int8.tile_int8_avx2",
    ],
)
def test_tiles_for_avx2_need_no_more(name: str) -> None:
    """Eight lanes a register, and no call."""
    text = assembly(KernelJob(name, TILE_ARGUMENTS), X86, machine_for(X86, "x86-64-v3"))
    assert not outside(text)
    assert "ymm" in text
    assert "zmm" not in text


def test_threads_meet_in_order_on_arm() -> None:
    """ARM shows stores in any order unless told otherwise: words by which threads meet are acquired and released."""
    text = assembly(all_jobs()["launch.chain_worker"], ARM, machine_for(ARM, "generic"))
    assert re.search(r"\bldar\b", text)
    assert re.search(r"\bstlr\b", text)
    assert re.search(r"\bldaxr\b", text)
    assert re.search(r"\bstlxr\b", text)
    assert re.search(r"\bisb\b", text)


def test_without_fused_multiply_adds_the_library_rounds_once() -> None:
    """Slow, but the same bits."""
    machine = machine_for(X86, "x86-64")
    assert outside(assembly(all_jobs()["tiles.tile_fp32"], X86, machine)) == {"fmaf"}
