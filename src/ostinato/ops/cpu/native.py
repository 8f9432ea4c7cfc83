"""Compiles emitted functions straight with LLVM, without Numba: the inner loops that drivers call by address.

A library is one LLVM module of functions of int64 arguments for one kind of lanes. Compiling it once, apart
from the drivers, keeps their compilation short; its object code is kept on disk beside the drivers'. Knows
nothing of what is emitted. Invariant: a library outlives every address it gave, and an object file is used
only under the key of the sources, LLVM and CPU that made it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from llvmlite import binding, ir

from ostinato.ops.cpu.compile import Compiler
from ostinato.ops.cpu.lane_kinds import Kind
from ostinato.ops.cpu.objects import LoadedCode, emit_object, target_machine
from ostinato.ops.cpu.vector_ir import I64, Lanes, Value

Emit = Callable[[Lanes, Kind, list[Value]], None]


@dataclass(frozen=True, slots=True)
class NativeFunction:
    """`emit` writes the body of `void f(int64 x num_args)`."""

    num_args: int
    emit: Emit


class NativeLibrary:
    """Functions compiled for one kind; `addresses` maps their names to machine code."""

    __slots__ = ("_code", "addresses")

    def __init__(
        self, name: str, functions: Mapping[str, NativeFunction], kind: Kind, compiler: Compiler
    ) -> None:
        """Load the library as `compiler` keeps it, or compile it."""
        code = compiler.code(f"{name}.{kind.name}", lambda: _compile(functions, kind, target_machine()))
        self._code = LoadedCode(code, functions)
        self.addresses: Mapping[str, int] = self._code.addresses


def _compile(functions: Mapping[str, NativeFunction], kind: Kind, machine: Any) -> bytes:
    module = ir.Module()
    module.triple = machine.triple
    module.data_layout = str(machine.target_data)
    for name, native in functions.items():
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * native.num_args), name)
        function.attributes.add("nounwind")
        builder = ir.IRBuilder(function.append_basic_block("entry"))
        native.emit(Lanes(builder), kind, list(function.args))
        builder.ret_void()
    parsed = binding.parse_assembly(str(module))
    parsed.verify()
    passes = binding.create_pass_builder(machine, binding.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(parsed, passes)
    return emit_object(parsed, machine)
