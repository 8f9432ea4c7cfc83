"""Object code of kernels."""

from __future__ import annotations

import struct

import pytest
from llvmlite import binding

from ostinato.ops.cpu.jit import compile_to_ir
from ostinato.ops.cpu.objects import kernel_object
from ostinato.ops.cpu.tiles import TILE_ARGUMENTS, tile_fp32

_SYMBOL = struct.Struct("<IBBHQQ")  # of 64-bit ELF: name, type and binding, visibility, section, value, size
_FUNCTION = 2


def test_the_function_that_c_calls_is_the_kernel_itself() -> None:
    """A function around it would copy the arguments behind the sixth on the stack, and wait for them there."""
    code = kernel_object(*compile_to_ir(tile_fp32, TILE_ARGUMENTS), "entry")
    if code[:4] != b"\x7fELF":
        pytest.skip("symbols are read from ELF files only")
    sections = binding.ObjectFileRef.from_data(code).sections()
    symbols = next(section.data() for section in sections if section.name() == b".symtab")
    defined = [entry for entry in _SYMBOL.iter_unpack(symbols) if entry[1] & 15 == _FUNCTION and entry[3]]
    assert len(defined) == 1
