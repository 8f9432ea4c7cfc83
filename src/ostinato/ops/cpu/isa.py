"""Which instructions the CPU kernels may use, decided once at start from LLVM's view of the host.

`avx512_bf16`: bf16 and int8 dot products of 512 bits (vdpbf16ps, vpdpbusd). `avx2`: tiles of 16 registers of 256 bits,
fused multiply-adds, products of 16-bit integers. `portable`: generic vectors, which LLVM lowers to whatever the machine
has (AVX512 without BF16, NEON). Knows nothing of kernels. Invariant: on every path an output sums its products in the
same order; `avx2` and `portable` give the same bits, and what differs on `avx512_bf16` is the rounding inside one
dot-product instruction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llvmlite import binding

from ostinato.errors import ConfigError

AVX512_BF16 = "avx512_bf16"
AVX2 = "avx2"
PORTABLE = "portable"
_DOT_FEATURES = ("avx512f", "avx512bw", "avx512vl", "avx512bf16", "avx512vnni")
_AVX2_FEATURES = ("avx2", "fma")
MOST_TILE_ROWS = 96
"""Of any path: what a worker's scratch has room for."""


@dataclass(frozen=True, slots=True)
class Isa:
    """One set of kernels.

    dot_products: bf16 and int8 dot-product instructions of 512 bits are there.
    tile_rows:    most rows of a matrix tile (see also `tile_choice`); their sums are in the vector registers, by groups
                  of rows on `avx2`.
    byte_tables:  bytes are looked up in a table of 16, as decoding coded weights does.
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
    lacking = {
        AVX512_BF16: [feature for feature in _DOT_FEATURES if not found.get(feature, False)],
        AVX2: [feature for feature in _AVX2_FEATURES if not found.get(feature, False)],
        PORTABLE: [],
    }
    wide = found.get("avx512f", False)
    best = AVX512_BF16 if not lacking[AVX512_BF16] else PORTABLE if wide or lacking[AVX2] else AVX2
    chosen = name or best
    if chosen not in lacking:
        raise ConfigError(f"instruction set {name!r} is unknown; choose one of {', '.join(lacking)}")
    if lacking[chosen]:
        raise ConfigError(
            f"instruction set {chosen!r} needs {', '.join(lacking[chosen])}, which this CPU lacks; use {best!r}"
        )
    if chosen == AVX512_BF16:
        tables = found.get("avx512vbmi", False)
        return Isa(AVX512_BF16, dot_products=True, tile_rows=12, byte_tables=tables)
    if chosen == AVX2:
        return Isa(AVX2, dot_products=False, tile_rows=24, byte_tables=True)
    return Isa(PORTABLE, dot_products=False, tile_rows=12 if wide else 2)
