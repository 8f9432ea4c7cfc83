"""What the contract holds for: every model, on every instruction path of this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ostinato.errors import ConfigError
from ostinato.ops.cpu.isa import AVX2, AVX512_BF16, PORTABLE, select_isa

DEMO = "demo"
FAMILIES = (
    "llama",
    "llama_tied",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen2_moe",
    "qwen3_moe",
    "mixtral",
    "olmoe",
    "phimoe",
    "llama4",
)
"""The tiny checkpoints of `tests/oracle/checkpoints.py`; named here, since that module loads transformers."""


@dataclass(frozen=True, slots=True)
class NumericPath:
    """Kernels, instructions and number format: what may change bits."""

    kernels: str
    isa: str
    dtype: str
    quantization: str | None = None
    weight_coding: str = "auto"

    def __str__(self) -> str:
        name = f"{self.isa if self.kernels == 'numba' else self.kernels}-{self.quantization or self.dtype}"
        return name if self.weight_coding == "auto" else f"{name}-{self.weight_coding}"

    @property
    def page(self) -> int:
        """Tokens of the smallest KV page it takes."""
        return 16 if self.kernels == "numba" else 4

    @property
    def options(self) -> dict[str, Any]:
        return {
            "kernels": self.kernels,
            "isa": self.isa,
            "dtype": self.dtype,
            "quantization": self.quantization,
            "weight_coding": self.weight_coding,
            "page_size": self.page,
        }

    def skip_where_missing(self) -> None:
        """Skip the test on a machine without the instructions."""
        try:
            select_isa(None if self.isa == "auto" else self.isa)
        except ConfigError as error:
            pytest.skip(str(error))


PATHS = (
    NumericPath("numba", AVX512_BF16, "bfloat16"),
    NumericPath("numba", AVX2, "bfloat16"),
    NumericPath("numba", PORTABLE, "bfloat16"),
    NumericPath("numba", AVX512_BF16, "float32"),
    NumericPath("numba", AVX2, "float32"),
    NumericPath("numba", PORTABLE, "float32"),
    NumericPath("numba", AVX512_BF16, "bfloat16", "int8"),
    NumericPath("numba", AVX2, "bfloat16", "int8"),
    NumericPath("numba", PORTABLE, "bfloat16", "int8"),
    NumericPath("numba", AVX512_BF16, "bfloat16", weight_coding="plain"),
    NumericPath("reference", "auto", "bfloat16"),
    NumericPath("reference", "auto", "float32"),
)


@dataclass(frozen=True, slots=True)
class Subject:
    """A checkpoint on a path. `model` None is the bundled demo."""

    name: str
    model: Path | None
    path: NumericPath

    def __str__(self) -> str:
        return f"{self.name} on {self.path}"


def subject(name: str, path: NumericPath, checkpoint: Callable[[str], Path]) -> Subject:
    path.skip_where_missing()
    return Subject(name, None if name == DEMO else checkpoint(name), path)
