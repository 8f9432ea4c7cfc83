"""Compiles kernels to plain C functions, and keeps them on disk between starts.

A kernel is a module-level Python function of int64 arguments; Numba turns it into LLVM IR for exactly that signature,
once, and its object code lies in a directory keyed by everything that decides it: package version, the sources of
this folder, Numba, LLVM and CPU. Knows nothing of what is compiled. Invariant: a kernel that is on disk under the key
is loaded without importing Numba.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
import time
from collections.abc import Callable
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Protocol

import llvmlite
from llvmlite import binding

from ostinato.ops.cpu.jit import compile_to_ir
from ostinato.ops.cpu.objects import LoadedCode, kernel_object, read_code, write_code

Address = int
Kernel = Callable[..., None]

UNUSED_DAYS = 30
_KEYED = re.compile(r".+-[0-9a-f]{16}")
_ENTRY = "kernel"  # the symbol of every kernel in its own file


@lru_cache(maxsize=1)
def cache_key() -> str:
    """Name of the directory of kernels that fit this machine and this version of the code."""
    digest, here = hashlib.sha256(), Path(__file__).parent
    for source in (*sorted(here.glob("*.py")), *sorted(here.parent.glob("*.py"))):  # constants come from both
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


def discard_unused(root: Path, days: float = UNUSED_DAYS) -> list[str]:
    """Mark this key's directory as used, and remove those of other keys that no start has used for `days`.

    Returns their names. Other processes may start meanwhile: a directory vanishes at once, and who misses a file
    compiles it anew; code that is loaded needs its file no more. What cannot be made, marked or removed stays as it is.
    """
    mine = root / cache_key()
    with contextlib.suppress(OSError):  # a cache may be read-only, whether it holds what is needed or not
        mine.mkdir(parents=True, exist_ok=True)
        os.utime(mine)
    if not root.is_dir():
        return []
    oldest = time.time() - days * 86400
    removed = []
    for directory in root.iterdir():
        if not _KEYED.fullmatch(directory.name) or directory == mine:
            continue
        with contextlib.suppress(OSError):
            if directory.stat().st_mtime >= oldest:
                continue
            with tempfile.TemporaryDirectory(dir=root, prefix=".unused-") as scratch:
                directory.rename(Path(scratch) / directory.name)
            removed.append(directory.name)
    return removed


def kernel_name(function: Kernel) -> str:
    """Name of a kernel's file: `gemm.gemm_worker`."""
    return f"{function.__module__.rpartition('.')[2]}.{function.__qualname__}"


class Pending(Protocol):
    """Code that others are compiling: `names` are those that were missing when they began."""

    names: frozenset[str]

    def wait(self, name: str) -> None:
        """Return when the file `name` is there, or will not be."""
        ...


class Compiler:
    """Compiles each function once; owns the compiled code, so it must outlive every address it gave."""

    def __init__(self, cache_dir: Path | None = None) -> None:
        self.root = cache_dir or default_cache_dir()
        self.pending: Pending | None = None
        self._loaded: dict[Kernel, LoadedCode] = {}
        self._sources: dict[str, bool] = {}  # name -> whether it was on disk before

    @property
    def directory(self) -> Path:
        """The keyed directory in which compiled code is kept."""
        return self.root / cache_key()

    @property
    def num_compiled(self) -> int:
        """Kernels and libraries ready, compiled at this start or before."""
        return len(self._sources)

    @property
    def num_cache_hits(self) -> int:
        """How many of them were on disk when this start began."""
        return sum(self._sources.values())

    @property
    def names(self) -> frozenset[str]:
        """Names of their files."""
        return frozenset(self._sources)

    def has(self, name: str) -> bool:
        """Whether code of this name is on disk, whole."""
        return read_code(self._path(name)) is not None

    def code(self, name: str, make: Callable[[], bytes]) -> bytes:
        """The object code `name`: from disk, where others that compile it have put it, or made here and kept.

        What cannot be kept, on a full or read-only disk, costs the next start time, not this one.
        """
        code = read_code(self._path(name))
        found = code is not None
        if self.pending is not None and name in self.pending.names:
            found = False
            self.pending.wait(name)
            code = read_code(self._path(name))
        self._sources[name] = found
        if code is None:
            code = make()
            with contextlib.suppress(OSError):
                write_code(self._path(name), code)
        return code

    def address(self, function: Kernel, arguments: int = 1) -> Address:
        """Address of `function` as `void f(int64_t, ...)` of so many arguments."""
        loaded = self._loaded.get(function)
        if loaded is None:
            code = self.code(kernel_name(function), lambda: _compile(function, arguments))
            loaded = self._loaded[function] = LoadedCode(code, [_ENTRY])
        return loaded.addresses[_ENTRY]

    def _path(self, name: str) -> Path:
        return self.directory / f"{name}.o"


def _compile(function: Kernel, arguments: int) -> bytes:
    ir, symbol = compile_to_ir(function, arguments)
    return kernel_object(ir, symbol, _ENTRY)
