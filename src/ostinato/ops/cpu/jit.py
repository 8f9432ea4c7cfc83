"""Numba's decorators, applied when a kernel is compiled instead of when its module is imported.

Importing Numba takes longer than loading every compiled kernel from disk, so modules of kernels take `njit`,
`intrinsic` and `types` from here; a start that compiles nothing then never imports Numba. Knows nothing of kernels.
Invariant: what is compiled is what Numba's own decorators would have given.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


class Deferred:
    """A function that Numba will be given when a kernel that uses it is compiled."""

    __slots__ = ("_decorate", "_made", "function")

    def __init__(self, function: Callable[..., Any], decorate: Callable[[Any], Any]) -> None:
        self.function = function
        self._decorate = decorate
        self._made: Any = None

    def made(self) -> Any:
        """What the decorator made of it."""
        if self._made is None:
            self._made = self._decorate(self.function)
        return self._made

    def __call__(self, *args: Any, **options: Any) -> Any:
        raise NotImplementedError(f"{self.function.__qualname__} runs in compiled kernels only")


class _Types:
    """`numba.types`, imported when one of them is asked for."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module("numba.core.types"), name)


types: Any = _Types()


def njit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """`numba.njit(**options)`."""

    def decorate(function: Any) -> Any:
        return importlib.import_module("numba").njit(**options)(function)

    return lambda function: Deferred(function, decorate)


def intrinsic(function: Callable[..., Any]) -> Any:
    """`numba.extending.intrinsic`."""

    def decorate(function: Any) -> Any:
        return importlib.import_module("numba.extending").intrinsic(function)

    return Deferred(function, decorate)


def _type_of(deferred: Deferred, context: object) -> Any:
    """The type by which Numba knows what was deferred."""
    typing = importlib.import_module("numba.core.registry").cpu_target.typing_context
    made = deferred.made()
    typing.refresh()  # an intrinsic is known once its registration was read
    return typing.resolve_value_type(made)


def compile_to_ir(function: Callable[..., None], arguments: int) -> tuple[str, str]:
    """Optimised LLVM IR of `function` as `void f(int64_t, ...)` of so many arguments, and the name of that symbol."""
    numba: Any = importlib.import_module("numba")
    importlib.import_module("numba.extending").typeof_impl.register(Deferred)(_type_of)
    signature = f"void({', '.join(['int64'] * arguments)})"
    kernel = numba.cfunc(signature, error_model="numpy", nopython=True)(function)
    return kernel.inspect_llvm(), kernel.native_name
