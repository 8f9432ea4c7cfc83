"""Object code: emitted from LLVM IR for this machine, kept in files, and loaded into the process.

Every kernel runs from object code, whether it was compiled now or at an earlier start. Knows nothing of what the code
does. Invariant: a file appears whole or not at all; loaded code outlives every address it gave.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from llvmlite import binding

# What a kernel compiled by Numba would call to raise an exception. Kernels raise none.
_RAISING = ("Py", "NRT_", "numba_")
_MARK_BYTES = 16  # of a digest at the end of a file


def target_machine() -> Any:
    """LLVM's code generator for this CPU and all its instructions."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    target = binding.Target.from_default_triple()
    features = binding.get_host_cpu_features().flatten()
    return target.create_target_machine(
        cpu=binding.get_host_cpu_name(), features=features, opt=3, jit=True, reloc="pic"
    )


def emit_object(module: Any, machine: Any) -> bytes:
    """Object code of a parsed and optimised module."""
    code: bytes = machine.emit_object(module)
    return code


def kernel_object(ir: str, symbol: str, name: str) -> bytes:
    """Object code of a kernel's IR, in which `symbol` becomes `name`.

    Calls that would raise an exception become traps, so the code needs neither Numba nor Python.
    """
    machine = target_machine()
    module = binding.parse_assembly(ir.replace("{ noinline }", "{ alwaysinline }"))  # of the call of the body
    module.get_function(symbol).name = name
    module.link_in(binding.parse_assembly(_traps(module)))
    _inline_body(module, name, machine)
    module.verify()
    return emit_object(module, machine)


def _inline_body(module: Any, name: str, machine: Any) -> None:
    """Put the body of a kernel into `name`, the function that C calls, and keep nothing else.

    Numba leaves a call between them, which copies the arguments on the stack, two at a time, and so waits until the
    writes of each have left the core: the start of a matrix tile would wait for the end of the one before.
    """
    for function in module.functions:
        if not function.is_declaration and function.name != name:
            function.linkage = "internal"
    passes = binding.create_new_module_pass_manager()
    passes.add_always_inliner_pass()
    passes.add_simplify_cfg_pass()
    passes.add_global_dead_code_eliminate_pass()
    passes.run(module, binding.create_pass_builder(machine, binding.create_pipeline_tuning_options()))


def _traps(module: Any) -> str:
    lines = [f'target triple = "{module.triple}"', "declare void @llvm.trap()"]
    for function in module.functions:
        if function.is_declaration and function.name.startswith(_RAISING):
            lines.append(f"define void @{function.name}() {{ call void @llvm.trap() unreachable }}")
    for variable in module.global_variables:
        if variable.is_declaration and variable.name.startswith(_RAISING):
            lines.append(f"@{variable.name} = global i8 0")
    return "\n".join(lines)


class LoadedCode:
    """Functions of one object file; `addresses` maps their names to machine code."""

    __slots__ = ("_engine", "addresses")

    def __init__(self, code: bytes, functions: Iterable[str]) -> None:
        self._engine: Any = binding.create_mcjit_compiler(binding.parse_assembly(""), target_machine())
        self._engine.add_object_file(binding.ObjectFileRef.from_data(code))
        self._engine.finalize_object()
        self.addresses: Mapping[str, int] = {f: self._engine.get_function_address(f) for f in functions}
        assert all(self.addresses.values()), self.addresses


def read_code(path: Path) -> bytes | None:
    """The code in a file, or None where there is none (any more), none to read, or not what was written: a disk may
    lose the end of a file when the power fails, and LLVM does not survive half an object.
    """
    try:
        found = path.read_bytes()
    except OSError:
        return None
    code, mark = found[:-_MARK_BYTES], found[-_MARK_BYTES:]
    return code if mark == _mark(code) else None


def _mark(code: bytes) -> bytes:
    return hashlib.blake2b(code, digest_size=_MARK_BYTES).digest()


def write_code(path: Path, code: bytes) -> None:
    """Keep code in a file; another process never sees half of it. Raises OSError, and then leaves nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(code + _mark(code))
        os.replace(temporary, path)
    except OSError:
        os.unlink(temporary)
        raise
