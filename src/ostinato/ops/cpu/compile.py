"""Compiles kernels to plain C functions, and keeps them on disk between starts.

A kernel is a module-level Python function of int64 arguments; Numba compiles it for exactly that signature,
once. Numba's own cache notices changes of the function's file alone, so the directory is keyed by everything
else that decides the code: package version, the sources of this folder, Numba, LLVM and CPU. Knows nothing of
what is compiled.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import llvmlite
import numba
from llvmlite import binding

Address = int


@lru_cache(maxsize=1)
def cache_key() -> str:
    """Name of the directory of kernels that fit this machine and this version of the code."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    features = binding.get_host_cpu_features().flatten()
    for part in (numba.__version__, llvmlite.__version__, binding.get_host_cpu_name(), features):
        digest.update(part.encode() + b"\0")
    try:
        package = version("ostinato")
    except PackageNotFoundError:  # run from a source tree
        package = "source"
    return f"{package}-{digest.hexdigest()[:16]}"


def default_cache_dir() -> Path:
    """Where kernels are kept unless the configuration names another place."""
    return Path.home() / ".cache" / "ostinato" / "kernels"


def configure_cache(directory: Path | None = None) -> Path:
    """Make Numba keep what it compiles from now on under `directory`, by key; returns the keyed directory.

    Must come before the import of modules whose kernels are decorated with `cache=True`: Numba chooses the
    place when it decorates.
    """
    keyed = (directory or default_cache_dir()) / cache_key()
    keyed.mkdir(parents=True, exist_ok=True)
    numba.config.CACHE_DIR = str(keyed)
    return keyed


class Compiler:
    """Compiles each function once; owns the compiled code, so it must outlive every address it gave."""

    def __init__(self, cache_dir: Path | None = None) -> None:
        self._cache_dir = cache_dir
        self._compiled: dict[Callable[..., None], Any] = {}

    @property
    def directory(self) -> Path:
        """The keyed directory in which compiled code is kept."""
        return configure_cache(self._cache_dir)

    @property
    def num_compiled(self) -> int:
        """Functions ready, compiled here or loaded from disk."""
        return len(self._compiled)

    @property
    def num_cache_hits(self) -> int:
        """How many of them came from disk."""
        return sum(bool(kernel.cache_hits) for kernel in self._compiled.values())

    def address(self, function: Callable[..., None], arguments: int = 1) -> Address:
        """Address of `function` as `void f(int64_t, ...)` of so many arguments."""
        kernel = self._compiled.get(function)
        if kernel is None:
            configure_cache(self._cache_dir)
            words = ", ".join(["int64"] * arguments)
            options = {"cache": True, "error_model": "numpy", "nopython": True}
            kernel = numba.cfunc(f"void({words})", **options)(function)
            self._compiled[function] = kernel
        found: int = kernel.address
        return found
