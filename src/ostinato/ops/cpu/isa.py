"""Which instructions the CPU kernels may use, decided once at start from LLVM's view of the host.

`avx512_bf16`: bf16 and int8 dot products of 512 bits (vdpbf16ps, vpdpbusd). `portable`: generic vectors,
which LLVM lowers to whatever the machine has (AVX512, AVX2, NEON). Knows nothing of kernels. Invariant: on
either path an output sums its products in the same order; what differs is the rounding inside one dot-product
instruction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llvmlite import binding

from ostinato.errors import ConfigError

AVX512_BF16 = "avx512_bf16"
PORTABLE = "portable"
_DOT_FEATURES = ("avx512f", "avx512bw", "avx512vl", "avx512bf16", "avx512vnni")


@dataclass(frozen=True, slots=True)
class Isa:
    """One set of kernels.

    dot_products: bf16 and int8 dot-product instructions of 512 bits are there.
    tile_rows:    most rows of a matrix tile (times 32 columns) whose sums fit into the vector registers.
    byte_tables:  64 bytes are looked up in a table at once (AVX512-VBMI), as decoding coded weights does.
    """

    name: str
    dot_products: bool
    tile_rows: int
    byte_tables: bool = False


def host_features() -> Mapping[str, bool]:
    """LLVM's feature flags of this machine."""
    found: Mapping[str, bool] = binding.get_host_cpu_features()
    return found


def select_isa(name: str | None = None, features: Mapping[str, bool] | None = None) -> Isa:
    """The best set for this machine, or the one asked for by name.

    Raises ConfigError when `name` is unknown or needs instructions that the machine lacks.
    """
    found = host_features() if features is None else features
    wide = found.get("avx512f", False)
    missing = [feature for feature in _DOT_FEATURES if not found.get(feature, False)]
    chosen = name or (PORTABLE if missing else AVX512_BF16)
    if chosen == PORTABLE:
        return Isa(PORTABLE, dot_products=False, tile_rows=12 if wide else 2)
    if chosen != AVX512_BF16:
        raise ConfigError(f"instruction set {name!r} is unknown; choose {AVX512_BF16!r} or {PORTABLE!r}")
    if missing:
        raise ConfigError(
            f"instruction set {AVX512_BF16!r} needs {', '.join(missing)}, which this CPU lacks; "
            f"use {PORTABLE!r}"
        )
    return Isa(AVX512_BF16, dot_products=True, tile_rows=12, byte_tables=found.get("avx512vbmi", False))
