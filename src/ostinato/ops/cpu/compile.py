"""Compiles kernels to plain C functions, and keeps them on disk between starts.

A kernel is a module-level Python function of int64 arguments; Numba turns it into LLVM IR for exactly that signature,
once, and its object code lies in a directory keyed by everything that decides it: package version, the sources of
this folder, Numba, LLVM and CPU. Knows nothing of what is compiled. Invariant: a kernel that is on disk under the key
is loaded without importing Numba.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import llvmlite
from llvmlite import binding

from ostinato.ops.cpu.jit import compile_to_ir
from ostinato.ops.cpu.objects import LoadedCode, kernel_object, read_code, write_code

Address = int
Kernel = Callable[..., None]

_ENTRY = "kernel"  # the symbol of every kernel in its own file


@lru_cache(maxsize=1)
def cache_key() -> str:
    """Name of the directory of kernels that fit this machine and this version of the code."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    features = binding.get_host_cpu_features().flatten()
    for part in (version("numba"), llvmlite.__version__, binding.get_host_cpu_name(), features):
        digest.update(part.encode() + b"\0")
    try:
        package = version("ostinato")
    except PackageNotFoundError:  # run from a source tree
        package = "source"
    return f"{package}-{digest.hexdigest()[:16]}"


def default_cache_dir() -> Path:
    """Where kernels are kept unless the configuration names another place."""
    return Path.home() / ".cache" / "ostinato" / "kernels"


def kernel_name(function: Kernel) -> str:
    """Name of a kernel's file: `gemm.gemm_worker`."""
    return f"{function.__module__.rpartition('.')[2]}.{function.__qualname__}"


class Compiler:
    """Compiles each function once; owns the compiled code, so it must outlive every address it gave."""

    def __init__(self, cache_dir: Path | None = None) -> None:
        self._root = cache_dir or default_cache_dir()
        self._loaded: dict[Kernel, LoadedCode] = {}
        self._cache_hits = 0

    @property
    def directory(self) -> Path:
        """The keyed directory in which compiled code is kept."""
        return self._root / cache_key()

    @property
    def num_compiled(self) -> int:
        """Functions ready, compiled here or loaded from disk."""
        return len(self._loaded)

    @property
    def num_cache_hits(self) -> int:
        """How many of them came from disk."""
        return self._cache_hits

    def address(self, function: Kernel, arguments: int = 1) -> Address:
        """Address of `function` as `void f(int64_t, ...)` of so many arguments."""
        code = self._loaded.get(function)
        if code is None:
            code = self._loaded[function] = self._load(function, arguments)
        return code.addresses[_ENTRY]

    def _load(self, function: Kernel, arguments: int) -> LoadedCode:
        path = self.directory / f"{kernel_name(function)}.o"
        code = read_code(path)
        if code is None:
            ir, symbol = compile_to_ir(function, arguments)
            code = kernel_object(ir, symbol, _ENTRY)
            write_code(path, code)
        else:
            self._cache_hits += 1
        return LoadedCode(code, [_ENTRY])
